"""Attention of decoding rounds against Transformers' SDPA path, which repeats keys and values."""

import copy

import pytest
import torch
from rollout.drafts import OracleDraft, ragged_prompts
from tiny import tiny_policy
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from trl_codraft.rollout import cache
from trl_codraft.rollout import decode_attention as module_under_test
from trl_codraft.rollout.cache import causal_mask
from trl_codraft.rollout.controller import FixedDraftLength
from trl_codraft.rollout.speculative import SpeculativeDecoder


@pytest.mark.parametrize("additive", [False, True])
@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (8, 1)])
@pytest.mark.parametrize("columns", [1, 4])
def test_equals_attention_with_repeated_heads(columns, heads, additive):
    generator = torch.Generator().manual_seed(0)
    num_q, num_kv = heads
    query = torch.randn(3, columns, num_q, 8, dtype=torch.float64, generator=generator).transpose(1, 2)
    key, value = torch.randn(2, 3, 11, num_kv, 8, dtype=torch.float64, generator=generator).transpose(2, 3)
    slots = torch.tensor([[4], [9], [2]]) - columns + 1 + torch.arange(columns)
    mask = causal_mask(slots, 11)
    if additive:
        mask = torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, -torch.inf)
    attention = torch.nn.Module()
    attention.num_key_value_groups = num_q // num_kv
    expected = sdpa_attention_forward(attention, query, key, value, mask, scaling=0.3)[0]
    actual = module_under_test.decode_attention(attention, query, key, value, mask, scaling=0.3)[0]
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)


def test_is_used_in_every_decoding_layer_and_only_there(monkeypatch):
    policy = tiny_policy("llama", dtype=torch.float64, scale=3.0, num_attention_heads=4, num_key_value_heads=2)
    policy.generation_config.eos_token_id = None
    calls, original = [], module_under_test.decode_attention

    def counting(module, query, *args, **kwargs):
        calls.append(query.shape[2])
        return original(module, query, *args, **kwargs)

    monkeypatch.setitem(module_under_test.AttentionInterface._global_mapping, module_under_test.DECODING, counting)
    ids, mask = ragged_prompts([4, 7])
    decoder = SpeculativeDecoder(policy, OracleDraft(copy.deepcopy(policy)), num_draft_tokens=3)
    output = decoder.bind(policy.generate)(ids, attention_mask=mask, do_sample=False, max_new_tokens=9)
    decoder.close()
    assert policy.config._attn_implementation == "sdpa"
    layers = policy.config.num_hidden_layers
    assert calls == [4] * 2 * layers  # two rounds of four tokens after the prefill, which attends as usual
    assert torch.equal(output, policy.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=9))


def test_configuration_is_restored_after_an_error(monkeypatch):
    policy = tiny_policy("llama", dtype=torch.float64)
    ids, mask = ragged_prompts([4, 7])
    decoder = SpeculativeDecoder(policy, OracleDraft(policy), num_draft_tokens=3)
    monkeypatch.setattr("trl_codraft.rollout.loop.Rollout._verify", lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        decoder.bind(policy.generate)(ids, attention_mask=mask, do_sample=False, max_new_tokens=9)
    decoder.close()
    assert policy.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("heads", [(4, 2), (4, 1), (4, 4)])
def test_a_mask_is_repeated_once_for_all_layers_that_share_it(heads, monkeypatch):
    """Layers with a window have another mask than those without."""
    num_q, num_kv = heads
    policy = tiny_policy(
        "gemma3_text", dtype=torch.float64, scale=3.0, num_attention_heads=num_q, num_key_value_heads=num_kv,
        sliding_window=3, num_hidden_layers=4, layer_types=["sliding_attention", "full_attention"] * 2,
    )  # fmt: skip
    policy.generation_config.eos_token_id = None
    seen, made, original, repeat = [], [], module_under_test.decode_attention, module_under_test.repeated

    def looking(module, query, key, value, attention_mask, **kwargs):
        seen.append(attention_mask)
        return original(module, query, key, value, attention_mask, **kwargs)

    monkeypatch.setitem(module_under_test.AttentionInterface._global_mapping, module_under_test.DECODING, looking)
    monkeypatch.setattr(cache, "repeated", lambda mask, groups: made.append(mask) or repeat(mask, groups))
    monkeypatch.setattr(module_under_test, "repeated", lambda mask, groups: pytest.fail("a layer repeats for itself"))
    ids, mask = ragged_prompts([4, 7])
    decoder = SpeculativeDecoder(policy, OracleDraft(copy.deepcopy(policy)), num_draft_tokens=3)
    output = decoder.bind(policy.generate)(ids, attention_mask=mask, do_sample=False, max_new_tokens=9)
    decoder.close()
    masks = len({id(mask) for mask in seen})
    assert len(seen) == 2 * masks  # two layers of each kind
    assert len(made) == (masks if num_q > num_kv else 0)
    assert torch.equal(output, policy.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=9))


@pytest.mark.parametrize("groups", [1, 2, 8])
def test_layers_with_other_groups_than_the_mask_was_repeated_for_attend_alike(groups):
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(1, 8, 3, 8, dtype=torch.float64, generator=generator)
    key = torch.randn(1, 8 // groups, 5, 8, dtype=torch.float64, generator=generator)
    mask, attention = causal_mask(torch.tensor([[2, 3, 4]]), 5), torch.nn.Module()
    attention.num_key_value_groups = groups
    expected = sdpa_attention_forward(attention, query, key, key, mask)[0]
    mask.repeated = module_under_test.repeated(mask, 4)
    actual = module_under_test.decode_attention(attention, query, key, key, mask)[0]
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)


def test_policies_that_make_masks_of_their_own_of_ours_roll_out_exactly():
    """Doge adds a gate per key to the mask of each layer."""
    policy = tiny_policy("doge", dtype=torch.float64, scale=3.0, num_attention_heads=4, num_key_value_heads=2)
    policy.generation_config.eos_token_id = None
    ids, mask = ragged_prompts([4, 7])
    decoder = SpeculativeDecoder(policy, OracleDraft(copy.deepcopy(policy)), num_draft_tokens=3)
    output = decoder.bind(policy.generate)(ids, attention_mask=mask, do_sample=False, max_new_tokens=9)
    decoder.close()
    assert decoder.stats.accepted > 0
    assert torch.equal(output, policy.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=9))


@pytest.mark.parametrize(
    ("lengths", "window", "masked"), [([5], None, False), ([4, 7], None, True), ([5], 3, True), ([6, 6], None, False)]
)
def test_rounds_without_drafts_have_a_mask_only_where_something_is_hidden(lengths, window, masked, monkeypatch):
    model_type, extra = ("llama", {}) if window is None else ("mistral", {"sliding_window": window})
    policy = tiny_policy(model_type, dtype=torch.float64, scale=3.0, **extra)
    policy.generation_config.eos_token_id = None
    masks, original = [], module_under_test.decode_attention

    def looking(module, query, key, value, attention_mask, **kwargs):
        masks.append(attention_mask)
        return original(module, query, key, value, attention_mask, **kwargs)

    monkeypatch.setitem(module_under_test.AttentionInterface._global_mapping, module_under_test.DECODING, looking)
    ids, mask = ragged_prompts(lengths)
    decoder = SpeculativeDecoder(policy, OracleDraft(copy.deepcopy(policy)), num_draft_tokens=3)
    decoder.controller = FixedDraftLength(0)
    output = decoder.bind(policy.generate)(ids, attention_mask=mask, do_sample=False, max_new_tokens=6)
    decoder.close()
    assert masks
    assert {one is not None for one in masks} == {masked}
    assert torch.equal(output, policy.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=6))
