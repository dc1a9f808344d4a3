"""
The law of rollouts: each committed token is the most likely one of a plain forward over the text before it, and what
is kept of it for training is what that forward computes, whatever the policy attends with and however few rows are
left.
"""

import pytest
import torch
from rollout.drafts import OracleDraft, ragged_prompts
from tiny import BALANCED_EXPERTS, tiny_policy

from trl_codraft.rollout.cache import RaggedCache
from trl_codraft.rollout.speculative import SpeculativeDecoder
from trl_codraft.rollout.support import unsupported_reason


BOTH, EAGER = ("sdpa", "eager"), ("eager",)
WINDOW = {"sliding_window": 5}
LATENT = {"num_key_value_heads": 4, "kv_lora_rank": 8, "q_lora_rank": 8, "v_head_dim": 8}
LATENT |= {"head_dim": 4, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4}
FAMILIES = {
    "llama": (BOTH, {}),
    "qwen3": (BOTH, {}),
    "qwen2": (BOTH, {"use_sliding_window": True, "max_window_layers": 2, **WINDOW}),
    "mistral": (BOTH, WINDOW),
    "phi3": (BOTH, WINDOW),
    "starcoder2": (BOTH, WINDOW),
    "cohere2": (BOTH, WINDOW),
    "gemma2": (EAGER, WINDOW),
    "gemma3_text": (BOTH, WINDOW),
    "gemma4_text": (BOTH, {}),
    "gpt_oss": (EAGER, {**WINDOW, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}),
    "gpt_neox": (BOTH, {}),
    "opt": (BOTH, {"ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0}),
    "stablelm": (BOTH, {}),
    "biogpt": (BOTH, {}),
    "olmo2": (BOTH, {}),
    "glm4": (BOTH, {}),
    "granite": (BOTH, {}),
    "deepseek_v3": (BOTH, {**LATENT, **BALANCED_EXPERTS}),
    "mixtral": (BOTH, {}),
    "qwen3_moe": (BOTH, {}),
}
# Draft lengths of every family, and of those that stand for a way of building masks.
LENGTHS = (0, 3)
ALL_LENGTHS = (0, 1, 3, "auto")
THOROUGH = ("llama", "mistral", "gemma3_text", "gpt_oss")
PROMPTS = {"equal rows": [6, 6, 6], "ragged rows": [9, 2, 6], "one row": [7]}
NEW_TOKENS = 8


def law_policy(family, implementation):
    policy = tiny_policy(family, dtype=torch.float64, scale=3.0, **FAMILIES[family][1])
    policy.set_attn_implementation(implementation)
    policy.generation_config.eos_token_id = None
    if hasattr(policy.config, "num_experts_per_tok"):
        policy.set_experts_implementation("eager")  # the grouped kernels do not take fp64
    return policy


def wrong_on_thirds(ids, length):
    return int(ids[:length].sum()) % 3 == 0


def check_law(policy, lengths, k, greedy=True):
    """Rolls out and compares with a plain forward over each row; returns the completions."""
    ids, mask = ragged_prompts(lengths, seed=1)
    decoder = SpeculativeDecoder(policy, OracleDraft(policy, wrong_on_thirds), num_draft_tokens=k)
    with decoder.recording() as trace:
        output = decoder.bind(policy.generate)(
            ids, attention_mask=mask, do_sample=not greedy, max_new_tokens=NEW_TOKENS
        )
    # Eager attention takes its softmax in fp32, some families their norms or rotations.
    tolerance = 1e-9 if policy.config.model_type == "llama" and policy.config._attn_implementation == "sdpa" else 2e-5
    for row, length in enumerate(lengths):
        text = output[row, ids.shape[1] - length :]
        with torch.no_grad(), decoder._recorder.record() as record:
            logits = policy(text[None], use_cache=False).logits[0]
        if greedy:
            assert torch.equal(logits[length - 1 : -1].argmax(-1), text[length:])
        taps, last_hidden = trace.row(row, len(text))
        for kept, plain in ((taps, torch.cat(record.taps, -1)), (last_hidden, record.last_hidden)):
            scale = plain.abs().max()
            torch.testing.assert_close(kept[:-1] / scale, plain[0, :-1] / scale, rtol=0, atol=tolerance)
    decoder.close()
    return output[:, ids.shape[1] :]


CASES = [(family, implementation) for family, (both, _) in FAMILIES.items() for implementation in both]


@pytest.mark.parametrize(("family", "implementation"), CASES)
def test_committed_tokens_and_kept_states_are_those_of_a_plain_forward(family, implementation):
    policy = law_policy(family, implementation)
    assert unsupported_reason(policy) is None
    for lengths in PROMPTS.values():
        for k in ALL_LENGTHS if family in THOROUGH else LENGTHS:
            check_law(policy, lengths, k)
    check_law(policy, PROMPTS["ragged rows"], 3, greedy=False)
    check_law(policy, PROMPTS["equal rows"], 0, greedy=False)


@pytest.mark.parametrize("implementation", BOTH)
@pytest.mark.parametrize("k", ALL_LENGTHS)
def test_last_row_left_alone_obeys_the_law(implementation, k):
    policy = law_policy("llama", implementation)
    free = check_law(policy, [6, 3], 0)
    ends = next(token for token in free[0, 1:4].tolist() if token not in free[1, :-1].tolist())
    output = check_last_row(policy, k, ends)
    assert (output[0] == 0).any()
    assert torch.equal(output[1], free[1])


def check_last_row(policy, k, ends):
    ids, mask = ragged_prompts([6, 3], seed=1)
    decoder = SpeculativeDecoder(policy, OracleDraft(policy, wrong_on_thirds), num_draft_tokens=k)
    output = decoder.bind(policy.generate)(
        ids, attention_mask=mask, do_sample=False, max_new_tokens=NEW_TOKENS, eos_token_id=ends, pad_token_id=0
    )
    decoder.close()
    return output[:, ids.shape[1] :]


def test_cache_answers_like_a_cache_that_holds_the_same():
    """What mask functions ask, before and after each layer of a prompt's and of a decoding forward."""
    cache = RaggedCache(2, max_slots=9)
    states = torch.zeros(2, 1, 3, 4)
    for slots, visible in ((torch.arange(3), 3), (torch.arange(3, 4), 4)):
        columns = len(slots)
        cache.begin(slots.expand(2, -1), visible)
        for layer in range(2):
            assert cache.get_seq_length(layer) == visible - columns
            cache.update(states[:, :, :columns], states[:, :, :columns], layer)
            assert cache.get_seq_length(layer) == visible
            assert cache.get_query_offset(layer) == visible - columns
            assert cache.get_mask_sizes(columns, layer) == (visible, 0)
    assert (cache.get_max_length(), cache.get_max_length(1), cache.batch_size, len(cache)) == (9, 9, 2, 2)
    assert cache.is_initialized
    assert (cache.is_compileable, cache.is_croppable, any(cache.is_sliding)) == (False, False, False)


@pytest.mark.parametrize("family", ["bart", "trocr"])
def test_decoders_that_count_columns_are_left_to_plain_generation(family):
    policy = tiny_policy(family, d_model=32, decoder_layers=2, decoder_attention_heads=4, decoder_ffn_dim=48)
    assert "takes no `position_ids`" in unsupported_reason(policy)
