"""
Context parallelism in the trainer: what is refused, and how ranks join.

To TRL and Accelerate all ranks stay data-parallel workers; see `grpo/grouped_losses.py` for the losses and `cp/sharding.py`
for the forward on shards.
"""

import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING

from accelerate.utils import DistributedType, broadcast_object_list
from torch import nn
from transformers import PreTrainedModel

from ..config import CoDraftGRPOConfig
from ..cp.draft import sharded_draft_loss
from ..cp.probe import disagreement_with_plain, unsupported_by_shards
from ..cp.sharding import ContextSharding
from ..group.exchange import new_loss_group, warn_if_groups_cross_nodes
from ..modeling.losses import draft_loss
from ..pp.stages.split import two_layer_copy
from ..rollout.support import dropout_reason
from .grouped_losses import TRAVELLING_TENSORS
from .support import base_policy, unsupported_in_groups


if TYPE_CHECKING:
    from ..trainer import CoDraftGRPOTrainer

INSTEAD = "Set `context_parallel_size=1`."


def require_divisible_world(args: CoDraftGRPOConfig) -> None:
    """
    Checks before a policy is loaded that the processes can be split into groups.

    Raises:
        ValueError: if their number is not a multiple of `pipeline_parallel_size * context_parallel_size`.
    """
    sizes = {name: getattr(args, name) for name in ("pipeline_parallel_size", "context_parallel_size")}
    group = math.prod(sizes.values())
    if args.world_size % group:
        given = " and ".join(f"`{name}={size}`" for name, size in sizes.items() if size > 1)
        raise ValueError(
            f"{given} with {args.world_size} process(es): ranks that share a microbatch come in groups of {group}. Start a "
            f"multiple of it (`torchrun --nproc_per_node {group}`; on CPU with `ACCELERATE_USE_CPU=true`), or set "
            f"{' and '.join(f'`{name}=1`' for name, size in sizes.items() if size > 1)}."
        )


@contextmanager
def not_sharded_by_accelerate(args: CoDraftGRPOConfig) -> Iterator[None]:
    """Within it, an `Accelerator` does not take over the context parallelism that `accelerate launch` has set."""
    name = "ACCELERATE_USE_PARALLELISM_CONFIG"
    before = os.environ.get(name)
    if args.context_parallel_size > 1 and before is not None:
        os.environ[name] = "false"
    try:
        yield
    finally:
        if before is not None:
            os.environ[name] = before


def join_context_group(trainer: "CoDraftGRPOTrainer") -> None:
    """
    Splits the losses of a trainer over groups of `context_parallel_size` ranks from now on. Collective.

    Args:
        trainer ([`CoDraftGRPOTrainer`]):
            The trainer, at the end of its construction.

    Raises:
        ValueError: on all ranks, if the policy or the settings do not allow it; the message says what to set.
    """
    args, accelerator = trainer.args, trainer.accelerator
    require_shards(trainer)
    timeout = timedelta(seconds=args.ddp_timeout)
    group = new_loss_group(args.context_parallel_size, accelerator.device, TRAVELLING_TENSORS, timeout=timeout)

    def unwrap(model: nn.Module) -> PreTrainedModel:
        return base_policy(accelerator.unwrap_model(model))

    trainer.join_loss_group(group, ContextSharding(group.members, unwrap, args.context_parallel_layout))


def require_shards(trainer: "CoDraftGRPOTrainer") -> None:
    """
    Checks that a trainer's policy and settings allow context parallelism. Collective.

    Args:
        trainer ([`CoDraftGRPOTrainer`]):
            The trainer, at the end of its construction.

    Raises:
        ValueError: on all ranks, if they do not; the message says what to set.
    """
    args, accelerator = trainer.args, trainer.accelerator
    reason = unsupported_with_shards(trainer)
    if reason is not None:
        raise ValueError(f"`context_parallel_size={args.context_parallel_size}` is not possible: {reason}")
    # One rank looks: under FSDP2 the others may not have the weights yet. Of a policy in parts it has no more than one.
    verdict, failure = [None], None
    if accelerator.is_main_process:
        policy = base_policy(trainer.model)
        try:
            verdict = [disagreement_with_plain(policy if args.holds_whole_policy else two_layer_copy(policy))]
        except Exception as error:  # of the policy's own code: any. The other ranks wait for the verdict
            verdict, failure = [f"a short forward of the policy raised {type(error).__name__}: {error}"], error
    broadcast_object_list(verdict)
    if verdict[0] is not None:
        message = f"`context_parallel_size={args.context_parallel_size}` is not possible: {verdict[0]}"
        raise ValueError(message) from failure
    ranks_per_node = int(os.environ.get("LOCAL_WORLD_SIZE", accelerator.num_processes))
    warn_if_groups_cross_nodes(args.context_parallel_size, ranks_per_node)


def draft_loss_on(trainer: "CoDraftGRPOTrainer") -> Callable:
    """The draft's loss on what the policy's forward left behind: whole microbatches, or this rank's part of them."""
    if trainer.sharding is None:
        return draft_loss
    return partial(sharded_draft_loss, trunk=trainer.args.context_parallel_trunk)


def unsupported_with_shards(trainer: "CoDraftGRPOTrainer") -> str | None:
    """
    Why a run cannot split its microbatches over ranks, as far as settings and configurations tell.

    Args:
        trainer ([`CoDraftGRPOTrainer`]):
            The trainer, after `GRPOTrainer.__init__`.

    Returns:
        `str` or `None`: what stands in the way and what to set instead.
    """
    accelerator, policy = trainer.accelerator, base_policy(trainer.model)
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        return "DeepSpeed reduces gradients in ways of its own. Use FSDP2 (`fsdp_version: 2`), or DDP."
    if accelerator.distributed_type == DistributedType.FSDP and not accelerator.is_fsdp2:
        return "FSDP1 is not supported. Set `fsdp_version: 2` in the Accelerate config."
    reason = unsupported_in_groups(trainer, INSTEAD)
    if reason is not None:
        return reason
    return _routing_reason(policy) or dropout_reason(policy, training=True) or unsupported_by_shards(policy)


def _routing_reason(policy: PreTrainedModel) -> str | None:
    """What makes a mixture of experts random in training mode; only some configuration classes declare these fields."""
    config = policy.config.get_text_config()
    for name in ("router_jitter_noise", "input_jitter_noise"):
        if getattr(config, name, 0.0):
            return f"the router adds noise (`{name}`), which would differ between splits. Set it to 0.0."
    return None
