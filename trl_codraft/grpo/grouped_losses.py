"""
Losses computed by groups of ranks (`group/`), each member's microbatch split over all of them.

TRL keeps seeing plain data parallelism: rollouts, rewards, advantages and gathers are untouched. The difference is who
runs the policy: log-probs of a microbatch come from all ranks of a group, and each rank backpropagates its share of
every member's loss. The mean over all ranks that DDP and FSDP2 take is then the data-parallel gradient.

Shapes: `B` rows, `P` prompt columns, `C` completion columns.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from ..group.exchange import LossGroup
from ..group.header import Phase
from ..group.members import Scores, Sharding, backward_members, report_as, score_members, score_together
from ..modeling.losses import draft_loss
from .failures import HeldFailures
from .member_passes import MemberPasses
from .run import Learner, Run
from .support import require_averaged_gradients


@dataclass
class _Scored:
    """Keeps the policy's scores of one member's microbatch, without graph, and how the microbatch was split."""

    scores: Scores | None = None
    packed: Any = None


class GroupedLosses:
    """
    Computes losses in a group of ranks. A [`~run.Losses`].

    Args:
        run ([`~run.Run`]):
            The trainer.
        group ([`~group.exchange.LossGroup`]):
            The ranks that share this rank's losses, made with the names `TRAVELLING_TENSORS`.
        sharding ([`~group.members.Sharding`]):
            Splits a microbatch over them.
        failures ([`HeldFailures`]):
            Holds exceptions of this rank until the next header.
        learner ([`~run.Learner`], *optional*):
            Keeps what the draft learns from each gradient pass.
        draft_loss (`Callable`, *optional*):
            The draft's loss on this rank's share of a microbatch.
    """

    rank_of_head = 0
    has_head = True

    def __init__(
        self,
        run: Run,
        group: LossGroup,
        sharding: Sharding,
        failures: HeldFailures,
        learner: Learner | None = None,
        draft_loss: Callable = draft_loss,
    ):
        self.run, self.group, self.sharding, self.learner, self.draft_loss = run, group, sharding, learner, draft_loss
        self.passes = MemberPasses(run, group, failures, sharding.count_tokens)
        self.announce_rollout = self.passes.announce_rollout
        if run.accelerator.is_fsdp2:
            # Each backward reduces and frees its gradients: otherwise whole gradients pile up over micro-steps too.
            run.accelerator.gradient_state.plugin_kwargs["sync_each_batch"] = True

    def start_run(self) -> None:
        """See [`~run.Losses`]. Nothing is left."""

    def compute(self, model: nn.Module, inputs: dict[str, Any]) -> torch.Tensor:
        """See [`~run.Losses`]."""
        run, accelerator = self.run, self.run.accelerator
        require_averaged_gradients(accelerator, model)
        inputs = self.passes.with_high_entropy_mask(inputs, self._score_own_rows)
        headers = self.passes.announce(Phase.LOSS, inputs, inputs["completion_ids"].shape[1])
        own = _Scored()

        def loss_of(member: int, rows: dict[str, torch.Tensor]) -> torch.Tensor:
            scored = own if member == self.group.rank else _Scored()
            with self._recording(rows, scored), self.passes.gradient_pass(rows, partial(self._score, model, scored)):
                return run._compute_loss(model, rows)

        loss = backward_members(
            self.group,
            headers,
            inputs,
            loss_of=loss_of,
            backward=accelerator.backward,
            # FSDP2: see `__init__`.
            no_sync=lambda: nullcontext() if accelerator.is_fsdp2 else accelerator.no_sync(model),
        )
        # Nothing is recorded for the draft here: the gradient passes have been.
        with self.passes.metric_pass(inputs, own.scores):
            value = run._compute_loss(model, inputs)
        return report_as(loss, value)

    def _recording(self, rows: dict[str, torch.Tensor], scored: _Scored):
        """Within it, the draft's learner records what one member's loss runs of the policy on this rank."""
        if self.learner is None:
            return nullcontext()
        return self.learner.recording(rows, packed=lambda: scored.packed)

    def _score(self, model: nn.Module, scored: _Scored, *rows: Any, **settings: Any) -> Scores:
        """Scores a member's microbatch together with the other ranks, and notes the result for its loss."""
        scores, scored.packed = self._score_together(model, *rows, **settings)
        scored.scores = scores.detach()
        return scores

    def score(self, model: nn.Module, *rows: Any, **settings: Any) -> Scores:
        """See [`~run.Losses`]."""
        phase = Phase.LOG_PROBS if self.run.model.training else Phase.EVALUATION
        return self._score_own_rows(phase, model, *rows, **settings)

    def _score_own_rows(
        self,
        phase: Phase,
        model: nn.Module,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        compute_entropy: bool = False,
        compute_aux_loss: bool = False,
        **images: Any,
    ) -> Scores:
        """Scores this rank's rows outside the gradient passes: the group goes through the rows of each member."""
        rows = {"input_ids": input_ids, "attention_mask": attention_mask}
        # Images cannot travel: announcing them raises.
        headers = self.passes.announce(phase, {**rows, **images}, logits_to_keep, chunk_rows=batch_size or 0)
        settings = {"compute_entropy": compute_entropy, "compute_aux_loss": compute_aux_loss}
        return score_members(
            self.group, headers, rows, lambda *rows: self._score_together(model, *rows, **settings)[0]
        )

    def _score_together(
        self, model: nn.Module, *rows: Any, compute_entropy: bool = False, compute_aux_loss: bool = False, **_: Any
    ) -> tuple[Scores, Any]:
        """Scores rows that all members hold; how they were split. Images do not come here: see `_score_own_rows`."""
        with self.run.accelerator.autocast():
            return score_together(self.group, self.sharding, model, *rows, compute_entropy, compute_aux_loss)
