"""The draft's share of checkpoints, resume and the Hub: overrides of the trainer's methods that read and write files."""

import os
import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer
from transformers.utils import logging

from .building import SHAPE_SETTINGS
from .compatibility import base_policy
from .export import check_repo_id, export_draft, push_draft, score_draft
from .modeling.configuration_eagle3 import Eagle3DraftConfig
from .modeling.disk_config import config_from_disk
from .modeling.draft_folder import read_config, resolve_folder
from .modeling.modeling_eagle3 import Eagle3DraftModel
from .prompt_column import held_out_prompts
from .rollout.speculative import SpeculativeDecoder
from .rollout.support import unsupported_reason
from .training import DraftTrainer


logger = logging.get_logger(__name__)

DRAFT_FOLDER = "draft"
DRAFT_STATE_NAME = "draft_state.pt"
# What the draft's weights mean, by the setting that chooses it in a run; the policy settles the rest.
MEANING_SETTINGS = {
    **SHAPE_SETTINGS,
    "norm_before_residual": "draft_model_name_or_path",
    "norm_before_fc": "draft_model_name_or_path",
}
# Prompts of the evaluation set that the model card's accept length is measured on.
HELD_OUT_PROMPTS = 64


class DraftCheckpoints(Trainer):
    """
    A trainer's checkpoints with the draft in them: `draft/` beside the policy's files in the format that servers load,
    and in it `draft_state.pt`, the state of its optimizer, wherever the policy's optimizer is saved too.

    Attributes:
        draft_model ([`Eagle3DraftModel`] or `None`), draft_trainer ([`~training.DraftTrainer`] or `None`):
            Set by [`CoDraftGRPOTrainer`].
    """

    draft_model: Eagle3DraftModel | None
    draft_trainer: DraftTrainer | None
    _decoder: SpeculativeDecoder
    _draft_checkpoint: str | None
    _draft_is_fresh: bool

    def save_draft(self, path: str | os.PathLike) -> None:
        """
        Writes the draft in the format that vLLM, SGLang and speculators load. Only the main process writes.

        Args:
            path (`str` or `os.PathLike`):
                Folder to write.

        Raises:
            ValueError: if there is no draft (yet), or it does not validate.
        """
        self._require_draft()
        if self.args.should_save:
            # The draft is for the policy as it has become, not for the one it started from.
            base_model = self.args.hub_model_id or self.args.output_dir
            policy = base_policy(self.model)
            export_draft(self.draft_model, policy, path, base_model=base_model, provenance=self._provenance())

    def push_draft_to_hub(self, repo_id: str, **kwargs):
        """
        Pushes the draft, with a model card, to a repository of its own: servers take a repository, not a subfolder.
        With an `eval_dataset` that has prompts, the card reports the accept length on the first of them at the rollout
        temperature (not with environments, FSDP, a policy that no rank has whole, or one that cannot speculate here).

        Args:
            repo_id (`str`):
                Repository to push to, such as `"me/Qwen3-4B-eagle3"`.
            kwargs (`dict`, *optional*):
                Passed on to [`~export.push_draft`]. `scores` takes the place of the measurement; `base_model` names the
                repository of the trained policy where `hub_model_id` does not.

        Raises:
            ValueError: if there is no draft (yet), it does not validate, or `repo_id` can be no repository.
        """
        self._require_draft()
        check_repo_id("repo_id", repo_id)
        if not self.is_world_process_zero():
            return None
        if "scores" not in kwargs and self._can_score_draft():
            kwargs["scores"] = self._score_on_held_out_prompts()
        kwargs.setdefault("provenance", self._provenance())
        if self.args.hub_model_id:
            kwargs.setdefault("base_model", self.args.hub_model_id)
        return push_draft(self.draft_model, base_policy(self.model), repo_id, **kwargs)

    def _provenance(self) -> dict[str, Any]:
        """How the draft came about, for its card."""
        args = self.args
        start = args.draft_model_name_or_path or ("fresh" if self._draft_is_fresh else "a model that was passed in")
        return {
            "policy started from": base_policy(self.model).config._name_or_path or "a model that was passed in",
            "draft started from": start,
            "GRPO steps": self.state.global_step,
            "draft-only updates before": args.draft_pretrain_steps,
            "trained inside the GRPO step": "yes" if args.draft_train else "no (`draft_train=False`)",
            "passes of the unroll": f"{args.draft_ttt_steps}, weights {args.draft_ttt_decay} ** pass",
            "learning rate": args.draft_learning_rate,
            "rollout temperature": args.temperature,
            "seed": args.seed,
        }

    def _can_score_draft(self) -> bool:
        """Whether there are held-out prompts, and one process can roll out on them with the draft."""
        # Environments write (part of) the prompts themselves.
        has_prompts = self.eval_dataset is not None and self.environment_factories is None
        return (
            has_prompts
            and not self.is_fsdp_enabled
            and self.args.holds_whole_policy
            and unsupported_reason(base_policy(self.model), training=False) is None
        )

    def _score_on_held_out_prompts(self) -> dict[str, Any] | None:
        """What [`~export.score_draft`] measures on up to 64 prompts of the evaluation sets; None if they hold none."""
        prompts = held_out_prompts(self.eval_dataset, HELD_OUT_PROMPTS)
        prompt_ids = [ids for ids in self._tokenize_prompts(prompts)[0] if len(ids)] if prompts else []
        if not prompt_ids:
            return None
        policy, generator = base_policy(self.model), torch.Generator(self.accelerator.device)
        was_training = policy.training
        policy.eval()
        try:
            return score_draft(
                policy,
                self.draft_model,
                prompt_ids,
                max_new_tokens=self.max_completion_length,
                temperature=self.temperature,
                batch_size=self.args.per_device_eval_batch_size,
                generator=generator.manual_seed(self.args.seed),
            )
        finally:
            policy.train(was_training)

    def _require_draft(self) -> None:
        if self.draft_model is None:
            raise ValueError("There is no draft: the trainer was built with `use_draft=False`.")
        if self._draft_is_fresh and self.draft_trainer is None:
            raise ValueError(
                "The draft is fresh and has no weights to write yet: it is finished when training begins. Call "
                "`train()` first."
            )

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False):
        # Before `super()`, which pushes the folder to the Hub when the user calls this.
        if self.draft_trainer is not None:
            self.save_draft(Path(output_dir or self.args.output_dir) / DRAFT_FOLDER)
        super().save_model(output_dir, _internal_call)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        if self.draft_trainer is None:
            return
        # On every rank: they may share the state of the draft's optimizer.
        state = {
            "draft_trainer": self.draft_trainer.state_dict(keep=self.args.should_save),
            "controller": self._decoder.controller.state_dict(),
        }
        if self.args.should_save:
            torch.save(state, Path(output_dir) / DRAFT_FOLDER / DRAFT_STATE_NAME)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        draft = Path(checkpoint_folder) / DRAFT_FOLDER
        if draft.is_dir() and self.is_world_process_zero():
            target = Path(self.args.output_dir) / DRAFT_FOLDER
            shutil.copytree(draft, target, dirs_exist_ok=True, ignore=shutil.ignore_patterns(DRAFT_STATE_NAME))
        super()._push_from_checkpoint(checkpoint_folder)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if self.draft_model is None or checkpoint is None:
            return
        if not (Path(checkpoint) / DRAFT_FOLDER).is_dir():
            logger.warning(f"{checkpoint} holds no draft: the policy resumes, and the draft starts as in a new run.")
            return
        # Applied when training begins: the draft's optimizer does not exist before.
        self._draft_checkpoint = checkpoint

    def _load_best_model(self) -> None:
        super()._load_best_model()
        if self.draft_trainer is not None:
            self._load_draft(self.state.best_model_checkpoint)

    def _load_draft(self, checkpoint: str) -> None:
        folder = Path(checkpoint) / DRAFT_FOLDER
        policy_config = base_policy(self.model).config.get_text_config()
        check_same_draft(config_from_disk(read_config(resolve_folder(folder)), policy_config), self.draft_model.config)
        if not (folder / DRAFT_STATE_NAME).is_file():
            logger.warning(
                f"{folder} holds the draft's weights but not the state of its optimizer (`save_only_model=True`): its "
                "moments and schedule start anew."
            )
            self.draft_model.load_state_dict(Eagle3DraftModel.from_pretrained(str(folder)).state_dict())
            self.draft_trainer.refresh_rollout_draft()
            return
        # On the CPU: AdamW's step counters belong there, and loading moves the moments to the weights' device. Mapped where a
        # rank copies its share of them: each reads no more of the file than it needs.
        mapped = self.draft_trainer.shares_state
        state = torch.load(folder / DRAFT_STATE_NAME, map_location="cpu", weights_only=True, mmap=mapped)
        self.draft_trainer.load_state_dict(state["draft_trainer"])
        self._decoder.controller.load_state_dict(state["controller"])


def check_same_draft(saved: Eagle3DraftConfig, own: Eagle3DraftConfig) -> None:
    """
    Refuses to continue with weights that mean something else in this run, even where their shapes agree.

    Raises:
        ValueError: naming what differs and the settings to put back.
    """
    different = {
        field: setting for field, setting in MEANING_SETTINGS.items() if getattr(saved, field) != getattr(own, field)
    }
    if different:
        values = ", ".join(
            f"`{field}` {getattr(saved, field)} there, {getattr(own, field)} here" for field in different
        )
        settings = ", ".join(f"`{setting}`" for setting in dict.fromkeys(different.values()))
        raise ValueError(
            f"The checkpoint's draft is not the draft of this run: {values}. Set {settings} as in the run that wrote it."
        )
