"""The schedule of the draft's learning rate: those of Transformers that follow from the number of the step alone."""

import torch
from torch.optim.lr_scheduler import LambdaLR
from transformers import SchedulerType, get_scheduler

from ..modeling.naming import shown


def build_schedule(
    kind: str, optimizer: torch.optim.Optimizer, *, warmup_steps: int, num_training_steps: int
) -> LambdaLR | None:
    """
    A schedule of Transformers.

    Args:
        kind (`str`):
            One of [`~transformers.SchedulerType`].
        optimizer (`torch.optim.Optimizer`):
            The optimizer that it schedules.
        warmup_steps (`int`):
            Steps of warmup.
        num_training_steps (`int`):
            Steps in all, at which schedules that decay end. At least one more than `warmup_steps` is taken: without
            any, "polynomial" divides by zero when the warmup ends.

    Returns:
        `LambdaLR` or `None`: `None` where there is no such schedule, or it needs more than the number of the step.
    """
    try:
        schedule = get_scheduler(
            kind,
            optimizer,
            num_warmup_steps=warmup_steps,
            num_training_steps=max(num_training_steps, warmup_steps + 1),
        )
    # Unknown names and missing numbers end in one, arguments that a schedule has no default for in the other.
    except (ValueError, TypeError):
        return None
    return schedule if isinstance(schedule, LambdaLR) else None


def check_schedule(name: str, kind: str) -> None:
    """
    Builds a schedule to see whether it can be built.

    Args:
        name (`str`):
            The setting that chooses it, as its user writes it.
        kind (`str`):
            Its value.

    Raises:
        ValueError: naming both, and the schedules that can be.
    """
    if _can_be_built(kind):
        return
    words = [member.value for member in SchedulerType if _can_be_built(member.value)]
    known = isinstance(kind, str) and kind in list(SchedulerType)
    reason = " depends on more than the number of the step" if known else " is no schedule of Transformers"
    raise ValueError(f"`{name}={shown(kind)}`{reason}. Set `{name}` to one of {words}.")


def _can_be_built(kind: str) -> bool:
    optimizer = torch.optim.SGD([torch.zeros(())], lr=1.0)
    return build_schedule(kind, optimizer, warmup_steps=1, num_training_steps=2) is not None
