"""How the layers of a policy lie on the ranks of a pipeline, and what these run in a training step."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from .order import Order, schedule_order


@dataclass(frozen=True)
class PipelineShape:
    """
    Stages, ranks and microbatches of a pipeline. Stage `s` is on rank `s % num_ranks`.

    Args:
        layers (`Sequence[int]`):
            Number of decoder layers of every stage.
        num_ranks (`int`):
            Ranks of the pipeline.
        num_microbatches (`int`):
            Microbatches of a training step: `GA * p * c`, with `GA` micro-steps, `p` ranks and `c` context-parallel
            ranks.
        schedule (`str` or `Callable`, *optional*, defaults to `"1F1B"`):
            `"GPipe"`, `"1F1B"`, `"Interleaved1F1B"`, or a function that returns the order of any other pipeline for a
            number of microbatches: by rank, the [`Action`]s in the order in which it runs them.
    """

    layers: Sequence[int]
    num_ranks: int
    num_microbatches: int
    schedule: str | Callable[[int], Order] = "1F1B"

    def __post_init__(self):
        object.__setattr__(self, "layers", tuple(self.layers))

    @property
    def num_stages(self) -> int:
        return len(self.layers)

    @property
    def rank_of_last(self) -> int:
        """The rank with the policy's head and the draft."""
        return self.rank_of(self.num_stages - 1)

    def rank_of(self, stage: int) -> int:
        return stage % self.num_ranks

    def stages_of(self, rank: int) -> range:
        return range(rank, self.num_stages, self.num_ranks)

    @cached_property
    def order(self) -> Order:
        """
        By rank, the actions of a training step in the order in which it runs them.

        Raises:
            ValueError: if the schedule is unknown or cannot run with these sizes.
        """
        if not isinstance(self.schedule, str):
            return self.schedule(self.num_microbatches)
        return schedule_order(self.schedule, self.num_ranks, self.num_stages, self.num_microbatches)

    @property
    def bubble(self) -> float:
        """
        Share of a step that a rank waits, `(p - 1) / (v * n + p - 1)` for `p` ranks of `v` stages and `n`
        microbatches, at equal stage times (arXiv 2104.04473, section 2.2).
        """
        each = self.num_stages // self.num_ranks
        return (self.num_ranks - 1) / (each * self.num_microbatches + self.num_ranks - 1)


def stages_of_layers(layers_per_stage: Sequence[int]) -> list[int]:
    """By decoder layer, the stage that runs it."""
    return [stage for stage, count in enumerate(layers_per_stage) for _ in range(count)]
