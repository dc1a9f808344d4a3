"""Each way to break a checkpoint is named."""

import copy

import pytest
import torch
from breaks import drop, eagle, messages, nested, poison, put, swap, taps, tensor, theta
from checkpoints import H, V
from safetensors.torch import load_file, save_file

from trl_codraft.modeling.configuration_eagle3 import Eagle3DraftConfig
from trl_codraft.modeling.modeling_eagle3 import Eagle3DraftModel
from trl_codraft.serving.validation import problems, validate_draft


BREAKS = {
    # identity
    "no model_type": (drop("model_type"), "`model_type` is missing"),
    "other model_type": (put("model_type", "qwen3"), "`model_type` is 'qwen3'"),
    "no architectures": (drop("architectures"), "`architectures` is missing"),
    "other architecture": (put("architectures", ["Eagle3Qwen3ForCausalLM"]), "`architectures` names"),
    # sizes
    "no head_dim": (drop("head_dim"), "`head_dim` is missing"),
    "other head_dim": (put("head_dim", 16), "tensor `layers.0.self_attn.q_proj.weight` has shape"),
    "odd head_dim": (put("head_dim", 7), "`head_dim` is 7"),
    "no draft_vocab_size": (drop("draft_vocab_size"), "`draft_vocab_size` is missing"),
    "null draft_vocab_size": (put("draft_vocab_size", None), "`draft_vocab_size` is None"),
    "draft vocabulary too large": (put("draft_vocab_size", V + 1), "exceeds `vocab_size`"),
    "heads do not divide": (put("num_key_value_heads", 3), "not a multiple of `num_key_value_heads`"),
    "hidden not divided by heads": (put("num_attention_heads", 6), "transformers' Llama refuses it"),
    "no rms_norm_eps": (drop("rms_norm_eps"), "`rms_norm_eps` is None"),
    "rms_norm_eps 0": (put("rms_norm_eps", 0.0), "`rms_norm_eps` is 0.0, not a positive number"),
    "rms_norm_eps NaN": (put("rms_norm_eps", float("nan")), "`rms_norm_eps` is nan, not a positive number"),
    "rms_norm_eps of text": (put("rms_norm_eps", "1e-6"), "`rms_norm_eps` is '1e-6', not a positive number"),
    "no target_hidden_size": (drop("target_hidden_size"), "`target_hidden_size` is missing"),
    "other target_hidden_size": (put("target_hidden_size", 48), "`target_hidden_size` is 48 but the policy's"),
    "narrower taps": (put("target_hidden_size", 48), "`hidden_size` (32) is not `target_hidden_size` (48)"),
    "other vocabulary": (put("vocab_size", 96), "`vocab_size` is 96 but the policy's"),
    "other layers": (put("target_num_hidden_layers", 12), "made for a policy of 12 layers"),
    "short context": (put("max_position_embeddings", 64), "`max_position_embeddings` is 64, the policy's 256"),
    # features
    "tied": (put("tie_word_embeddings", True), "`tie_word_embeddings` is not false"),
    "tied by default": (drop("tie_word_embeddings"), "`tie_word_embeddings` is not false"),
    "attention bias": (put("attention_bias", True), "`attention_bias` is true"),
    "attention bias in the layer section": (
        nested("transformer_layer_config", "attention_bias", True),
        "`attention_bias` is true",
    ),
    "mlp bias": (put("mlp_bias", True), "`mlp_bias` is true"),
    "parallel drafting": (put("ptd_token_id", 5), "`ptd_token_id`: marks a parallel-drafting"),
    "activation": (put("hidden_act", "gelu"), "`hidden_act` is 'gelu'"),
    "logit scale": (put("logit_scale", 0.5), "`logit_scale` is 0.5"),
    "quantization": (put("quantization_config", {"bits": 4}), "`quantization_config` is {'bits': 4}"),
    # flags
    "no norm_before_residual": (drop("norm_before_residual"), "`norm_before_residual` is 'missing'"),
    "no norm_output": (drop("norm_output"), "`norm_output` is 'missing'"),
    "no fc_norm": (drop("fc_norm"), "`fc_norm` is 'missing'"),
    "no norm_before_fc": (drop("norm_before_fc"), "`norm_before_fc` is 'missing'"),
    "fc_norm without its tensors": (put("fc_norm", True), "missing tensor `fc_norm.0.weight`"),
    "both input norms": (
        lambda config, tensors: config.update(fc_norm=True, norm_before_fc=True),
        "exclude each other",
    ),
    "no taps read": (eagle(use_aux_hidden_state=False), "`use_aux_hidden_state` in `eagle_config` is false"),
    "norm_before_fc in eagle_config": (
        eagle(norm_before_fc=True),
        "`norm_before_fc` is False at top level but True in `eagle_config`",
    ),
    "norm_output in eagle_config": (eagle(norm_output=True), "`norm_output` is False at top level but True"),
    "fc_norm under its older name": (put("use_aux_norm", True), "`use_aux_norm` is true but `fc_norm` is not"),
    # RoPE
    "no rope_theta": (drop("rope_theta"), "`rope_theta` is missing"),
    "no rope_parameters": (drop("rope_parameters"), "`rope_parameters` is missing"),
    "two thetas": (put("rope_theta", 5e5), "`rope_theta` is 500000.0 but `rope_parameters` says 10000.0"),
    "scaling not repeated": (
        put("rope_parameters", {"rope_type": "llama3", "rope_theta": 10000.0}),
        "`rope_scaling` does not repeat",
    ),
    "other factor in the old key": (
        lambda config, tensors: (
            put("rope_parameters", {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0})(config, tensors),
            put("rope_scaling", {"rope_type": "linear", "factor": 4.0})(config, tensors),
        ),
        "`factor` is 4.0 in `rope_scaling` but 2.0 in `rope_parameters`",
    ),
    "theta 0": (theta(0.0), "`rope_theta` of RoPE type 'default' must be a positive number, got 0.0"),
    "negative theta": (theta(-1e4), "must be a positive number, got -10000.0"),
    "theta is true": (theta(True), "must be a positive number, got True"),
    "unknown RoPE type": (put("rope_parameters", {"rope_type": "spiral", "rope_theta": 1e4}), "RoPE type 'spiral'"),
    "linear RoPE without its factor": (
        put("rope_parameters", {"rope_type": "linear", "rope_theta": 1e4}),
        "`factor` of RoPE type 'linear' must be a positive number, got None",
    ),
    "llama3 RoPE without its bounds": (
        put("rope_parameters", {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0}),
        "`low_freq_factor` of RoPE type 'llama3' must be a positive number, got None",
    ),
    "scaling only in the old key": (put("rope_scaling", {"rope_type": "yarn"}), "`rope_scaling` says 'yarn'"),
    "partial rotary": (put("partial_rotary_factor", 0.5), "`partial_rotary_factor` is 0.5"),
    # taps
    "no taps": (drop("eagle_aux_hidden_state_layer_ids"), "`eagle_aux_hidden_state_layer_ids` is missing"),
    "taps not ascending": (taps(4, 2, 5), "not strictly ascending"),
    "tap twice": (taps(2, 2, 5), "not strictly ascending"),
    "tap out of range": (taps(2, 4, 9), "out of range: a policy of 8 layers has ids 0..8"),
    "negative tap": (taps(-1, 4, 5), "out of range"),
    "tap is true": (taps(True, 4, 5), "not a list of integers"),
    "taps of strings": (taps("2", "4", "5"), "not a list of integers"),
    "same ids in both places": (taps(2, 4, 5, inner=[2, 4, 5]), "must be one less than at top level"),
    "other taps without nested": (taps(1, 4, 5), "SGLang would read the default ones"),
    "two taps without count": (taps(2, 5, inner=[1, 4]), "`num_aux_hidden_states` in config.json is None"),
    "wrong count": (put("num_aux_hidden_states", 4), "`num_aux_hidden_states` in config.json is 4"),
    # speculators sections
    "two hidden sizes": (
        nested("transformer_layer_config", "hidden_size", 64),
        "`hidden_size` is 32 at top level but 64 in `transformer_layer_config`",
    ),
    "no layer section": (drop("transformer_layer_config"), "`transformer_layer_config` is missing"),
    "layer section without RoPE": (
        lambda config, tensors: config["transformer_layer_config"].pop("rope_parameters"),
        "`transformer_layer_config` lacks `rope_parameters`",
    ),
    "layer section without key heads": (
        lambda config, tensors: config["transformer_layer_config"].pop("num_key_value_heads"),
        "`transformer_layer_config` lacks `num_key_value_heads`",
    ),
    "layer section without epsilon": (
        lambda config, tensors: config["transformer_layer_config"].pop("rms_norm_eps"),
        "`transformer_layer_config` lacks `rms_norm_eps`",
    ),
    "no draft tokens": (
        nested("speculators_config", "proposal_methods", [{"speculative_tokens": 0}]),
        "`speculative_tokens` in `speculators_config` is 0, not a positive integer",
    ),
    "no proposal method": (nested("speculators_config", "proposal_methods", []), "`speculators_config` lacks"),
    "other kind": (put("speculators_model_type", "dflash"), "`speculators_model_type` is 'dflash'"),
    # tensors
    "missing fc": (drop("fc.weight"), "missing tensor `fc.weight`"),
    "missing lm_head": (drop("lm_head.weight"), "missing tensor `lm_head.weight`"),
    "missing norm": (drop("layers.0.hidden_norm.weight"), "missing tensor `layers.0.hidden_norm.weight`"),
    "extra bias": (tensor("fc.bias", lambda _: torch.zeros(H)), "extra tensor `fc.bias`"),
    "extra q_norm": (
        tensor("layers.0.self_attn.q_norm.weight", lambda _: torch.zeros(8)),
        "extra tensor `layers.0.self_attn.q_norm.weight`",
    ),
    "own embedding": (
        tensor("embed_tokens.weight", lambda _: torch.zeros(V, H)),
        "extra tensor `embed_tokens.weight`",
    ),
    "own embedding differs": (tensor("embed_tokens.weight", lambda _: torch.ones(V, H)), "largest difference"),
    "fc too narrow": (tensor("fc.weight", lambda old: old[:, :H]), "tensor `fc.weight` has shape (32, 32), expected"),
    "model. prefix": (
        lambda config, tensors: tensors.__setitem__("model.norm.weight", tensors.pop("norm.weight")),
        "tensor names begin with `model.`",
    ),
    "twice": (
        lambda config, tensors: tensors.__setitem__("midlayer.mlp.up_proj.weight", torch.zeros(48, H)),
        "stored twice",
    ),
    # values and dtypes
    "NaN": (tensor("fc.weight", poison), "tensor `fc.weight` holds NaN"),
    "infinite": (tensor("norm.weight", lambda old: old / 0), "tensor `norm.weight` holds NaN or infinite"),
    "head never filled": (
        tensor("lm_head.weight", torch.zeros_like),
        "tensor `lm_head.weight` holds nothing but zeros",
    ),
    "fc never filled": (tensor("fc.weight", torch.zeros_like), "tensor `fc.weight` holds nothing but zeros"),
    "8-bit integers": (tensor("fc.weight", lambda old: old.mul(9).to(torch.int8)), "has dtype torch.int8"),
    "8-bit floats": (tensor("fc.weight", lambda old: old.to(torch.float8_e4m3fn)), "has dtype torch.float8_e4m3fn"),
    "mixed dtypes": (tensor("norm.weight", lambda old: old.half()), "several dtypes"),
    "float64": (tensor("norm.weight", lambda old: old.double()), "has dtype torch.float64"),
    "other dtype declared": (put("dtype", "bfloat16"), "`dtype` says bfloat16 but the tensors are torch.float32"),
    "other torch_dtype declared": (put("torch_dtype", "bfloat16"), "`torch_dtype` says bfloat16 but the tensors are"),
    "d2t as int32": (tensor("d2t", lambda old: old.int()), "tensor `d2t` has dtype torch.int32"),
    "t2d as int64": (tensor("t2d", lambda old: old.long()), "tensor `t2d` has dtype torch.int64"),
    # vocabulary
    "no d2t": (drop("d2t"), "missing tensor `d2t`"),
    "no t2d": (drop("t2d"), "missing tensor `t2d`"),
    "d2t holds ids": (tensor("d2t", lambda _: torch.arange(20) * 5 + 1), "looks like token ids"),
    "d2t repeats": (tensor("d2t", lambda old: old - old), "`t2d` does not select"),
    "d2t not unique": (tensor("d2t", lambda old: -torch.arange(20)), "repeated"),
    "d2t not ascending": (tensor("d2t", swap), "`d2t` is not ascending"),
    "d2t too short": (tensor("d2t", lambda old: old[:19]), "tensor `d2t` has shape (19,)"),
    "t2d of other tokens": (tensor("t2d", lambda old: old.roll(1)), "`t2d` does not select"),
    "maps with the full vocabulary": (put("draft_vocab_size", V), "extra tensor `d2t`"),
}


@pytest.mark.parametrize("name", BREAKS)
def test_break_is_named(good, policy, tmp_path, name):
    change, expected = BREAKS[name]
    found = problems(messages(good, policy, tmp_path, change))
    assert any(expected in message for message in found), found


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (put("norm_before_residual", True), "not SGLang"),
        (put("architectures", ["Eagle3DraftModel"]), "SGLang knows only"),
        (put("rope_theta", 5e5), "`rope_theta` is 500000.0, the policy's 10000.0"),
    ],
)
def test_notes_are_not_problems(good, policy, tmp_path, change, expected):
    def both_thetas(config, tensors):
        change(config, tensors)
        theta = config["rope_theta"]
        put("rope_parameters", {"rope_type": "default", "rope_theta": theta})(config, tensors)

    found = messages(good, policy, tmp_path, both_thetas)
    assert problems(found) == []
    assert any(message.startswith("note: ") and expected in message for message in found), found


def test_second_norm_of_later_layers(policy, tmp_path):
    draft = Eagle3DraftModel(Eagle3DraftConfig.from_policy(policy.config, num_hidden_layers=2))
    draft.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({**tensors, "layers.1.hidden_norm.weight": torch.zeros(H)}, tmp_path / "model.safetensors")
    assert "differs from `layers.1.input_layernorm.weight`" in " ".join(problems(validate_draft(tmp_path, policy)))
    del tensors["layers.1.hidden_norm.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    assert problems(validate_draft(tmp_path)) == ["missing tensor `layers.1.hidden_norm.weight`"]


def test_values_beyond_the_policys_dtype_are_named(good, policy, tmp_path):
    half = copy.deepcopy(policy).half()
    found = problems(messages(good, half, tmp_path, tensor("norm.weight", lambda old: old * 1e5)))
    assert found == [
        "tensor `norm.weight` holds values that are infinite in torch.float16, which servers run the draft in"
    ]


@pytest.mark.parametrize("key", ["transformer_layer_config", "speculators_config", "eagle_config", "rope_parameters"])
def test_sections_of_another_kind(good, policy, tmp_path, key):
    found = messages(good, policy, tmp_path, lambda config, tensors: config.__setitem__(key, "text"))
    assert f"`{key}` in the draft's config.json must be an object" in found[0]


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("hidden_size", "abc", "a whole number"),
        ("max_position_embeddings", [], "a whole number"),
        ("target_num_hidden_layers", {}, "a whole number"),
        ("architectures", -3, "a list of names"),
    ],
)
def test_values_of_another_kind(good, policy, tmp_path, key, value, words):
    found = messages(good, policy, tmp_path, lambda config, tensors: config.__setitem__(key, value))
    assert f"`{key}` in the draft's config.json must be {words}" in found[0]
    with pytest.raises(ValueError, match=f"`{key}`.*must be {words}"):
        Eagle3DraftModel.from_pretrained(tmp_path, policy=policy)


def test_unknown_activation_is_named(good, policy, tmp_path):
    def change(config, tensors):
        config["hidden_act"] = config["transformer_layer_config"]["hidden_act"] = "brelu"

    messages(good, policy, tmp_path, change)
    with pytest.raises(ValueError, match="`hidden_act` 'brelu' is no activation"):
        Eagle3DraftModel.from_pretrained(tmp_path, policy=policy)


def test_policy_may_be_a_config(good, policy, tmp_path):
    assert messages(good, policy.config, tmp_path, lambda config, tensors: None) == []


def test_head_equal_to_the_policys_is_noted(tmp_path, policy):
    draft = Eagle3DraftModel(Eagle3DraftConfig.from_policy(policy.config))
    draft.save_pretrained(tmp_path)
    assert validate_draft(tmp_path, policy) == []
    draft.lm_head.weight.data.copy_(policy.lm_head.weight)
    draft.save_pretrained(tmp_path)
    found = validate_draft(tmp_path, policy)
    assert ["`lm_head` equals the policy's" in message for message in found] == [True]
    assert problems(found) == []


def test_every_number_of_rope_is_compared_with_the_policys(good, tmp_path, policy):
    def scaled(config, tensors):
        rope = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
        put("rope_parameters", rope)(config, tensors)
        put("rope_scaling", rope)(config, tensors)

    found = messages(good, policy, tmp_path, scaled)
    assert ["`rope_parameters.factor` is 2.0" in message for message in found] == [True, False]
    assert "`rope_type` is 'linear'" in found[1]
