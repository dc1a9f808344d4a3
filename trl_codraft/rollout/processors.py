"""
Logits processors at every verified position, each with its own true prefix.

`generate` calls a processor once per step, with all rows at one length. A verification asks about many (row, position)
pairs of different lengths at once, so each supported class of Transformers has a form here that takes them together
and returns exactly what the class itself would return pair by pair. All other classes are refused: they may keep state
between calls.

Shapes: `N` (row, position) pairs, `V` vocabulary, `B` rows of the prompt batch, `S` columns of the sequence buffer.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.generation import logits_process as hf


@dataclass
class Prefixes:
    """
    The prefixes of `N` (row, position) pairs.

    Attributes:
        sequences (`torch.LongTensor` of shape `(B, S)`):
            Token ids as `generate` would hold them, left pads included; columns behind a prefix may hold anything.
        rows (`torch.LongTensor` of shape `(N,)`):
            Row of each pair in `sequences`.
        lengths (`torch.LongTensor` of shape `(N,)`):
            Number of columns in each pair's prefix.
    """

    sequences: torch.Tensor
    rows: torch.Tensor
    lengths: torch.Tensor

    def tail(self, size: int) -> torch.Tensor:
        """Returns the last `size` tokens of each prefix, `(N, size)`; a shorter prefix gives meaningless ones."""
        columns = self.lengths[:, None] - size + torch.arange(size, device=self.lengths.device)
        return self.sequences[self.rows[:, None], columns.clamp(min=0)]

    def padded(self) -> torch.Tensor:
        """`(N, longest)` prefixes; tokens behind a pair's own length are not part of it."""
        return self.sequences[self.rows, : int(self.lengths.max())]


Adapter = Callable[[LogitsProcessor, Prefixes, torch.Tensor], torch.Tensor]


def _tokenwise(processor: LogitsProcessor, prefixes: Prefixes, scores: torch.Tensor) -> torch.Tensor:
    """Calls the class itself, which never reads the prefix."""
    return processor(None, scores)


def _vocabulary_mask(token_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """`(V,)`: True at the given ids."""
    return torch.isin(torch.arange(scores.shape[-1], device=scores.device), token_ids.to(scores.device))


def _ban_where(rows: torch.Tensor, token_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """`-inf` at the given ids, in the rows selected."""
    return scores.masked_fill(rows[:, None] & _vocabulary_mask(token_ids, scores), -torch.inf)


def _min_length(processor, prefixes, scores):
    return _ban_where(prefixes.lengths < processor.min_length, processor.eos_token_id, scores)


def _min_new_tokens(processor, prefixes, scores):
    new_tokens = prefixes.lengths - processor.prompt_length_to_skip
    return _ban_where(new_tokens < processor.min_new_tokens, processor.eos_token_id, scores)


def _suppress_at_begin(processor, prefixes, scores):
    return _ban_where(prefixes.lengths == processor.begin_index, processor.begin_suppress_tokens, scores)


def _forced_eos(processor, prefixes, scores):
    eos = _vocabulary_mask(processor.eos_token_id, scores)
    forced = torch.full_like(scores[0], -torch.inf).masked_fill(eos, 0.0)
    return torch.where((prefixes.lengths == processor.max_length - 1)[:, None], forced, scores)


def _exponential_decay(processor, prefixes, scores):
    eos = processor.eos_token_id.to(scores.device)
    steps = (prefixes.lengths - processor.regulation_start).clamp(min=0)
    # The power is taken in Python's double precision, as the class does, so that results agree to the last bit.
    growth = torch.tensor(
        [pow(processor.regulation_factor, step) - 1 for step in steps.tolist()], device=scores.device
    )
    eos_scores = scores[:, eos]
    penalty = (eos_scores.abs() * growth.to(scores.dtype)[:, None]).masked_fill(~eos_scores.isfinite(), 0.0)
    return scores.index_add(1, eos, penalty)


def _seen_tokens(ids: torch.Tensor, valid: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """`(N, V)`: True for tokens that occur in a pair's valid ids."""
    ids = torch.where(valid, ids.clamp(max=vocab_size), vocab_size)
    seen = torch.zeros(len(ids), vocab_size + 1, dtype=torch.bool, device=ids.device)
    return seen.scatter_(1, ids, True)[:, :vocab_size]


def _repetition_penalty(processor, prefixes, scores):
    ids = prefixes.padded()
    columns = torch.arange(ids.shape[1], device=ids.device)
    valid = columns < prefixes.lengths[:, None]
    ignored = processor.prompt_ignore_length
    if isinstance(ignored, torch.Tensor):
        valid &= columns >= ignored.to(ids.device)[prefixes.rows][:, None]
    elif ignored is not None:
        valid &= columns >= ignored
    penalised = torch.where(scores < 0, scores * processor.penalty, scores / processor.penalty)
    return torch.where(_seen_tokens(ids, valid, scores.shape[-1]), penalised, scores)


def _no_repeat_ngram(processor, prefixes, scores):
    size = processor.ngram_size
    ids = prefixes.padded()
    if ids.shape[1] < size:
        return scores
    windows = ids.unfold(1, size, 1)
    matches = (windows[..., :-1] == prefixes.tail(size - 1)[:, None]).all(-1)
    ends = torch.arange(size, ids.shape[1] + 1, device=ids.device)
    matches &= (ends <= prefixes.lengths[:, None]) & (prefixes.lengths >= size)[:, None]
    return scores.masked_fill(_seen_tokens(windows[..., -1], matches, scores.shape[-1]), -torch.inf)


def _sequence_bias(processor, prefixes, scores):
    if not processor.prepared_bias_variables:
        processor._prepare_bias_variables(scores)
    bias = torch.zeros_like(scores)
    bias += processor.length_1_bias
    for starts, last_tokens, biases in processor.multi_token_biases:
        size = starts.shape[1]
        matching = (prefixes.tail(size)[:, None] == starts).all(-1) & (prefixes.lengths >= size)[:, None]
        bias.index_add_(1, last_tokens, torch.where(matching, biases, 0.0).to(bias.dtype))
    return scores + bias


def _prefix_constrained(processor, prefixes, scores):
    mask = torch.full_like(scores, -torch.inf)
    for pair, (row, length) in enumerate(zip(prefixes.rows.tolist(), prefixes.lengths.tolist(), strict=True)):
        allowed = processor._prefix_allowed_tokens_fn(row, prefixes.sequences[row, :length])
        if len(allowed) == 0:
            raise ValueError(
                f"`prefix_allowed_tokens_fn` returned an empty list for batch ID {row}: no token is left."
            )
        mask[pair, allowed] = 0
    constrained = scores + mask
    return torch.where(constrained.amax(-1, keepdim=True).isneginf(), mask, constrained)


ADAPTERS: dict[type[LogitsProcessor], Adapter] = {
    hf.TemperatureLogitsWarper: _tokenwise,
    hf.TopKLogitsWarper: _tokenwise,
    hf.TopPLogitsWarper: _tokenwise,
    hf.TopHLogitsWarper: _tokenwise,
    hf.MinPLogitsWarper: _tokenwise,
    hf.TypicalLogitsWarper: _tokenwise,
    hf.EpsilonLogitsWarper: _tokenwise,
    hf.EtaLogitsWarper: _tokenwise,
    hf.InfNanRemoveLogitsProcessor: _tokenwise,
    hf.LogitNormalization: _tokenwise,
    hf.SuppressTokensLogitsProcessor: _tokenwise,
    hf.MinLengthLogitsProcessor: _min_length,
    hf.MinNewTokensLengthLogitsProcessor: _min_new_tokens,
    hf.SuppressTokensAtBeginLogitsProcessor: _suppress_at_begin,
    hf.ForcedEOSTokenLogitsProcessor: _forced_eos,
    hf.ExponentialDecayLengthPenalty: _exponential_decay,
    hf.RepetitionPenaltyLogitsProcessor: _repetition_penalty,
    hf.NoRepeatNGramLogitsProcessor: _no_repeat_ngram,
    hf.SequenceBiasLogitsProcessor: _sequence_bias,
    hf.NoBadWordsLogitsProcessor: _sequence_bias,
    hf.PrefixConstrainedLogitsProcessor: _prefix_constrained,
}


# These read scores alone, whatever tokens they belong to, so that they can be applied in a draft's own vocabulary.
ID_FREE = {
    hf.TemperatureLogitsWarper,
    hf.TopKLogitsWarper,
    hf.TopPLogitsWarper,
    hf.TopHLogitsWarper,
    hf.MinPLogitsWarper,
    hf.TypicalLogitsWarper,
    hf.EpsilonLogitsWarper,
    hf.EtaLogitsWarper,
    hf.InfNanRemoveLogitsProcessor,
    hf.LogitNormalization,
}


def unsupported_processor(processors: list[LogitsProcessor]) -> str | None:
    """Names the first processor that has no form here, or returns None."""
    for processor in processors:
        # The exact type: a subclass may override `__call__` with anything.
        if type(processor) not in ADAPTERS:
            return (
                f"the logits processor {type(processor).__name__} is not one that the loop evaluates at several "
                "positions at once (guidance, watermarks and custom classes may keep state between calls, which "
                "that would corrupt)."
            )
    return None


class PositionwiseProcessors:
    """
    A [`~transformers.LogitsProcessorList`] evaluated at many (row, position) pairs at once.

    Args:
        processors ([`~transformers.LogitsProcessorList`]):
            The list that `generate` prepared, in its order.

    Raises:
        ValueError: if a processor is not one of the supported classes.
    """

    def __init__(self, processors: LogitsProcessorList):
        reason = unsupported_processor(processors)
        if reason is not None:
            raise ValueError(
                f"Speculative rollouts cannot honour this call: {reason} Set `speculative_rollouts=False` to generate "
                "plainly, or drop the processor."
            )
        self._steps = [(ADAPTERS[type(processor)], processor) for processor in processors]
        self.id_free = all(type(processor) in ID_FREE for processor in processors)

    def __call__(self, prefixes: Prefixes, scores: torch.Tensor) -> torch.Tensor:
        """Processed scores `(N, V)` of raw fp32 scores `(N, V)`."""
        for adapter, processor in self._steps:
            scores = adapter(processor, prefixes, scores)
        return scores
