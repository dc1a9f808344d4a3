"""
[`CoDraftGRPOTrainer`]: TRL's GRPO trainer with a draft that is trained inside the step and speeds up its rollouts.

Every override of TRL is here, a few lines that ask a part in `grpo/`: losses, the draft's learner, rollouts,
checkpoints. Nothing of ours stands between this class and [`~trl.GRPOTrainer`], and the parts see the trainer as a
[`~grpo.run.Run`].
"""

import os
from collections.abc import Callable
from functools import cached_property, partial
from typing import Any

import torch
from datasets import Dataset, DatasetDict, IterableDataset, IterableDatasetDict
from huggingface_hub import CommitInfo
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from trl.trainer.utils import get_config_model_id

from .config import CoDraftGRPOConfig
from .group.members import attributes_set
from .grpo.agreement import require_same_parts, require_same_settings, require_same_start
from .grpo.draft_checkpoints import DraftCheckpoints
from .grpo.failures import HeldFailures
from .grpo.join_context import join_context_group, mesh_of
from .grpo.join_pipeline import join_pipeline_group
from .grpo.learner import DraftLearner, StartDraft
from .grpo.losses import PlainLosses
from .grpo.policy_checkpoints import PolicyCheckpoints
from .grpo.progress import ProgressReports
from .grpo.rollouts import DraftRollouts
from .grpo.run import Losses
from .grpo.saved_draft import remove_stale_draft
from .grpo.stage_optimizer import StageOptimizer
from .grpo.stage_weights import StageWeights, only_stage_weights
from .grpo.support import refuse_contradictions
from .grpo.trl_patches import (
    generation_with_draft,
    not_sharded_by_accelerate,
    rewards_gathered_by,
)
from .grpo.warnings import warn_about_settings, warn_about_unused_settings
from .modeling.modeling_eagle3 import Eagle3DraftModel
from .training.draft_trainer import DraftTrainer


class CoDraftGRPOTrainer(GRPOTrainer):
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

    learner: DraftLearner | None = None
    rollouts: DraftRollouts | None = None
    draft_checkpoints: DraftCheckpoints | None = None
    failures: HeldFailures | None = None
    stage_optimizer: StageOptimizer | None = None

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
        source = self._draft_source(args, draft_model)
        if args.use_draft:
            self._tag_names = [*self._tag_names, "codraft"]
        with (
            only_stage_weights(args, model, peft_config, source) as stage_weights,
            generation_with_draft(args),
            not_sharded_by_accelerate(args.context_parallel_size),
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
        if args.use_draft or args.pipeline_parallel_size * args.context_parallel_size > 1:
            require_same_parts(self)
        if args.use_draft:
            self._make_draft(source)
        else:
            warn_about_unused_settings(args)
        self._join_group(stage_weights)

    @staticmethod
    def _draft_source(args: CoDraftGRPOConfig, draft_model: Any) -> str | Eagle3DraftModel | None:
        """Checks the settings before anything is loaded; returns the draft to start from, `None` for a fresh one."""
        require_same_settings(args, fresh_draft=draft_model is None and args.draft_model_name_or_path is None)
        mesh_of(args)  # refuses a number of processes that does not fit
        draft_model = os.fspath(draft_model) if isinstance(draft_model, os.PathLike) else draft_model
        refuse_contradictions(args, draft_model)
        return draft_model or args.draft_model_name_or_path

    # The parts of a run without a draft, on a rank of its own, which is [`~trl.GRPOTrainer`]. They are there without
    # `__init__` too, as tests of TRL's methods expect.

    @cached_property
    def losses(self) -> Losses:
        """Computes losses and log-probs."""
        return PlainLosses(self, super())

    @cached_property
    def reports(self) -> ProgressReports:
        """Tells the other ranks how far this one has come."""
        return ProgressReports(self)

    @cached_property
    def policy_checkpoints(self) -> PolicyCheckpoints:
        """Writes and reads the policy and its optimizer's state."""
        return PolicyCheckpoints(self, super())

    def _make_draft(self, source: str | Eagle3DraftModel | None) -> None:
        """Makes the draft, and the parts that train it, roll out with it and save it."""
        self.learner = DraftLearner(self, source)
        self.rollouts = DraftRollouts(self, self.learner)
        self.draft_checkpoints = DraftCheckpoints(self, self.learner, self.rollouts.decoder.controller)
        self.losses = PlainLosses(self, super(), self.learner)
        warn_about_settings(self.args, self.learner.is_fresh)
        self.add_callback(StartDraft(self._start_draft))

    def _join_group(self, stage_weights: StageWeights | None) -> None:
        """Lets the run compute losses with other ranks from now on, if its settings say so."""
        pipelined = self.args.pipeline_parallel_size > 1
        if not pipelined and self.args.context_parallel_size == 1:
            return
        self.failures = HeldFailures(self, super())
        if not pipelined:
            self.losses = join_context_group(self, self.failures)
            return
        self.losses = join_pipeline_group(self, super(), self.failures, stage_weights)
        self.stage_optimizer = StageOptimizer(self, self.losses.pipelining)
        self.policy_checkpoints = PolicyCheckpoints(self, super(), self.losses.pipelining)

    # The draft

    @property
    def draft_model(self) -> Eagle3DraftModel | None:
        """The draft, with fp32 weights; `None` with `use_draft=False`."""
        return None if self.learner is None else self.learner.draft

    @property
    def draft_trainer(self) -> DraftTrainer | None:
        """The draft's optimizer and schedule; `None` before training begins."""
        return None if self.learner is None else self.learner.trainer

    @property
    def draft_pretraining_log(self) -> list[dict[str, float]]:
        """Metrics of each pretraining update."""
        return [] if self.learner is None else self.learner.pretraining_log

    def _start_draft(self) -> None:
        """Finishes the draft just before the first step, or reads the one to resume with."""
        require_same_start(self)
        # Read before anything is built, so that a trainer whose resume is refused can still train.
        state = self.draft_checkpoints.read_resumed()
        self.learner.start(resumes=state is not None)
        self.rollouts.reset()
        if state is not None:
            self.draft_checkpoints.load(state)
        if self.use_vllm:
            # An evaluation or pretraining rollouts of this step have pushed an earlier draft: push again.
            self._last_loaded_step = -1

    def _require_draft(self) -> DraftCheckpoints:
        if self.draft_checkpoints is None:
            raise ValueError("There is no draft: the trainer was built with `use_draft=False`.")
        return self.draft_checkpoints

    def save_draft(self, path: str | os.PathLike) -> None:
        """
        Writes the draft in the format that vLLM, SGLang and speculators load. Only the main process writes.

        Args:
            path (`str` or `os.PathLike`):
                Folder to write.

        Raises:
            ValueError: if there is no draft (yet), or it does not validate.
        """
        self._require_draft().save_draft(path)

    def push_draft_to_hub(self, repo_id: str, **kwargs) -> CommitInfo | None:
        """
        Pushes the draft, with a model card, to a repository of its own: servers take a repository, not a subfolder.
        With an `eval_dataset`, the card reports the accept length on its first prompts at the rollout temperature
        (not with environments, FSDP, a policy that no rank has whole, or one that cannot speculate here).

        Args:
            repo_id (`str`):
                Repository to push to, such as `"me/Qwen3-4B-eagle3"`.
            kwargs (`dict`, *optional*):
                Passed on to [`~serving.export.push_draft`]. `scores` takes the place of the measurement; `base_model`
                names the repository of the trained policy where `hub_model_id` does not (with `adapter_of=None` if
                that of a LoRA run holds it merged).

        Raises:
            ValueError: if there is no draft (yet), or it does not validate.
        """
        return self._require_draft().push_draft_to_hub(repo_id, **kwargs)

    # Training

    def train(self, *args, **kwargs):
        self.losses.start_run()
        self.reports.start()
        with self.reports.explained_errors():
            return super().train(*args, **kwargs)

    def training_step(self, model, inputs, num_items_in_batch):
        loss = super().training_step(model, inputs, num_items_in_batch)
        if self.learner is not None:
            self.learner.end_micro_step()
        return loss

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        if return_outputs or not self.model.training:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        return self.losses.compute(model, inputs)

    def _get_per_token_logps_and_entropies(self, model, *rows, **settings):
        return self.losses.score(model, *rows, **settings)

    def _prepare_inputs(self, generation_batch):
        inputs = super()._prepare_inputs(generation_batch)
        self.reports.note("loss")
        return inputs

    # Rolling out

    def _generate_and_score_completions(self, inputs):
        self.losses.announce_rollout()
        output = super()._generate_and_score_completions(inputs)
        if self.rollouts is not None:
            self.rollouts.log()
        return output

    def _generate(self, prompts):
        self.reports.note("rollouts")
        generate = super()._generate if self.failures is None else self.failures.generate
        if self.rollout_func is None or self.reports.board is None:
            return generate(prompts)
        with attributes_set(self.accelerator, gather=self.reports.noting("rollouts done")(self.accelerator.gather)):
            return generate(prompts)

    def _generate_single_turn(self, prompt_ids, *rows, **settings):
        generate = partial(super()._generate_single_turn, prompt_ids, *rows, **settings)
        result = generate() if self.rollouts is None else self.rollouts.generate(generate, prompt_ids)
        self.reports.note("rollouts done")
        return result

    def _calculate_rewards(self, *rows):
        self.reports.note("rewards")
        with rewards_gathered_by(self.reports.noting("rewards done")):
            calculate = super()._calculate_rewards if self.failures is None else self.failures.calculate_rewards
            return calculate(*rows)

    # The optimizer

    def create_optimizer(self, model=None):
        optimizer = super().create_optimizer(model)
        if self.stage_optimizer is not None:
            optimizer = self.optimizer = self.stage_optimizer.prepare(optimizer)
        return optimizer

    def _clip_grad_norm(self, model):
        if self.stage_optimizer is None:
            return super()._clip_grad_norm(model)
        return self.stage_optimizer.clip_grad_norm()

    def _get_grad_norm(self, model, grad_norm=None):
        if self.stage_optimizer is not None and grad_norm is None:
            grad_norm = self.stage_optimizer.grad_norm()
        return super()._get_grad_norm(model, grad_norm)

    # Checkpoints

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False):
        # Before `super()`, which pushes the folder to the Hub when the user calls this.
        if self.draft_trainer is not None:
            self.draft_checkpoints.save(output_dir or self.args.output_dir)
        elif self.args.should_save and _internal_call and output_dir is not None:
            remove_stale_draft(output_dir)
        super().save_model(output_dir, _internal_call)

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None):
        self.policy_checkpoints.save(output_dir, state_dict)

    def _save_optimizer_and_scheduler(self, output_dir: str):
        self.policy_checkpoints.save_optimizer(output_dir)
        if self.draft_checkpoints is not None:
            self.draft_checkpoints.save_state(output_dir)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None):
        self.policy_checkpoints.load(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None):
        self.policy_checkpoints.load_optimizer(checkpoint)
        if self.draft_checkpoints is not None:
            self.draft_checkpoints.find_resumed(checkpoint)

    def _load_best_model(self):
        self.policy_checkpoints.load_best()
        if self.draft_checkpoints is not None:
            self.draft_checkpoints.load_best()

    def _push_from_checkpoint(self, checkpoint_folder: str):
        if self.draft_checkpoints is not None:
            self.draft_checkpoints.copy_for_push(checkpoint_folder)
        super()._push_from_checkpoint(checkpoint_folder)
