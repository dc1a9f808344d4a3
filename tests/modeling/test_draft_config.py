"""The configuration of a fresh draft for many families of policies."""

import pytest
import torch
from transformers import AutoConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from trl_codraft.modeling.configuration_eagle3 import Eagle3DraftConfig, default_tap_layers
from trl_codraft.modeling.layers import DraftRotary


DENSE = ["llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3_text", "phi3", "olmo2", "granite"]
SIZES = {"hidden_size": 96, "intermediate_size": 200, "num_attention_heads": 6, "num_key_value_heads": 3}
SCALED = {
    "linear": {"factor": 4.0},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 16.0, "attention_factor": 1.2},
}


@pytest.mark.parametrize(
    ("num_layers", "expected"),
    [
        (1, [0]),
        (2, [1]),
        (3, [1, 2]),
        (4, [1, 2, 3]),
        (6, [1, 3, 5]),
        (7, [2, 3, 4]),
        (8, [2, 4, 5]),
        (36, [2, 18, 33]),
    ],
)
def test_default_tap_layers(num_layers, expected):
    assert default_tap_layers(num_layers) == expected


@pytest.mark.parametrize("model_type", DENSE)
def test_dense_policy_gives_its_sizes(model_type):
    policy = AutoConfig.for_model(
        model_type, head_dim=20, vocab_size=500, num_hidden_layers=12, pad_token_id=0, **SIZES
    )
    draft = Eagle3DraftConfig.from_policy(policy)
    assert {name: getattr(draft, name) for name in SIZES} == SIZES
    assert draft.head_dim == (20 if hasattr(policy, "head_dim") else 16)
    assert draft.vocab_size == draft.draft_vocab_size == 500
    assert draft.target_hidden_size == 96
    assert draft.tap_layers == [2, 6, 9]
    assert draft.num_hidden_layers == 1
    assert draft.max_position_embeddings == policy.max_position_embeddings
    assert draft.rms_norm_eps == policy.rms_norm_eps


def test_policy_whose_layers_differ_gives_the_sizes_of_the_first():
    policy = AutoConfig.for_model("gemma4_text", head_dim=20, num_hidden_layers=6, vocab_size=500, **SIZES)
    assert {layer.head_dim for layer in policy.per_layer_config} == {20, 512}
    draft = Eagle3DraftConfig.from_policy(policy)
    assert {name: getattr(draft, name) for name in SIZES} == SIZES
    assert draft.head_dim == 20


@pytest.mark.parametrize(
    ("model_type", "sizes", "width"),
    [
        ("mixtral", {"intermediate_size": 120, "num_experts_per_tok": 2}, 240),
        ("mixtral", {"intermediate_size": 900, "num_experts_per_tok": 2}, 384),
        ("qwen3_moe", {"moe_intermediate_size": 40, "num_experts_per_tok": 8}, 320),
        ("qwen3_moe", {"moe_intermediate_size": 8, "num_experts_per_tok": 2}, 192),
        ("gpt_oss", {"intermediate_size": 96, "num_experts_per_tok": 4}, 384),
    ],
)
def test_mixture_of_experts_gets_a_dense_mlp(model_type, sizes, width):
    policy = AutoConfig.for_model(model_type, **{**SIZES, "head_dim": 16, **sizes})
    assert Eagle3DraftConfig.from_policy(policy).intermediate_size == width


@pytest.mark.parametrize(
    ("hidden_size", "heads", "expected"),
    [(40, (6, 3), (5, 1)), (48, (5, 5), (4, 1)), (36, (8, 4), (4, 4)), (24, (5, 1), (4, 1))],
)
def test_heads_that_do_not_divide_the_width_become_fewer(hidden_size, heads, expected):
    policy = AutoConfig.for_model(
        "qwen3", hidden_size=hidden_size, num_attention_heads=heads[0], num_key_value_heads=heads[1], head_dim=8
    )
    config = Eagle3DraftConfig.from_policy(policy)
    assert (config.num_attention_heads, config.num_key_value_heads) == expected
    assert config.head_dim == 8
    assert hidden_size % config.num_attention_heads == 0


def test_latent_attention_gets_ordinary_heads():
    draft = Eagle3DraftConfig.from_policy(AutoConfig.for_model("deepseek_v3"))
    assert (draft.num_attention_heads, draft.num_key_value_heads, draft.head_dim) == (56, 8, 128)


@pytest.mark.parametrize("rope_type", SCALED)
def test_scaled_rope_is_the_policys_own(rope_type):
    rope = {"rope_type": rope_type, "rope_theta": 5e5, **SCALED[rope_type]}
    policy = AutoConfig.for_model("llama", head_dim=16, max_position_embeddings=256, rope_parameters=rope, **SIZES)
    given = dict(policy.rope_parameters)
    config = Eagle3DraftConfig.from_policy(policy)
    assert config.rope_parameters == given == policy.rope_parameters
    draft, rotary = DraftRotary(config), LlamaRotaryEmbedding(policy)
    assert torch.equal(draft.inv_freq, rotary.inv_freq)
    plain = DraftRotary(
        Eagle3DraftConfig.from_policy(policy, rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    )
    assert not torch.equal(draft.inv_freq, plain.inv_freq)
    positions = torch.arange(200)[None]
    cos, sin = draft(positions, torch.float32)
    for ours, theirs in zip((cos, sin), rotary(torch.zeros(1), positions), strict=True):
        torch.testing.assert_close(ours[:, :, 0], theirs)


def test_rope_of_gpt_oss_and_gemma3():
    gpt_oss = AutoConfig.for_model("gpt_oss")
    assert Eagle3DraftConfig.from_policy(gpt_oss).rope_parameters == gpt_oss.rope_parameters
    # Per layer type: full attention's.
    for model_type in ("gemma3_text", "gemma3"):
        rope = Eagle3DraftConfig.from_policy(AutoConfig.for_model(model_type)).rope_parameters
        assert rope == {"rope_type": "default", "rope_theta": 1e6}


@pytest.mark.parametrize("rope_type", ["dynamic", "longrope"])
def test_rope_that_follows_the_length_becomes_plain(rope_type):
    factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8} if rope_type == "longrope" else {}
    rope = {"rope_type": rope_type, "rope_theta": 5e5, "factor": 4.0, **factors}
    policy = AutoConfig.for_model("llama", head_dim=16, rope_parameters=rope, **SIZES)
    assert Eagle3DraftConfig.from_policy(policy).rope_parameters == {"rope_type": "default", "rope_theta": 5e5}
    with pytest.raises(ValueError, match=f"RoPE type '{rope_type}' cannot be used in a draft"):
        Eagle3DraftConfig.from_policy(policy, rope_parameters=rope)


def test_policy_without_rope_gets_plain_rope():
    draft = Eagle3DraftConfig.from_policy(AutoConfig.for_model("gpt2"))
    assert draft.rope_parameters == {"rope_type": "default", "rope_theta": 10000.0}
    assert (draft.intermediate_size, draft.num_key_value_heads, draft.head_dim) == (3072, 12, 64)


def test_round_trip_through_a_dict():
    config = Eagle3DraftConfig.from_policy(AutoConfig.for_model("gpt_oss"), draft_vocab_size=1000, norm_output=True)
    assert Eagle3DraftConfig.from_dict(config.to_dict()).to_dict() == config.to_dict()
    assert Eagle3DraftConfig.from_dict(config.to_diff_dict()).to_dict() == config.to_dict()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"tap_layer": [1]}, r"Unknown draft settings \['tap_layer'\].*'tap_layers'"),
        ({"tap_layers": [3, 2]}, "strictly ascending and at least one, got"),
        ({"tap_layers": [2, 2]}, "strictly ascending"),
        ({"tap_layers": []}, "strictly ascending"),
        ({"tap_layers": [-1, 2]}, "from 0 .* to 12"),
        ({"tap_layers": [2, 13]}, "from 0 .* to 12"),
        ({"fc_norm": True, "norm_before_fc": True}, "Set one of them to False"),
        ({"draft_vocab_size": 501}, "exceeds the policy's vocabulary"),
        ({"num_hidden_layers": 0}, "`num_hidden_layers` must be at least 1"),
        ({"num_key_value_heads": 4}, "must be a multiple of `num_key_value_heads`"),
        ({"head_dim": 7}, "must be even for RoPE"),
    ],
)
def test_impossible_settings_are_refused(overrides, message):
    policy = AutoConfig.for_model("llama", vocab_size=500, num_hidden_layers=12, **SIZES)
    with pytest.raises(ValueError, match=message):
        Eagle3DraftConfig.from_policy(policy, **overrides)


def test_taps_are_needed():
    with pytest.raises(ValueError, match="needs `tap_layers`, or `num_policy_layers`"):
        Eagle3DraftConfig(hidden_size=32)
