"""What we write: complete, explicit, exact, and whole or absent after a crash."""

import json
import os

import pytest
import torch
from checkpoints import H, V
from safetensors.torch import load_file
from tiny import tiny_policy
from transformers import AutoConfig

from trl_codraft.modeling.configuration_eagle3 import Eagle3DraftConfig
from trl_codraft.modeling.disk import folder as draft_folder
from trl_codraft.modeling.modeling_eagle3 import Eagle3DraftModel
from trl_codraft.serving.validation import problems, validate_draft


LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 64}
VARIANTS = {
    "plain": {},
    "fc_norm": {"fc_norm": True},
    "norm_output": {"norm_output": True},
    "norm_before_residual": {"norm_before_residual": True},
    "norm_before_fc": {"norm_before_fc": True},
    "reduced": {"draft_vocab_size": 20},
    "two_layers": {"num_hidden_layers": 2},
    "other_taps": {"tap_layers": [0, 8]},
    "llama3": {"rope_parameters": LLAMA3},
    "yarn": {"rope_parameters": YARN},
}


def random_draft(policy, **overrides):
    draft = Eagle3DraftModel(Eagle3DraftConfig.from_policy(policy.config, **overrides))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    if draft.config.draft_vocab_size < V:
        draft.set_vocab(torch.arange(draft.config.draft_vocab_size) * 3)
    return draft


def written(folder):
    return json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")


@pytest.mark.parametrize("name", VARIANTS)
def test_round_trip_is_exact_and_valid(tmp_path, policy, name):
    draft = random_draft(policy, **VARIANTS[name])
    draft.save_pretrained(tmp_path / "draft")
    again = Eagle3DraftModel.from_pretrained(tmp_path / "draft", policy=policy)
    state = draft.state_dict()
    assert set(again.state_dict()) == set(state)
    assert all(torch.equal(tensor, state[name]) for name, tensor in again.state_dict().items())
    assert again.config.to_dict() == draft.config.to_dict()
    assert problems(validate_draft(tmp_path / "draft", policy)) == []


@pytest.mark.parametrize("name", VARIANTS)
def test_loading_needs_no_policy(tmp_path, policy, name):
    draft = random_draft(policy, **VARIANTS[name])
    draft.save_pretrained(tmp_path / "draft")
    assert Eagle3DraftModel.from_pretrained(tmp_path / "draft").config.to_dict() == draft.config.to_dict()


def test_names_and_shapes_on_disk(tmp_path, policy):
    random_draft(policy, draft_vocab_size=20, fc_norm=True).save_pretrained(tmp_path / "draft")
    tensors = written(tmp_path / "draft")[1]
    layer = "layers.0"
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == {
        "fc.weight": (H, 3 * H),
        "fc_norm.0.weight": (H,),
        "fc_norm.1.weight": (H,),
        "fc_norm.2.weight": (H,),
        f"{layer}.hidden_norm.weight": (H,),
        f"{layer}.input_layernorm.weight": (H,),
        f"{layer}.post_attention_layernorm.weight": (H,),
        f"{layer}.self_attn.q_proj.weight": (32, 2 * H),
        f"{layer}.self_attn.k_proj.weight": (16, 2 * H),
        f"{layer}.self_attn.v_proj.weight": (16, 2 * H),
        f"{layer}.self_attn.o_proj.weight": (H, 32),
        f"{layer}.mlp.gate_proj.weight": (48, H),
        f"{layer}.mlp.up_proj.weight": (48, H),
        f"{layer}.mlp.down_proj.weight": (H, 48),
        "norm.weight": (H,),
        "lm_head.weight": (20, H),
        "d2t": (20,),
        "t2d": (V,),
    }
    assert (torch.arange(20) + tensors["d2t"]).tolist() == list(range(0, 60, 3))
    assert tensors["t2d"].nonzero().flatten().tolist() == list(range(0, 60, 3))


def test_full_vocabulary_has_no_maps(tmp_path, policy):
    random_draft(policy).save_pretrained(tmp_path / "draft")
    assert not {"d2t", "t2d", "embed_tokens.weight"} & set(written(tmp_path / "draft")[1])


def test_every_key_a_server_reads_is_explicit(tmp_path):
    tied = tiny_policy(num_hidden_layers=8, tie_word_embeddings=True, rope_parameters=LLAMA3)
    random_draft(tied, norm_output=True).save_pretrained(
        tmp_path / "draft", base_model="me/policy", base_architectures=["LlamaForCausalLM"], num_draft_tokens=5
    )
    config = written(tmp_path / "draft")[0]
    expected = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "head_dim": 8,
        "rope_theta": 5e5,
        "rope_parameters": LLAMA3,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "draft_vocab_size": V,
        "target_hidden_size": H,
        "max_position_embeddings": 256,
        "norm_before_residual": False,
        "norm_before_fc": False,
        "fc_norm": False,
        "norm_output": True,
        "speculators_model_type": "eagle3",
    }
    assert {key: config[key] for key in expected} == expected
    assert config["speculators_config"]["verifier"] == {
        "name_or_path": "me/policy",
        "architectures": ["LlamaForCausalLM"],
    }
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 5


@pytest.mark.parametrize("rope", [LLAMA3, YARN])
def test_transformers_reads_the_layer_as_meant(tmp_path, policy, rope):
    """Through the flat keys and through `transformer_layer_config`: what the servers hand to their Llama block."""
    random_draft(policy, rope_parameters=rope).save_pretrained(tmp_path / "draft")
    section = dict(written(tmp_path / "draft")[0]["transformer_layer_config"])
    for config in (AutoConfig.from_pretrained(tmp_path / "draft"), AutoConfig.for_model(**section)):
        assert {key: value for key, value in config.rope_parameters.items() if key in rope} == rope
        assert (config.head_dim, config.num_hidden_layers, config.tie_word_embeddings) == (8, 1, False)


@pytest.mark.parametrize(
    ("layers", "taps", "nested"),
    [
        (8, [2, 4, 5], None),
        (8, [1, 4, 6], [0, 3, 5]),
        (4, None, [0, 1, 2]),
        (8, [2, 8], [1, 7]),
    ],
)
def test_tap_numberings(tmp_path, layers, taps, nested):
    """Default taps: top level only. Others, and those of policies too small for the servers' rule: both."""
    overrides = {} if taps is None else {"tap_layers": taps}
    draft = random_draft(tiny_policy(num_hidden_layers=layers), **overrides)
    draft.save_pretrained(tmp_path / "draft")
    config = written(tmp_path / "draft")[0]
    assert config["eagle_aux_hidden_state_layer_ids"] == draft.config.tap_layers
    assert config.get("eagle_config", {}).get("eagle_aux_hidden_state_layer_ids") == nested
    count = len(draft.config.tap_layers)
    assert config.get("num_aux_hidden_states", 3) == count
    # vLLM looks here when the speculators keys are present.
    assert config["transformer_layer_config"].get("num_aux_hidden_states", 3) == count


def test_later_layers_are_normed_in_sglang_too(tmp_path, policy):
    random_draft(policy, num_hidden_layers=2).save_pretrained(tmp_path / "draft")
    tensors = written(tmp_path / "draft")[1]
    assert torch.equal(tensors["layers.1.hidden_norm.weight"], tensors["layers.1.input_layernorm.weight"])


def test_dtype(tmp_path, policy):
    draft = random_draft(policy, draft_vocab_size=20)
    draft.save_pretrained(tmp_path / "draft", dtype=torch.bfloat16)
    config, tensors = written(tmp_path / "draft")
    assert (config["dtype"], config["torch_dtype"]) == ("bfloat16", "bfloat16")
    maps = {"d2t": torch.int64, "t2d": torch.bool}
    assert all(tensor.dtype == maps.get(name, torch.bfloat16) for name, tensor in tensors.items())
    assert draft.fc.weight.dtype == torch.float32


def test_readable_by_other_users(tmp_path, policy):
    random_draft(policy).save_pretrained(tmp_path / "draft")
    modes = {os.stat(tmp_path / "draft" / name).st_mode & 0o777 for name in ("config.json", "model.safetensors")}
    assert len(modes) == 1


class TestCrash:
    def test_config_comes_last_and_goes_first(self, tmp_path, policy, monkeypatch):
        """At each file operation the folder holds no config, or a config with its own weights."""
        first, second = random_draft(policy), random_draft(policy, fc_norm=True)
        first.save_pretrained(tmp_path / "draft")
        replace, states = os.replace, []

        def spy(source, target):
            states.append(sorted(file.name for file in (tmp_path / "draft").iterdir()))
            replace(source, target)

        monkeypatch.setattr(draft_folder.os, "replace", spy)
        second.save_pretrained(tmp_path / "draft")
        assert states == [[], ["model.safetensors"]]
        assert problems(validate_draft(tmp_path / "draft", policy)) == []

    def test_interrupted_write_is_recognised(self, tmp_path, policy, monkeypatch):
        def full_disk(source, target):
            raise OSError("no space left")

        monkeypatch.setattr(draft_folder.os, "replace", full_disk)
        with pytest.raises(OSError, match="no space"):
            random_draft(policy).save_pretrained(tmp_path / "draft")
        with pytest.raises(ValueError, match="interrupted"):
            Eagle3DraftModel.from_pretrained(tmp_path / "draft")
        assert [file.name for file in tmp_path.iterdir()] == ["draft"]

    def test_older_weights_do_not_stay_behind(self, tmp_path, policy):
        folder = tmp_path / "draft"
        random_draft(policy).save_pretrained(folder)
        for name in ("pytorch_model.bin", "model.safetensors.index.json", "draft_state.pt"):
            (folder / name).write_text("old")
        random_draft(policy, fc_norm=True).save_pretrained(folder)
        assert sorted(file.name for file in folder.iterdir()) == ["config.json", "draft_state.pt", "model.safetensors"]
