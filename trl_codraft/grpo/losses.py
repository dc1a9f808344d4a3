"""
Computes the policy's losses and log-probs on this rank alone (here), in a group of ranks (`grouped_losses.py`), or in
a pipeline (`pipelined_losses.py`). The trainer holds one of the three and asks it; TRL's own loss code runs in all of
them.

Shapes: `B` rows, `P` prompt columns, `C` completion columns.
"""

from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from trl import GRPOTrainer

from ..modeling.losses import draft_loss
from .run import Learner, Run


class PlainLosses:
    """
    TRL's losses on this rank. A [`~run.Losses`].

    Args:
        run ([`~run.Run`]):
            The trainer.
        trl (`GRPOTrainer`):
            The same trainer without our overrides.
        learner ([`~run.Learner`], *optional*):
            Keeps what the draft learns from each loss.
    """

    draft_loss = staticmethod(draft_loss)
    rank_of_head = 0
    has_head = True

    def __init__(self, run: Run, trl: GRPOTrainer, learner: Learner | None = None):
        self.run, self.trl, self.learner = run, trl, learner

    def compute(self, model: nn.Module, inputs: dict[str, Any]) -> torch.Tensor:
        """See [`~run.Losses`]."""
        with nullcontext() if self.learner is None else self.learner.recording(inputs):
            return self.run._compute_loss(model, inputs)

    def score(self, model: nn.Module, *rows: Any, **settings: Any) -> tuple:
        """See [`~run.Losses`]."""
        return self.trl._get_per_token_logps_and_entropies(model, *rows, **settings)

    def announce_rollout(self) -> None:
        """See [`~run.Losses`]. Nobody waits."""

    def start_run(self) -> None:
        """See [`~run.Losses`]. Nothing is left."""
