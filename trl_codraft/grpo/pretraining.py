"""
Work on the policy's own rollouts before the first GRPO step: token counts, tap scales, draft-only updates.

Nothing here calls a reward function or an environment, and every random state is put back, so the policy's run is the
one it would have been without.
"""

import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np
import torch
from accelerate.utils import broadcast_object_list
from datasets import IterableDataset
from torch.nn.utils.rnn import pad_sequence
from tqdm.auto import tqdm

from ..cp.draft import DraftBatchShard
from ..modeling.initialization import tap_log_scales
from ..modeling.losses import draft_loss
from ..modeling.packing import DraftBatch, pack_rows
from ..modeling.vocab import choose_draft_vocab
from ..rollout.trace import RolloutTrace
from .join_context import draft_loss_on
from .support import base_policy


if TYPE_CHECKING:
    from ..trainer import CoDraftGRPOTrainer


MAX_COUNTED_PROMPTS = 2000
# Each pretraining rollout is trained this many times: on a CPU and on a GPU alike, generating it and running the policy
# over it cost far more than one more update of the draft.
PASSES_PER_ROLLOUT = 4
# Taps of a window that are kept between those passes; beyond, the policy's forward is run again.
MAX_HELD_BYTES = 2 * 2**30

# A prompt and its completion.
Rollout = tuple[list[int], list[int]]
# What the draft learns from rollouts, as far as this rank has it.
Batches = list[DraftBatch | DraftBatchShard | None]


@contextmanager
def preserved_random_state() -> Iterator[None]:
    """Puts the states of python, numpy, torch (CPU and all devices) back on exit."""
    python_state, numpy_state = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=range(torch.accelerator.device_count())):
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)


class PolicyRollouts:
    """
    Rollouts of the current policy on prompts of the training set, outside the GRPO loop.

    Args:
        trainer ([`CoDraftGRPOTrainer`]):
            The trainer; only its dataset, tokenization and generation are used.
        seed (`int`):
            Seed of the order of prompts. Each rank draws its own.
    """

    def __init__(self, trainer: "CoDraftGRPOTrainer", seed: int):
        self.trainer = trainer
        self.random = torch.Generator().manual_seed(seed + 1000 * trainer.accelerator.process_index)
        self._rows = self._stream()
        self._trace: RolloutTrace | None = None

    def _stream(self) -> Iterator[dict]:
        dataset = self.trainer.train_dataset
        while True:
            row = None
            if isinstance(dataset, (IterableDataset, torch.utils.data.IterableDataset)):
                num_ranks, rank = self.trainer.accelerator.num_processes, self.trainer.accelerator.process_index
                taken = 0
                for index, row in enumerate(dataset):
                    if index % num_ranks == rank:
                        taken += 1
                        yield row
                if row is not None and not taken:  # fewer rows than ranks
                    yield row
            else:
                for index in torch.randperm(len(dataset), generator=self.random).tolist():
                    row = dataset[index]
                    yield row
            if row is None:
                raise ValueError(
                    "The training set has no rows (left): the draft starts from rollouts on its prompts. Pass a "
                    "`train_dataset` that holds prompts and can be iterated more than once, or set `use_draft=False`."
                )

    def generate(self, count: int, prompts_only: bool = False) -> list[Rollout]:
        """
        Samples one completion for each of the next `count` prompts: `(prompt_ids, completion_ids)` pairs, the
        completions empty with `prompts_only`. Where the speculative loop generates them and their hidden states may be
        held, it keeps them for [`~PolicyRollouts.record`].
        """
        trainer = self.trainer
        rows = [next(self._rows) for _ in range(count)]
        was_training = trainer.model.training
        trainer.model.train()  # as in the GRPO loop, which also generates in training mode
        # Set by TRL at its first generation, which has not happened yet in a new run.
        environments = trainer.__dict__.get("_batch_environments")
        try:
            if trainer.environment_factories is not None:
                trainer._batch_environments = self._environments_of(rows)
            prompts = [row.get("prompt", [{"role": "user", "content": ""}]) for row in rows]
            prompt_ids, images, multimodal_fields = trainer._tokenize_prompts(_require_text(prompts))
            if prompts_only:
                return [(ids, []) for ids in prompt_ids]
            with self._tracing(prompt_ids):
                completion_ids, _ = trainer._generate_single_turn(prompt_ids, images, multimodal_fields, 1)
        finally:
            if trainer.environment_factories is not None:
                trainer._batch_environments = environments
            trainer.model.train(was_training)
        return list(zip(prompt_ids, completion_ids, strict=True))

    def _environments_of(self, rows: list[dict]) -> list[str | None]:
        """The environment of each row. An unknown one is an error here as in the GRPO loop, which comes later."""
        trainer = self.trainer
        if not trainer._multi_environment:
            return [None] * len(rows)
        names = [row.get("environment") for row in rows]
        unknown = sorted({str(name) for name in names if name not in trainer.environment_factories})
        if unknown:
            raise ValueError(
                f"Rows of the training set have the `environment` {', '.join(unknown)}, which is not among the environments "
                f"passed to `environment_factory`: {list(trainer.environment_factories)}. Add it there, or drop the rows."
            )
        return names

    @contextmanager
    def _tracing(self, prompt_ids: list[list[int]]) -> Iterator[None]:
        """Keeps the hidden states of the rollout inside, if the loop runs and they surely fit."""
        trainer, self._trace = self.trainer, None
        longest = sum(len(ids) + trainer.max_completion_length for ids in prompt_ids)
        if not trainer.speculates or not self._fits(longest):
            yield
            return
        with trainer._decoder.recording() as trace:
            yield
        # Empty where the call was one that the loop does not serve.
        self._trace = None if trace.is_empty else trace

    def recorded(self, rollouts: list[Rollout], first: int) -> Batches:
        """
        What the draft learns from some of the rollouts of the last [`~PolicyRollouts.generate`], as
        [`~PolicyRollouts.record`] returns it, from the hidden states that the rollout itself left where it kept them.

        Args:
            rollouts (`list[Rollout]`):
                Neighbouring rollouts.
            first (`int`):
                Number of the first of them among those that `generate` returned.
        """
        if self._trace is None:
            return self.record(rollouts)
        input_ids, attention_mask, trained = self._columns(rollouts)
        lengths = [len(prompt) + len(completion) for prompt, completion in rollouts]
        states = [self._trace.row(first + index, length) for index, length in enumerate(lengths)]
        taps, last_hidden = (pad_sequence(parts, batch_first=True) for parts in zip(*states, strict=True))
        taps = taps.split(self.trainer.draft_model.config.target_hidden_size, dim=-1)
        return [pack_rows(input_ids, attention_mask, trained, taps, last_hidden, self.trainer.args.draft_ttt_steps)]

    def release(self) -> None:
        """Lets go of the hidden states of the last rollout."""
        self._trace = None

    def record(self, rollouts: list[Rollout]) -> Batches:
        """
        Runs the policy over rollouts, without gradient, and packs what the draft learns from. Where no rank has the whole
        policy, those of all ranks of a pipeline go through it, and its last stage has what the draft learns.
        """
        trainer = self.trainer
        if not trainer.args.holds_whole_policy:
            trainer.learn_from_rows(self._padded(rollouts))
            batches, trainer._draft_batches = trainer._draft_batches, []
            return batches
        input_ids, attention_mask, trained = self._columns(rollouts)
        with torch.no_grad(), trainer.recorder.record() as record, trainer.accelerator.autocast():
            trainer.model_wrapped(
                input_ids=input_ids, attention_mask=attention_mask.long(), use_cache=False, logits_to_keep=1
            )
        states = record.taps, record.last_hidden, trainer.args.draft_ttt_steps
        return [pack_rows(input_ids, attention_mask, trained, *states)]

    @property
    def loss_function(self) -> Callable:
        """The draft's loss on what [`~PolicyRollouts.record`] returns."""
        return draft_loss if self.trainer.args.holds_whole_policy else draft_loss_on(self.trainer)

    def _padded(self, rollouts: list[Rollout]) -> dict[str, torch.Tensor]:
        """Prompts padded on the left, `(B, P)`, and completions on the right, `(B, C)`, each with its mask."""
        trainer, rows = self.trainer, {}
        prompts, completions = zip(*rollouts, strict=True)
        for name, side, sequences in (("prompt", "left", prompts), ("completion", "right", completions)):
            # At least one column: messages need content.
            longest = max(1, *(len(ids) for ids in sequences))
            padded = [torch.tensor(ids, dtype=torch.long) for ids in [*sequences, [0] * longest]]
            masks = [torch.ones_like(ids) for ids in padded]
            fill, settings = trainer._tokenizer.pad_token_id, {"batch_first": True, "padding_side": side}
            rows[f"{name}_ids"] = pad_sequence(padded, padding_value=fill, **settings)[:-1]
            rows[f"{name}_mask"] = pad_sequence(masks, padding_value=0, **settings)[:-1]
        return {name: value.to(trainer.accelerator.device) for name, value in rows.items()}

    def _columns(self, rollouts: list[Rollout]) -> tuple[torch.Tensor, ...]:
        """Right-padded ids, attention mask and trained tokens of rollouts, `(B, S)` each."""
        trainer = self.trainer
        sequences = [torch.tensor(prompt + completion) for prompt, completion in rollouts]
        input_ids = pad_sequence(sequences, batch_first=True, padding_value=trainer._tokenizer.pad_token_id)
        columns = torch.arange(input_ids.shape[1])
        lengths = torch.tensor([len(sequence) for sequence in sequences])
        prompt_lengths = torch.tensor([len(prompt) for prompt, _ in rollouts])
        attention_mask = columns < lengths[:, None]
        trained = attention_mask.clone()
        if not trainer.args.draft_train_on_prompt:
            trained &= columns >= prompt_lengths[:, None]
        return tuple(x.to(trainer.accelerator.device) for x in (input_ids, attention_mask, trained))

    def taps_fit(self, rollouts: list[Rollout]) -> bool:
        """Whether packed taps of rollouts may be held."""
        return self._fits(sum(len(prompt) + len(completion) for prompt, completion in rollouts))

    def _fits(self, num_tokens: int) -> bool:
        """Whether taps of a rank's tokens may be held: at most `MAX_HELD_BYTES` on average over ranks, which agree."""
        draft, policy = self.trainer.draft_model.config, base_policy(self.trainer.model)
        row_bytes = (len(draft.tap_layers) + 1) * draft.target_hidden_size * policy.dtype.itemsize
        if not self.trainer.args.holds_whole_policy:
            # The last stage holds those of the whole pipeline.
            row_bytes *= self.trainer.args.pipeline_parallel_size
        num_tokens = torch.tensor(float(num_tokens), device=self.trainer.accelerator.device)
        return self.trainer.accelerator.reduce(num_tokens, reduction="mean").item() * row_bytes <= MAX_HELD_BYTES


def measure_tap_scales(
    trainer: "CoDraftGRPOTrainer", batches: Sequence[DraftBatch | DraftBatchShard | None]
) -> torch.Tensor | None:
    """
    The typical size of each tap over the tokens of one batch per rank: the geometric mean of their root mean squares,
    which the few tokens with huge hidden states (a prompt's first) do not move.

    Returns:
        `torch.Tensor` or `None`: fp32, shape `(number of taps,)`; `None` if no rank has a token.
    """
    num_taps = len(trainer.draft_model.config.tap_layers)
    sums = torch.zeros(num_taps + 1, dtype=torch.float64, device=trainer.accelerator.device)
    for batch in batches:
        if batch is not None:
            sums[:num_taps] += tap_log_scales(batch.taps, num_taps)
            sums[num_taps] += len(batch.taps)
    sums = trainer.accelerator.reduce(sums, reduction="sum")
    return (sums[:-1] / sums[-1]).exp().float() if sums[-1] > 0 else None


def first_prompts(trainer: "CoDraftGRPOTrainer", count: int) -> list:
    """Prompts of the first rows of the training set, as they stand there; none where environments make them."""
    if trainer.environment_factories is not None:
        return []
    return [row["prompt"] for row in islice(trainer.train_dataset, count) if "prompt" in row]


def _require_text(prompts: list) -> list:
    """The same prompts, each a string or messages: a run with a `rollout_func` may have any."""
    if not all(isinstance(prompt, str | list) for prompt in prompts):
        raise ValueError(
            "The draft starts from rollouts on the prompts of the training set, and some are neither a string nor messages, "
            "which only the `rollout_func` understands. Start from a trained draft (`draft_model_name_or_path`) with "
            "`draft_pretrain_steps=0`, or set `use_draft=False`."
        )
    return prompts


def longest_prompt(trainer: "CoDraftGRPOTrainer", count: int) -> int:
    """Tokens of the longest of the first prompts; 0 where none can be read before the run, as of a stream."""
    # What a `rollout_func` takes need not be text.
    if isinstance(trainer.train_dataset, IterableDataset | None) or trainer.rollout_func is not None:
        return 0
    prompts = first_prompts(trainer, count)
    return max(map(len, trainer._tokenize_prompts(prompts)[0])) if prompts else 0


def count_tokens(trainer: "CoDraftGRPOTrainer", rollouts: list[Rollout]) -> torch.Tensor:
    """
    How often each token occurs in up to 2,000 prompts of the training set and in given rollouts, over all ranks.

    Returns:
        `torch.Tensor`: int64 counts of shape `(V,)`.
    """
    vocab_size = trainer.draft_model.config.vocab_size
    counts = torch.zeros(vocab_size, dtype=torch.long)
    sequences = [completion for _, completion in rollouts]
    # All of them, so that all ranks refuse what one would.
    prompts = _require_text(first_prompts(trainer, MAX_COUNTED_PROMPTS))
    own = prompts[trainer.accelerator.process_index :: trainer.accelerator.num_processes]
    if own:
        sequences += trainer._tokenize_prompts(own)[0]
    for ids in sequences:
        # A head with more rows than the vocabulary may have sampled one of them: it is no token of the draft's.
        counts += torch.bincount(torch.as_tensor(ids, dtype=torch.long), minlength=vocab_size)[:vocab_size]
    return trainer.accelerator.reduce(counts.to(trainer.accelerator.device), reduction="sum").cpu()


def pretrain_draft(trainer: "CoDraftGRPOTrainer", num_steps: int, source: PolicyRollouts) -> None:
    """
    Draft-only updates on fresh rollouts. Every rank runs the same number of steps.

    Args:
        trainer ([`CoDraftGRPOTrainer`]):
            The trainer, with its `draft_trainer` built.
        num_steps (`int`):
            Number of updates. Each trains on `per_device_train_batch_size` rollouts per rank; every rollout is used in
            four of them. The taps of one window (`steps_per_generation` microbatches) are held meanwhile, or recorded
            anew where they would take more than 2 GiB per rank. They are those of the rollout itself where the
            speculative loop generated it.
        source ([`PolicyRollouts`]):
            Where the rollouts come from.
    """
    rows_per_step = trainer.args.per_device_train_batch_size
    rollouts_per_window = rows_per_step * trainer.args.steps_per_generation
    chunks: list[list[Rollout]] = []
    held: list[Batches] | None = None
    queue: list[int] = []
    progress = tqdm(
        range(num_steps),
        desc="draft pretraining",
        disable=trainer.args.disable_tqdm or not trainer.accelerator.is_local_main_process,
    )
    with trainer.draft_trainer.pretraining():
        for _ in progress:
            if not queue:
                rollouts = source.generate(rollouts_per_window)
                chunks = [rollouts[i : i + rows_per_step] for i in range(0, len(rollouts), rows_per_step)]
                held = None
                if source.taps_fit(rollouts):
                    firsts = range(0, len(rollouts), rows_per_step)
                    held = [source.recorded(chunk, first) for chunk, first in zip(chunks, firsts, strict=True)]
                source.release()
                for _pass in range(PASSES_PER_ROLLOUT):
                    queue += torch.randperm(len(chunks), generator=source.random).tolist()
                # One order for all ranks: those of a pipeline may have recorded a chunk together.
                broadcast_object_list(queue)
            index = queue.pop(0)
            for batch in held[index] if held is not None else source.record(chunks[index]):
                trainer.draft_trainer.accumulate(batch, source.loss_function)
            metrics = trainer.draft_trainer.step()
            trainer.draft_pretraining_log.append(metrics)
            shown = {"loss": "draft/loss", "accept_length_sim": "draft/accept_length_sim"}
            progress.set_postfix({label: f"{metrics.get(name, math.nan):.3f}" for label, name in shown.items()})


def initialize_fresh_draft(trainer: "CoDraftGRPOTrainer", source: PolicyRollouts) -> None:
    """
    Sets the vocabulary and the weights of a fresh draft from the policy and one generation batch per rank.

    Args:
        trainer ([`CoDraftGRPOTrainer`]):
            The trainer, with its `draft_model` built and its optimizer not yet.
        source ([`PolicyRollouts`]):
            Where the batch comes from. With vLLM, and where no rank has the whole policy, only its prompts are used.
    """
    args, draft = trainer.args, trainer.draft_model
    prompts_only = trainer.use_vllm or not args.holds_whole_policy
    rollouts = source.generate(args.per_device_train_batch_size * args.steps_per_generation, prompts_only=prompts_only)
    if draft.config.draft_vocab_size < draft.config.vocab_size:
        # A tokenizer may know tokens that the policy has no row for; it cannot sample them.
        special = [*trainer._tokenizer.all_special_ids, *trainer.eos_token_ids]
        special = [token for token in special if token < draft.config.vocab_size]
        draft.set_vocab(choose_draft_vocab(count_tokens(trainer, rollouts), draft.config.draft_vocab_size, special))
    scales = measure_tap_scales(trainer, source.record(rollouts[: args.per_device_train_batch_size]))
    if trainer.has_policy_head:
        draft.initialize_from_policy(trainer.policy_head, tap_scales=scales)
