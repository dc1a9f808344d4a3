"""
Joins the ranks of a run into groups that share microbatches. `support.py` says which runs cannot have one.

To TRL and Accelerate all ranks stay data-parallel workers; see `grpo/grouped_losses.py` for the losses and
`cp/sharding.py` for the forward on shards.
"""

import os
from datetime import timedelta
from functools import partial

import torch.distributed as dist
from accelerate.utils import broadcast_object_list
from torch import nn
from transformers import PreTrainedModel

from ..config import CoDraftGRPOConfig
from ..cp.draft import sharded_draft_loss
from ..cp.probe import disagreement_with_plain
from ..cp.sharding import ContextSharding
from ..group.exchange import LossGroup
from ..group.mesh import RankMesh
from ..modeling.policy import base_policy, two_layer_copy
from .failures import HeldFailures
from .grouped_losses import GroupedLosses
from .member_passes import TRAVELLING_TENSORS
from .run import Run
from .support import unsupported_with_shards


def mesh_of(args: CoDraftGRPOConfig) -> RankMesh:
    """
    The mesh of the ranks of a run.

    Raises:
        ValueError: if their number is not a multiple of `pipeline_parallel_size * context_parallel_size`.
    """
    return RankMesh(args.world_size, args.pipeline_parallel_size, args.context_parallel_size)


def join_context_group(run: Run, failures: HeldFailures) -> GroupedLosses:
    """
    Splits the losses of a run over groups of `context_parallel_size` ranks. Collective.

    Args:
        run ([`~run.Run`]):
            The trainer, at the end of its construction.
        failures ([`HeldFailures`]):
            Holds exceptions of this rank until the next header.

    Returns:
        [`GroupedLosses`]

    Raises:
        ValueError: on all ranks, if the policy or the settings do not allow it; the message says what to set.
    """
    args, accelerator = run.args, run.accelerator
    require_shards(run)
    timeout = timedelta(seconds=args.ddp_timeout)
    members = mesh_of(args).new_group(("pp", "cp"), timeout=timeout)
    group = LossGroup(members, dist.group.WORLD, accelerator.device, TRAVELLING_TENSORS)

    def unwrap(model: nn.Module) -> PreTrainedModel:
        return base_policy(accelerator.unwrap_model(model))

    sharding = ContextSharding(group.members, unwrap, args.context_parallel_layout)
    loss = partial(sharded_draft_loss, trunk=args.context_parallel_trunk)
    return GroupedLosses(run, group, sharding, failures, run.learner, loss)


def require_shards(run: Run) -> None:
    """
    Checks that a trainer's policy and settings allow context parallelism. Collective.

    Args:
        run ([`~run.Run`]):
            The trainer, at the end of its construction.

    Raises:
        ValueError: on all ranks, if they do not; the message says what to set.
    """
    args, accelerator = run.args, run.accelerator
    reason = unsupported_with_shards(run)
    if reason is not None:
        raise ValueError(f"`context_parallel_size={args.context_parallel_size}` is not possible: {reason}")
    # One rank looks: under FSDP2 the others may not have the weights yet. It has only its stages of a staged policy.
    verdict, failure = [None], None
    if accelerator.is_main_process:
        policy = base_policy(run.model)
        try:
            verdict = [disagreement_with_plain(policy if args.holds_whole_policy else two_layer_copy(policy))]
        except Exception as error:  # the policy's own code may raise any. The other ranks wait for the verdict
            verdict, failure = [f"a short forward of the policy raised {type(error).__name__}: {error}"], error
    broadcast_object_list(verdict)
    if verdict[0] is not None:
        message = f"`context_parallel_size={args.context_parallel_size}` is not possible: {verdict[0]}"
        raise ValueError(message) from failure
    ranks_per_node = int(os.environ.get("LOCAL_WORLD_SIZE", accelerator.num_processes))
    mesh_of(args).warn_if_crossing_nodes(ranks_per_node)
