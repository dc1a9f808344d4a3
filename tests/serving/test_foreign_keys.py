"""Keys of configs that others wrote: read, neutral, without effect, or refused by name; and tensors that decide."""

import json

import pytest
import torch
from checkpoints import D, V, flat_config, flat_tensors, speculators_config, write
from tiny import tiny_policy

from trl_codraft import Eagle3DraftModel, validate_draft
from trl_codraft.cli import main
from trl_codraft.modeling.disk import foreign_keys
from trl_codraft.modeling.naming import few
from trl_codraft.serving.validation import problems


# Key: values that mean another draft, values that mean this one.
KEYS = {
    "qkv_bias": ([True], [False]),
    "use_bias": ([True], [False]),
    "use_qk_norm": ([True], [False]),
    "qk_norm": ([True, "per_head"], [False]),
    "partial_rotary_factor": ([0.5, True], [1.0, 1]),
    "rotary_pct": ([0.25], [1.0]),
    "rope_interleave": ([True], [False]),
    "position_embedding_type": (["absolute"], ["rope"]),
    "alibi": ([True], [False]),
    "use_rope": ([False], [True]),
    "no_rope_layers": ([[1]], [[]]),
    "no_rope_layer_interval": ([4], [0]),
    "attention_chunk_size": ([8192], []),
    "sliding_window": ([512], []),
    "layer_types": ([["sliding_attention"], ["linear_attention"]], [["full_attention"], []]),
    "is_causal": ([False], [True]),
    "use_bidirectional_attention": ([True], [False]),
    "is_encoder_decoder": ([True], [False]),
    "attn_logit_softcapping": ([50.0], [0]),
    "final_logit_softcapping": ([30.0], []),
    "query_pre_attn_scalar": ([2 * D], [D]),
    "attention_multiplier": ([1.0], [D**-0.5]),
    "residual_multiplier": ([0.22], [1.0]),
    "embedding_multiplier": ([12.0], [1]),
    "logits_scaling": ([8.0], [1.0]),
    "scale_emb": ([12], [1]),
    "scale_depth": ([1.4], []),
    "num_experts": ([128], [0]),
    "num_local_experts": ([16], [0]),
    "n_routed_experts": ([64], []),
    "kv_lora_rank": ([512], [0]),
    "hidden_activation": (["gelu_pytorch_tanh"], ["silu"]),
    "quantization_config": ([{"quant_method": "fp8"}], [{}]),
    "pruned_heads": ([{"0": [1]}], [{}]),
    "additional_fc": ([True], [False]),
    "dflash_config": ([{"block_size": 16}], []),
    # Of no table: only null says nothing.
    "norm_eps": ([1e-5, 0, False, "x"], []),
    "block_size": ([16], []),
    "a_new_feature": ([True, False, 0, [], {"on": True}], []),
}
EAGLE_KEYS = {
    "use_aux_hidden_state": ([False], [True]),
    "use_input_layernorm_in_first_layer": ([False], [True]),
    "use_last_layernorm": ([False], [True]),
    "use_mtp_layernorm": ([True], [False]),
    "next_layer_regular": ([False], [True]),
    "parallel_draft_step": ([4], [1]),
    "layer_ids": ([[1, 3, 4]], []),
}
ROPE_KEYS = {
    "partial_rotary_factor": ([0.5], [1.0]),
    "mrope_section": ([[2, 1, 1]], [[]]),
    "mrope_interleaved": ([True], [False]),
    "unheard_of": ([1], []),
}
ROPE = {"rope_type": "default", "rope_theta": 10000.0}


def places(key, value):
    """The same key in every form of the file."""
    nested = speculators_config()["transformer_layer_config"] | {key: value}
    yield "flat", flat_config() | {key: value}
    yield "speculators", speculators_config(transformer_layer_config=nested)
    yield "hybrid", flat_config() | speculators_config() | flat_config() | {key: value}


def eagle_places(key, value):
    yield "flat", flat_config(eagle_config={key: value})
    yield "speculators", speculators_config(eagle_config={key: value})


def rope_places(key, value):
    yield "flat", flat_config(rope_parameters=ROPE | {key: value})
    yield "old", flat_config(rope_parameters=None, rope_scaling={"rope_type": "default", key: value})
    nested = speculators_config()["transformer_layer_config"] | {"rope_parameters": ROPE | {key: value}}
    yield "speculators", speculators_config(transformer_layer_config=nested)


CASES = [
    *((places, key, values) for key, values in KEYS.items()),
    *((eagle_places, key, values) for key, values in EAGLE_KEYS.items()),
    *((rope_places, key, values) for key, values in ROPE_KEYS.items()),
]


@pytest.mark.parametrize(("where", "key", "values"), CASES, ids=[f"{case[0].__name__}-{case[1]}" for case in CASES])
def test_a_key_that_means_another_draft_is_refused_in_every_form(tmp_path, policy, where, key, values):
    for index, value in enumerate(values[0]):
        for form, config in where(key, value):
            layer = "layers.0" if form == "speculators" else "midlayer"
            folder = write(tmp_path / f"{form}{index}", config, flat_tensors(layer))
            with pytest.raises(ValueError, match=f"`{key}") as error:
                Eagle3DraftModel.from_pretrained(folder, policy=policy)
            assert len(str(error.value)) < 700
            assert any(f"`{key}" in message for message in problems(validate_draft(folder))), (form, value)


@pytest.mark.parametrize(("where", "key", "values"), CASES, ids=[f"{case[0].__name__}-{case[1]}" for case in CASES])
def test_a_key_that_means_this_draft_changes_nothing(tmp_path, policy, where, key, values):
    plain = Eagle3DraftModel.from_pretrained(write(tmp_path / "plain", flat_config(), flat_tensors()), policy=policy)
    for index, value in enumerate([None, *values[1]]):
        for form, config in where(key, value):
            layer = "layers.0" if form == "speculators" else "midlayer"
            folder = write(tmp_path / f"{form}{index}", config, flat_tensors(layer))
            draft = Eagle3DraftModel.from_pretrained(folder, policy=policy)
            # The one number that speculators' files leave to a default.
            draft.config.max_position_embeddings = plain.config.max_position_embeddings
            assert draft.config.to_dict() == plain.config.to_dict()
            assert not any(f"`{key}" in message for message in validate_draft(folder)), (form, value)


def test_no_key_stands_in_two_tables():
    tables = [foreign_keys.READ, foreign_keys.NEUTRAL.keys(), foreign_keys.WITHOUT_EFFECT.keys()]
    assert sum(map(len, tables)) == len(set().union(*tables))


# As published: what each project writes beside what is read.
PUBLISHED = {
    "specforge": {
        "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.02,
        "max_window_layers": 48, "pretraining_tp": 1, "rope_scaling": None, "sliding_window": None,
        "use_sliding_window": False, "use_cache": True,
        "transformers_version": "4.57.0", "target_model_type": "gemma3_text", "additional_fc": False,
        "reuse_target_lm_head": True,
    },
    "specforge-window-off": {"sliding_window": 512, "use_sliding_window": False},
    "modelopt": {
        "pad_token_id": 0,
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": [1, 3, 4], "use_aux_hidden_state": True, "next_layer_regular": True,
            "use_input_layernorm_in_first_layer": True, "use_last_layernorm": True, "use_mtp_layernorm": False,
            "parallel_draft_step": 1, "parallel_draft_heads_num_layers": 1,
        },
    },
    "transformers-4": {
        "_name_or_path": "x", "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}, "temperature": 1.0,
        "top_k": 50, "is_decoder": False, "is_encoder_decoder": False, "chunk_size_feed_forward": 0,
        "torchscript": False, "add_cross_attention": False, "pruned_heads": {}, "tie_encoder_decoder": False,
        "use_bfloat16": False,
    },
    "a-policys-experts-left-over": {"num_experts": 0, "num_experts_per_tok": 8, "moe_intermediate_size": 768},
}  # fmt: skip


@pytest.mark.parametrize("extra", PUBLISHED.values(), ids=PUBLISHED)
def test_files_as_published_are_read(tmp_path, policy, extra):
    draft = Eagle3DraftModel.from_pretrained(write(tmp_path, flat_config() | extra, flat_tensors()), policy=policy)
    assert draft.config.tap_layers == [2, 4, 5]
    assert torch.equal(draft.fc.weight, flat_tensors()["fc.weight"])


def test_the_file_of_speculators_is_read(tmp_path, policy):
    config = speculators_config(
        auto_map={"": "eagle3.Eagle3SpeculatorConfig"}, speculators_version="0.1.0", has_no_defaults_at_init=False,
        transformers_version="4.55.0", torch_dtype="float32", embed_requires_grad=False, enable_sp_ulysses=False,
    )  # fmt: skip
    draft = Eagle3DraftModel.from_pretrained(write(tmp_path, config, flat_tensors("layers.0")), policy=policy)
    assert torch.equal(draft.norm.weight, flat_tensors()["norm.weight"])


def test_what_this_package_writes_has_no_unread_key(policy, good):
    assert list(foreign_keys.unread_keys(good[0])) == []


class TestLayersOnDisk:
    @pytest.mark.parametrize("form", [flat_config, speculators_config], ids=["flat", "speculators"])
    def test_tensors_decide_where_the_config_holds_the_policys_count(self, tmp_path, policy, form):
        config = form()
        config.get("transformer_layer_config", config)["num_hidden_layers"] = 40
        folder = write(tmp_path, config, flat_tensors("midlayer" if form is flat_config else "layers.0"))
        assert Eagle3DraftModel.from_pretrained(folder, policy=policy).config.num_hidden_layers == 1
        found = problems(validate_draft(folder, policy))
        assert form is speculators_config or any("is 40 but the tensors are of 1 layer" in line for line in found)
        assert sum(map(len, found)) < 3000

    def test_export_writes_the_count_of_the_tensors(self, tmp_path, policy):
        policy.save_pretrained(tmp_path / "policy")
        draft = str(write(tmp_path / "draft", flat_config(num_hidden_layers=40), flat_tensors()))
        assert main(["export", draft, str(tmp_path / "out"), "--policy", str(tmp_path / "policy")]) == 0
        assert json.loads((tmp_path / "out" / "config.json").read_text())["num_hidden_layers"] == 1

    def test_a_gap_between_layers_is_named(self, tmp_path, policy):
        tensors = flat_tensors() | {"layers.40.input_layernorm.weight": torch.ones(32)}
        with pytest.raises(ValueError, match="layers 0, 40: layers count from 0 without a gap"):
            Eagle3DraftModel.from_pretrained(write(tmp_path, flat_config(), tensors), policy=policy)
        assert any("without a gap" in line for line in validate_draft(tmp_path))


MANY = {f"block.{index}.weight": torch.ones(1) for index in range(400)}
LONG = {
    "extra": (flat_config(), flat_tensors() | MANY),
    "missing": (flat_config(), {"fc.weight": torch.ones(32, 96)}),
    "misshaped": (flat_config(), {name: torch.ones(3) for name in flat_tensors()}),
    "biases": (flat_config(), flat_tensors() | {f"layers.0.{index}.bias": torch.ones(1) for index in range(400)}),
    "NaN": (flat_config(), {name: value * float("nan") for name, value in flat_tensors().items()}),
    "quantised": (flat_config(), {name: value.to(torch.int8) for name, value in flat_tensors().items()}),
    "unknown keys": (flat_config() | {f"key_{index}": index for index in range(400)}, flat_tensors()),
    "long value": (flat_config() | {"a_key": list(range(4000))}, flat_tensors()),
    "long list of taps": (flat_config(eagle_aux_hidden_state_layer_ids=["x"] * 4000), flat_tensors()),
    "long name list": (flat_config(architectures=[1] * 4000), flat_tensors()),
}


@pytest.mark.parametrize(("config", "tensors"), LONG.values(), ids=LONG)
def test_messages_name_a_few_and_count_the_rest(tmp_path, policy, config, tensors):
    folder = write(tmp_path, config, tensors)
    found = problems(validate_draft(folder, policy))
    assert found
    assert max(map(len, found)) < 800
    assert len(found) < 20
    if config is not LONG["NaN"][0]:
        with pytest.raises(ValueError, match=".") as error:
            Eagle3DraftModel.from_pretrained(folder, policy=policy)
        assert len(str(error.value)) < 1500


def test_few():
    assert few([]) == ""
    assert few("abcd") == "a, b, c, d"
    assert few(range(44)) == "0, 1, 2, 3 and 40 more"
    assert few("abc", "; ", limit=1) == "a and 2 more"


# Key: a value that means another draft where it stands, though it is not read there.
OF_THE_TOP = {
    "norm_before_residual": True, "norm_before_fc": True, "fc_norm": True, "norm_output": True, "use_aux_norm": True,
    "eagle_aux_hidden_state_layer_ids": [1, 3, 5], "draft_vocab_size": 50, "target_hidden_size": 64,
    "parallel_drafting": True, "mask_token_id": 5, "eagle_config": {"use_aux_hidden_state": False},
    "speculators_config": {"algorithm": "peagle"}, "speculators_model_type": "peagle",
}  # fmt: skip
OF_THE_LAYER = {
    "attention_bias": True, "mlp_bias": True, "bias": True, "hidden_act": "gelu",
    "rms_norm_eps": 1e-2, "rope_theta": 5.0, "rope_scaling": {"rope_type": "linear", "factor": 2.0},
}  # fmt: skip


class TestKeysWhereNobodyReadsThem:
    def refused(self, folder, policy, key):
        with pytest.raises(ValueError, match=f"`{key}`"):
            Eagle3DraftModel.from_pretrained(folder, policy=policy)
        assert any(f"`{key}`" in message for message in problems(validate_draft(folder)))

    @pytest.mark.parametrize("key", OF_THE_TOP)
    def test_of_the_top_level_in_the_layer_section(self, tmp_path, policy, key):
        for form, config in (("speculators", speculators_config()), ("hybrid", flat_config() | speculators_config())):
            config["transformer_layer_config"][key] = OF_THE_TOP[key]
            self.refused(write(tmp_path / form, config, flat_tensors("layers.0")), policy, key)

    @pytest.mark.parametrize("key", OF_THE_LAYER)
    def test_of_the_layer_section_at_the_top_level(self, tmp_path, policy, key):
        config = speculators_config(**{key: OF_THE_LAYER[key]})
        key = {"rope_scaling": "rope_type"}.get(key, key)
        self.refused(write(tmp_path, config, flat_tensors("layers.0")), policy, key)

    @pytest.mark.parametrize("key", [*OF_THE_TOP, *OF_THE_LAYER])
    def test_in_the_section_of_servers(self, tmp_path, policy, key):
        config = speculators_config()
        config["speculators_config"][key] = (OF_THE_TOP | OF_THE_LAYER)[key]
        self.refused(write(tmp_path, config, flat_tensors("layers.0")), policy, key)

    def test_the_same_value_in_both_places_is_read(self, tmp_path, policy):
        config = flat_config() | speculators_config() | flat_config()
        config["transformer_layer_config"] |= {key: config[key] for key in OF_THE_TOP if key in config}
        config["transformer_layer_config"].pop("speculators_config")
        config |= {"hidden_act": "silu", "attention_bias": False, "rope_theta": 1e4}
        folder = write(tmp_path, config, flat_tensors())
        assert Eagle3DraftModel.from_pretrained(folder, policy=policy).config.tap_layers == [2, 4, 5]

    def test_an_algorithm_that_is_not_eagle3(self, tmp_path, policy):
        config = speculators_config(speculators_config={"algorithm": "dflash"})
        self.refused(write(tmp_path, config, flat_tensors("layers.0")), policy, "algorithm")


class TestTwoValues:
    @pytest.mark.parametrize(
        ("top", "inner"),
        [
            ({"rms_norm_eps": 1e-5}, {"rms_norm_eps": 1e-6}),
            ({"rope_theta": 5e5}, {}),
            ({"hidden_act": "gelu"}, {"hidden_act": "silu"}),
        ],
        ids=["epsilon", "theta", "activation"],
    )
    def test_a_file_that_says_two_things_is_refused(self, tmp_path, policy, top, inner):
        config = speculators_config(**top)
        config["transformer_layer_config"] |= {"rope_theta": 10000.0} | inner
        folder = write(tmp_path, config, flat_tensors("layers.0"))
        with pytest.raises(ValueError, match=f"`{next(iter(top))}` is .* but .* in `transformer_layer_config`"):
            Eagle3DraftModel.from_pretrained(folder, policy=policy)

    @pytest.mark.parametrize(
        ("config", "message"),
        [
            ({"rope_theta": 5e5}, "two values of `rope_theta`"),
            ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "two things of RoPE"),
            ({"num_aux_hidden_states": 4}, "`num_aux_hidden_states` in the draft's config.json is 4"),
        ],
    )
    def test_spellings_that_differ_are_refused(self, tmp_path, policy, config, message):
        with pytest.raises(ValueError, match=message):
            Eagle3DraftModel.from_pretrained(write(tmp_path, flat_config(**config), flat_tensors()), policy=policy)


def test_the_factor_of_the_logits_is_read_from_the_layer_section(tmp_path, policy):
    config = speculators_config()
    config["transformer_layer_config"]["logit_scale"] = 0.5
    folder = write(tmp_path, config, flat_tensors("layers.0"))
    draft = Eagle3DraftModel.from_pretrained(folder, policy=policy)
    assert torch.equal(draft.lm_head.weight, flat_tensors()["lm_head.weight"] * 0.5)
    assert any("`logit_scale` is 0.5" in message for message in validate_draft(folder))


def test_a_tied_head_is_not_taken_for_the_head_of_an_untied_policy(tmp_path):
    tensors = flat_tensors()
    del tensors["lm_head.weight"]
    folder = write(tmp_path, flat_config(tie_word_embeddings=True), tensors)
    with pytest.raises(ValueError, match="The draft's head is the embedding"):
        Eagle3DraftModel.from_pretrained(folder, policy=tiny_policy(num_hidden_layers=8))
    tied = tiny_policy(num_hidden_layers=8, tie_word_embeddings=True)
    assert Eagle3DraftModel.from_pretrained(folder, policy=tied).lm_head.weight.shape == (V, 32)
