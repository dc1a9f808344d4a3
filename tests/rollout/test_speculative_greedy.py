"""Greedy rollouts return token for token what `generate` returns, whatever the draft does."""

import pytest
import torch
from rollout.drafts import OracleDraft, ragged_prompts, random_draft
from tiny import tiny_policy, tiny_tokenizer
from transformers import StoppingCriteria

from trl_codraft.rollout import loop, speculative
from trl_codraft.rollout.speculative import SpeculativeDecoder, speculative_generate


@pytest.fixture(scope="module")
def policy():
    policy = tiny_policy("llama", dtype=torch.float64, scale=3.0, num_hidden_layers=2)
    policy.generation_config.eos_token_id = None
    return policy


def sometimes_wrong(ids, length):
    """Wrong after about a third of all texts, so that rows accept different numbers in every round."""
    return int(ids[:length].sum()) % 3 == 0


def both(policy, draft, ids, mask, k, **kwargs):
    plain = policy.generate(ids, attention_mask=mask, do_sample=False, **kwargs)
    output = speculative_generate(policy, draft, ids, mask, num_draft_tokens=k, do_sample=False, **kwargs)
    assert torch.equal(output.sequences, plain)
    return output


@pytest.mark.parametrize("k", range(6))
def test_random_draft_returns_what_generate_returns(policy, k):
    ids, mask = ragged_prompts([9, 1, 4, 6], columns=11)
    output = both(policy, random_draft(policy), ids, mask, k, max_new_tokens=17)
    assert output.stats.committed == 4 * 17


@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_perfect_draft_is_accepted_whole(policy, k):
    ids, mask = ragged_prompts([9, 1, 4, 6])
    output = both(policy, OracleDraft(policy), ids, mask, k, max_new_tokens=16)
    assert output.stats.accepted == output.stats.drafted > 0
    # First token from the prefill, then ceil(15 / (k + 1)) forwards.
    assert output.stats.policy_forwards == 1 + -(-15 // (k + 1))


@pytest.mark.parametrize("k", [1, 2, 4, 5])
def test_unequal_acceptance_keeps_rows_apart(policy, k):
    ids, mask = ragged_prompts([3, 8, 5, 1, 7], seed=1)
    output = both(policy, OracleDraft(policy, sometimes_wrong), ids, mask, k, max_new_tokens=21)
    assert 0.1 < output.stats.accept_rate < 0.95


def test_always_wrong_draft_costs_only_speed(policy):
    ids, mask = ragged_prompts([5, 2, 8])
    output = both(policy, OracleDraft(policy, lambda ids, length: True), ids, mask, 3, max_new_tokens=9)
    assert output.stats.accepted == 0
    assert output.stats.accept_length == output.stats.tokens_per_row_forward == 1.0


@pytest.mark.parametrize("length", [1, 2, 3, 5, 8, 13])
def test_every_prompt_length(policy, length):
    ids, mask = ragged_prompts([length, max(1, length - 3)], seed=length)
    both(policy, OracleDraft(policy, sometimes_wrong), ids, mask, 3, max_new_tokens=9)


def test_batch_equals_rows_alone(policy):
    ids, mask = ragged_prompts([7, 1, 4, 9], seed=3)
    draft = OracleDraft(policy, sometimes_wrong)
    batch = speculative_generate(policy, draft, ids, mask, num_draft_tokens=3, do_sample=False, max_new_tokens=12)
    for row, sequence in enumerate(batch.sequences):
        prompt = ids[row][mask[row] != 0]
        alone = policy.generate(prompt[None], do_sample=False, max_new_tokens=12)[0]
        assert torch.equal(sequence[-12:], alone[-12:])


def test_mask_without_pads_and_inferred_mask(policy):
    ids, _ = ragged_prompts([6, 6])
    plain = policy.generate(ids, do_sample=False, max_new_tokens=8)
    output = speculative_generate(
        policy, random_draft(policy), ids, num_draft_tokens=2, do_sample=False, max_new_tokens=8
    )
    assert torch.equal(output.sequences, plain)


def test_no_draft_tokens_decode_plainly_without_asking_the_draft(policy, monkeypatch):
    monkeypatch.setattr(speculative, "DraftRollout", None)  # cannot be called
    ids, mask = ragged_prompts([4, 7, 2], seed=4)
    free = policy.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=10)
    eos = int(free[0, ids.shape[1] + 3])
    output = both(policy, random_draft(policy), ids, mask, 0, max_new_tokens=10, eos_token_id=eos, pad_token_id=0)
    assert (output.stats.drafted, output.stats.tokens_per_row_forward) == (0, 1.0)


@pytest.mark.parametrize("num_draft_tokens", [-1, 17, 1.5, "3"])
def test_impossible_numbers_of_draft_tokens_are_refused(policy, num_draft_tokens):
    ids, mask = ragged_prompts([4])
    with pytest.raises(ValueError, match=r"must be \"auto\" or an integer in 0\.\.16"):
        speculative_generate(policy, random_draft(policy), ids, mask, num_draft_tokens=num_draft_tokens)


@pytest.mark.parametrize("k", [1, 3, 4])
@pytest.mark.parametrize("offset", range(1, 9))
def test_eos_at_every_offset_of_a_block(policy, k, offset):
    """Declaring the token at `offset` the EOS puts it at every place of a block, drafted, corrected or extra."""
    ids, mask = ragged_prompts([4, 7, 2], seed=4)
    free = policy.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=10)
    for row, draft in enumerate((OracleDraft(policy), OracleDraft(policy, sometimes_wrong))):
        eos = int(free[row, ids.shape[1] + offset - 1])
        both(policy, draft, ids, mask, k, max_new_tokens=10, eos_token_id=eos, pad_token_id=0)


def test_several_eos_ids_and_pad_equal_to_eos(policy):
    ids, mask = ragged_prompts([4, 7, 2, 5], seed=5)
    free = policy.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=12)[:, ids.shape[1] :]
    eos = [int(free[0, 2]), int(free[1, 6]), int(free[2, 9])]
    output = both(
        policy,
        OracleDraft(policy, sometimes_wrong),
        ids,
        mask,
        4,
        max_new_tokens=12,
        eos_token_id=eos,
        pad_token_id=eos[0],
    )
    lengths = {int(torch.isin(row, torch.tensor(eos)).long().argmax()) for row in output.sequences[:, ids.shape[1] :]}
    assert len(lengths) > 1  # rows did finish at different times


@pytest.mark.parametrize("new_tokens", range(1, 8))
def test_budget_ends_inside_a_block(policy, new_tokens):
    ids, mask = ragged_prompts([3, 6], seed=6)
    output = both(policy, OracleDraft(policy, sometimes_wrong), ids, mask, 4, max_new_tokens=new_tokens)
    assert output.sequences.shape[1] == ids.shape[1] + new_tokens


def test_eos_before_at_and_after_the_cap(policy):
    ids, mask = ragged_prompts([3, 6], seed=6)
    free = policy.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=8)[:, ids.shape[1] :]
    for offset in (4, 5, 6):
        eos = int(free[0, offset])
        both(policy, OracleDraft(policy), ids, mask, 5, max_new_tokens=6, eos_token_id=eos, pad_token_id=0)


def test_max_length_instead_of_max_new_tokens(policy):
    ids, mask = ragged_prompts([3, 6], seed=6)
    both(policy, OracleDraft(policy), ids, mask, 5, max_length=15)


@pytest.mark.parametrize("limit", [1, 4, 8, 10, 13])
def test_draft_context_limit_falls_back_to_plain(policy, limit):
    ids, mask = ragged_prompts([3, 8, 6], seed=7)
    draft = OracleDraft(policy, max_position_embeddings=limit)
    output = both(policy, draft, ids, mask, 3, max_new_tokens=12)
    assert output.stats.accepted == output.stats.drafted
    # The first chain leaves from the last prompt token of the shortest row, position 2.
    assert (output.stats.drafted == 0) == (limit < 3)


PROCESSORS = {
    "min_new_tokens": {"min_new_tokens": 6},
    "min_length": {"min_length": 13},
    "repetition_penalty": {"repetition_penalty": 1.7},
    "no_repeat_ngram": {"no_repeat_ngram_size": 2},
    "suppress": {"suppress_tokens": [7, 8, 9], "begin_suppress_tokens": [20, 21]},
    "forced_eos": {"forced_eos_token_id": 2},
    "decay": {"exponential_decay_length_penalty": (2, 1.4)},
}


@pytest.mark.parametrize("name", PROCESSORS)
@pytest.mark.parametrize("reduced", [False, True])
def test_processors_see_the_true_prefix(policy, name, reduced):
    ids, mask = ragged_prompts([4, 7, 2], seed=8)
    free = policy.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=12)[:, ids.shape[1] :]
    draft = OracleDraft(policy, sometimes_wrong, target_ids=range(0, 104, 2)) if reduced else OracleDraft(policy)
    eos = [int(free[0, 2]), int(free[1, 3])]
    kwargs = {"max_new_tokens": 12, "eos_token_id": eos, "pad_token_id": 0, **PROCESSORS[name]}
    both(policy, draft, ids, mask, 3, **kwargs)


@pytest.mark.parametrize(
    "kwargs", [{"repetition_penalty": 0.3}, {"repetition_penalty": 1.7}, {"no_repeat_ngram_size": 1}]
)
def test_drafted_tokens_see_the_true_prefix_too(policy, kwargs):
    """The oracle says what the policy says before processing: with the same processors it is always right."""
    ids, mask = ragged_prompts([4, 7, 2], seed=8)
    stats = both(policy, OracleDraft(policy), ids, mask, 3, max_new_tokens=16, **kwargs).stats
    assert stats.accepted == stats.drafted > 0


def test_bad_words_and_biases(policy):
    ids, mask = ragged_prompts([4, 7, 2], seed=8)
    free = policy.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=12)[:, ids.shape[1] :].tolist()
    bad = [[free[0][1]], free[1][2:4], free[2][3:6]]
    both(policy, OracleDraft(policy, sometimes_wrong), ids, mask, 3, max_new_tokens=12, bad_words_ids=bad)
    bias = [[[free[0][2]], -5.0], [free[1][1:3], -9.0]]
    both(policy, OracleDraft(policy), ids, mask, 3, max_new_tokens=12, sequence_bias=bias)


def test_prefix_constraint_knows_its_row(policy):
    ids, mask = ragged_prompts([4, 7, 2], seed=8)

    def allowed(row, prefix):
        return [3 + (row * 31 + int(prefix[-1]) * 7 + step) % 100 for step in range(5)]

    eos = allowed(0, torch.tensor([5]))[0]
    both(
        policy, OracleDraft(policy), ids, mask, 3, max_new_tokens=12, prefix_allowed_tokens_fn=allowed,
        eos_token_id=eos, pad_token_id=0,
    )  # fmt: skip


def test_stop_strings(policy):
    ids, mask = ragged_prompts([4, 7, 2], seed=9)
    tokenizer = tiny_tokenizer()
    free = policy.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=12)[:, ids.shape[1] :]
    strings = [tokenizer.decode(free[0, 3:5]), tokenizer.decode(free[1, 6:7])]
    draft = OracleDraft(policy, sometimes_wrong)
    for extra in ({}, {"eos_token_id": 103, "pad_token_id": 0}):  # without an EOS, finished rows run on
        output = both(
            policy, draft, ids, mask, 4, max_new_tokens=12, stop_strings=strings, tokenizer=tokenizer, **extra
        )
        assert output.stats.committed <= 3 * 12
    policy.generation_config.stop_strings = strings
    try:
        both(policy, draft, ids, mask, 4, max_new_tokens=12, tokenizer=tokenizer)
        assert policy.generation_config.stop_strings == strings
    finally:
        policy.generation_config.stop_strings = None


def test_custom_criterion_gets_the_ids_generate_passes(policy):
    ids, mask = ragged_prompts([4, 7, 2], seed=9)

    class Log(StoppingCriteria):
        def __init__(self):
            self.calls = set()

        def __call__(self, input_ids, scores, **kwargs):
            self.calls.update(tuple(row) for row in input_ids.tolist())
            return input_ids[:, -1] % 5 == 0

    logs = []
    for k in (None, 4):
        log = Log()
        kwargs = {"do_sample": False, "max_new_tokens": 12, "eos_token_id": 103, "pad_token_id": 0}
        if k is None:
            result = policy.generate(ids, attention_mask=mask, stopping_criteria=[log], **kwargs)
            # Plain generation also shows the criterion rows that are already padded; keep the calls of live rows.
            log.calls = {call for call in log.calls if not any(t % 5 == 0 for t in call[ids.shape[1] : -1])}
        else:
            decoder = SpeculativeDecoder(policy, OracleDraft(policy, sometimes_wrong), num_draft_tokens=k)
            speculative = decoder.bind(policy.generate)
            assert torch.equal(speculative(ids, attention_mask=mask, stopping_criteria=[log], **kwargs), result)
            decoder.close()
        logs.append(log.calls)
    assert logs[0] == logs[1]


def test_max_time_stops_after_the_running_round(policy):
    ids, mask = ragged_prompts([4, 7])
    output = speculative_generate(
        policy, random_draft(policy), ids, mask, num_draft_tokens=3, do_sample=False, max_new_tokens=200, max_time=0.0,
        eos_token_id=103, pad_token_id=0,
    )  # fmt: skip
    assert output.sequences.shape[1] == ids.shape[1] + 1
    plain = policy.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=1)
    assert torch.equal(output.sequences, plain)


def test_switching_between_plain_and_drafted_rounds(policy, monkeypatch):
    """A draft length that changes every round, also to 0 for a while, loses nothing of the draft's context."""
    ids, mask = ragged_prompts([4, 7, 2], seed=10)
    lengths = iter([0, 0, 3, 1, 0, 4, 0, 0, 0, 2, 5] + [3] * 40)
    decoder = SpeculativeDecoder(policy, OracleDraft(policy), num_draft_tokens=5)
    monkeypatch.setattr(decoder.controller, "choose", lambda rows: next(lengths))
    plain = policy.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=40)
    output = decoder.bind(policy.generate)(ids, attention_mask=mask, do_sample=False, max_new_tokens=40)
    decoder.close()
    assert torch.equal(output, plain)
    assert decoder.stats.accepted == decoder.stats.drafted


def test_caches_grow_while_rows_leave(policy, monkeypatch):
    monkeypatch.setattr(loop, "INITIAL_NEW_SLOTS", 2)
    monkeypatch.setattr("trl_codraft.rollout.speculative.INITIAL_NEW_SLOTS", 2)
    ids, mask = ragged_prompts([4, 7, 2, 9, 1, 3], seed=11)
    free = policy.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=90)[:, ids.shape[1] :]
    eos = [int(free[row, 10 + 13 * row]) for row in range(5)]
    both(policy, OracleDraft(policy), ids, mask, 5, max_new_tokens=90, eos_token_id=eos, pad_token_id=0)


@pytest.mark.parametrize("num_draft_tokens", [3, "auto"])
def test_turns_of_a_tool_loop_reenter_with_other_batch_shapes(policy, num_draft_tokens):
    """One decoder, as in a trainer: rows drop out between turns, prompts grow by what was generated and by results."""
    decoder = SpeculativeDecoder(policy, OracleDraft(policy, sometimes_wrong), num_draft_tokens=num_draft_tokens)
    speculative = decoder.bind(policy.generate)
    texts = [list(range(3, 3 + length)) for length in (5, 9, 2, 7)]
    for turn, rows in enumerate(([0, 1, 2, 3], [3, 0, 2], [2], [0, 1, 2, 3, 1])):
        chosen = [texts[row] for row in rows]
        width = max(map(len, chosen))
        ids = torch.tensor([[0] * (width - len(text)) + text for text in chosen])
        mask = torch.tensor([[0] * (width - len(text)) + [1] * len(text) for text in chosen])
        call = {"attention_mask": mask, "do_sample": False, "max_new_tokens": 6 + 5 * turn}
        output = speculative(ids, **call)
        assert torch.equal(output, policy.generate(ids, **call))
        for row, tokens in zip(rows, output[:, width:].tolist(), strict=True):
            texts[row] = texts[row] + tokens + [11, 12, 13][: turn + 1]
    decoder.close()
    assert decoder.stats.drafted > 0
