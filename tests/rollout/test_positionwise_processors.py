"""Processors at many positions at once equal Transformers' own classes, called one (row, position) at a time."""

import pytest
import torch
from transformers import ClassifierFreeGuidanceLogitsProcessor, LogitsProcessor, LogitsProcessorList
from transformers.generation import logits_process as hf

from trl_codraft.rollout.processors import ADAPTERS, PositionwiseProcessors, Prefixes, unsupported_processor


ROWS, COLUMNS, VOCAB = 4, 14, 12
PADS = torch.tensor([0, 3, 1, 5])


def sequences():
    ids = torch.randint(1, VOCAB, (ROWS, COLUMNS), generator=torch.Generator().manual_seed(1))
    ids[:, 8:] = ids[:, 2:8]  # repeated n-grams
    return torch.where(torch.arange(COLUMNS) < PADS[:, None], 0, ids)


EOS = torch.tensor([2, 5])
PROMPTS = sequences()[:, :6]

PROCESSORS = {
    "temperature": lambda: hf.TemperatureLogitsWarper(0.6),
    "top_k": lambda: hf.TopKLogitsWarper(4),
    "top_p": lambda: hf.TopPLogitsWarper(0.7),
    "top_h": lambda: hf.TopHLogitsWarper(0.5),
    "min_p": lambda: hf.MinPLogitsWarper(0.2),
    "typical": lambda: hf.TypicalLogitsWarper(0.6),
    "epsilon": lambda: hf.EpsilonLogitsWarper(0.05),
    "eta": lambda: hf.EtaLogitsWarper(0.05),
    "remove_invalid": lambda: hf.InfNanRemoveLogitsProcessor(),
    "normalize": lambda: hf.LogitNormalization(),
    "suppress": lambda: hf.SuppressTokensLogitsProcessor([3, 7]),
    "min_length": lambda: hf.MinLengthLogitsProcessor(9, EOS),
    "min_new_tokens": lambda: hf.MinNewTokensLengthLogitsProcessor(6, 4, EOS),
    "begin_suppress": lambda: hf.SuppressTokensAtBeginLogitsProcessor([3, 4], 6),
    "forced_eos": lambda: hf.ForcedEOSTokenLogitsProcessor(11, EOS),
    "decay": lambda: hf.ExponentialDecayLengthPenalty((2, 1.3), EOS, 6),
    "repetition": lambda: hf.RepetitionPenaltyLogitsProcessor(1.7),
    "repetition_ignoring_pads": lambda: hf.RepetitionPenaltyLogitsProcessor(1.7, prompt_ignore_length=PADS),
    "repetition_ignoring_prompt": lambda: hf.RepetitionPenaltyLogitsProcessor(1.7, prompt_ignore_length=6),
    "ngram_1": lambda: hf.NoRepeatNGramLogitsProcessor(1),
    "ngram_2": lambda: hf.NoRepeatNGramLogitsProcessor(2),
    "ngram_3": lambda: hf.NoRepeatNGramLogitsProcessor(3),
    "bias": lambda: hf.SequenceBiasLogitsProcessor({(3,): 2.0, (4, 5): -3.0, (6, 7, 8): 4.0, (4, 9): 1.0}),
    "bad_words": lambda: hf.NoBadWordsLogitsProcessor([[3], [4, 5], sequences()[0, 2:5].tolist()], EOS),
    "prefix": lambda: hf.PrefixConstrainedLogitsProcessor(lambda row, ids: [1 + row, 5 + int(ids[-1]) % 5], 1),
}


def one_by_one(processor, prefixes, scores):
    """The oracle: the class itself, on the whole batch cut at the pair's length, reading off the pair's row."""
    results = []
    for pair, (row, length) in enumerate(zip(prefixes.rows.tolist(), prefixes.lengths.tolist(), strict=True)):
        ids = prefixes.sequences[:, :length]
        results.append(processor(ids, scores[pair].expand(ROWS, -1).clone())[row])
    return torch.stack(results)


def all_pairs(lowest=1):
    """Every row at every length, in an order that mixes both."""
    lengths, rows = torch.meshgrid(torch.arange(lowest, COLUMNS + 1), torch.arange(ROWS), indexing="ij")
    order = torch.randperm(lengths.numel(), generator=torch.Generator().manual_seed(2))
    return Prefixes(sequences(), rows.flatten()[order], lengths.flatten()[order])


@pytest.mark.parametrize("name", PROCESSORS)
def test_equals_the_class_itself_at_every_position(name):
    prefixes = all_pairs()
    scores = torch.randn(len(prefixes.rows), VOCAB, generator=torch.Generator().manual_seed(3)) * 3
    scores[::7, 4] = -torch.inf  # as an earlier processor would leave it
    expected = one_by_one(PROCESSORS[name](), prefixes, scores)
    actual = PositionwiseProcessors(LogitsProcessorList([PROCESSORS[name]()]))(prefixes, scores.clone())
    assert torch.equal(actual, expected)
    assert name in ("remove_invalid",) or not torch.equal(expected, scores)


@pytest.mark.parametrize("name", ["repetition_ignoring_pads", "ngram_2", "bias", "bad_words"])
def test_tokens_behind_the_prefix_do_not_matter(name):
    """What the buffer holds behind a prefix are tokens not yet accepted (penalties must not count them)."""
    prefixes = all_pairs(lowest=6)
    scores = torch.randn(len(prefixes.rows), VOCAB, generator=torch.Generator().manual_seed(3))
    full = PositionwiseProcessors(LogitsProcessorList([PROCESSORS[name]()]))(prefixes, scores)
    for pair in range(0, len(prefixes.rows), 5):
        row, length = prefixes.rows[pair : pair + 1], prefixes.lengths[pair : pair + 1]
        other = prefixes.sequences.clone()
        other[:, int(length) :] = (other[:, int(length) :] + 3) % VOCAB
        alone = PositionwiseProcessors(LogitsProcessorList([PROCESSORS[name]()]))(
            Prefixes(other, row, length), scores[pair : pair + 1]
        )
        assert torch.equal(alone[0], full[pair])


def test_processors_apply_in_the_order_of_the_list():
    prefixes = all_pairs()
    scores = torch.randn(len(prefixes.rows), VOCAB, generator=torch.Generator().manual_seed(3)) * 3
    names = ["repetition_ignoring_pads", "temperature", "top_k", "top_p"]
    expected = scores
    for name in names:
        expected = one_by_one(PROCESSORS[name](), prefixes, expected)
    actual = PositionwiseProcessors(LogitsProcessorList([PROCESSORS[name]() for name in names]))(prefixes, scores)
    assert torch.equal(actual, expected)


def test_every_supported_class_is_tested():
    assert {type(make()) for make in PROCESSORS.values()} == set(ADAPTERS)


class Custom(LogitsProcessor):
    def __call__(self, input_ids, scores):
        return scores


class LouderTemperature(hf.TemperatureLogitsWarper):
    pass


UNKNOWN = [
    ClassifierFreeGuidanceLogitsProcessor(1.5),
    Custom(),
    LouderTemperature(0.5),
    hf.ForcedBOSTokenLogitsProcessor(0),
    hf.EncoderRepetitionPenaltyLogitsProcessor(1.4, PROMPTS),
    hf.EncoderNoRepeatNGramLogitsProcessor(2, PROMPTS),
]


@pytest.mark.parametrize("processor", UNKNOWN)
def test_unknown_and_stateful_processors_are_refused_by_name(processor):
    processors = LogitsProcessorList([hf.TopKLogitsWarper(3), processor])
    assert type(processor).__name__ in unsupported_processor(processors)
    with pytest.raises(ValueError, match=f"{type(processor).__name__}.*speculative_rollouts=False"):
        PositionwiseProcessors(processors)
