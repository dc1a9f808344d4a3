"""
Runs the forwards of a pipeline's stages during one of its steps, and scores tokens on the last one.

Shapes: `B` rows, `S` columns, `H` hidden size.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ..modeling.taps import TapRecorder
from ..pp.stages.view import Shard, StageView
from .pipeline_microbatches import StepMicrobatches
from .run import Run


class StageForwards:
    """
    Runs the forwards of this rank's stages.

    Args:
        run ([`~run.Run`]):
            The trainer.
        recorder ([`~modeling.taps.TapRecorder`], *optional*):
            Records the decoder's output on the last stage, if a draft learns from a channel's taps.

    Attributes:
        last_hidden (`list[torch.Tensor]` or `None`):
            While a step runs that the draft learns from: on the last stage, the decoder's output `(B, S, H)` of each
            microbatch so far.
    """

    def __init__(self, run: Run, recorder: TapRecorder | None = None):
        self.run, self.recorder = run, recorder
        self.last_hidden: list[torch.Tensor] | None = None
        self._step: StepMicrobatches | None = None

    @contextmanager
    def running(self, step: StepMicrobatches, for_draft: bool) -> Iterator[StepMicrobatches]:
        """Within it, stages run the forwards of these microbatches."""
        records = for_draft and self.recorder is not None
        self._step, self.last_hidden = step, [] if records else None
        try:
            yield step
        finally:
            self._step, self.last_hidden = None, None

    @contextmanager
    def context(self, microbatch: int | None, layers: Sequence[int]) -> Iterator[Shard | None]:
        """Surrounds a stage's forward: a [`~pp.stages.view.StageContext`]."""
        with self.run.accelerator.autocast(), self._step.forward_of(microbatch, layers) as shard:
            yield shard

    def score(
        self, stage: StageView, policy: nn.Module, arguments: dict[str, Any], extras: dict[str, torch.Tensor]
    ) -> torch.Tensor:
        """Runs the last stage's forward, and returns log-probs and entropies `(B, columns, 2)`."""
        arguments |= {"fused_lm_head": True, **self._step.label_arguments(stage.microbatch, extras["labels"])}
        if self.last_hidden is None:
            outputs = policy(**arguments)
        else:
            with self.recorder.record() as record:
                outputs = policy(**arguments)
            self.last_hidden.append(record.last_hidden)
        # A reference policy gives no entropies.
        entropies = outputs.log_probs if outputs.entropy is None else outputs.entropy
        return torch.stack([outputs.log_probs, entropies], dim=-1)
