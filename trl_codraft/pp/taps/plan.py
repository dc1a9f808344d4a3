"""
The plan of a tap channel: which stage captures which taps, which rank runs which stage, how a message is laid out.

Both ends of a lane compute everything from the same plan, so no shapes travel.
"""

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import NamedTuple

import torch

from ..order import Order, forwards_only, required_slots, runs_through, schedule_order, slots_ahead
from ..shape import PipelineShape, stages_of_layers
from .message import HEADER_BYTES


# Taps start at multiples of this in a message: a cache line.
ALIGNMENT = HEADER_BYTES


class Tap(NamedTuple):
    """
    One hidden state that a draft reads.

    Args:
        layer (`int`):
            Its id: `i` in `0..n-1` is the input of decoder layer `i`, `n` the output of the last layer. With 0 the
            embedded tokens travel. Larger ids are free for others, such as the hidden state that the policy's head
            reads.
        stage (`int`):
            The (virtual) stage that captures it.
        width (`int`):
            Size of its last dimension.
        dtype (`torch.dtype`):
            Its dtype.
    """

    layer: int
    stage: int
    width: int
    dtype: torch.dtype

    def shape(self, rows: tuple[int, ...]) -> tuple[int, ...]:
        """Returns its shape for a microbatch whose leading dimensions are `rows`, such as `(B, S)`."""
        return (*rows, self.width)

    def num_bytes(self, rows: tuple[int, ...]) -> int:
        return math.prod(self.shape(rows)) * self.dtype.itemsize


class Lane(NamedTuple):
    """The path from one source stage to the draft's stage."""

    stage: int
    source: int  # rank that runs the source stage
    sink: int  # rank that runs the draft's stage
    slots: int  # landing slots


@dataclass(frozen=True)
class TapPlan:
    """
    The taps that a [`TapChannel`] carries and their way, the same on every rank.

    Args:
        taps (`tuple[Tap, ...]`):
            Strictly ascending by layer.
        stage_ranks (`tuple[int, ...]`):
            By (virtual) stage, the rank in the channel's group that runs it.
        schedule (`str` or `Callable`, *optional*, defaults to `"1F1B"`):
            `"GPipe"`, `"1F1B"`, `"Interleaved1F1B"`, or a function that returns the order of any other pipeline for a
            number of microbatches: by rank, the [`Action`]s in the order in which it runs them.
        num_microbatches (`int`):
            Microbatches of a training step. Steps may have others if the slots suffice.
        slots (`int`, *optional*):
            Landing slots per lane. If `None`, one more than a source fills at equal stage times, which is at least one
            more than needed.

    Raises:
        ValueError: if the taps or stages do not fit together, the schedule cannot run, or `slots` would deadlock.
    """

    taps: tuple[Tap, ...]
    stage_ranks: tuple[int, ...]
    num_microbatches: int
    schedule: str | Callable[[int], Order] = "1F1B"
    slots: int | None = None
    lanes: tuple[Lane, ...] = field(init=False, compare=False)

    @classmethod
    def for_layers(
        cls,
        tap_layers: Sequence[int],
        shape: PipelineShape,
        hidden_size: int,
        dtype: torch.dtype,
        *,
        slots: int | None = None,
    ) -> "TapPlan":
        """
        Makes the plan for a policy split by layers.

        Args:
            tap_layers (`Sequence[int]`):
                Ids of the taps, ascending.
            shape ([`PipelineShape`]):
                Its stages.
            hidden_size (`int`), dtype (`torch.dtype`):
                Width and dtype of the hidden states.
            slots (`int`, *optional*):
                As in [`TapPlan`].
        """
        # The output of the last layer belongs to the last stage, like its input.
        stages = [*stages_of_layers(shape.layers), shape.num_stages - 1]
        if any(not 0 <= layer < len(stages) for layer in tap_layers):
            last = len(stages) - 1
            raise ValueError(f"Tap layers {list(tap_layers)} do not fit {last} layers: ids run from 0 to {last}.")
        return cls(
            taps=tuple(Tap(layer, stages[layer], hidden_size, dtype) for layer in tap_layers),
            stage_ranks=tuple(map(shape.rank_of, range(shape.num_stages))),
            num_microbatches=shape.num_microbatches,
            schedule=shape.schedule,
            slots=slots,
        )

    def __post_init__(self):
        layers = [tap.layer for tap in self.taps]
        if not layers or layers != sorted(set(layers)):
            raise ValueError(f"Taps must be strictly ascending by layer and at least one, got layers {layers}.")
        if any(not 0 <= tap.stage < self.num_stages for tap in self.taps):
            raise ValueError(f"A tap names a stage that is not among the {self.num_stages} of `stage_ranks`.")
        if self.slots is not None and self.slots < 1:
            raise ValueError(f"A lane needs at least one landing slot, got `slots={self.slots}`.")
        order = self._order(self.num_microbatches)
        needed = self.required_slots(self.num_microbatches)
        lanes = []
        for stage in self.source_stages:
            slots = self.slots
            if slots is None:
                slots = max(needed, slots_ahead(order, self.num_stages, stage, self.sink)) + 1
            lanes.append(Lane(stage, self.stage_ranks[stage], self.stage_ranks[self.sink], slots))
        object.__setattr__(self, "lanes", tuple(lanes))
        self.require_slots(self.num_microbatches)

    @property
    def num_stages(self) -> int:
        return len(self.stage_ranks)

    @property
    def sink(self) -> int:
        """The draft's stage: the last."""
        return self.num_stages - 1

    @property
    def source_stages(self) -> tuple[int, ...]:
        """Stages that send: they capture taps and are on another rank than the draft's stage."""
        ranks = self.stage_ranks
        return tuple(sorted({tap.stage for tap in self.taps if ranks[tap.stage] != ranks[self.sink]}))

    def taps_of(self, stage: int) -> tuple[Tap, ...]:
        """Returns the taps that a stage captures."""
        return self._taps_by_stage[stage]

    @cached_property
    def _taps_by_stage(self) -> tuple[tuple[Tap, ...], ...]:
        return tuple(tuple(tap for tap in self.taps if tap.stage == stage) for stage in range(self.num_stages))

    def required_slots(self, num_microbatches: int) -> int:
        """Returns the smallest number of landing slots per lane that cannot deadlock, training or forward only."""
        return _required_slots(self, num_microbatches)

    def require_slots(self, num_microbatches: int) -> None:
        """
        Checks that a step with this many microbatches cannot deadlock.

        Raises:
            ValueError: if it can; says how many slots it takes.
        """
        needed = self.required_slots(num_microbatches)
        for lane in self.lanes:
            if lane.slots < needed:
                raise ValueError(
                    f"{lane.slots} landing slots deadlock: with {num_microbatches} microbatches on {self.num_stages} "
                    f"stages a source waits for a slot that is freed by a forward behind it. Set `slots` (in the "
                    f"trainer: `tap_channel_slots`) to {needed} or more, or leave it None."
                )

    def message_bytes(self, stage: int, rows: tuple[int, ...]) -> int:
        """Returns the bytes of the payload of a stage's message for a microbatch."""
        return sum(_aligned(tap.num_bytes(rows)) for tap in self.taps_of(stage))

    def step_bytes(self, shapes: Sequence[tuple[int, ...]]) -> dict[int, list[int]]:
        """Returns, by source stage, the bytes of the payloads of all messages of a step."""
        return {lane.stage: [self.message_bytes(lane.stage, rows) for rows in shapes] for lane in self.lanes}

    def views(self, stage: int, rows: tuple[int, ...], payload: torch.Tensor) -> dict[int, torch.Tensor]:
        """
        Returns the taps inside a message, by layer.

        Args:
            stage (`int`):
                The source stage.
            rows (`tuple[int, ...]`):
                Leading dimensions of the microbatch.
            payload (`torch.ByteTensor`):
                At least [`~TapPlan.message_bytes`] long.
        """
        views, offset = {}, 0
        for tap in self.taps_of(stage):
            content = payload[offset : offset + tap.num_bytes(rows)]
            views[tap.layer] = content.view(tap.dtype).view(tap.shape(rows))
            offset += _aligned(tap.num_bytes(rows))
        return views

    @cached_property
    def fingerprint(self) -> int:
        """64 bits that differ between different plans, the same in every process."""
        parts = [self.taps, self.stage_ranks, self.num_microbatches, self.lanes, self._order(self.num_microbatches)]
        return digest(repr(parts))

    def _order(self, num_microbatches: int) -> Order:
        """Returns the pipeline's order."""
        if not callable(self.schedule):
            ranks = len(set(self.stage_ranks))
            if self.stage_ranks != tuple(stage % ranks for stage in range(self.num_stages)):
                raise ValueError(
                    f"{self.schedule} runs stage s on rank s % {ranks}, got `stage_ranks={self.stage_ranks}`. Pass a "
                    "function as `schedule` for another placement."
                )
            return schedule_order(self.schedule, ranks, self.num_stages, num_microbatches)
        order = self.schedule(num_microbatches)
        if not runs_through(order, self.num_stages, {}, self.sink):
            raise ValueError("The order that `schedule` returns cannot run: an action needs one that comes after it.")
        return order


@lru_cache(maxsize=256)
def _required_slots(plan: TapPlan, num_microbatches: int) -> int:
    forward_order = backward_order = None
    if plan.schedule == "1F1B" and num_microbatches < plan.num_stages:
        # Too few to train on, but a forward-only step may have any number.
        forward_order = schedule_order("GPipe", plan.num_stages, plan.num_stages, num_microbatches)
    else:
        backward_order = plan._order(num_microbatches)
        forward_order = forwards_only(backward_order)
    orders = [order for order in (forward_order, backward_order) if order is not None]
    return max(required_slots(order, plan.num_stages, plan.source_stages, plan.sink) for order in orders)


def digest(text: str) -> int:
    """Returns 64 bits of a text. `hash` would differ between processes."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
