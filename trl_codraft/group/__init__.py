"""
Losses computed by groups of ranks: every rank generates and scores its own rows, as in plain data parallelism; a
group computes the losses together, member by member, each member's microbatch split over the group.

Knows nothing of TRL: a trainer passes callables in (see `grpo/grouped_losses.py`). Nothing is imported here: every
name comes from its own module.
"""
