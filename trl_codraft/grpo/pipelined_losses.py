"""
TRL's GRPO trainer with the policy's layers split over the ranks of a pipeline (`pp/`).

TRL keeps seeing plain data parallelism, as in `grpo/grouped_losses.py`. Micro-steps are prepared as always, but only put aside;
the last one of an accumulation window runs all of them, those of all ranks of the pipeline, in one step of its schedule.
A rank trains the layers of its stages. With `pipeline_replica` it also keeps the whole policy for everything else
(rollouts, log-probs of other policies, evaluation, checkpoints), and is sent the others' layers after each optimizer step;
without, what needs no gradient goes through the pipeline too.

Shapes: `B` rows, `P` prompt columns, `C` completion columns, `S` columns, `H` hidden size.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn
from trl import GRPOTrainer

from ..group.exchange import LossGroup
from ..group.header import Header, Phase
from ..group.members import Scores, report_as
from ..modeling.taps import TapRecorder
from ..pp.pipeline import Pipeline
from ..pp.stages.gradients import clip_grad_norm, reduce_gradients
from ..pp.stages.loading import send_embedding
from ..pp.stages.replica import PolicyReplica
from ..pp.stages.shared_optimizer import shard_optimizer
from ..pp.stages.view import Shard, StageView
from .grouped_losses import GroupedLoss
from .pipeline_microbatches import Job, StepRows
from .stage_weights import PolicyParts
from .support import base_policy


class StagedModel(NamedTuple):
    """
    A policy whose layers are split over a pipeline.

    Args:
        pipeline ([`~pp.Pipeline`]):
            This rank's part of it.
        rows_of (`Callable`):
            Brings microbatches into the shape of a pipeline step.
    """

    pipeline: Pipeline
    rows_of: Callable[[Sequence[Job]], StepRows]


class Pipelining(NamedTuple):
    """
    A trainer's pipeline.

    Args:
        policy ([`StagedModel`]):
            The policy that is trained.
        reference ([`StagedModel`] or `None`):
            The reference policy, if it is a model of its own and no rank has the whole of it.
        replica ([`~pp.PolicyReplica`] or `None`):
            The whole policy, of which the stages are views.
        parts ([`~grpo.stage_weights.PolicyParts`] or `None`):
            In its place, what cut the policy down to this rank's stages.
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
    replica: PolicyReplica | None
    parts: PolicyParts | None
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


class PipelinedLoss(GroupedLoss):
    """
    Computes losses in pipelines of ranks. Without `pipelining` it is [`GroupedLoss`].

    Attributes:
        pipelining ([`Pipelining`] or `None`):
            Set by [`~PipelinedLoss.join_pipeline`].
    """

    pipelining: Pipelining | None = None
    recorder: TapRecorder | None = None
    # Micro-steps that were put aside.
    _window: list[dict[str, Any]]
    # While a pipeline step runs: its microbatches, and on the last stage the outputs of the decoder for them if the draft
    # learns from them.
    _rows: StepRows | None = None
    _last_hidden: list[torch.Tensor] | None = None

    def join_pipeline(self, loss_group: LossGroup, pipelining: Pipelining) -> None:
        """
        Runs the policy's losses in a pipeline from now on. Collective: all ranks of the run call it before training.

        Args:
            loss_group ([`~group.LossGroup`]):
                The ranks of the pipeline, made with the names `TRAVELLING_TENSORS`.
            pipelining ([`Pipelining`]):
                The pipeline.
        """
        self.join_loss_group(loss_group, self.sharding)
        self.pipelining = pipelining

    def train(self, *args, **kwargs):
        # An error or a stop in the middle of a window leaves micro-steps, which the next run must not train on.
        self._window = []
        return super().train(*args, **kwargs)

    @property
    def rank_of_policy_head(self) -> int:
        """A rank of the run that has the policy's head: the first, unless ranks have their stages alone."""
        if self.pipelining is None or self.pipelining.parts is None:
            return 0
        return self.pipelining.rank_of_last

    @property
    def has_policy_head(self) -> bool:
        """Whether this rank has it."""
        return self.pipelining is None or self.pipelining.parts is None or self.pipelining.pipeline.has_last

    # Losses

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        if self.pipelining is None or not self.model.training:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        if self.top_entropy_quantile < 1.0:
            inputs = {**inputs, "entropy_mask": self._high_entropy_mask(inputs)}
        self._window.append(inputs)
        value = torch.zeros((), device=self.accelerator.device)
        if self.accelerator.sync_gradients:
            window, self._window = self._window, []
            value = self._run_window(window)
        # Its backward has run in the pipeline.
        return report_as(torch.zeros((), device=value.device, requires_grad=True), value)

    def _run_window(self, window: list[dict[str, Any]]) -> torch.Tensor:
        """Forward, backward and metrics of an accumulation window; the sum of the losses of this rank's own rows."""
        jobs = []
        for inputs in window:
            headers = self._announce(Phase.LOSS, inputs, inputs["completion_ids"].shape[1])
            jobs += [
                Job(member, self.loss_group.send_rows(inputs, header, member))
                for member, header in enumerate(headers)
                if header.rows
            ]
        scores = self._run_pipeline(jobs)
        reduce_gradients(self.pipelining.stages, self.pipelining.group, self.pipelining.holders)
        losses = []
        own = [values for job, values in zip(jobs, scores, strict=True) if job.member == self.loss_group.rank]
        for number, (inputs, values) in enumerate(zip(window, own, strict=True)):
            at_end = self._end_of_window(number == len(window) - 1)
            with torch.no_grad(), at_end, self._metric_pass(inputs, values):
                losses.append(super()._compute_loss(self.model, inputs))
        return torch.stack(losses).sum()

    def _run_pipeline(self, jobs: list[Job]) -> list[Scores]:
        """One step of the schedule; the scores of each microbatch, without graph, on every rank."""
        pipeline, learns = self.pipelining.pipeline, self.args.draft_train
        with self._running(self.pipelining.policy.rows_of(jobs), for_draft=learns) as rows:
            kept = self._empty_scores(jobs)

            def loss(number, output):
                scores = rows.scores(number, output)
                kept[number].copy_(torch.stack([scores.log_probs, scores.entropies]).detach())
                return self._loss_of_job(jobs[number], scores)

            pipeline.step(rows.inputs(), loss, rows.tap_shapes(), with_taps=learns)
            self._take_taps(jobs, rows)
        if learns and pipeline.channel is not None:
            # Before anything that waits for earlier stages, which still run backwards.
            self._learn_from_kept()
        return self._share_scores(kept)

    def _forward_pipeline(self, model: StagedModel, jobs: list[Job], for_draft: bool = False) -> list[Scores]:
        """The same without backwards: scores, or what the draft learns from these microbatches."""
        with self._running(model.rows_of(jobs), for_draft) as rows:
            kept = self._empty_scores(jobs)
            with torch.no_grad():
                outputs = model.pipeline.forward(rows.inputs(), rows.tap_shapes(), with_taps=for_draft)
                for number, output in enumerate(outputs):
                    scores = rows.scores(number, output)
                    kept[number].copy_(torch.stack([scores.log_probs, scores.entropies]))
            self._take_taps(jobs, rows)
        return self._share_scores(kept)

    @contextmanager
    def _running(self, rows: StepRows, for_draft: bool) -> Iterator[StepRows]:
        """Within it, stages run the forwards of these microbatches."""
        records = for_draft and self.pipelining.pipeline.channel is not None
        self._rows, self._last_hidden = rows, [] if records else None
        try:
            yield rows
        finally:
            self._rows, self._last_hidden = None, None

    def _take_taps(self, jobs: list[Job], rows: StepRows) -> None:
        """On the last stage, after a step whose taps were sent."""
        pipeline = self.pipelining.pipeline
        if self._last_hidden is None or not pipeline.has_last:
            return
        for number, job in enumerate(jobs):
            # What is packed is let go of.
            states = [*pipeline.channel.take(number), self._last_hidden.pop(0)]
            states = [rows.keep_states(number, state) for state in states]
            self._keep_for_draft(job.tensors, states[:-1], states[-1])

    def _empty_scores(self, jobs: list[Job]) -> list[torch.Tensor]:
        """Room for log-probs and entropies of each microbatch. They are small: everyone gets all of them."""
        # TRL's are in float32; what a policy in float64 has beyond that is kept.
        dtype = torch.promote_types(torch.float32, base_policy(self.model).dtype)
        return [torch.zeros(2, *job.completion_shape, dtype=dtype, device=self.accelerator.device) for job in jobs]

    def _share_scores(self, kept: list[torch.Tensor]) -> list[Scores]:
        """The last stage's scores, on every rank."""
        flat = torch.cat([values.flatten() for values in kept])
        dist.broadcast(flat, group=self.loss_group.members, group_src=self.pipelining.rank_of_last)
        parts = flat.split([values.numel() for values in kept])
        return [Scores(*part.view_as(values), None) for part, values in zip(parts, kept, strict=True)]

    def _loss_of_job(self, job: Job, scores: Scores) -> torch.Tensor:
        """One member's loss of one micro-step, with TRL's code and the graph of the last stage."""
        with self._as_world_of_one(job.tensors, lambda *rows, **settings: scores):
            loss = super()._compute_loss(self.model, job.tensors)
        # The mean over the ranks that hold a stage is then that of the plain run: see `pp/stages/gradients.py`.
        return loss / self.pipelining.pipeline.num_ranks

    def _keep_for_draft(self, rows: dict[str, torch.Tensor], taps: list[torch.Tensor], last_hidden: torch.Tensor):
        """What the draft learns from one microbatch, on the last stage's ranks."""
        raise NotImplementedError

    def _learn_from_kept(self):
        """The draft's gradients of what was kept."""
        raise NotImplementedError

    @contextmanager
    def stage_forward(self, microbatch: int | None, layers: Sequence[int]) -> Iterator[Shard | None]:
        """What a stage's forward runs in: a [`~pp.StageContext`]."""
        with self.accelerator.autocast(), self._rows.forward_of(microbatch, layers) as shard:
            yield shard

    def score_stage(
        self, stage: StageView, policy: nn.Module, arguments: dict, extras: dict[str, torch.Tensor]
    ) -> torch.Tensor:
        """What the last stage returns: log-probs and entropies `(B, columns, 2)`."""
        arguments |= {"fused_lm_head": True, **self._rows.label_arguments(stage.microbatch, extras["labels"])}
        if self._last_hidden is None:
            outputs = policy(**arguments)
        else:
            with self.recorder.record() as record:
                outputs = policy(**arguments)
            self._last_hidden.append(record.last_hidden)
        # A reference policy gives no entropies.
        entropies = outputs.log_probs if outputs.entropy is None else outputs.entropy
        return torch.stack([outputs.log_probs, entropies], dim=-1)

    @contextmanager
    def _end_of_window(self, last: bool) -> Iterator[None]:
        """TRL's controllers act at the end of a window: only its last micro-step is one."""
        state = self.accelerator.gradient_state
        state._set_sync_gradients(last)
        try:
            yield
        finally:
            state._set_sync_gradients(True)

    def _tokens_per_shard(self, attention_mask: torch.Tensor) -> tuple[int, ...]:
        # Shards are planned from the masks that travel, by all ranks alike.
        return () if self.pipelining is not None else super()._tokens_per_shard(attention_mask)

    # Without gradients: on the whole policy, each rank its own rows, or in the pipeline

    def _score_own_rows(self, phase, model, input_ids, attention_mask, logits_to_keep, batch_size=None, **settings):
        if self.pipelining is None:
            return super()._score_own_rows(
                phase, model, input_ids, attention_mask, logits_to_keep, batch_size, **settings
            )
        rows = {"input_ids": input_ids, "attention_mask": attention_mask}
        headers = self._announce(phase, rows, logits_to_keep, chunk_rows=batch_size or 0)
        if self.pipelining.parts is not None:
            reference = model is self.ref_model and model is not None
            return self._score_in_pipeline(
                self.pipelining.reference if reference else self.pipelining.policy, rows, headers
            )
        # The headers are not needed to compute, but with them a failure of one rank reaches the others.
        return Scores(
            *GRPOTrainer._get_per_token_logps_and_entropies(
                self, model, input_ids, attention_mask, logits_to_keep, batch_size, **settings
            )
        )

    def _score_in_pipeline(
        self, model: StagedModel, rows: dict[str, torch.Tensor], headers: Sequence[Header]
    ) -> Scores:
        """Log-probs and entropies of the rows of all ranks; those of this rank's own."""
        jobs = []
        for member, header in enumerate(headers):
            if header.rows:
                theirs = self.loss_group.send_rows(rows, header, member)
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
                    jobs.append(Job(member, {name: part[start : start + chunk_rows] for name, part in whole.items()}))
        scores = self._forward_pipeline(model, jobs)
        own = [values for job, values in zip(jobs, scores, strict=True) if job.member == self.loss_group.rank]
        log_probs, entropies, _ = zip(*own, strict=True)
        return Scores(torch.cat(log_probs), torch.cat(entropies), None)

    def learn_from_rows(self, rows: dict[str, torch.Tensor]) -> None:
        """
        Runs the rows of all ranks of the pipeline through it, and keeps on its last stage what the draft learns from them.
        Collective in the pipeline.

        Args:
            rows (`dict[str, torch.Tensor]`):
                Of this rank, at least one: `prompt_ids`, `prompt_mask` `(B, P)`, `completion_ids`, `completion_mask`
                `(B, C)`.
        """
        headers = self._announce(Phase.LOG_PROBS, rows, rows["completion_ids"].shape[1])
        jobs = [Job(member, self.loss_group.send_rows(rows, header, member)) for member, header in enumerate(headers)]
        self._forward_pipeline(self.pipelining.policy, jobs, for_draft=True)

    # Around the optimizer step

    def create_optimizer(self, model=None):
        optimizer = super().create_optimizer(model)
        if self.pipelining is not None and not isinstance(optimizer, AcceleratedOptimizer):
            # In a second run of the same trainer it is wrapped, and has the hook.
            if self.args.pipeline_shard_optimizer and dist.get_world_size(self.pipelining.holders) > 1:
                optimizer = self.optimizer = self._share_state(optimizer)
            optimizer.register_step_post_hook(self._send_what_changed)
        return optimizer

    def _share_state(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """The same with its state split over the ranks that hold the same stages."""
        kind, settings = self.optimizer_cls_and_kwargs or self.get_optimizer_cls_and_kwargs(self.args, self.model)
        if type(optimizer) is not kind or {"params", "model", "optimizer_dict"} & settings.keys():
            raise ValueError(
                f"`pipeline_shard_optimizer=True` does not know how to make parts of this {type(optimizer).__name__}. Choose "
                "it with `optim` or `optimizer_cls_and_kwargs`, without settings by layer, or set "
                "`pipeline_shard_optimizer=False`."
            )
        stages, holders = self.pipelining.stages, self.pipelining.holders
        return shard_optimizer(optimizer, lambda groups: kind(groups, **settings), stages, holders)

    def _send_what_changed(self, optimizer, args, kwargs) -> None:
        if self.pipelining.replica is not None:
            self.pipelining.replica.refresh()
        elif self.pipelining.sends_embedding:
            send_embedding(self.pipelining.stages[0].policy, self.pipelining.group)

    def _clip_grad_norm(self, model):
        if self.pipelining is None:
            return super()._clip_grad_norm(model)
        return clip_grad_norm(self.pipelining.stages, self.args.max_grad_norm, self.pipelining.group)

    def _get_grad_norm(self, model, grad_norm=None):
        if self.pipelining is not None and grad_norm is None:
            grad_norm = clip_grad_norm(self.pipelining.stages, torch.inf, self.pipelining.group)
        return super()._get_grad_norm(model, grad_norm)
