"""
Losses computed in a pipeline of ranks, each of which trains the layers of its stages (`pp/`).

TRL keeps seeing plain data parallelism, as in `grouped_losses.py`. Micro-steps are prepared as always, but only put
aside; the last one of an accumulation window runs all of them, for all ranks of the pipeline, in one step of its
schedule. With `pipeline_replica` a rank also keeps the whole policy for everything else (rollouts, log-probs of other
policies, evaluation, checkpoints), and is sent the others' layers after each optimizer step; without, work that needs
no gradient goes through the pipeline too.

Shapes: `B` rows, `P` prompt columns, `C` completion columns.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from trl import GRPOTrainer

from ..group.exchange import LossGroup
from ..group.header import Header, Phase
from ..group.members import Scores, report_as
from ..modeling.losses import draft_loss
from ..modeling.policy import base_policy
from ..pp.pipeline import Pipeline
from ..pp.stages.gradients import reduce_gradients
from ..pp.stages.replica import PolicyReplica
from ..pp.stages.view import StageView
from .failures import HeldFailures
from .member_passes import MemberPasses
from .pipeline_microbatches import MemberMicrobatch, StepMicrobatches
from .run import Batch, Learner, Run
from .stage_forwards import StageForwards
from .stage_weights import StageWeights


class StagedModel(NamedTuple):
    """
    Holds a policy whose layers are split over a pipeline.

    Args:
        pipeline ([`~pp.pipeline.Pipeline`]):
            This rank's stages of it.
        lay_out (`Callable`):
            Brings microbatches into the one shape of a pipeline step.
    """

    pipeline: Pipeline
    lay_out: Callable[[Sequence[MemberMicrobatch]], StepMicrobatches]


class Pipelining(NamedTuple):
    """
    Describes a trainer's pipeline.

    Args:
        policy ([`StagedModel`]):
            The policy that is trained.
        reference ([`StagedModel`] or `None`):
            The reference policy, if it is a model of its own and no rank has the whole of it.
        forwards ([`StageForwards`]):
            Runs the forwards of this rank's stages.
        replica ([`~pp.stages.replica.PolicyReplica`] or `None`):
            The whole policy, of which the stages are views.
        stage_weights ([`~grpo.stage_weights.StageWeights`] or `None`):
            Cuts a policy down to this rank's stages, if no rank has the whole of it.
        loss_group ([`~group.exchange.LossGroup`]):
            The ranks of the pipeline, made with the names `TRAVELLING_TENSORS`.
        holders (`ProcessGroup`):
            The ranks of the run that hold the same stages.
        host_group (`ProcessGroup`):
            The ranks of the pipeline on gloo.
        rank_of_last (`int`):
            A rank of the loss group that runs the last stage.
        saves (`bool`):
            Whether this pipeline writes checkpoints.
        sends_embedding (`bool`):
            Whether the last stage's copy of the input embedding has to follow the first stage's.
    """

    policy: StagedModel
    reference: StagedModel | None
    forwards: StageForwards
    replica: PolicyReplica | None
    stage_weights: StageWeights | None
    loss_group: LossGroup
    holders: dist.ProcessGroup
    host_group: dist.ProcessGroup
    rank_of_last: int
    saves: bool
    sends_embedding: bool

    @property
    def pipeline(self) -> Pipeline:
        return self.policy.pipeline

    @property
    def stages(self) -> list[StageView]:
        return self.pipeline.stages

    @property
    def group(self) -> dist.ProcessGroup:
        return self.pipeline.group


class PipelinedLosses:
    """
    Computes losses in a pipeline of ranks. A [`~run.Losses`].

    Args:
        run ([`~run.Run`]):
            The trainer.
        trl (`GRPOTrainer`):
            The same trainer without our overrides.
        pipelining ([`Pipelining`]):
            The pipeline.
        failures ([`HeldFailures`]):
            Holds exceptions of this rank until the next header.
        learner ([`~run.Learner`], *optional*):
            Keeps, on the last stage, what the draft learns from a window.
        draft_loss (`Callable`, *optional*):
            The draft's loss on what the last stage's rank has of a microbatch.
    """

    def __init__(
        self,
        run: Run,
        trl: GRPOTrainer,
        pipelining: Pipelining,
        failures: HeldFailures,
        learner: Learner | None = None,
        draft_loss: Callable = draft_loss,
    ):
        self.run, self.trl, self.pipelining, self.learner, self.draft_loss = run, trl, pipelining, learner, draft_loss
        self.group, self.forwards = pipelining.loss_group, pipelining.forwards
        # Shards are planned from the masks that travel, by all ranks alike: headers announce none.
        self.passes = MemberPasses(run, self.group, failures)
        self.announce_rollout = self.passes.announce_rollout
        # Micro-steps that were put aside.
        self._window: list[dict[str, Any]] = []

    @property
    def rank_of_head(self) -> int:
        """See [`~run.Losses`]. The first rank, unless ranks have their stages alone."""
        return 0 if self.pipelining.stage_weights is None else self.pipelining.rank_of_last

    @property
    def has_head(self) -> bool:
        """See [`~run.Losses`]."""
        return self.pipelining.stage_weights is None or self.pipelining.pipeline.has_last

    def start_run(self) -> None:
        """See [`~run.Losses`]. An error or a stop in the middle of a window leaves micro-steps behind."""
        self._window = []

    # With gradients: whole windows

    def compute(self, model: nn.Module, inputs: dict[str, Any]) -> torch.Tensor:
        """See [`~run.Losses`]. 0 for a micro-step that is put aside, the sum of all at the end of a window."""
        self._window.append(self.passes.with_high_entropy_mask(inputs, self._score_own_rows))
        value = torch.zeros((), device=self.run.accelerator.device)
        if self.run.accelerator.sync_gradients:
            window, self._window = self._window, []
            value = self._run_window(window)
        # Its backward has run in the pipeline.
        return report_as(torch.zeros((), device=value.device, requires_grad=True), value)

    def _run_window(self, window: list[dict[str, Any]]) -> torch.Tensor:
        """Forward, backward and metrics of an accumulation window; the sum of the losses of this rank's own rows."""
        microbatches = []
        for inputs in window:
            headers = self.passes.announce(Phase.LOSS, inputs, inputs["completion_ids"].shape[1])
            microbatches += self._microbatches(headers, inputs)
        scores = self._step(microbatches)
        reduce_gradients(self.pipelining.stages, self.pipelining.group, self.pipelining.holders)
        losses = []
        own = [
            values
            for microbatch, values in zip(microbatches, scores, strict=True)
            if microbatch.member == self.group.rank
        ]
        for number, (inputs, values) in enumerate(zip(window, own, strict=True)):
            with self._end_of_window(number == len(window) - 1), self.passes.metric_pass(inputs, values):
                losses.append(self.run._compute_loss(self.run.model, inputs))
        return torch.stack(losses).sum()

    def _microbatches(self, headers: Sequence[Header], inputs: dict[str, torch.Tensor]) -> list[MemberMicrobatch]:
        """Sends each member's rows to all ranks of the pipeline."""
        return [
            MemberMicrobatch(member, self.group.send_rows(inputs, header, member))
            for member, header in enumerate(headers)
            if header.rows
        ]

    def _step(self, microbatches: list[MemberMicrobatch]) -> list[Scores]:
        """Runs one step of the schedule; the scores of each microbatch, without graph, on every rank."""
        pipeline, learns = self.pipelining.pipeline, self.run.args.draft_train
        with self.forwards.running(self.pipelining.policy.lay_out(microbatches), for_draft=learns) as step:
            kept = self._empty_scores(microbatches)

            def loss(number: int, output: torch.Tensor) -> torch.Tensor:
                scores = step.scores(number, output)
                kept[number].copy_(torch.stack([scores.log_probs, scores.entropies]).detach())
                return self._loss_of(microbatches[number], scores)

            pipeline.step(step.inputs(), loss, step.tap_shapes(), with_taps=learns)
            batches = self._take_taps(microbatches, step)
        if learns and pipeline.channel is not None:
            # Before anything that waits for earlier stages, which still run backwards.
            self.learner.keep(batches)
            self.learner.learn_from_kept()
        return self._share_scores(kept)

    def _loss_of(self, microbatch: MemberMicrobatch, scores: Scores) -> torch.Tensor:
        """One member's loss of one micro-step, with TRL's code and the graph of the last stage."""
        with self.passes.gradient_pass(microbatch.tensors, lambda *rows, **settings: scores):
            loss = self.run._compute_loss(self.run.model, microbatch.tensors)
        # The mean over the ranks that hold a stage is then that of the plain run: see `pp/stages/gradients.py`.
        return loss / self.pipelining.pipeline.num_ranks

    @contextmanager
    def _end_of_window(self, last: bool) -> Iterator[None]:
        """TRL's controllers act at the end of a window: only its last micro-step is one."""
        state = self.run.accelerator.gradient_state
        state._set_sync_gradients(last)
        try:
            yield
        finally:
            state._set_sync_gradients(True)

    # Without gradients: on the whole policy, each rank its own rows, or in the pipeline

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
        **settings: Any,
    ) -> Scores:
        rows = {"input_ids": input_ids, "attention_mask": attention_mask}
        # A whole policy needs no headers to compute, but with them a failure of one rank reaches the
        # others.
        headers = self.passes.announce(phase, rows, logits_to_keep, chunk_rows=batch_size or 0)
        if self.pipelining.stage_weights is not None:
            of_reference = model is self.run.ref_model and model is not None
            staged = self.pipelining.reference if of_reference else self.pipelining.policy
            return self._score_in_pipeline(staged, rows, headers)
        score = self.trl._get_per_token_logps_and_entropies
        return Scores(*score(model, input_ids, attention_mask, logits_to_keep, batch_size, **settings))

    def _score_in_pipeline(
        self, model: StagedModel, rows: dict[str, torch.Tensor], headers: Sequence[Header]
    ) -> Scores:
        """Runs the rows of all ranks through the pipeline; log-probs and entropies of this rank's own."""
        microbatches = []
        for member, header in enumerate(headers):
            if header.rows:
                theirs = self.group.send_rows(rows, header, member)
                columns = header.prompt_length, header.completion_length
                prompt_ids, completion_ids = theirs["input_ids"].split(columns, dim=1)
                prompt_mask, completion_mask = theirs["attention_mask"].split(columns, dim=1)
                whole = {
                    "prompt_ids": prompt_ids,
                    "prompt_mask": prompt_mask,
                    "completion_ids": completion_ids,
                    "completion_mask": completion_mask,
                }
                chunk_rows = header.chunk_rows or header.rows
                for start in range(0, header.rows, chunk_rows):
                    chunk = {name: tensor[start : start + chunk_rows] for name, tensor in whole.items()}
                    microbatches.append(MemberMicrobatch(member, chunk))
        scores, _ = self._forward(model, microbatches)
        own = [
            values
            for microbatch, values in zip(microbatches, scores, strict=True)
            if microbatch.member == self.group.rank
        ]
        log_probs, entropies, _ = zip(*own, strict=True)
        return Scores(torch.cat(log_probs), torch.cat(entropies), None)

    def draft_batches_of(self, rows: dict[str, torch.Tensor]) -> list[Batch]:
        """
        Runs the rows of all ranks of the pipeline through it. Collective in the pipeline.

        Args:
            rows (`dict[str, torch.Tensor]`):
                This rank's rows, at least one: `prompt_ids`, `prompt_mask` `(B, P)`, `completion_ids`,
                `completion_mask` `(B, C)`.

        Returns:
            `list`: on its last stage, a batch that the draft learns from for each member; empty elsewhere.
        """
        headers = self.passes.announce(Phase.LOG_PROBS, rows, rows["completion_ids"].shape[1])
        return self._forward(self.pipelining.policy, self._microbatches(headers, rows), for_draft=True)[1]

    def _forward(
        self, model: StagedModel, microbatches: list[MemberMicrobatch], for_draft: bool = False
    ) -> tuple[list[Scores], list[Batch]]:
        """Runs forwards alone: scores of these microbatches, and what the draft learns from them if it does."""
        with self.forwards.running(model.lay_out(microbatches), for_draft) as step:
            kept = self._empty_scores(microbatches)
            with torch.no_grad():
                outputs = model.pipeline.forward(step.inputs(), step.tap_shapes(), with_taps=for_draft)
                for number, output in enumerate(outputs):
                    scores = step.scores(number, output)
                    kept[number].copy_(torch.stack([scores.log_probs, scores.entropies]))
            batches = self._take_taps(microbatches, step)
        return self._share_scores(kept), batches

    def _take_taps(self, microbatches: list[MemberMicrobatch], step: StepMicrobatches) -> list[Batch]:
        """Packs what the draft learns, on the last stage, after a step whose taps were sent."""
        pipeline, last_hidden = self.pipelining.pipeline, self.forwards.last_hidden
        if last_hidden is None or not pipeline.has_last:
            return []
        batches = []
        for number, microbatch in enumerate(microbatches):
            # Hidden states that have been packed are let go of.
            states = [*pipeline.channel.take(number), last_hidden.pop(0)]
            *taps, last = (step.keep_states(number, state) for state in states)
            batches.append(self.learner.pack(microbatch.tensors, taps, last, step.packed(number)))
        return batches

    def _empty_scores(self, microbatches: list[MemberMicrobatch]) -> list[torch.Tensor]:
        """Room for log-probs and entropies of each microbatch. They are small: everyone gets all of them."""
        # TRL's are in float32; a policy in float64 has more than that, which is kept.
        dtype = torch.promote_types(torch.float32, base_policy(self.run.model).dtype)
        device = self.run.accelerator.device
        return [
            torch.zeros(2, *microbatch.completion_shape, dtype=dtype, device=device) for microbatch in microbatches
        ]

    def _share_scores(self, kept: list[torch.Tensor]) -> list[Scores]:
        """Sends the last stage's scores to every rank."""
        flat = torch.cat([values.flatten() for values in kept])
        dist.broadcast(flat, group=self.group.members, group_src=self.pipelining.rank_of_last)
        pieces = flat.split([values.numel() for values in kept])
        return [Scores(*piece.view_as(values), None) for piece, values in zip(pieces, kept, strict=True)]
