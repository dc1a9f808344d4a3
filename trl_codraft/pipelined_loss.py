"""
TRL's GRPO trainer with the policy's layers split over the ranks of a pipeline (`pp/`).

TRL keeps seeing plain data parallelism, as in `grouped_loss.py`. Micro-steps are prepared as always, but only put aside;
the last one of an accumulation window runs all of them, those of all ranks of the pipeline, in one step of its schedule.
Every rank keeps the whole policy for everything else (rollouts, log-probs of other policies, evaluation, checkpoints),
trains the layers of its stage, and is sent the others' after each optimizer step.

Shapes: `B` rows, `P` prompt columns, `C` completion columns, `S` columns, `H` hidden size.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn
from trl import GRPOTrainer

from .group import LossGroup, Phase, Scores, attributes_set, report_as
from .grouped_loss import GroupedLoss
from .modeling.taps import TapRecorder
from .pp import Pipeline, PolicyReplica, Rows, StageView, clip_grad_norm, pad_microbatches, reduce_gradients


IGNORED = -100


class Pipelining(NamedTuple):
    """
    A trainer's pipeline.

    Args:
        pipeline ([`~pp.Pipeline`]):
            This rank's part of it.
        replica ([`~pp.PolicyReplica`]):
            The whole policy, of which the stages are views.
        holders (`ProcessGroup`):
            The ranks of the run that hold the same stages.
        host_group (`ProcessGroup`):
            The ranks of the pipeline on gloo.
        saves (`bool`):
            Whether this pipeline writes checkpoints.
    """

    pipeline: Pipeline
    replica: PolicyReplica
    holders: dist.ProcessGroup
    host_group: dist.ProcessGroup
    saves: bool

    @property
    def stages(self) -> list[StageView]:
        return self.pipeline.stages

    @property
    def group(self) -> dist.ProcessGroup:
        return self.pipeline.group


class Job(NamedTuple):
    """One microbatch of a pipeline step: which micro-step of which member it is, and its tensors."""

    step: int
    member: int
    tensors: dict[str, torch.Tensor]

    @property
    def attention_mask(self) -> torch.Tensor:
        return torch.cat([self.tensors["prompt_mask"], self.tensors["completion_mask"]], dim=1)

    @property
    def completion_shape(self) -> torch.Size:
        """`(B, C)`."""
        return self.tensors["completion_ids"].shape

    def rows(self) -> Rows:
        ids = torch.cat([self.tensors["prompt_ids"], self.tensors["completion_ids"]], dim=1)
        return Rows(ids, self.attention_mask, self.completion_shape[1])


class PipelinedLoss(GroupedLoss):
    """
    Computes losses in pipelines of ranks. Without `pipelining` it is [`GroupedLoss`].

    Attributes:
        pipelining ([`Pipelining`] or `None`):
            Set by [`~PipelinedLoss.join_pipeline`].
    """

    pipelining: Pipelining | None = None
    recorder: TapRecorder | None = None
    _window: list[dict[str, Any]]
    # On the last stage, by microbatch of the step that runs: outputs of the decoder.
    _last_hidden: list[torch.Tensor]

    def join_pipeline(self, loss_group: LossGroup, pipelining: Pipelining) -> None:
        """
        Runs the policy's losses in a pipeline from now on. Collective: all ranks of the run call it before training.

        Args:
            loss_group ([`~group.LossGroup`]):
                The ranks of the pipeline, made with the names `TRAVELLING_TENSORS`.
            pipelining ([`Pipelining`]):
                The pipeline.
        """
        self.join_loss_group(loss_group, None)
        self.pipelining, self._window, self._last_hidden = pipelining, [], []

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
        for step, inputs in enumerate(window):
            headers = self._announce(Phase.LOSS, inputs, inputs["completion_ids"].shape[1])
            jobs += [
                Job(step, member, self.loss_group.send_rows(inputs, header, member))
                for member, header in enumerate(headers)
                if header.rows
            ]
        scores = self._run_pipeline(jobs)
        reduce_gradients(self.pipelining.stages, self.pipelining.group, self.pipelining.holders)
        losses = []
        own = [values for job, values in zip(jobs, scores, strict=True) if job.member == self.loss_group.rank]
        for number, (inputs, values) in enumerate(zip(window, own, strict=True)):
            at_end = self._end_of_window(number == len(window) - 1)
            with torch.no_grad(), at_end, self._metric_pass(inputs, Scores(values[..., 0], values[..., 1], None)):
                losses.append(super()._compute_loss(self.model, inputs))
        return torch.stack(losses).sum()

    def _run_pipeline(self, jobs: list[Job]) -> list[torch.Tensor]:
        """One step of the schedule; by microbatch the log-probs and entropies `(B, C, 2)`, on every rank."""
        pipeline = self.pipelining.pipeline
        padded = pad_microbatches([job.rows() for job in jobs], pad_token_id=self._tokenizer.pad_token_id)
        shapes = [job.completion_shape for job in jobs]
        scores = [torch.zeros(*shape, 2, device=self.accelerator.device) for shape in shapes]
        self._last_hidden = []

        def loss(number, output):
            num_rows, num_columns = shapes[number]
            own = output[:num_rows, -padded[number].completion_length :][:, :num_columns]
            scores[number].copy_(own.detach())
            return self._loss_of_job(jobs[number], Scores(own[..., 0], own[..., 1], None))

        pipeline.step([_inputs_of(job, rows) for job, rows in zip(jobs, padded, strict=True)], loss)
        if pipeline.channel is not None and pipeline.has_last:
            for number, job in enumerate(jobs):
                first = padded[number].attention_mask.shape[1] - padded[number].completion_length
                first -= job.tensors["prompt_ids"].shape[1]
                taps = [_crop(tap, job, first) for tap in pipeline.channel.take(number)]
                self._keep_for_draft(job.tensors, taps, _crop(self._last_hidden[number], job, first))
        self._last_hidden = []
        # Log-probs are small: everyone gets all of them.
        flat = torch.cat([values.flatten() for values in scores])
        last = (pipeline.num_stages - 1) % pipeline.num_ranks
        dist.broadcast(flat, group=self.pipelining.group, group_src=last)
        return [
            part.view(*shape, 2) for part, shape in zip(flat.split([2 * s.numel() for s in shapes]), shapes, strict=True)
        ]

    def _loss_of_job(self, job: Job, scores: Scores) -> torch.Tensor:
        """One member's loss of one micro-step, with TRL's code and the graph of the last stage."""
        with self._as_world_of_one(job.tensors, lambda *rows, **settings: scores):
            loss = super()._compute_loss(self.model, job.tensors)
        # The mean over the ranks that hold a stage is then that of the plain run: see `pp/gradients.py`.
        return loss / self.pipelining.pipeline.num_ranks

    def _keep_for_draft(self, rows: dict[str, torch.Tensor], taps: list[torch.Tensor], last_hidden: torch.Tensor):
        """What the draft learns from one microbatch, on the last stage's rank."""
        raise NotImplementedError

    def score_stage(self, policy: nn.Module, arguments: dict, extras: dict[str, torch.Tensor]) -> torch.Tensor:
        """What the last stage returns: log-probs and entropies `(B, S-1, 2)`, each of the next column's token."""
        arguments = {**arguments, "labels": extras["labels"], "fused_lm_head": True}
        if self.pipelining.pipeline.channel is None:
            outputs = policy(**arguments)
        else:
            with self.recorder.record() as record:
                outputs = policy(**arguments)
            self._last_hidden.append(record.last_hidden)
        return torch.stack([outputs.log_probs, outputs.entropy], dim=-1)

    @contextmanager
    def _end_of_window(self, last: bool) -> Iterator[None]:
        """TRL's controllers act at the end of a window: only its last micro-step is one."""
        state = self.accelerator.gradient_state
        state._set_sync_gradients(last)
        try:
            yield
        finally:
            state._set_sync_gradients(True)

    # Everything without gradients runs on the whole policy, each rank on its own rows

    def _score_own_rows(self, phase, model, input_ids, attention_mask, logits_to_keep, batch_size=None, **settings):
        if self.pipelining is None:
            return super()._score_own_rows(
                phase, model, input_ids, attention_mask, logits_to_keep, batch_size, **settings
            )
        # Not needed to compute, but here a failure of one rank reaches the others.
        rows = {"input_ids": input_ids, "attention_mask": attention_mask}
        self._announce(phase, rows, logits_to_keep, chunk_rows=batch_size or 0)
        return Scores(
            *GRPOTrainer._get_per_token_logps_and_entropies(
                self, model, input_ids, attention_mask, logits_to_keep, batch_size, **settings
            )
        )

    # Around the optimizer step

    def create_optimizer(self, model=None):
        optimizer = super().create_optimizer(model)
        if self.pipelining is not None and not isinstance(optimizer, AcceleratedOptimizer):
            # In a second run of the same trainer it is wrapped, and has the hook.
            optimizer.register_step_post_hook(self._refresh_replica)
        return optimizer

    def _refresh_replica(self, optimizer, args, kwargs) -> None:
        self.pipelining.replica.refresh()

    def _clip_grad_norm(self, model):
        if self.pipelining is None:
            return super()._clip_grad_norm(model)
        return clip_grad_norm(self.pipelining.stages, self.args.max_grad_norm, self.pipelining.group)

    def _get_grad_norm(self, model, grad_norm=None):
        if self.pipelining is not None and grad_norm is None:
            grad_norm = clip_grad_norm(self.pipelining.stages, torch.inf, self.pipelining.group)
        return super()._get_grad_norm(model, grad_norm)


def _inputs_of(job: Job, rows: Rows) -> dict[str, torch.Tensor]:
    """
    A padded microbatch as the stages take it. Positions are those of the columns that the microbatch has without the
    padding that was added, as in a plain run, where rotary embeddings may depend on them.
    """
    num_columns = rows.input_ids.shape[1]
    prompt, completion = job.tensors["prompt_ids"].shape[1], job.completion_shape[1]
    columns = torch.arange(num_columns, device=rows.input_ids.device)
    positions = (columns - (num_columns - rows.completion_length - prompt)).clamp(0, prompt + completion - 1)
    labels = rows.input_ids.masked_fill(rows.attention_mask == 0, IGNORED)
    labels[:, : -rows.completion_length] = IGNORED
    return {
        "input_ids": rows.input_ids,
        "attention_mask": rows.attention_mask,
        "position_ids": positions.expand_as(rows.input_ids),
        "labels": labels,
    }


def _crop(values: torch.Tensor, job: Job, first: int) -> torch.Tensor:
    """A microbatch's own rows and columns `(B, P+C, H)` of a padded one's."""
    num_rows, num_columns = job.attention_mask.shape
    return values[:num_rows, first : first + num_columns]
