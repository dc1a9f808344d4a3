"""The optimizer of a stage, its state split over the ranks that hold the stage (ZeRO, stage 1, arXiv 1910.02054)."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.optim import ZeroRedundancyOptimizer

from .split import PolicyStage


class SharedOptimizer(ZeroRedundancyOptimizer):
    """
    Torch's, with a `state_dict` that needs no other rank: it holds the settings and no state, of which each rank has a
    share in `optim`. [`save_optimizer`] writes the shares.
    """

    def state_dict(self) -> dict[str, Any]:
        return torch.optim.Optimizer.state_dict(self)


def shard_optimizer(
    optimizer: torch.optim.Optimizer,
    make: Callable[[list[dict[str, Any]]], torch.optim.Optimizer],
    stages: Sequence[PolicyStage],
    holders: dist.ProcessGroup,
) -> SharedOptimizer:
    """
    An optimizer whose state the ranks that hold the same stages share (ZeRO, stage 1, arXiv 1910.02054): each updates
    some of the parameters and sends them to the others. Collective in the group.

    Args:
        optimizer (`torch.optim.Optimizer`):
            One that has made no step: its groups, with their settings, are taken over.
        make (`Callable`):
            From groups of parameters, an optimizer of the same kind.
        stages (`Sequence[PolicyStage]`):
            The stages of this rank. An optimizer of a whole policy is reduced to their parameters.
        holders (`ProcessGroup`):
            The world's ranks that hold these stages.

    Raises:
        ValueError: if these stages have no parameters that are trained, or of several dtypes.
    """
    own = {parameter for stage in stages for _, parameter in stage.named_own_parameters()}
    own |= {stage.tied_copy for stage in stages} - {None}
    groups = [{**group, "params": [p for p in group["params"] if p in own]} for group in optimizer.param_groups]
    dtypes = {parameter.dtype for group in groups for parameter in group["params"]}
    if len(dtypes) != 1:
        raise ValueError(
            f"The optimizer of stages {[stage.index for stage in stages]} cannot be shared: they train parameters of "
            f"{'no' if not dtypes else 'several'} dtypes ({', '.join(sorted(map(str, dtypes)))}). Set "
            "`pipeline_shard_optimizer=False`."
        )
    return SharedOptimizer(groups, lambda share, **defaults: make(share), process_group=holders)
