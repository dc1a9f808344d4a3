"""
Losses computed by groups of ranks: every rank generates and scores its own rows, as in plain data parallelism; a
group computes the losses together, member by member, each member's microbatch split over the group.

Knows nothing of TRL: a trainer passes callables in (see `grpo/grouped_losses.py`).
"""

from .exchange import LossGroup, new_loss_group, parallel_mesh, require_same, warn_if_groups_cross_nodes
from .header import Header, Phase, describe
from .members import (
    MemberAccelerator,
    Scores,
    Sharding,
    ShardScores,
    attributes_set,
    backward_members,
    report_as,
    score_members,
    score_together,
)


__all__ = [
    "Header",
    "LossGroup",
    "MemberAccelerator",
    "Phase",
    "Scores",
    "ShardScores",
    "Sharding",
    "attributes_set",
    "backward_members",
    "describe",
    "new_loss_group",
    "parallel_mesh",
    "report_as",
    "require_same",
    "score_members",
    "score_together",
    "warn_if_groups_cross_nodes",
]
