"""The draft's share of checkpoints, resume and the Hub."""

import os
import shutil
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object, is_peft_model
from huggingface_hub import CommitInfo
from transformers import GenerationConfig
from transformers.trainer_utils import HubStrategy
from transformers.utils import logging

from ..modeling.policy import base_policy
from ..rollout.binding import reason_of_generate
from ..rollout.controller import DraftLengthController, FixedDraftLength
from ..serving.export import check_repo_id, export_draft, push_draft, score_draft
from .learner import DraftLearner
from .prompt_column import held_out_prompts
from .run import Run
from .saved_draft import DRAFT_FOLDER, DRAFT_STATE_NAME, SavedDraft, find_draft, read_draft, write_state


logger = logging.get_logger(__name__)

# Prompts of the evaluation set that the model card's accept length is measured on.
HELD_OUT_PROMPTS = 64


class DraftCheckpoints:
    """
    Keeps the draft in a run's checkpoints: `draft/` beside the policy's files in the format that servers load, and in
    it `draft_state.pt`, the state of its optimizer, wherever the policy's optimizer is saved too.

    Args:
        run ([`~run.Run`]):
            The trainer.
        learner ([`DraftLearner`]):
            Owns the draft.
        controller ([`~rollout.controller.DraftLengthController`] or [`~rollout.controller.FixedDraftLength`]):
            Chooses the number of drafted tokens.
    """

    def __init__(self, run: Run, learner: DraftLearner, controller: DraftLengthController | FixedDraftLength):
        self.run, self.learner, self.controller = run, learner, controller
        self._told_size = False

    def save_draft(self, path: str | os.PathLike) -> None:
        """See [`CoDraftGRPOTrainer.save_draft`]."""
        self._write_draft(path, self.run.args.hub_model_id or self.run.args.output_dir)

    def _write_draft(self, path: str | os.PathLike, policy_name: str, in_policy_repo: bool = False) -> None:
        """Writes the draft of the policy as it has become, which lies elsewhere than the one it started from."""
        self._require_draft()
        if self.run.args.should_save:
            export_draft(
                self.learner.draft,
                base_policy(self.run.model),
                path,
                base_model=policy_name,
                adapter_of=self._adapter_of(),
                in_policy_repo=in_policy_repo,
                provenance=self._provenance(),
            )

    def _adapter_of(self) -> str | None:
        """The model that this run's policy is an adapter of, `None` where it is a whole model."""
        if not is_peft_model(self.run.model):
            return None
        return self.run.model.active_peft_config.base_model_name_or_path or "PATH_OF_THE_BASE_MODEL"

    def push_draft_to_hub(self, repo_id: str, **kwargs) -> CommitInfo | None:
        """See [`CoDraftGRPOTrainer.push_draft_to_hub`]."""
        self._require_draft()
        check_repo_id("repo_id", repo_id)
        if not self.run.is_world_process_zero():
            return None
        if "scores" not in kwargs and self._can_score_draft():
            kwargs["scores"] = self._score_on_held_out_prompts()
        kwargs.setdefault("provenance", self._provenance())
        if self.run.args.hub_model_id:
            kwargs.setdefault("base_model", self.run.hub_model_id or self.run.args.hub_model_id)
        if "base_model" in kwargs:
            kwargs.setdefault("adapter_of", self._adapter_of())
        return push_draft(self.learner.draft, base_policy(self.run.model), repo_id, **kwargs)

    def _provenance(self) -> dict[str, Any]:
        """How the draft came about, for its card."""
        args = self.run.args
        start = args.draft_model_name_or_path or ("fresh" if self.learner.is_fresh else "a model that was passed in")
        return {
            "policy started from": base_policy(self.run.model).config._name_or_path or "a model that was passed in",
            "draft started from": start,
            "GRPO steps": self.run.state.global_step,
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
        has_prompts = self.run.eval_dataset is not None and self.run.environment_factories is None
        if not has_prompts or self.run.is_fsdp_enabled or not self.run.args.holds_whole_policy:
            return False
        policy = base_policy(self.run.model)
        config = GenerationConfig(max_new_tokens=self.run.max_completion_length, do_sample=self.run.temperature > 0)
        reason = reason_of_generate(policy, policy.generate, config, training=False)
        if reason is not None:
            logger.warning(f"The draft's card reports no accept length, which needs speculative rollouts: {reason}")
        return reason is None

    def _score_on_held_out_prompts(self) -> dict[str, Any] | None:
        """Runs [`~serving.export.score_draft`] on up to 64 prompts of the evaluation sets; `None` without any."""
        prompts = held_out_prompts(self.run.eval_dataset, HELD_OUT_PROMPTS)
        prompt_ids = [ids for ids in self.run._tokenize_prompts(prompts)[0] if len(ids)] if prompts else []
        if not prompt_ids:
            return None
        policy, generator = base_policy(self.run.model), torch.Generator(self.run.accelerator.device)
        was_training = policy.training
        policy.eval()
        try:
            return score_draft(
                policy,
                self.learner.draft,
                prompt_ids,
                max_new_tokens=self.run.max_completion_length,
                temperature=self.run.temperature,
                batch_size=self.run.args.per_device_eval_batch_size,
                generator=generator.manual_seed(self.run.args.seed),
            )
        finally:
            policy.train(was_training)

    def _require_draft(self) -> None:
        """Refuses to write a draft without weights."""
        if self.learner.is_fresh and self.learner.trainer is None:
            raise ValueError(
                "The draft is fresh and has no weights to write yet: it is finished when training begins. Call "
                "`train()` first."
            )

    # Writing

    def save(self, folder: str | os.PathLike) -> None:
        """Writes the draft beside the policy that is saved in a folder."""
        if self.learner.trainer is None:
            return
        folder = Path(folder)
        if self.run.args.should_save:
            # An earlier run into this folder may have left it, and a resume would read it in the place of these
            # weights.
            (folder / DRAFT_FOLDER / DRAFT_STATE_NAME).unlink(missing_ok=True)
        os.makedirs(folder, exist_ok=True)
        # Set where the run pushes its policy, and with it the folder of the draft.
        pushed_to = self.run.hub_model_id
        self._write_draft(folder / DRAFT_FOLDER, pushed_to or str(folder), in_policy_repo=pushed_to is not None)

    def save_state(self, folder: str) -> None:
        """Writes the state of the draft's training into a checkpoint."""
        if self.learner.trainer is None:
            return
        # On every rank: they may share the state of the draft's optimizer. A run that is stopped may save within an
        # accumulation window, of which Transformers keeps no gradients either.
        state = {
            "draft_trainer": self.learner.trainer.state_dict(
                keep=self.run.args.should_save, moments=self.run.args.draft_save_optimizer, mid_window=True
            ),
            "controller": self.controller.state_dict(),
        }
        if self.run.args.should_save:
            write_state(Path(folder) / DRAFT_FOLDER, state)
            self._tell_size(Path(folder), state["draft_trainer"])

    def _tell_size(self, checkpoint: Path, state: dict[str, Any]) -> None:
        """Says once what the draft adds to every checkpoint; a warning where that is more than all the rest."""
        if self._told_size:
            return
        self._told_size = True
        folder = checkpoint / DRAFT_FOLDER
        draft = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
        rest = sum(file.stat().st_size for file in checkpoint.rglob("*") if file.is_file()) - draft
        moments = state["optimizer"]["state"].values() if state["optimizer"] is not None else ()
        optimizer = sum(tensor.nbytes for moment in moments for tensor in moment.values())
        say = logger.warning if draft > rest else logger.info
        say(
            f"Each checkpoint has {draft:,} bytes of the draft and {rest:,} of everything else: in {folder}, "
            f"{draft - optimizer:,} bytes are its weights (for servers, and in {DRAFT_STATE_NAME} as they are "
            f"trained) and {optimizer:,} the state of its optimizer, which `draft_save_optimizer=False` leaves out."
        )

    def copy_for_push(self, checkpoint_folder: str) -> None:
        """Copies a checkpoint's draft to where Transformers pushes from."""
        saved = find_draft(checkpoint_folder)
        if saved.lack is None and self.run.is_world_process_zero() and self._pushes_now():
            target = Path(self.run.args.output_dir) / DRAFT_FOLDER
            shutil.copytree(saved.folder, target, dirs_exist_ok=True, ignore=shutil.ignore_patterns(DRAFT_STATE_NAME))

    def _pushes_now(self) -> bool:
        """Whether Transformers pushes at this save: an upload that still runs reads the files that would change."""
        waits = self.run.push_in_progress is not None and not self.run.push_in_progress.is_done()
        return self.run.args.hub_strategy != HubStrategy.END and (self.run.args.hub_always_push or not waits)

    # Reading

    def find_resumed(self, checkpoint: str | None) -> None:
        """Looks for the draft of a checkpoint that the policy resumes from; it is read when training begins."""
        if checkpoint is None:
            return
        instead = "the draft starts as in a new run" if self.learner.trainer is None else "the draft stays as it is"
        self.learner.resumes_from = self._find_draft(checkpoint, f"The policy resumes, and {instead}")

    def read_resumed(self) -> dict[str, Any] | None:
        """Reads what the draft resumes with, if it does; refused, it resumes with nothing when it is asked again."""
        saved, self.learner.resumes_from = self.learner.resumes_from, None
        return None if saved is None else self._read_draft(saved)

    def load_best(self) -> None:
        """Goes back to the draft of the best checkpoint."""
        if self.learner.trainer is None:
            return
        checkpoint = self.run.state.best_model_checkpoint
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
        self.load(state)

    def _find_draft(self, checkpoint: str, instead: str) -> SavedDraft | None:
        """
        The draft of a checkpoint; None, with a warning that says what happens `instead`, if it is not there.
        Collective: there is what every rank sees.
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
        policy_config = base_policy(self.run.model).config.get_text_config()
        state, failure = None, None
        # Mapped where a rank copies its share of the moments: each reads no more of the file than it needs.
        mapped = self.run.args.draft_shard_optimizer and self.run.args.world_size > 1
        try:
            state = read_draft(saved, self.learner.draft.config, policy_config, mapped=mapped)
        except ValueError as error:
            failure = error
        failures = [text for text in gather_object([None if failure is None else str(failure)]) if text is not None]
        if failures:
            raise ValueError(failures[0]) from failure
        return state

    def load(self, state: dict[str, Any]) -> None:
        """Goes on with what [`~grpo.saved_draft.read_draft`] has read."""
        if "weights" in state:
            self._warn(
                "The checkpoint holds the draft's weights but not the state of its training (`save_only_model=True`): "
                "its moments and schedule start anew."
            )
            self.learner.trainer.load_weights(state["weights"])
            return
        if not self.learner.trainer.load_state_dict(state["draft_trainer"]):
            self._warn(
                "The checkpoint was saved without the state of the draft's optimizer (`draft_save_optimizer=False`), "
                "or with that of other weights: the draft goes on with fresh moments."
            )
        self.controller.load_state_dict(state["controller"])

    def _warn(self, text: str) -> None:
        """Warns on one rank of a finding that all ranks share."""
        if self.run.is_world_process_zero():
            logger.warning(text)
