"""The draft's share of checkpoints, resume and the Hub: overrides of the trainer's methods that read and write files."""

import os
import shutil
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object, is_peft_model
from transformers import GenerationConfig, Trainer
from transformers.trainer_utils import HubStrategy
from transformers.utils import logging

from ..modeling.modeling_eagle3 import Eagle3DraftModel
from ..rollout.binding import reason_of_generate
from ..rollout.speculative import SpeculativeDecoder
from ..serving.export import check_repo_id, export_draft, push_draft, score_draft
from ..training.draft_trainer import DraftTrainer
from .prompt_column import held_out_prompts
from .saved_draft import DRAFT_FOLDER, DRAFT_STATE_NAME, SavedDraft, find_draft, read_draft, write_state
from .support import base_policy


logger = logging.get_logger(__name__)

# Prompts of the evaluation set that the model card's accept length is measured on.
HELD_OUT_PROMPTS = 64


class DraftCheckpoints(Trainer):
    """
    A trainer's checkpoints with the draft in them: `draft/` beside the policy's files in the format that servers load,
    and in it `draft_state.pt`, the state of its optimizer, wherever the policy's optimizer is saved too.

    Attributes:
        draft_model ([`Eagle3DraftModel`] or `None`), draft_trainer ([`~training.draft_trainer.DraftTrainer`] or `None`):
            Set by [`CoDraftGRPOTrainer`].
    """

    draft_model: Eagle3DraftModel | None
    draft_trainer: DraftTrainer | None
    _decoder: SpeculativeDecoder
    _draft_to_resume: SavedDraft | None
    _draft_is_fresh: bool
    _told_draft_size = False

    def save_draft(self, path: str | os.PathLike) -> None:
        """
        Writes the draft in the format that vLLM, SGLang and speculators load. Only the main process writes.

        Args:
            path (`str` or `os.PathLike`):
                Folder to write.

        Raises:
            ValueError: if there is no draft (yet), or it does not validate.
        """
        self._write_draft(path, self.args.hub_model_id or self.args.output_dir)

    def _write_draft(self, path: str | os.PathLike, policy_name: str, in_policy_repo: bool = False) -> None:
        """Writes the draft of the policy as it has become, which lies elsewhere than the one it started from."""
        self._require_draft()
        if self.args.should_save:
            export_draft(
                self.draft_model,
                base_policy(self.model),
                path,
                base_model=policy_name,
                adapter_of=self._adapter_of(),
                in_policy_repo=in_policy_repo,
                provenance=self._provenance(),
            )

    def _adapter_of(self) -> str | None:
        """The model that this run's policy is an adapter of, `None` where it is a whole model."""
        if not is_peft_model(self.model):
            return None
        return self.model.active_peft_config.base_model_name_or_path or "PATH_OF_THE_BASE_MODEL"

    def push_draft_to_hub(self, repo_id: str, **kwargs):
        """
        Pushes the draft, with a model card, to a repository of its own: servers take a repository, not a subfolder.
        With an `eval_dataset` that has prompts, the card reports the accept length on the first of them at the rollout
        temperature (not with environments, FSDP, a policy that no rank has whole, or one that cannot speculate here).

        Args:
            repo_id (`str`):
                Repository to push to, such as `"me/Qwen3-4B-eagle3"`.
            kwargs (`dict`, *optional*):
                Passed on to [`~serving.export.push_draft`]. `scores` takes the place of the measurement; `base_model` names the
                repository of the trained policy where `hub_model_id` does not (with `adapter_of=None` if that of a LoRA
                run holds it merged).

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
            kwargs.setdefault("base_model", self.hub_model_id or self.args.hub_model_id)
        if "base_model" in kwargs:
            kwargs.setdefault("adapter_of", self._adapter_of())
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
        if not has_prompts or self.is_fsdp_enabled or not self.args.holds_whole_policy:
            return False
        policy = base_policy(self.model)
        config = GenerationConfig(max_new_tokens=self.max_completion_length, do_sample=self.temperature > 0)
        reason = reason_of_generate(policy, policy.generate, config, training=False)
        if reason is not None:
            logger.warning(f"The draft's card reports no accept length, which needs speculative rollouts: {reason}")
        return reason is None

    def _score_on_held_out_prompts(self) -> dict[str, Any] | None:
        """What [`~serving.export.score_draft`] measures on up to 64 prompts of the evaluation sets; None if they hold none."""
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

    # Writing

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False):
        folder = Path(output_dir or self.args.output_dir) / DRAFT_FOLDER
        # Of an earlier run into this folder. A resume would read it in the place of what is saved now.
        if self.args.should_save and self.draft_trainer is not None:
            (folder / DRAFT_STATE_NAME).unlink(missing_ok=True)
        elif (
            self.args.should_save and _internal_call and output_dir is not None and find_draft(output_dir).lack is None
        ):
            shutil.rmtree(folder)
        # Before `super()`, which pushes the folder to the Hub when the user calls this.
        if self.draft_trainer is not None:
            os.makedirs(folder.parent, exist_ok=True)
            # Set where the run pushes its policy, and with it the folder of the draft.
            pushed_to = self.hub_model_id
            self._write_draft(folder, pushed_to or str(folder.parent), in_policy_repo=pushed_to is not None)
        super().save_model(output_dir, _internal_call)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        if self.draft_trainer is None:
            return
        # On every rank: they may share the state of the draft's optimizer. A run that is stopped may save within an
        # accumulation window, of which Transformers keeps no gradients either.
        state = {
            "draft_trainer": self.draft_trainer.state_dict(
                keep=self.args.should_save, moments=self.args.draft_save_optimizer, mid_window=True
            ),
            "controller": self._decoder.controller.state_dict(),
        }
        if self.args.should_save:
            write_state(Path(output_dir) / DRAFT_FOLDER, state)
            self._tell_draft_size(Path(output_dir), state["draft_trainer"])

    def _tell_draft_size(self, checkpoint: Path, state: dict[str, Any]) -> None:
        """Says once what the draft adds to every checkpoint; a warning where that is more than all the rest."""
        if self._told_draft_size:
            return
        self._told_draft_size = True
        folder = checkpoint / DRAFT_FOLDER
        draft = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
        rest = sum(file.stat().st_size for file in checkpoint.rglob("*") if file.is_file()) - draft
        moments = state["optimizer"]["state"].values() if state["optimizer"] is not None else ()
        optimizer = sum(tensor.nbytes for moment in moments for tensor in moment.values())
        say = logger.warning if draft > rest else logger.info
        say(
            f"Each checkpoint has {draft:,} bytes of the draft and {rest:,} of everything else: in {folder}, "
            f"{draft - optimizer:,} bytes are its weights (for servers, and in {DRAFT_STATE_NAME} as they are trained) and "
            f"{optimizer:,} the state of its optimizer, which `draft_save_optimizer=False` leaves out."
        )

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        saved = find_draft(checkpoint_folder)
        if saved.lack is None and self.is_world_process_zero() and self._pushes_now():
            target = Path(self.args.output_dir) / DRAFT_FOLDER
            shutil.copytree(saved.folder, target, dirs_exist_ok=True, ignore=shutil.ignore_patterns(DRAFT_STATE_NAME))
        super()._push_from_checkpoint(checkpoint_folder)

    def _pushes_now(self) -> bool:
        """Whether Transformers pushes at this save: an upload that still runs reads the files that would change."""
        waits = self.push_in_progress is not None and not self.push_in_progress.is_done()
        return self.args.hub_strategy != HubStrategy.END and (self.args.hub_always_push or not waits)

    # Reading

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if self.draft_model is None or checkpoint is None:
            return
        instead = "the draft starts as in a new run" if self.draft_trainer is None else "the draft stays as it is"
        # Applied when training begins: the draft's optimizer does not exist before.
        self._draft_to_resume = self._find_draft(checkpoint, f"The policy resumes, and {instead}")

    def _load_best_model(self) -> None:
        super()._load_best_model()
        if self.draft_trainer is None:
            return
        checkpoint = self.state.best_model_checkpoint
        instead = "The policy is the best one, and the draft stays that of the last step"
        saved = self._find_draft(checkpoint, instead)
        if saved is None:
            return
        try:
            state = self._read_draft(saved)
        except ValueError as error:
            # The run is over, and has to end with what it has.
            self._warn(f"{checkpoint}: {error} {instead}.")
            return
        self._load_draft(state)

    def _find_draft(self, checkpoint: str, instead: str) -> SavedDraft | None:
        """
        The draft of a checkpoint; None, with a warning that says what happens `instead`, if it is not there. Collective:
        there is what every rank sees.
        """
        here = find_draft(checkpoint)
        everywhere = gather_object([here])
        blind = {rank: saved.lack for rank, saved in enumerate(everywhere) if saved.lack is not None}
        if blind:
            where = "" if len(blind) == len(everywhere) else f" on rank {', '.join(map(str, blind))}"
            lack = next(iter(blind.values()))
            self._warn(f"The checkpoint {checkpoint} holds no draft{where}: {lack}. {instead}.")
            return None
        return SavedDraft(here.folder, None, all(saved.has_state for saved in everywhere))

    def _read_draft(self, saved: SavedDraft) -> dict[str, Any]:
        """
        Reads the draft of a checkpoint. Collective: if one rank cannot, all raise what it says.

        Raises:
            ValueError: if it is not this run's draft, or damaged.
        """
        policy_config = base_policy(self.model).config.get_text_config()
        state, failure = None, None
        # Mapped where a rank copies its share of the moments: each reads no more of the file than it needs.
        mapped = self.args.draft_shard_optimizer and self.args.world_size > 1
        try:
            state = read_draft(saved, self.draft_model.config, policy_config, mapped=mapped)
        except ValueError as error:
            failure = error
        failures = [text for text in gather_object([None if failure is None else str(failure)]) if text is not None]
        if failures:
            raise ValueError(failures[0]) from failure
        return state

    def _load_draft(self, state: dict[str, Any]) -> None:
        """Goes on with what [`~grpo.saved_draft.read_draft`] has read."""
        if "weights" in state:
            self._warn(
                "The checkpoint holds the draft's weights but not the state of its training (`save_only_model=True`): its "
                "moments and schedule start anew."
            )
            self.draft_trainer.load_weights(state["weights"])
            return
        if not self.draft_trainer.load_state_dict(state["draft_trainer"]):
            self._warn(
                "The checkpoint was saved without the state of the draft's optimizer (`draft_save_optimizer=False`), or with "
                "that of other weights: the draft goes on with fresh moments."
            )
        self._decoder.controller.load_state_dict(state["controller"])

    def _warn(self, text: str) -> None:
        """What all ranks have found alike, said by one."""
        if self.is_world_process_zero():
            logger.warning(text)
