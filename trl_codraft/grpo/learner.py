"""
Trains the draft of a run on the hidden states of its steps, and owns its state.

Everything that keeps the policy from feeling the draft is here or named here:

- taps and last hidden states are detached where hooks record them (`modeling/taps.py`), the head and the embedding
  where the teacher reads them (`modeling/teacher.py`);
- the draft has its own backward, after the policy's ([`DraftLearner.end_micro_step`]), its own optimizer, schedule and
  clipping (`training/draft_trainer.py`), and is no child module of the policy;
- whatever draws random numbers for the draft does so inside [`preserved_random_state`]: building, initialisation,
  pretraining ([`DraftLearner.start`]);
- the policy's loss runs as it would without us; [`DraftLearner.recording`] only listens.

Shapes: `B` rows, `P` prompt columns, `C` completion columns, `T` rows of a shard, `Ht` policy hidden size.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from accelerate.utils import broadcast
from transformers import TrainerCallback

from ..cp.draft import shard_rows
from ..cp.sharding import PackedMicrobatch
from ..modeling.modeling_eagle3 import Eagle3DraftModel
from ..modeling.packing import pack_rows
from ..modeling.policy import base_policy
from ..modeling.taps import TapRecorder, let_compiled_forwards_see_hooks
from ..modeling.teacher import PolicyHead
from ..training.draft_trainer import DraftTrainer
from .agreement import require_same_draft
from .building import build_draft, draft_training_arguments, head_dtype
from .pretraining import PolicyRollouts, initialize_fresh_draft, preserved_random_state, pretrain_draft
from .prompt_column import require_prompts
from .run import Batch, Run
from .saved_draft import SavedDraft
from .support import is_compiled, refuse_unsupported
from .warnings import warn_about_metrics


class DraftLearner:
    """
    Owns the draft of a run and trains it.

    Args:
        run ([`~run.Run`]):
            The trainer, after `GRPOTrainer.__init__`.
        source (`str` or [`Eagle3DraftModel`], *optional*):
            Draft to start from; `None` for a fresh one.

    Attributes:
        draft ([`Eagle3DraftModel`]):
            The draft, with fp32 weights.
        trainer ([`~training.draft_trainer.DraftTrainer`] or `None`):
            Its optimizer and schedule; `None` before training begins.
        is_fresh (`bool`):
            Whether the run started without a trained draft.
        head ([`~modeling.teacher.PolicyHead`]):
            The policy's head: the teacher.
        recorder ([`~modeling.taps.TapRecorder`]):
            Records taps of the policy.
        resumes_from ([`~saved_draft.SavedDraft`] or `None`):
            Draft of a checkpoint to read when training begins: the draft's optimizer does not exist before.
        pretraining_log (`list[dict[str, float]]`):
            Metrics of each pretraining update.
        simulated_accept_length (`float` or `None`):
            The latest `draft/accept_length_sim`.

    Raises:
        ValueError: if the policy or the settings do not allow a draft, or the draft does not fit the policy.
    """

    def __init__(self, run: Run, source: str | Eagle3DraftModel | None):
        refuse_unsupported(run)
        policy = base_policy(run.model)
        self.run = run
        self.head = PolicyHead(policy, compute_dtype=head_dtype(run.args))
        self.is_fresh = source is None
        with preserved_random_state():
            require_prompts(run)
            self.draft = build_draft(run.args, policy, source).to(run.accelerator.device)
        require_same_draft(self.draft.config)
        if is_compiled(run):
            let_compiled_forwards_see_hooks()
        self.recorder = TapRecorder(policy, self.draft.config.tap_layers)
        self.trainer: DraftTrainer | None = None
        self.resumes_from: SavedDraft | None = None
        self.pretraining_log: list[dict[str, float]] = []
        self.simulated_accept_length: float | None = None
        # One per microbatch that this rank ran a share of since the draft last learned.
        self._kept: list[Batch] = []
        self._seconds = 0.0

    # Before the first step

    def start(self, resumes: bool) -> None:
        """
        Finishes the draft before the first step: vocabulary, initial weights, optimizer, pretraining.

        Args:
            resumes (`bool`):
                Whether the caller loads weights and state of a checkpoint afterwards.
        """
        run = self.run
        if self.trainer is not None:
            self._kept, self._seconds = [], 0.0
            self.trainer.restart(run.state.max_steps)
            return
        rollouts = PolicyRollouts(run, self, seed=run.args.seed)
        with preserved_random_state():
            if self.is_fresh and not resumes:
                initialize_fresh_draft(run, self, rollouts)
            for tensor in self.draft.state_dict().values():
                broadcast(tensor, from_process=run.losses.rank_of_head)
            self.trainer = self._build_trainer()
            if run.args.draft_pretrain_steps and not resumes:
                pretrain_draft(run, self, run.args.draft_pretrain_steps, rollouts)

    def _build_trainer(self) -> DraftTrainer:
        """Builds the draft's trainer, pretraining included. The draft's weights are there and equal on all ranks."""
        args = self.run.args
        return DraftTrainer(
            self.draft,
            self.head,
            draft_training_arguments(args, rollout_temperature=self.run.temperature),
            reduce_sum=self.sum_over_ranks,
            num_training_steps=args.draft_pretrain_steps + self.run.state.max_steps,
            sharers=dist.group.WORLD if args.draft_shard_optimizer and args.world_size > 1 else None,
        )

    def sum_over_ranks(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sums in place: a large draft's gradients leave no room for a copy."""
        if self.run.accelerator.num_processes > 1:
            dist.all_reduce(tensor)
        return tensor

    # Inside a step

    @property
    def learns(self) -> bool:
        """Whether the draft learns from the run's steps."""
        return self.trainer is not None and self.run.args.draft_train

    @contextmanager
    def recording(
        self, rows: dict[str, Any], packed: Callable[[], PackedMicrobatch | None] = lambda: None
    ) -> Iterator[None]:
        """
        Within it, the policy's one forward of these rows leaves what the draft learns from them.

        Args:
            rows (`dict[str, Any]`):
                A microbatch: ids and masks of prompt `(B, P)` and completion `(B, C)`, and `tool_mask` where tools
                ran.
            packed (`Callable`, *optional*):
                Returns, after the forward, how the microbatch was split over ranks; `None` if it was not.
        """
        if not self.learns:
            yield
            return
        with self.recorder.record() as record:
            yield
        self.keep([self.pack(rows, record.taps, record.last_hidden, packed())])

    def pack(
        self,
        rows: dict[str, torch.Tensor],
        taps: Sequence[torch.Tensor],
        last_hidden: torch.Tensor,
        packed: PackedMicrobatch | None = None,
    ) -> Batch:
        """
        Packs what the draft learns from a microbatch.

        Args:
            rows (`dict[str, torch.Tensor]`):
                The microbatch, as in [`~DraftLearner.recording`].
            taps (`Sequence[torch.Tensor]`), last_hidden (`torch.Tensor`):
                Hidden states of its tokens `(B, P+C, Ht)`, or of this rank's `(1, T, Ht)`.
            packed ([`~cp.sharding.PackedMicrobatch`], *optional*):
                How it was split over ranks.
        """
        completion_mask, prompt_mask = rows["completion_mask"], rows["prompt_mask"]
        trained = completion_mask * rows["tool_mask"] if "tool_mask" in rows else completion_mask
        trained_prompt = prompt_mask if self.run.args.draft_train_on_prompt else torch.zeros_like(prompt_mask)
        masks = torch.cat([prompt_mask, completion_mask], dim=1), torch.cat([trained_prompt, trained], dim=1).bool()
        states = taps, last_hidden, self.run.args.draft_ttt_steps
        if packed is None:
            return pack_rows(torch.cat([rows["prompt_ids"], rows["completion_ids"]], dim=1), *masks, *states)
        return shard_rows(packed.input_ids, *masks, *states, packed.layout)

    def keep(self, batches: list[Batch]) -> None:
        """Keeps batches until the policy's backward has run."""
        self._kept += batches

    def learn_from_kept(self) -> None:
        """Adds up the draft's gradients of the batches that were kept."""
        start, batches, self._kept = time.perf_counter(), self._kept, []
        self.run.reports.note("draft")
        for batch in batches:
            self.trainer.accumulate(batch, self.run.losses.draft_loss)
        self.run.reports.note("draft done")
        self._seconds += time.perf_counter() - start

    def end_micro_step(self) -> None:
        """Learns after the policy's backward of a micro-step, and updates the draft at the end of a window."""
        if not self.learns:
            return
        self.learn_from_kept()
        if not self.run.accelerator.sync_gradients:
            return
        start, metrics = time.perf_counter(), self.trainer.step()
        seconds = torch.tensor([self._seconds + time.perf_counter() - start], device=self.run.accelerator.device)
        # The slowest rank's: in a pipeline, where only the last stage's learn, others wait for them elsewhere.
        metrics["draft/time"] = self.run.accelerator.gather(seconds).max().item()
        self._seconds = 0.0
        for name, value in metrics.items():
            self.run._metrics["train"][name].append(value)
        self.simulated_accept_length = metrics.get("draft/accept_length_sim", self.simulated_accept_length)
        warn_about_metrics(metrics, self.is_fresh, self.run.args)


class StartDraft(TrainerCallback):
    """
    Starts the draft when the policy is placed and wrapped, just before the first step.

    Args:
        start (`Callable`):
            Called without arguments.
    """

    def __init__(self, start: Callable[[], None]):
        self.start = start

    def on_train_begin(self, args, state, control, **kwargs):
        self.start()
