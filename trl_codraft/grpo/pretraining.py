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

import numpy as np
import torch
from accelerate.utils import broadcast_object_list
from datasets import IterableDataset
from torch.nn.utils.rnn import pad_sequence
from tqdm.auto import tqdm

from ..group.members import attributes_set
from ..modeling.initialization import tap_log_scales
from ..modeling.losses import draft_loss
from ..modeling.packing import pack_rows
from ..modeling.policy import base_policy
from ..modeling.vocab import choose_draft_vocab
from ..rollout.trace import RolloutTrace
from .run import Batch, Learner, Run


MAX_COUNTED_PROMPTS = 2000
# Each pretraining rollout is trained this many times: on a CPU and on a GPU alike, generating it and running the
# policy over it cost far more than one more update of the draft.
PASSES_PER_ROLLOUT = 4
# Taps of a window that are kept between those passes; beyond, the policy's forward is run again.
MAX_HELD_BYTES = 2 * 2**30

# A prompt and its completion.
Rollout = tuple[list[int], list[int]]
# This rank's share of the hidden states and tokens that the draft learns from.
Batches = list[Batch]


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
        run ([`~run.Run`]):
            The trainer; only its dataset, tokenization and generation are used.
        learner ([`~run.Learner`]):
            The draft that learns from them.
        seed (`int`):
            Seed of the order of prompts. Each rank draws its own.
    """

    def __init__(self, run: Run, learner: Learner, seed: int):
        self.run, self.learner = run, learner
        self.random = torch.Generator().manual_seed(seed + 1000 * run.accelerator.process_index)
        self._rows = self._stream()
        self._trace: RolloutTrace | None = None

    def _stream(self) -> Iterator[dict]:
        dataset = self.run.train_dataset
        while True:
            row = None
            if isinstance(dataset, (IterableDataset, torch.utils.data.IterableDataset)):
                num_ranks, rank = self.run.accelerator.num_processes, self.run.accelerator.process_index
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
        run = self.run
        rows = [next(self._rows) for _ in range(count)]
        was_training = run.model.training
        run.model.train()  # as in the GRPO loop, which also generates in training mode
        environments = {}
        if run.environment_factories is not None:
            environments["_batch_environments"] = self._environments_of(rows)
        try:
            with attributes_set(run, **environments):
                prompts = [row.get("prompt", [{"role": "user", "content": ""}]) for row in rows]
                prompt_ids, images, multimodal_fields = run._tokenize_prompts(_require_text(prompts))
                if prompts_only:
                    return [(ids, []) for ids in prompt_ids]
                with self._tracing(prompt_ids):
                    completion_ids, _ = run._generate_single_turn(prompt_ids, images, multimodal_fields, 1)
        finally:
            run.model.train(was_training)
        return list(zip(prompt_ids, completion_ids, strict=True))

    def _environments_of(self, rows: list[dict]) -> list[str | None]:
        """The environment of each row. An unknown one is an error here as in the GRPO loop, which comes later."""
        run = self.run
        if not run._multi_environment:
            return [None] * len(rows)
        names = [row.get("environment") for row in rows]
        unknown = sorted({str(name) for name in names if name not in run.environment_factories})
        if unknown:
            raise ValueError(
                f"Rows of the training set have the `environment` {', '.join(unknown)}, which is not among the "
                f"environments passed to `environment_factory`: {list(run.environment_factories)}. Add it there, or "
                "drop the rows."
            )
        return names

    @contextmanager
    def _tracing(self, prompt_ids: list[list[int]]) -> Iterator[None]:
        """Keeps the hidden states of the rollout inside, if the loop runs and they surely fit."""
        run, self._trace = self.run, None
        longest = sum(len(ids) + run.max_completion_length for ids in prompt_ids)
        if not run.rollouts.speculates or not self._fits(longest):
            yield
            return
        with run.rollouts.decoder.recording() as trace:
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
        taps = taps.split(self.learner.draft.config.target_hidden_size, dim=-1)
        return [pack_rows(input_ids, attention_mask, trained, taps, last_hidden, self.run.args.draft_ttt_steps)]

    def release(self) -> None:
        """Lets go of the hidden states of the last rollout."""
        self._trace = None

    def record(self, rollouts: list[Rollout]) -> Batches:
        """
        Runs the policy over rollouts, without gradient, and packs what the draft learns from. Where no rank has the
        whole policy, those of all ranks of a pipeline go through it, and its last stage has what the draft learns.
        """
        run = self.run
        if not run.args.holds_whole_policy:
            return run.losses.draft_batches_of(self._padded(rollouts))
        input_ids, attention_mask, trained = self._columns(rollouts)
        with torch.no_grad(), self.learner.recorder.record() as record, run.accelerator.autocast():
            run.model_wrapped(
                input_ids=input_ids, attention_mask=attention_mask.long(), use_cache=False, logits_to_keep=1
            )
        states = record.taps, record.last_hidden, run.args.draft_ttt_steps
        return [pack_rows(input_ids, attention_mask, trained, *states)]

    @property
    def loss_function(self) -> Callable:
        """The draft's loss on the batches of [`~PolicyRollouts.record`]."""
        return draft_loss if self.run.args.holds_whole_policy else self.run.losses.draft_loss

    def _padded(self, rollouts: list[Rollout]) -> dict[str, torch.Tensor]:
        """Prompts padded on the left, `(B, P)`, and completions on the right, `(B, C)`, each with its mask."""
        run, rows = self.run, {}
        prompts, completions = zip(*rollouts, strict=True)
        for name, side, sequences in (("prompt", "left", prompts), ("completion", "right", completions)):
            # At least one column: messages need content.
            longest = max(1, *(len(ids) for ids in sequences))
            padded = [torch.tensor(ids, dtype=torch.long) for ids in [*sequences, [0] * longest]]
            masks = [torch.ones_like(ids) for ids in padded]
            fill, settings = run._tokenizer.pad_token_id, {"batch_first": True, "padding_side": side}
            rows[f"{name}_ids"] = pad_sequence(padded, padding_value=fill, **settings)[:-1]
            rows[f"{name}_mask"] = pad_sequence(masks, padding_value=0, **settings)[:-1]
        return {name: value.to(run.accelerator.device) for name, value in rows.items()}

    def _columns(self, rollouts: list[Rollout]) -> tuple[torch.Tensor, ...]:
        """Right-padded ids, attention mask and trained tokens of rollouts, `(B, S)` each."""
        run = self.run
        sequences = [torch.tensor(prompt + completion) for prompt, completion in rollouts]
        input_ids = pad_sequence(sequences, batch_first=True, padding_value=run._tokenizer.pad_token_id)
        columns = torch.arange(input_ids.shape[1])
        lengths = torch.tensor([len(sequence) for sequence in sequences])
        prompt_lengths = torch.tensor([len(prompt) for prompt, _ in rollouts])
        attention_mask = columns < lengths[:, None]
        trained = attention_mask.clone()
        if not run.args.draft_train_on_prompt:
            trained &= columns >= prompt_lengths[:, None]
        return tuple(x.to(run.accelerator.device) for x in (input_ids, attention_mask, trained))

    def taps_fit(self, rollouts: list[Rollout]) -> bool:
        """Whether packed taps of rollouts may be held."""
        return self._fits(sum(len(prompt) + len(completion) for prompt, completion in rollouts))

    def _fits(self, num_tokens: int) -> bool:
        """Whether taps of a rank's tokens may be held: at most `MAX_HELD_BYTES` on average over ranks, which agree."""
        draft, policy = self.learner.draft.config, base_policy(self.run.model)
        row_bytes = (len(draft.tap_layers) + 1) * draft.target_hidden_size * policy.dtype.itemsize
        if not self.run.args.holds_whole_policy:
            # The last stage holds those of the whole pipeline.
            row_bytes *= self.run.args.pipeline_parallel_size
        num_tokens = torch.tensor(float(num_tokens), device=self.run.accelerator.device)
        return self.run.accelerator.reduce(num_tokens, reduction="mean").item() * row_bytes <= MAX_HELD_BYTES


def measure_tap_scales(run: Run, learner: Learner, batches: Sequence[Batch]) -> torch.Tensor | None:
    """
    The typical size of each tap over the tokens of one batch per rank: the geometric mean of their root mean squares,
    which the few tokens with huge hidden states (a prompt's first) do not move.

    Returns:
        `torch.Tensor` or `None`: fp32, shape `(number of taps,)`; `None` if no rank has a token.
    """
    num_taps = len(learner.draft.config.tap_layers)
    sums = torch.zeros(num_taps + 1, dtype=torch.float64, device=run.accelerator.device)
    for batch in batches:
        if batch is not None:
            sums[:num_taps] += tap_log_scales(batch.taps, num_taps)
            sums[num_taps] += len(batch.taps)
    sums = run.accelerator.reduce(sums, reduction="sum")
    return (sums[:-1] / sums[-1]).exp().float() if sums[-1] > 0 else None


def first_prompts(run: Run, count: int) -> list:
    """Prompts of the first rows of the training set, as they stand there; none where environments make them."""
    if run.environment_factories is not None:
        return []
    return [row["prompt"] for row in islice(run.train_dataset, count) if "prompt" in row]


def _require_text(prompts: list) -> list:
    """The same prompts, each a string or messages: a run with a `rollout_func` may have any."""
    if not all(isinstance(prompt, str | list) for prompt in prompts):
        raise ValueError(
            "The draft starts from rollouts on the prompts of the training set, and some are neither a string nor "
            "messages, which only the `rollout_func` understands. Start from a trained draft "
            "(`draft_model_name_or_path`) with `draft_pretrain_steps=0`, or set `use_draft=False`."
        )
    return prompts


def longest_prompt(run: Run, count: int) -> int:
    """Tokens of the longest of the first prompts; 0 where none can be read before the run, as of a stream."""
    # A `rollout_func` may take prompts that are no text.
    if isinstance(run.train_dataset, IterableDataset | None) or run.rollout_func is not None:
        return 0
    prompts = first_prompts(run, count)
    return max(map(len, run._tokenize_prompts(prompts)[0])) if prompts else 0


def count_tokens(run: Run, vocab_size: int, rollouts: list[Rollout]) -> torch.Tensor:
    """
    How often each token occurs in up to 2,000 prompts of the training set and in given rollouts, over all ranks.

    Returns:
        `torch.Tensor`: int64 counts of shape `(V,)`.
    """
    counts = torch.zeros(vocab_size, dtype=torch.long)
    sequences = [completion for _, completion in rollouts]
    # All of them, so that all ranks refuse what one would.
    prompts = _require_text(first_prompts(run, MAX_COUNTED_PROMPTS))
    own = prompts[run.accelerator.process_index :: run.accelerator.num_processes]
    if own:
        sequences += run._tokenize_prompts(own)[0]
    for ids in sequences:
        # A head with more rows than the vocabulary may have sampled one of them: it is no token of the draft's.
        counts += torch.bincount(torch.as_tensor(ids, dtype=torch.long), minlength=vocab_size)[:vocab_size]
    return run.accelerator.reduce(counts.to(run.accelerator.device), reduction="sum").cpu()


def pretrain_draft(run: Run, learner: Learner, num_steps: int, source: PolicyRollouts) -> None:
    """
    Draft-only updates on fresh rollouts. Every rank runs the same number of steps.

    Args:
        run ([`~run.Run`]):
            The trainer.
        learner ([`~run.Learner`]):
            Its draft, with its trainer built.
        num_steps (`int`):
            Number of updates. Each trains on `per_device_train_batch_size` rollouts per rank; every rollout is used in
            four of them. The taps of one window (`steps_per_generation` microbatches) are held meanwhile, or recorded
            anew where they would take more than 2 GiB per rank. They are those of the rollout itself where the
            speculative loop generated it.
        source ([`PolicyRollouts`]):
            The source of rollouts.
    """
    rows_per_step = run.args.per_device_train_batch_size
    rollouts_per_window = rows_per_step * run.args.steps_per_generation
    chunks: list[list[Rollout]] = []
    held: list[Batches] | None = None
    queue: list[int] = []
    progress = tqdm(
        range(num_steps),
        desc="draft pretraining",
        disable=run.args.disable_tqdm or not run.accelerator.is_local_main_process,
    )
    with learner.trainer.pretraining():
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
                learner.trainer.accumulate(batch, source.loss_function)
            metrics = learner.trainer.step()
            learner.pretraining_log.append(metrics)
            shown = {"loss": "draft/loss", "accept_length_sim": "draft/accept_length_sim"}
            progress.set_postfix({label: f"{metrics.get(name, math.nan):.3f}" for label, name in shown.items()})


def initialize_fresh_draft(run: Run, learner: Learner, source: PolicyRollouts) -> None:
    """
    Sets the vocabulary and the weights of a fresh draft from the policy and one generation batch per rank.

    Args:
        run ([`~run.Run`]):
            The trainer.
        learner ([`~run.Learner`]):
            Its draft, built, and its optimizer not yet.
        source ([`PolicyRollouts`]):
            The source of the batch. With vLLM, and where no rank has the whole policy, only its prompts are used.
    """
    args, draft = run.args, learner.draft
    prompts_only = run.use_vllm or not args.holds_whole_policy
    rollouts = source.generate(args.per_device_train_batch_size * args.steps_per_generation, prompts_only=prompts_only)
    if draft.config.draft_vocab_size < draft.config.vocab_size:
        # A tokenizer may know tokens that the policy has no row for; it cannot sample them.
        special = [*run._tokenizer.all_special_ids, *run.eos_token_ids]
        special = [token for token in special if token < draft.config.vocab_size]
        draft.set_vocab(
            choose_draft_vocab(
                count_tokens(run, draft.config.vocab_size, rollouts), draft.config.draft_vocab_size, special
            )
        )
    scales = measure_tap_scales(run, learner, source.record(rollouts[: args.per_device_train_batch_size]))
    if run.losses.has_head:
        draft.initialize_from_policy(learner.head, tap_scales=scales)
