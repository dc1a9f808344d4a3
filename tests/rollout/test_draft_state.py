"""What the draft sees during a rollout, and what is counted."""

import copy

import pytest
import torch
from rollout.drafts import OracleDraft, ragged_prompts, random_draft
from tiny import tiny_policy
from transformers import DynamicCache

from trl_codraft.modeling.taps import TapRecorder
from trl_codraft.modeling.teacher import PolicyHead
from trl_codraft.rollout import drafting, loop
from trl_codraft.rollout.cache import causal_mask
from trl_codraft.rollout.speculative import SpeculativeDecoder, speculative_generate
from trl_codraft.rollout.stats import MAX_DRAFT_TOKENS, SpeculativeStats


@pytest.fixture(scope="module")
def policy():
    policy = tiny_policy("llama", dtype=torch.float64, scale=2.0)
    policy.generation_config.eos_token_id = None
    return policy


def from_scratch(policy, draft, ids):
    """Draft keys, values and newest scores of one row without any cache of ours: all rows fed at once, true taps."""
    recorder = TapRecorder(policy, draft.config.tap_layers)
    with torch.no_grad(), recorder.record() as record:
        policy(ids[None])
    recorder.close()
    cache = DynamicCache()
    with torch.no_grad():
        hidden = draft.fuse_taps(torch.cat(record.taps, -1)[:, :-1])
        embeds = PolicyHead(policy).embed(ids[None, 1:])
        outputs = draft.step(hidden, embeds, torch.arange(len(ids) - 1)[None], cache, None)
    return cache.layers, draft.compute_logits(outputs[:, -1])[0]


@pytest.mark.parametrize("flags", [{}, {"num_hidden_layers": 2, "norm_output": True, "fc_norm": True}])
def test_draft_cache_equals_one_recomputed_from_true_taps(policy, monkeypatch, flags):
    """Also checks positions: train-time rows (position r reads x_{r+1}) and rollout rows give the same scores."""
    draft = random_draft(policy, scale=1.5, **flags)
    original, checked = loop.Rollout._round, []

    def checking(self, k):
        original(self, k)
        if not self.rows:
            return
        self.drafting._catch_up()
        for index, row in enumerate(self.rows):
            ids = self.sequences[row, self.pads[index] : self.lengths[index]]
            layers, scores = from_scratch(policy, draft, ids)
            for number, layer in enumerate(layers):
                keys, values = self.drafting.cache.layer(number)
                torch.testing.assert_close(keys[index, :, : len(ids) - 1], layer.keys[0], rtol=0, atol=1e-9)
                torch.testing.assert_close(values[index, :, : len(ids) - 1], layer.values[0], rtol=0, atol=1e-9)
            assert int(self.drafting._root[index]) == len(ids) - 2
            ours = draft.compute_logits(self.drafting._root_hidden)[index]
            torch.testing.assert_close(ours, scores, rtol=0, atol=1e-8)
            checked.append(row)

    monkeypatch.setattr(loop.Rollout, "_round", checking)
    ids, mask = ragged_prompts([6, 1, 4], seed=1)
    generator = torch.Generator().manual_seed(0)
    output = speculative_generate(
        policy, draft, ids, mask, num_draft_tokens=3, generator=generator, do_sample=True, temperature=3.0, top_k=0,
        max_new_tokens=14, eos_token_id=[3, 4, 5, 6], pad_token_id=0,
    )  # fmt: skip
    assert len(checked) > 6
    assert output.stats.accepted > 0


def hand_count(reference, prompt, k, wrong, eos, budget):
    """One row's counters by hand: the draft is right exactly where `wrong` says nothing."""
    counts = SpeculativeStats(rows=1, committed=1)
    length = prompt + 1
    while length < prompt + budget and reference[length - 1] not in eos:
        drafted = min(k, prompt + budget - length - 1)
        kept = 0
        while kept < drafted and not wrong(torch.tensor(reference), length + kept):
            kept += 1
        block = reference[length : length + kept + 1]
        ends = [offset for offset, token in enumerate(block) if token in eos]
        block = block[: ends[0] + 1] if ends else block
        counts.row_forwards += 1
        counts.committed += len(block)
        if drafted:
            counts.verifications += 1
            counts.drafted += drafted
            counts.accepted += len(block) - 1
            for position in range(len(block) - 1):
                counts.accepted_per_position[position] += 1
        length += len(block)
    return counts


@pytest.mark.parametrize("k", [0, 1, 3, 5])
def test_counters_equal_a_count_by_hand(policy, k):
    def wrong(ids, length):
        return int(ids[:length].sum()) % 3 == 0

    prompts, budget = [6, 1, 4, 9, 2], 17
    ids, mask = ragged_prompts(prompts, seed=2)
    free = policy.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=budget)
    eos = [int(free[0, ids.shape[1] + 8]), int(free[3, ids.shape[1] + 3])]
    plain = policy.generate(
        ids, attention_mask=mask, do_sample=False, max_new_tokens=budget, eos_token_id=eos, pad_token_id=0
    )
    expected = SpeculativeStats()
    for row, length in enumerate(prompts):
        reference = plain[row, ids.shape[1] - length :].tolist()
        expected.add(hand_count(reference, length, k, wrong, eos, budget))

    forwards = []
    draft = OracleDraft(copy.deepcopy(policy), wrong)  # its own policy, so that only the loop's forwards are seen
    hook = policy.register_forward_pre_hook(
        lambda module, args, kwargs: forwards.append(kwargs["input_ids"].shape[0]), with_kwargs=True
    )
    output = speculative_generate(
        policy, draft, ids, mask, num_draft_tokens=k, do_sample=False, max_new_tokens=budget, eos_token_id=eos,
        pad_token_id=0,
    )  # fmt: skip
    hook.remove()
    assert torch.equal(output.sequences, plain)
    expected.policy_forwards = len(forwards)
    assert output.stats == expected
    assert output.stats.row_forwards == sum(forwards[1:])  # finished rows take no part
    if k:
        # Nothing but what was committed is counted, so the ratio is committed tokens per verification where k >= 1.
        assert output.stats.accept_length == 1 + expected.accepted / expected.verifications
    else:
        assert output.stats.tokens_per_row_forward == 1.0
        assert output.stats.verifications == 0


def test_new_draft_weights_are_used_by_the_next_call(policy):
    draft = random_draft(policy, scale=2.0)
    other = random_draft(policy, seed=1, scale=2.0)
    ids, mask = ragged_prompts([6, 3], seed=3)
    decoder = SpeculativeDecoder(policy, draft, num_draft_tokens=3)
    generate = decoder.bind(policy.generate)

    def proposals():
        seen, propose = [], loop.DraftRollout.propose
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(loop.DraftRollout, "propose", lambda *args: seen.append(propose(*args)) or seen[-1])
            generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=6)
        return seen[0].tolist()

    before = proposals()
    draft.load_state_dict(other.state_dict())
    after = proposals()
    decoder.close()
    fresh = SpeculativeDecoder(policy, other, num_draft_tokens=3)
    generate = fresh.bind(policy.generate)
    assert after == proposals() != before
    fresh.close()


@pytest.mark.parametrize(
    ("kwargs", "width"), [({"temperature": 0.7, "top_p": 0.9}, 40), ({"repetition_penalty": 1.3}, 104)]
)
def test_a_reduced_draft_works_in_its_own_vocabulary_unless_token_ids_matter(policy, monkeypatch, kwargs, width):
    draft, widths, original = random_draft(policy, target_ids=range(3, 43)), set(), loop.accept.draft_distribution
    monkeypatch.setattr(
        loop.accept, "draft_distribution", lambda scores, raw: widths.add(raw.shape[-1]) or original(scores, raw)
    )
    ids, mask = ragged_prompts([6, 3], seed=3)
    speculative_generate(policy, draft, ids, mask, num_draft_tokens=2, do_sample=True, max_new_tokens=6, **kwargs)
    assert widths == {width}


def test_new_policy_weights_are_used_by_the_next_call(policy):
    policy = copy.deepcopy(policy)
    ids, mask = ragged_prompts([6, 3], seed=3)
    decoder = SpeculativeDecoder(policy, random_draft(policy), num_draft_tokens=3)
    generate = decoder.bind(policy.generate)
    first = generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=9)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(torch.randn(parameter.shape, dtype=parameter.dtype) * 0.05)
    second = generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=9)
    decoder.close()
    assert torch.equal(second, policy.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=9))
    assert not torch.equal(first, second)


def test_rollout_leaves_no_hooks_and_no_gradients(policy):
    hooks = sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in policy.modules())
    ids, mask = ragged_prompts([6, 3], seed=3)
    output = speculative_generate(policy, random_draft(policy), ids, mask, num_draft_tokens=2, max_new_tokens=5)
    assert hooks == sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in policy.modules())
    assert not output.sequences.requires_grad
    assert all(parameter.grad is None for parameter in policy.parameters())


def test_stats_add_up_over_calls_and_ranks():
    first, second = SpeculativeStats(rows=2, committed=2), SpeculativeStats(rows=1, committed=1)
    first.count_round([3, 0], [2, 1])
    second.count_round([2], [3])
    together = SpeculativeStats.from_tensor(first.as_tensor() + second.as_tensor())
    first.add(second)
    assert together == first
    assert len(first.as_tensor()) == 7 + MAX_DRAFT_TOKENS
    assert (first.verifications, first.drafted, first.accepted) == (2, 5, 3)
    assert first.accepted_per_position[:3] == [2, 1, 0]
    assert first.accept_length == 2.5
    assert first.accept_rate == 0.6
    assert first.num_draft_tokens == 2.5
    assert first.tokens_per_row_forward == 2.0
    first.reset()
    assert first == SpeculativeStats()
    assert (first.accept_length, first.tokens_per_row_forward, first.accept_rate) == (1.0, 1.0, 0.0)


@pytest.mark.parametrize("layers", [1, 2])
def test_masks_of_a_long_prompt_are_bounded_and_change_nothing(policy, monkeypatch, layers):
    """One layer needs the masks of one column per row; deeper drafts build theirs in pieces."""
    draft = random_draft(policy, scale=1.5, num_hidden_layers=layers)
    ids, mask = ragged_prompts([60, 41, 60], seed=3)
    call = {"attention_mask": mask, "do_sample": False, "max_new_tokens": 4}
    sizes, states, original = [], [], drafting.DraftRollout._catch_up

    def counting(slots, visible, window=None):
        built = causal_mask(slots, visible, window)
        sizes.append(built.numel())
        return built

    def keeping(self):
        original(self)
        states.append(self._root_hidden.clone())

    monkeypatch.setattr(drafting.DraftRollout, "_catch_up", keeping)
    for bound in (2**26, 2**10):
        monkeypatch.setattr("trl_codraft.rollout.cache.causal_mask", counting)
        monkeypatch.setattr("trl_codraft.modeling.modeling_eagle3.MAX_MASK_BYTES", bound)
        monkeypatch.setattr(
            loop.PolicyMasks, "__call__", lambda self, slots, visible, *_, **__: causal_mask(slots, visible)
        )
        decoder = SpeculativeDecoder(policy, draft, num_draft_tokens=2)
        decoder.bind(policy.generate)(ids, **call)
        decoder.close()
        assert max(sizes) <= (3 * 63 if layers == 1 else bound)
        sizes.clear()
    half = len(states) // 2
    for whole, pieces in zip(states[:half], states[half:], strict=True):
        torch.testing.assert_close(pieces, whole, rtol=0, atol=1e-12)
