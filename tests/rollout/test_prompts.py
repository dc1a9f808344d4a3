"""What prompts have in common is read once, and nothing else changes."""

import random

import pytest
import torch
from rollout.drafts import OracleDraft, random_draft, shared_prompts
from rollout.test_speculative_policies import FAMILIES, family_policy, wrong_on_thirds
from tiny import tiny_policy

from trl_codraft.modeling.taps import TapRecorder
from trl_codraft.rollout import loop
from trl_codraft.rollout.prompts import prompt_blocks
from trl_codraft.rollout.speculative import SpeculativeDecoder, speculative_generate


def random_prompts(generator):
    """Prompts of a few families: shared beginnings, repetitions, one that begins another, single tokens."""
    stems = [[generator.randrange(3) for _ in range(generator.randrange(6))] for _ in range(2)]
    prompts = []
    for _ in range(generator.randrange(1, 8)):
        rest = [generator.randrange(3) for _ in range(generator.randrange(1, 4))]
        prompts.append(tuple(generator.choice(stems) + rest))
    return prompts + prompts[: generator.randrange(3)]


def tokens_read(blocks):
    """Columns times rows of every forward."""
    return [len(block.tokens) * max(len(row) for row in block.tokens) for block in blocks]


def fewest_tokens(prompts):
    """That one forward or two can read, by trying every cut; not those below half of prompts of one length."""
    distinct = set(prompts)
    longest = max(map(len, distinct))
    costs = []
    for cut in range(longest):
        if 0 < cut < longest / 2 and min(map(len, distinct)) == longest:
            continue
        beginnings = {prompt[: min(cut, len(prompt) - 1)] for prompt in distinct}
        rests = [len(prompt) - min(cut, len(prompt) - 1) for prompt in distinct]
        costs.append(max(map(len, beginnings)) * len(beginnings) + max(rests) * len(rests))
    return min(costs)


def test_blocks_hold_every_prompt_and_as_few_tokens_as_possible():
    generator, cuts = random.Random(0), 0
    for _ in range(2000):
        prompts = random_prompts(generator)
        blocks = prompt_blocks(prompts, min_saved_tokens=1)
        read = dict.fromkeys(range(len(prompts)), ())
        places = list(range(len(prompts)))
        for block in reversed(blocks):
            places = [block.continued[place] for place in places]
            assert places == block.batch_rows
            for row, place in enumerate(places):
                read[row] = block.tokens[place] + read[row]
                assert block.starts[place] == len(prompts[row]) - len(read[row])
        assert [read[row] for row in range(len(prompts))] == prompts
        assert all(blocks[-1].tokens)  # the last token is read by the last forward
        assert sum(tokens_read(blocks)) == fewest_tokens(prompts)
        cuts += len(blocks) == 2
    assert cuts > 500


def test_a_second_forward_has_to_save_enough():
    prompts = [(1, 2, 3, 4, 5), (1, 2, 3, 4, 6), (1, 2, 3, 7, 8)]
    assert len(prompt_blocks(prompts, 7)) == 1
    first, second = prompt_blocks(prompts, 6)  # three tokens of two rows
    assert first.tokens == [(1, 2, 3)]
    assert second.tokens == [(4, 5), (4, 6), (7, 8)]


def test_prompts_of_one_length_go_without_a_mask_unless_they_share_half():
    for length, num_blocks in ((24, 1), (25, 2)):
        ids, _ = shared_prompts(length, [50 - length] * 8)
        blocks = prompt_blocks([tuple(row) for row in ids.tolist()], 64)
        assert len(blocks) == num_blocks
        assert blocks[0].is_plain
        # One token less in one of them, and all need a mask anyway.
        assert len(prompt_blocks([tuple(row) for row in [ids[0, :-1].tolist(), *ids[1:].tolist()]], 64)) == 2


class CountedSlices(tuple):
    """A prompt that counts how often tokens are copied out of prompts."""

    tokens = 0

    def __getitem__(self, place):
        part = tuple.__getitem__(self, place)
        if isinstance(place, slice):
            CountedSlices.tokens += len(part)
        return part


def test_planning_copies_each_prompt_a_few_times_however_many_there_are(monkeypatch):
    monkeypatch.setattr(CountedSlices, "tokens", 0)
    generator = random.Random(0)
    prompts = [CountedSlices(generator.randrange(9) for _ in range(length)) for length in range(20, 220)]
    assert len(prompt_blocks(prompts, 1)) == 2
    assert CountedSlices.tokens <= 3 * sum(map(len, prompts))


@pytest.fixture
def forwards():
    """Shapes of the ids that a policy reads, once it is watched."""
    return []


def watch(policy, forwards):
    return policy.register_forward_pre_hook(
        lambda module, args, kwargs: forwards.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )


@pytest.mark.parametrize("name", FAMILIES)
def test_family_returns_what_generate_returns(name, forwards):
    policy = family_policy(name)
    ids, mask = shared_prompts(40, [5, 1, 3], repeats=2)
    plain = policy.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=10)
    watch(policy, forwards)
    output = speculative_generate(
        policy, random_draft(policy), ids, mask, num_draft_tokens=3, do_sample=False, max_new_tokens=10
    )
    assert torch.equal(output.sequences, plain)
    assert forwards[:2] == [(1, 40), (3, 5)]
    assert output.stats.policy_forwards == len(forwards)


@pytest.mark.parametrize("k", [0, 3])
def test_equal_prompts_are_read_as_one(k, forwards):
    policy = family_policy("multi_head")
    ids, mask = shared_prompts(7, [2], repeats=8)
    plain = policy.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=9)
    watch(policy, forwards)
    output = speculative_generate(
        policy, random_draft(policy), ids, mask, num_draft_tokens=k, do_sample=False, max_new_tokens=9
    )
    assert torch.equal(output.sequences, plain)
    assert forwards[0] == (1, 9)
    assert forwards[1][0] == 8


def test_pads_before_all_prompts_are_not_read(forwards):
    policy = family_policy("qwen2")
    ids, mask = shared_prompts(4, [5, 2])
    ids, mask = (torch.cat((torch.zeros_like(part[:, :6]), part), 1) for part in (ids, mask))
    plain = policy.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=6)
    watch(policy, forwards)
    output = speculative_generate(
        policy, random_draft(policy), ids, mask, num_draft_tokens=2, do_sample=False, max_new_tokens=6
    )
    assert torch.equal(output.sequences, plain)
    assert forwards[0] == (2, 9)


def test_two_beginnings_and_a_short_prompt():
    policy = family_policy("qwen3")
    long, _ = shared_prompts(50, [4, 7], seed=1)
    other, _ = shared_prompts(50, [4, 7], seed=2)
    ids = torch.cat((long, other, long[:1]))
    ids[4] = 0
    ids[4, -1] = 9  # nothing but one token
    mask = (ids != 0).long()
    blocks = prompt_blocks([tuple(row[row != 0].tolist()) for row in ids], 64)
    assert [len(row) for row in blocks[0].tokens] == [50, 50, 0]
    draft = OracleDraft(policy, wrong_on_thirds)
    plain = policy.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=12)
    output = speculative_generate(policy, draft, ids, mask, num_draft_tokens=3, do_sample=False, max_new_tokens=12)
    assert torch.equal(output.sequences, plain)
    assert 0 < output.stats.accepted < output.stats.drafted


@pytest.mark.parametrize("graphs", [False, True])
def test_the_draft_gets_every_row_at_its_place(graphs, cuda_graphs):
    # The draft proposes the policy's own tokens exactly if all its rows are right.
    policy = family_policy("multi_query", num_hidden_layers=2)
    ids, mask = shared_prompts(40, [5, 1, 3], repeats=2)
    output = speculative_generate(
        policy,
        OracleDraft(policy),
        ids,
        mask,
        num_draft_tokens=3,
        do_sample=False,
        max_new_tokens=16,
        cuda_graphs=graphs,
    )
    assert output.stats.accepted == output.stats.drafted > 0


def test_hidden_states_for_training_are_those_of_a_separate_forward():
    policy = tiny_policy("llama", dtype=torch.float64, scale=2.0)
    rests = [5, 1, 3]
    ids, mask = shared_prompts(40, rests, repeats=2)
    draft = random_draft(policy, scale=1.5)
    decoder = SpeculativeDecoder(policy, draft, num_draft_tokens=2, generator=torch.Generator().manual_seed(0))
    with decoder.recording() as trace:
        output = decoder.bind(policy.generate)(
            ids, attention_mask=mask, do_sample=True, temperature=3.0, top_k=0, max_new_tokens=9, eos_token_id=None
        )
    decoder.close()
    recorder = TapRecorder(policy, draft.config.tap_layers)
    for row, tokens in enumerate(output):
        tokens = tokens[ids.shape[1] - 40 - rests[row // 2] :]
        with torch.no_grad(), recorder.record() as record:
            policy(tokens[None], use_cache=False)
        taps, last_hidden = trace.row(row, len(tokens))
        torch.testing.assert_close(taps[:-1], torch.cat(record.taps, -1)[0, :-1], rtol=0, atol=1e-10)
        torch.testing.assert_close(last_hidden[:-1], record.last_hidden[0, :-1], rtol=0, atol=1e-10)
    recorder.close()


def test_rows_of_one_prompt_draw_their_own_tokens():
    policy = family_policy("multi_head", num_hidden_layers=1)
    ids, mask = shared_prompts(3, [2], repeats=4000)
    generator = torch.Generator().manual_seed(0)
    output = speculative_generate(
        policy, random_draft(policy), ids, mask, num_draft_tokens=0, generator=generator, do_sample=True,
        temperature=2.0, top_k=0, max_new_tokens=1,
    )  # fmt: skip
    counts = torch.bincount(output.sequences[:, -1], minlength=policy.config.vocab_size)
    with torch.no_grad():
        expected = 4000 * (policy(ids[:1]).logits[0, -1] / 2.0).softmax(-1)
    common = expected > 5
    chi_square = ((counts - expected) ** 2 / expected)[common].sum()
    degrees = int(common.sum())
    assert degrees > 20
    assert chi_square < degrees + 5 * (2 * degrees) ** 0.5


def test_frequencies_that_follow_the_length_are_those_of_the_whole_prompt(monkeypatch):
    scaled = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    policy = tiny_policy("llama", torch.float64, scale=3.0, max_position_embeddings=32, rope_parameters=scaled)
    ids, mask = shared_prompts(40, [20, 20, 20])
    read, scores = loop.Rollout._read_prompts, []
    monkeypatch.setattr(loop.Rollout, "_read_prompts", lambda self: scores.append(read(self)) or scores[-1])
    speculative_generate(policy, random_draft(policy), ids, mask, num_draft_tokens=0, max_new_tokens=1)
    with torch.no_grad():
        plain = policy(ids).logits[:, -1]
    torch.testing.assert_close(scores[0][0], plain.float())
