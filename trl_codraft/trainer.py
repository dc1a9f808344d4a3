"""
[`CoDraftGRPOTrainer`]: TRL's GRPO trainer with a draft that is trained inside the step and speeds up its rollouts.

Each override is a few lines that call a part: taps and packing (`modeling/`), the draft's own training (`training.py`),
speculative decoding (`rollout/`), drafts on disk (`grpo/draft_checkpoints.py`, `export.py`). The draft is never a child
module of the policy and has its own backward and optimizer, so the policy's run is bit for bit the one without it.
"""

import os
import time
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from accelerate.utils import broadcast
from datasets import Dataset, DatasetDict, IterableDataset, IterableDatasetDict
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin, TrainerCallback
from transformers.utils import logging
from trl import GRPOConfig
from trl.trainer.utils import get_config_model_id

from .config import CoDraftGRPOConfig
from .cp.draft import DraftBatchShard, shard_rows
from .grpo.agreement import require_same_draft, require_same_parts, require_same_settings, require_same_start
from .grpo.building import build_draft, build_draft_trainer, head_dtype
from .grpo.draft_checkpoints import DraftCheckpoints
from .grpo.join_context import draft_loss_on, join_context_group, not_sharded_by_accelerate, require_divisible_world
from .grpo.join_pipeline import join_pipeline_group
from .grpo.pipeline_checkpoints import PipelineCheckpoints
from .grpo.pipelined_losses import PipelinedLoss
from .grpo.pretraining import PolicyRollouts, initialize_fresh_draft, preserved_random_state, pretrain_draft
from .grpo.prompt_column import require_prompts
from .grpo.saved_draft import SavedDraft
from .grpo.stage_weights import policies_in_parts
from .grpo.support import (
    GOOD_ACCEPT_LENGTH,
    base_policy,
    is_compiled,
    plain_rollout_reason,
    refuse_contradictions,
    refuse_cuda_graphs_elsewhere,
    refuse_unsupported,
    warn_about_collapse,
    warn_about_metrics,
    warn_about_settings,
    warn_about_unused_settings,
)
from .modeling.modeling_eagle3 import Eagle3DraftModel
from .modeling.packing import DraftBatch, pack_rows
from .modeling.taps import TapRecorder, let_compiled_forwards_see_hooks
from .modeling.teacher import PolicyHead
from .rollout.controller import SpeedReport
from .rollout.prompts import refuse_empty_prompts
from .rollout.speculative import SpeculativeDecoder
from .rollout.stats import SpeculativeStats
from .training.draft_trainer import DraftTrainer
from .vllm.generation import DraftVLLMGeneration, deferred_engine, stats_of


logger = logging.get_logger(__name__)


class CoDraftGRPOTrainer(DraftCheckpoints, PipelineCheckpoints, PipelinedLoss):
    """
    Trainer for Group Relative Policy Optimization (GRPO) that co-trains an EAGLE-3 draft and rolls out with it.

    A drop-in replacement for [`~trl.GRPOTrainer`]. The draft learns, at every step, from the hidden states that the
    policy's own loss forward produces; it proposes tokens during rollouts and never changes what the policy samples or
    learns. Method: arXiv 2609.07108; draft architecture: EAGLE-3, arXiv 2503.01840.

    Example:

    ```python
    from datasets import load_dataset
    from trl.rewards import accuracy_reward
    from trl_codraft import CoDraftGRPOConfig, CoDraftGRPOTrainer

    trainer = CoDraftGRPOTrainer(
        model="Qwen/Qwen3-4B",
        reward_funcs=accuracy_reward,
        args=CoDraftGRPOConfig(output_dir="out", draft_pretrain_steps=200),
        train_dataset=load_dataset("trl-lib/DeepMath-103K", split="train"),
    )
    trainer.train()
    trainer.push_draft_to_hub("me/Qwen3-4B-eagle3")
    ```

    Args:
        model, reward_funcs, train_dataset, ...:
            As in [`~trl.GRPOTrainer`].
        args ([`CoDraftGRPOConfig`] or [`~trl.GRPOConfig`], *optional*):
            Configuration. A plain `GRPOConfig` gets the draft's defaults.
        draft_model (`str` or [`Eagle3DraftModel`], *optional*):
            Draft to start from: a Hub id, a folder, or a model. Takes the place of `draft_model_name_or_path`.

    Attributes:
        draft_model ([`Eagle3DraftModel`] or `None`):
            The draft, with fp32 weights. `None` with `use_draft=False`.
        draft_trainer ([`~training.draft_trainer.DraftTrainer`] or `None`):
            Its optimizer and schedule. Built when training begins.
        draft_pretraining_log (`list[dict[str, float]]`):
            Metrics of each pretraining update.

    Raises:
        ValueError: if the policy, the parallelism or the settings do not allow a draft; the message says what to set.
    """

    def __init__(
        self,
        model: str | PreTrainedModel | nn.Module,
        reward_funcs: Any = None,
        args: GRPOConfig | None = None,
        train_dataset: Dataset | IterableDataset | None = None,
        eval_dataset: Dataset | IterableDataset | DatasetDict | IterableDatasetDict | dict | None = None,
        processing_class: PreTrainedTokenizerBase | ProcessorMixin | None = None,
        reward_processing_classes: PreTrainedTokenizerBase | list[PreTrainedTokenizerBase] | None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[torch.optim.Optimizer | None, torch.optim.lr_scheduler.LambdaLR | None] = (None, None),
        quantization_config: Any = None,
        peft_config: Any = None,
        tools: list[Callable] | None = None,
        rollout_func: Callable | None = None,
        environment_factory: Callable | dict[str, Callable] | None = None,
        *,
        draft_model: str | Eagle3DraftModel | None = None,
    ):
        if args is None:
            model_name = model if isinstance(model, str) else get_config_model_id(model.config)
            args = CoDraftGRPOConfig(f"{model_name.split('/')[-1]}-GRPO")
        args = CoDraftGRPOConfig.from_grpo_config(args)
        require_same_settings(args, fresh_draft=draft_model is None and args.draft_model_name_or_path is None)
        require_divisible_world(args)
        draft_model = os.fspath(draft_model) if isinstance(draft_model, os.PathLike) else draft_model
        refuse_contradictions(args, draft_model)
        if args.use_draft:
            self._tag_names = [*self._tag_names, "codraft"]
        served_group = args.pipeline_parallel_size * args.context_parallel_size > 1 and args.vllm_mode == "server"
        own_generation = args.use_vllm and (args.use_draft or served_group)
        with (
            policies_in_parts(args, model, peft_config, draft_model or args.draft_model_name_or_path) as parts,
            deferred_engine(own_generation, args.ddp_timeout),
            not_sharded_by_accelerate(args),
        ):
            super().__init__(
                model=model,
                reward_funcs=reward_funcs,
                args=args,
                train_dataset=train_dataset,
                eval_dataset=eval_dataset,
                processing_class=processing_class,
                reward_processing_classes=reward_processing_classes,
                callbacks=callbacks,
                optimizers=optimizers,
                quantization_config=quantization_config,
                peft_config=peft_config,
                tools=tools,
                rollout_func=rollout_func,
                environment_factory=environment_factory,
            )
        self.draft_model: Eagle3DraftModel | None = None
        self.draft_trainer: DraftTrainer | None = None
        self.draft_pretraining_log: list[dict[str, float]] = []
        if args.use_draft or args.pipeline_parallel_size * args.context_parallel_size > 1:
            require_same_parts(self)
        if args.use_draft:
            self._init_draft(draft_model or args.draft_model_name_or_path)
        else:
            warn_about_unused_settings(args)
        if args.pipeline_parallel_size > 1:
            join_pipeline_group(self, parts)
        elif args.context_parallel_size > 1:
            join_context_group(self)

    # Building the draft

    def _init_draft(self, source: str | Eagle3DraftModel | None) -> None:
        refuse_unsupported(self)
        policy = base_policy(self.model)
        self.policy_head = PolicyHead(policy, compute_dtype=head_dtype(self.args))
        self._draft_is_fresh = source is None
        with preserved_random_state():
            require_prompts(self)
            self.draft_model = build_draft(self.args, policy, source).to(self.accelerator.device)
        require_same_draft(self.draft_model.config)
        if is_compiled(self):
            let_compiled_forwards_see_hooks()
        self.recorder = TapRecorder(policy, self.draft_model.config.tap_layers)
        # One per microbatch that this rank ran a part of since the draft last learned.
        self._draft_batches: list[DraftBatch | DraftBatchShard | None] = []
        self._draft_to_resume: SavedDraft | None = None
        self._decoder = SpeculativeDecoder(
            policy,
            self.draft_model,
            num_draft_tokens=self.args.num_draft_tokens,
            recorder=self.recorder,
            cuda_graphs=self.args.rollout_cuda_graphs,
        )
        self._speculation_on = self._resolve_speculation()
        if self._speculation_on:
            refuse_cuda_graphs_elsewhere(self)
        if self.use_vllm:
            served = self.draft_model if self._speculation_on else None
            self.vllm_generation.start(served, self.args.num_draft_tokens, self.args.draft_vllm_server_sync)
        self._reset_rollout_tally()
        self._simulated_accept_length: float | None = None
        self._speculated_well = False
        self._draft_seconds = 0.0
        warn_about_settings(self.args, self._draft_is_fresh)
        self.add_callback(_StartDraft(self))

    def _resolve_speculation(self) -> bool:
        if self.args.speculative_rollouts == "false":
            return False
        # A `generate` that somebody wrapped may draw random numbers when it is asked.
        with preserved_random_state():
            reason = plain_rollout_reason(self)
        if reason is not None:
            self._roll_out_plainly(reason)
        return reason is None

    def _roll_out_plainly(self, reason: str) -> None:
        """Takes note that rollouts are plain, or one of them is; raises where they must not be."""
        self._rolled_out_plainly, reason = True, reason.removesuffix(".")
        if self.args.speculative_rollouts == "true":
            raise ValueError(
                f"`speculative_rollouts='true'`, but rollouts cannot be speculative: {reason}. Change that, or set "
                "`speculative_rollouts='auto'` to train the draft and roll out without it."
            )
        logger.warning_once(f"Rollouts are plain, without the draft: {reason}.")

    @property
    def speculates(self) -> bool:
        """Whether rollouts go through our speculative loop now: possible, wanted, and the draft exists."""
        return self._draft_rolls_out and not self.use_vllm

    @property
    def _draft_rolls_out(self) -> bool:
        """Whether rollouts use the draft now, in our loop or in vLLM."""
        elsewhere = self.use_vllm and not isinstance(self.vllm_generation, DraftVLLMGeneration)
        exists = self.draft_model is not None and self.draft_trainer is not None
        return exists and self._speculation_on and not elsewhere

    def _start_draft(self) -> None:
        """Finishes the draft before the first step: vocabulary, initial weights, optimizer, pretraining or resume."""
        require_same_start(self)
        # Read before anything is built, so that a trainer whose resume is refused can still train.
        saved, self._draft_to_resume = self._draft_to_resume, None
        resumes = saved is not None
        state = self._read_draft(saved) if resumes else None
        if self.draft_trainer is None:
            source = PolicyRollouts(self, seed=self.args.seed)
            with preserved_random_state():
                if self._draft_is_fresh and not resumes:
                    initialize_fresh_draft(self, source)
                for tensor in self.draft_model.state_dict().values():
                    broadcast(tensor, from_process=self.rank_of_policy_head)
                self.draft_trainer = build_draft_trainer(self)
                if self.args.draft_pretrain_steps and not resumes:
                    pretrain_draft(self, self.args.draft_pretrain_steps, source)
        else:
            self._draft_batches, self._draft_seconds = [], 0.0
            self.draft_trainer.restart(self.state.max_steps)
        self._reset_rollout_tally()
        if resumes:
            self._load_draft(state)
        if self.use_vllm:
            # An evaluation or pretraining rollouts of this step have pushed an earlier draft: push again.
            self._last_loaded_step = -1

    def _sum_over_ranks(self, tensor: torch.Tensor) -> torch.Tensor:
        """In place: of a large draft's gradients there is no room for a copy."""
        if self.accelerator.num_processes > 1:
            dist.all_reduce(tensor)
        return tensor

    # Training the draft inside the step

    def _compute_loss(self, model, inputs):
        if self.draft_trainer is None or not self.args.draft_train or not self.model.training:
            return super()._compute_loss(model, inputs)
        with self.recorder.record() as record:
            loss = super()._compute_loss(model, inputs)
        self._keep_for_draft(inputs, record.taps, record.last_hidden)
        return loss

    def _keep_for_draft(self, rows, taps, last_hidden):
        """Packs what the draft learns from a microbatch of this rank, until the policy's backward has run."""
        completion_mask, prompt_mask = rows["completion_mask"], rows["prompt_mask"]
        trained = completion_mask * rows["tool_mask"] if "tool_mask" in rows else completion_mask
        trained_prompt = prompt_mask if self.args.draft_train_on_prompt else torch.zeros_like(prompt_mask)
        masks = torch.cat([prompt_mask, completion_mask], dim=1), torch.cat([trained_prompt, trained], dim=1).bool()
        states = taps, last_hidden, self.args.draft_ttt_steps
        if self.sharding is None:
            batch = pack_rows(torch.cat([rows["prompt_ids"], rows["completion_ids"]], dim=1), *masks, *states)
        else:
            batch = shard_rows(self.sharding.packed.input_ids, *masks, *states, self.sharding.packed.layout)
        self._draft_batches.append(batch)

    def training_step(self, model, inputs, num_items_in_batch):
        loss = super().training_step(model, inputs, num_items_in_batch)
        if self.draft_trainer is not None and self.args.draft_train:
            self._train_draft()
        return loss

    def _train_draft(self) -> None:
        """The draft's part of a micro-step, after the policy's backward; an update at the end of the window."""
        self._learn_from_kept()
        if not self.accelerator.sync_gradients:
            return
        start, metrics = time.perf_counter(), self.draft_trainer.step()
        seconds = torch.tensor([self._draft_seconds + time.perf_counter() - start], device=self.accelerator.device)
        # Of the rank that took longest: in a pipeline, where only the last stage's learn, others wait for them elsewhere.
        metrics["draft/time"] = self.accelerator.gather(seconds).max().item()
        self._draft_seconds = 0.0
        for name, value in metrics.items():
            self._metrics["train"][name].append(value)
        self._simulated_accept_length = metrics.get("draft/accept_length_sim", self._simulated_accept_length)
        warn_about_metrics(metrics, self._draft_is_fresh, self.args)

    def _learn_from_kept(self):
        start, batches, self._draft_batches = time.perf_counter(), self._draft_batches, []
        self._note("draft")
        for batch in batches:
            self.draft_trainer.accumulate(batch, draft_loss_on(self))
        self._note("draft done")
        self._draft_seconds += time.perf_counter() - start

    # Rolling out with the draft

    def _generate_single_turn(self, prompt_ids, images, multimodal_fields, num_generations, has_tool_images=False):
        rows = prompt_ids, images, multimodal_fields, num_generations, has_tool_images
        if self.draft_model is None:
            return super()._generate_single_turn(*rows)
        refuse_empty_prompts([len(ids) for ids in prompt_ids])
        start = time.perf_counter()
        with self._speculative_generate():
            completion_ids, logprobs = super()._generate_single_turn(*rows)
        self._rollout_seconds += time.perf_counter() - start
        self._rollout_tokens += sum(len(ids) for ids in completion_ids)
        return completion_ids, logprobs

    @contextmanager
    def _speculative_generate(self):
        """Makes the policy's `generate` run the speculative loop, whoever calls it."""
        if not self.speculates:
            yield
            return
        policy = base_policy(self.model)
        self._decoder.draft = self.draft_trainer.rollout_draft
        replaced = policy.__dict__.get("generate")
        policy.generate = self._decoder.bind(policy.generate, self._roll_out_plainly)
        try:
            yield
        finally:
            if replaced is None:
                del policy.generate
            else:
                policy.generate = replaced

    def _generate_and_score_completions(self, inputs):
        output = super()._generate_and_score_completions(inputs)
        if self.draft_model is not None:
            self._log_rollout()
        return output

    def _log_rollout(self) -> None:
        """Sums the counters of all ranks, then divides. Tool loops end at different turns on different ranks."""
        if self.use_vllm:
            self._decoder.stats.add(stats_of(self.vllm_generation))
        device = self.accelerator.device
        tally = torch.tensor([self._rollout_tokens, self._rollout_seconds], dtype=torch.float64, device=device)
        report = self._decoder.controller.report.as_tensor().to(device)
        counters = torch.cat([tally[:1], report, self._decoder.stats.as_tensor().to(device)])
        counters = self._sum_over_ranks(counters)
        seconds = self.accelerator.gather(tally[1:]).max().item()
        report, stats = counters[1:].split([len(report), len(counters) - 1 - len(report)])
        report, stats = SpeedReport.from_tensor(report), SpeculativeStats.from_tensor(stats)
        metrics = rollout_metrics(stats) | report.metrics()
        if self.use_vllm or not self._speculated_well:  # else our loop says so itself
            warn_about_collapse(stats, self._simulated_accept_length, self._speculated_well)
        self._speculated_well |= stats.accept_length >= GOOD_ACCEPT_LENGTH
        metrics["rollout/tokens_per_second"] = counters[0].item() / max(seconds, 1e-9)
        metrics["rollout/speculation_on"] = float(self._draft_rolls_out and not self._rolled_out_plainly)
        for name, value in metrics.items():
            self._metrics["train" if self.model.training else "eval"][name].append(value)
        self._reset_rollout_tally()

    def _reset_rollout_tally(self) -> None:
        if self.use_vllm:
            stats_of(self.vllm_generation)
        self._decoder.stats.reset()
        self._decoder.controller.report = SpeedReport()
        self._rollout_tokens, self._rollout_seconds, self._rolled_out_plainly = 0, 0.0, False


def rollout_metrics(stats: SpeculativeStats) -> dict[str, float]:
    """The metrics of rollouts that are ratios of summed counters."""
    metrics = {
        "rollout/accept_length": stats.accept_length,
        "rollout/num_draft_tokens": stats.num_draft_tokens,
    }
    if stats.policy_forwards:  # vLLM does not count them
        metrics["rollout/tokens_per_row_forward"] = stats.tokens_per_row_forward
        metrics["rollout/policy_forwards"] = float(stats.policy_forwards)
    # Positions that were never accepted at the far end say nothing; position 0 always does.
    used = max([i + 1 for i, accepted in enumerate(stats.accepted_per_position) if accepted], default=1)
    for position, rate in enumerate(stats.accept_rate_per_position[:used]):
        metrics[f"rollout/accept_rate_pos_{position}"] = rate
    return metrics


class _StartDraft(TrainerCallback):
    """Calls the trainer when the policy is placed and wrapped, just before the first step."""

    def __init__(self, trainer: CoDraftGRPOTrainer):
        self.trainer = trainer

    def on_train_begin(self, args, state, control, **kwargs):
        self.trainer._start_draft()
