"""
Which ranks of a run work together: the mesh of its parallel axes, of which every process group follows.

Axes, the innermost last: `dp` replicas of the policy, `pp` places in a pipeline, `cp` shards of a microbatch. Ranks
that differ in `cp` alone are neighbours, those of a loss group (`pp` and `cp`) too.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import NamedTuple

import torch.distributed as dist
from transformers.utils import logging


logger = logging.get_logger(__name__)


class Place(NamedTuple):
    """
    Where a rank is on each axis.

    Args:
        dp (`int`):
            Number of its replica of the policy.
        pp (`int`):
            Place in its pipeline.
        cp (`int`):
            Place in its context-parallel group.
    """

    dp: int
    pp: int
    cp: int


@dataclass(frozen=True)
class RankMesh:
    """
    The ranks of a run by axis.

    Args:
        world_size (`int`):
            Ranks of the run.
        pipeline_size (`int`, *optional*, defaults to `1`):
            `pipeline_parallel_size`.
        context_size (`int`, *optional*, defaults to `1`):
            `context_parallel_size`.

    Raises:
        ValueError: if the ranks cannot be split into groups of these sizes; the message says what to set.
    """

    world_size: int
    pipeline_size: int = 1
    context_size: int = 1

    def __post_init__(self):
        sizes = {"pipeline_parallel_size": self.pipeline_size, "context_parallel_size": self.context_size}
        for name, size in sizes.items():
            if size < 1:
                raise ValueError(f"`{name}={size}` is not a number of ranks. Set 1 or more.")
        if self.world_size < 1 or self.world_size % self.group_size:
            given = {name: size for name, size in sizes.items() if size > 1}
            raise ValueError(
                f"{' and '.join(f'`{name}={size}`' for name, size in given.items())} with {self.world_size} "
                f"process(es): ranks that share a microbatch come in groups of {self.group_size}. Start a multiple of "
                f"it (`torchrun --nproc_per_node {self.group_size}`; on CPU with `ACCELERATE_USE_CPU=true`), or set "
                f"{' and '.join(f'`{name}=1`' for name in given)}."
            )

    @property
    def group_size(self) -> int:
        """Ranks that compute each other's losses together."""
        return self.pipeline_size * self.context_size

    @property
    def num_replicas(self) -> int:
        return self.world_size // self.group_size

    @property
    def rank_of_last(self) -> int:
        """A rank that runs the last stage: its number in each loss group, and in the run for the first of them."""
        return (self.pipeline_size - 1) * self.context_size

    def place_of(self, rank: int) -> Place:
        rest, cp = divmod(rank, self.context_size)
        return Place(*divmod(rest, self.pipeline_size), cp)

    def ranks_along(self, axes: Sequence[str], rank: int) -> list[int]:
        """
        The ranks that may differ from one in their places along some axes, in order, the rank itself among them.

        Args:
            axes (`Sequence[str]`):
                Of `"dp"`, `"pp"` and `"cp"`.
            rank (`int`):
                The rank.
        """
        own = self.place_of(rank)._replace(**dict.fromkeys(axes))
        places = enumerate(map(self.place_of, range(self.world_size)))
        return [other for other, place in places if all(o in (None, p) for o, p in zip(own, place, strict=True))]

    def loss_group(self, rank: int) -> list[int]:
        """The ranks that compute each other's losses together."""
        return self.ranks_along(("pp", "cp"), rank)

    def pipeline(self, rank: int) -> list[int]:
        """The ranks of its pipeline, in the order of the stages."""
        return self.ranks_along(("pp",), rank)

    def context_group(self, rank: int) -> list[int]:
        """The ranks that run the same stages on shards of the same microbatches."""
        return self.ranks_along(("cp",), rank)

    def holders(self, rank: int) -> list[int]:
        """All ranks of the run with the same stages."""
        return self.ranks_along(("dp", "cp"), rank)

    def new_group(
        self, axes: Sequence[str], *, timeout: timedelta | None = None, backend: str | None = None
    ) -> dist.ProcessGroup:
        """
        The process group of this rank along some axes. Collective: every rank of the run calls it.

        Args:
            axes (`Sequence[str]`):
                As in [`~RankMesh.ranks_along`].
            timeout (`timedelta`, *optional*):
                After which a rank that waits for another gives up. If `None`, that of the backend.
            backend (`str`, *optional*):
                If `None`, that of the run.
        """
        groups = sorted({tuple(self.ranks_along(axes, rank)) for rank in range(self.world_size)})
        return dist.new_subgroups_by_enumeration(list(map(list, groups)), timeout=timeout, backend=backend)[0]

    def new_groups(self, timeout: timedelta) -> "PipelineGroups":
        """The process groups of this rank in a run with pipelines. Collective."""
        loss = self.new_group(("pp", "cp"), timeout=timeout)
        sharded = self.context_size > 1
        return PipelineGroups(
            loss=loss,
            # Without shards its ranks are those of the loss group, who do nothing else while a schedule runs.
            pipeline=self.new_group(("pp",), timeout=timeout) if sharded else loss,
            host=self.new_group(("pp",), timeout=timeout, backend="gloo"),
            context=self.new_group(("cp",), timeout=timeout) if sharded else None,
            holders=self.new_group(("dp", "cp"), timeout=timeout),
        )

    def warn_if_crossing_nodes(self, ranks_per_node: int) -> None:
        """Warns if context-parallel groups would cross nodes of so many ranks."""
        if ranks_per_node % self.context_size:
            logger.warning(
                f"`context_parallel_size={self.context_size}` does not divide the {ranks_per_node} processes of a "
                "node, so keys and values will travel between nodes in every layer. Choose a divisor."
            )


@dataclass(frozen=True)
class PipelineGroups:
    """
    The process groups of a rank in a run with pipelines.

    Attributes:
        loss (`ProcessGroup`): the ranks that compute losses together.
        pipeline (`ProcessGroup`), host (`ProcessGroup`): the ranks of its pipeline, and the same on gloo.
        context (`ProcessGroup` or `None`): the ranks that run the same stages on shards of the same microbatches, if
            there are shards.
        holders (`ProcessGroup`): all ranks of the run with the same stages.
    """

    loss: dist.ProcessGroup
    pipeline: dist.ProcessGroup
    host: dist.ProcessGroup
    context: dist.ProcessGroup | None
    holders: dist.ProcessGroup
