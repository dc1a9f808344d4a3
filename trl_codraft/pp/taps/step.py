"""A step of a tap channel: made by `begin_step`, dropped by `end_step`."""

from dataclasses import dataclass, field

import torch

from .message import Kind, TapHeader
from .plan import TapPlan, digest


@dataclass
class ForwardTaps:
    """
    The taps of one forward of one stage, while it runs.

    Args:
        stage (`int`), microbatch (`int`):
            The stage and the microbatch.
        seen (`set[int]`, *optional*):
            Ids of the taps that were captured.
        views (`dict[int, torch.Tensor]`, *optional*):
            Tensors that the taps are copied to, from the first one on.
    """

    stage: int
    microbatch: int
    seen: set[int] = field(default_factory=set)
    views: dict[int, torch.Tensor] | None = None


@dataclass
class Step:
    """
    Everything that a channel knows of the step that runs.

    Args:
        plan ([`TapPlan`]):
            The channel's plan.
        epoch (`int`):
            Number of the step, from 1.
        shapes (`tuple[tuple[int, ...], ...]`):
            By microbatch, the leading dimensions of its taps.

    Attributes:
        running ([`ForwardTaps`] or `None`): the forward that runs.
        captured (`set[tuple[int, int]]`): stage and microbatch of the forwards that have run on this rank.
        drained (`int`): microbatches whose messages the draft's rank has taken out of their slots.
    """

    plan: TapPlan
    epoch: int
    shapes: tuple[tuple[int, ...], ...]
    running: ForwardTaps | None = None
    captured: set[tuple[int, int]] = field(default_factory=set)
    drained: int = 0

    def __post_init__(self):
        self.digest = self.plan.fingerprint ^ digest(repr(self.shapes))

    def header(self, stage: int, microbatch: int, sequence: int) -> TapHeader:
        """Returns the header of a message, `sequence` messages of its lane having gone before."""
        return TapHeader(
            kind=Kind.TAPS,
            epoch=self.epoch,
            sequence=sequence,
            microbatch=microbatch,
            stage=stage,
            num_bytes=self.plan.message_bytes(stage, self.shapes[microbatch]),
            plan=self.digest,
            num_taps=len(self.plan.taps_of(stage)),
        )

    def require_whole(self, stages: tuple[int, ...]) -> None:
        """
        Checks that every forward of some stages ran.

        Raises:
            RuntimeError: naming the first that did not.
        """
        due = {(stage, k) for stage in stages if self.plan.taps_of(stage) for k in range(len(self.shapes))}
        if due - self.captured:
            stage, microbatch = min(due - self.captured)
            raise RuntimeError(f"Stage {stage} did not run microbatch {microbatch} inside `TapChannel.forward`.")
