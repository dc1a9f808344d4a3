"""Drafts that others wrote: read into the right place, or refused by name."""

import json

import pytest
import torch
from checkpoints import H, V, flat_config, flat_tensors, speculators_config, write
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors.torch import save_file
from tiny import tiny_policy

from trl_codraft.modeling.disk import folder as draft_folder
from trl_codraft.modeling.disk.tensors import check_fits_policy
from trl_codraft.modeling.modeling_eagle3 import Eagle3DraftModel
from trl_codraft.serving.validation import validate_draft


def load(folder, policy=None, **kwargs):
    return Eagle3DraftModel.from_pretrained(folder, policy=policy, **kwargs)


def assert_holds(draft, tensors, layer="midlayer"):
    """Every stored tensor sits under the module of its name."""
    state = draft.state_dict()
    for name, tensor in tensors.items():
        name = name.removeprefix("model.").replace(f"{layer}.", "layers.0.")
        assert torch.equal(state[name].to(tensor.dtype), tensor), name


@pytest.mark.parametrize("prefix", ["", "model."])
@pytest.mark.parametrize("layer", ["midlayer", "layers.0"])
@pytest.mark.parametrize("draft_vocab", [V, 20])
def test_flat_folder(tmp_path, policy, layer, prefix, draft_vocab):
    tensors = flat_tensors(layer, draft_vocab, prefix)
    draft = load(write(tmp_path, flat_config(draft_vocab_size=draft_vocab), tensors), policy)
    assert_holds(draft, tensors, layer)
    assert draft.target_ids.tolist() == (list(range(V)) if draft_vocab == V else list(range(1, 41, 2)))
    assert draft.config.tap_layers == [2, 4, 5]
    assert draft.fc.weight.dtype == torch.float32


def test_speculators_folder_with_defaults_left_out(tmp_path, policy):
    tensors = flat_tensors("layers.0")
    embed = policy.get_input_embeddings().weight.detach().clone()
    folder = write(tmp_path, speculators_config(), {**tensors, "embed_tokens.weight": embed})
    draft = load(folder, policy)
    assert_holds(draft, tensors, "layers.0")
    # Left out because it equals the default of transformers' LlamaConfig.
    assert draft.config.rms_norm_eps == 1e-6
    assert draft.config.target_hidden_size == H


def test_norm_before_residual_absent_is_read_as_vllm_reads_it(tmp_path, policy):
    flat = write(tmp_path / "flat", flat_config(norm_before_residual=None), flat_tensors())
    assert load(flat, policy).config.norm_before_residual is False
    other = write(tmp_path / "spec", speculators_config(norm_before_residual=None), flat_tensors("layers.0"))
    with pytest.warns(UserWarning, match="norm_before_residual"):
        assert load(other, policy).config.norm_before_residual is True


@pytest.mark.parametrize("flag", ["norm_before_residual", "norm_output"])
def test_flags_are_inherited(tmp_path, policy, flag):
    assert getattr(load(write(tmp_path, flat_config(**{flag: True}), flat_tensors()), policy).config, flag) is True


def test_norm_before_fc_is_read_from_either_place(tmp_path, policy):
    tensors = flat_tensors() | {"input_norm.weight": torch.rand(3 * H)}
    top = write(tmp_path / "top", flat_config(norm_before_fc=True), tensors)
    nested = write(
        tmp_path / "nested", flat_config(norm_before_fc=None, eagle_config={"norm_before_fc": True}), tensors
    )
    for folder in (top, nested):
        assert torch.equal(load(folder, policy).input_norm.weight, tensors["input_norm.weight"])


def test_sglang_legacy_aux_norm_names(tmp_path, policy):
    norms = {f"aux_norm_{level}.weight": torch.rand(H) for level in ("low", "mid", "high")}
    folder = write(tmp_path, flat_config(fc_norm=None, use_aux_norm=True), flat_tensors() | norms)
    draft = load(folder, policy)
    assert [torch.equal(norm.weight, norms[key]) for norm, key in zip(draft.fc_norm, norms, strict=True)] == [True] * 3


class TestTapNumbering:
    def test_top_level_wins(self, tmp_path, policy):
        config = flat_config(
            eagle_aux_hidden_state_layer_ids=[1, 3, 6],
            eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 3, 6]},
        )
        assert load(write(tmp_path, config, flat_tensors()), policy).config.tap_layers == [1, 3, 6]

    def test_nested_only_counts_layer_outputs(self, tmp_path, policy):
        config = flat_config(
            eagle_aux_hidden_state_layer_ids=None, eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 3, 4]}
        )
        assert load(write(tmp_path, config, flat_tensors()), policy).config.tap_layers == [2, 4, 5]

    def test_absent_means_the_default_of_the_policy(self, tmp_path, policy):
        folder = write(tmp_path, flat_config(eagle_aux_hidden_state_layer_ids=None), flat_tensors())
        assert load(folder, policy).config.tap_layers == [2, 4, 5]
        with pytest.raises(ValueError, match="names no tap layers .* pass `policy=`"):
            load(folder)

    def test_beyond_the_policy_is_refused(self, tmp_path, policy):
        folder = write(tmp_path, flat_config(eagle_aux_hidden_state_layer_ids=[2, 4, 9]), flat_tensors())
        with pytest.raises(ValueError, match="9"):
            load(folder, policy)


class TestRope:
    def test_legacy_spelling(self, tmp_path, policy):
        scaling = {
            "type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
        config = flat_config(rope_parameters=None, rope_theta=5e5, rope_scaling=scaling)
        rope = load(write(tmp_path, config, flat_tensors()), policy).config.rope_parameters
        del scaling["type"]
        assert rope == {**scaling, "rope_type": "llama3", "rope_theta": 5e5}

    def test_absent_is_what_servers_take(self, tmp_path, policy):
        config = flat_config(rope_parameters=None, rope_theta=None)
        rope = load(write(tmp_path, config, flat_tensors()), policy).config.rope_parameters
        assert rope == {"rope_type": "default", "rope_theta": 10000.0}

    def test_short_context_is_raised_to_the_policys(self, tmp_path, policy):
        folder = write(tmp_path, flat_config(max_position_embeddings=16), flat_tensors())
        assert load(folder, policy).config.max_position_embeddings == 256
        assert load(folder).config.max_position_embeddings == 16


class TestFiles:
    def test_sharded_safetensors(self, tmp_path, policy):
        tensors = flat_tensors()
        folder = write(tmp_path, flat_config(), {})
        (folder / "model.safetensors").unlink()
        names = sorted(tensors)
        shards = {"model-00001-of-00002.safetensors": names[:5], "model-00002-of-00002.safetensors": names[5:]}
        for shard, part in shards.items():
            save_file({name: tensors[name] for name in part}, folder / shard)
        index = {"weight_map": {name: shard for shard, part in shards.items() for name in part}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        assert_holds(load(folder, policy), tensors)
        (folder / "model-00002-of-00002.safetensors").unlink()
        with pytest.raises(ValueError, match="model-00002-of-00002.safetensors"):
            load(folder, policy)

    def test_pytorch_bin(self, tmp_path, policy):
        tensors = flat_tensors()
        folder = write(tmp_path, flat_config(), {})
        (folder / "model.safetensors").unlink()
        torch.save(tensors, folder / "pytorch_model.bin")
        assert_holds(load(folder, policy), tensors)

    def test_no_weights_no_config_no_folder(self, tmp_path, policy):
        folder = write(tmp_path / "a", flat_config(), {})
        (folder / "model.safetensors").unlink()
        with pytest.raises(ValueError, match="holds no weights"):
            load(folder, policy)
        (folder / "config.json").write_text("{")
        with pytest.raises(ValueError, match="not valid JSON"):
            load(folder, policy)
        (folder / "config.json").unlink()
        with pytest.raises(ValueError, match="holds no config.json"):
            load(folder, policy)
        with pytest.raises(ValueError, match="no draft folder at"):
            load(str(tmp_path / "nowhere"), policy)

    def test_hub_repository(self, tmp_path, policy, monkeypatch):
        write(tmp_path / "draft", flat_config(), flat_tensors())
        calls = []

        def snapshot_download(repo_id, **kwargs):
            calls.append((repo_id, kwargs))
            return str(tmp_path)

        monkeypatch.setattr(draft_folder, "snapshot_download", snapshot_download)
        draft = load("someone/some-draft", policy, subfolder="draft", revision="abc")
        assert_holds(draft, flat_tensors())
        ((repo_id, kwargs),) = calls
        assert (repo_id, kwargs["revision"]) == ("someone/some-draft", "abc")
        assert "draft/*.safetensors" in kwargs["allow_patterns"]


class TestEmbedding:
    def test_equal_to_the_policys_is_dropped(self, tmp_path, policy):
        embed = policy.get_input_embeddings().weight.detach().to(torch.bfloat16)
        tensors = {name: tensor.to(torch.bfloat16) for name, tensor in flat_tensors().items()}
        draft = load(write(tmp_path, flat_config(), {**tensors, "embed_tokens.weight": embed}), policy)
        assert not any("embed" in name for name in draft.state_dict())

    def test_rows_beyond_the_vocabulary_are_padding(self, tmp_path, policy):
        embed = torch.cat([policy.get_input_embeddings().weight.detach(), torch.ones(24, H)])
        load(write(tmp_path, flat_config(), {**flat_tensors(), "embed_tokens.weight": embed}), policy)
        embed[3, 4] += 0.25
        folder = write(tmp_path, flat_config(), {**flat_tensors(), "embed_tokens.weight": embed})
        with pytest.raises(ValueError, match=r"largest difference 2\.500e-01"):
            load(folder, policy)

    def test_different_is_refused_with_the_largest_difference(self, tmp_path, policy):
        embed = policy.get_input_embeddings().weight.detach().clone()
        embed[3, 4] += 0.25
        folder = write(tmp_path, flat_config(), {**flat_tensors(), "embed_tokens.weight": embed})
        with pytest.raises(ValueError, match=r"largest difference 2\.500e-01"):
            load(folder, policy)

    def test_without_policy_the_check_comes_later(self, tmp_path, policy):
        embed = policy.get_input_embeddings().weight.detach() + 1.0
        folder = write(tmp_path, flat_config(), {**flat_tensors(), "embed_tokens.weight": embed})
        with pytest.warns(UserWarning, match="check_fits_policy"):
            draft = load(folder)
        with pytest.raises(ValueError, match="largest difference 1.0"):
            check_fits_policy(draft, policy)


class TestVocabulary:
    def folder(self, tmp_path, **tensors):
        merged = {**flat_tensors(draft_vocab=20), **tensors}
        return write(
            tmp_path,
            flat_config(draft_vocab_size=20),
            {name: tensor for name, tensor in merged.items() if tensor is not None},
        )

    def test_t2d_alone_is_enough(self, tmp_path, policy):
        draft = load(self.folder(tmp_path, d2t=None), policy)
        assert draft.target_ids.tolist() == list(range(1, 41, 2))

    def test_d2t_wins_over_t2d(self, tmp_path, policy):
        draft = load(self.folder(tmp_path, d2t=torch.full((20,), 7)), policy)
        assert draft.target_ids.tolist() == list(range(7, 27))
        assert draft.t2d.nonzero().flatten().tolist() == list(range(7, 27))

    def test_other_order_moves_the_rows_of_the_head(self, tmp_path, policy):
        ids = torch.arange(20).flip(0) * 2 + 1
        folder = self.folder(tmp_path, d2t=ids - torch.arange(20))
        draft = load(folder, policy)
        assert draft.target_ids.tolist() == list(range(1, 41, 2))
        assert torch.equal(draft.lm_head.weight, flat_tensors(draft_vocab=20)["lm_head.weight"].flip(0))

    @pytest.mark.parametrize(
        ("d2t", "message"),
        [
            (torch.arange(20) * 5 + 1, "outside 0..103.*looks like token ids"),
            (-torch.arange(20), "repeated"),
            (torch.full((20,), -1), "1 of them outside"),
            (torch.zeros(19, dtype=torch.int64), r"shape \(19,\)"),
        ],
    )
    def test_wrong_offsets_are_refused(self, tmp_path, policy, d2t, message):
        with pytest.raises(ValueError, match=message):
            load(self.folder(tmp_path, d2t=d2t), policy)

    def test_no_map_at_all_is_refused(self, tmp_path, policy):
        with pytest.raises(ValueError, match="`d2t` is missing"):
            load(self.folder(tmp_path, d2t=None, t2d=None), policy)


class TestRefusals:
    @pytest.mark.parametrize(
        ("config", "tensors", "message"),
        [
            ({"attention_bias": True}, {}, "biases"),
            ({}, {"midlayer.self_attn.q_proj.bias": torch.zeros(32)}, "biases.*q_proj.bias"),
            ({}, {"layers.0.self_attn.k_norm.weight": torch.ones(8)}, "q_norm and k_norm"),
            ({"model_type": "qwen3"}, {}, "q_norm and k_norm"),
            ({}, {"mask_hidden": torch.zeros(1, 96)}, "parallel drafting"),
            ({"ptd_token_id": 3}, {}, "parallel drafting"),
            ({"speculators_model_type": "dflash"}, {}, "kind 'dflash'"),
            ({"architectures": ["Eagle3DeepseekV2ForCausalLM"]}, {}, "plain Llama block"),
            ({"vocab_size": None}, {}, "lacks vocab_size"),
            ({"eagle_config": [1]}, {}, "`eagle_config` .* must be an object"),
            ({"eagle_aux_hidden_state_layer_ids": ["2"]}, {}, "must be a list of integers"),
            ({"eagle_aux_hidden_state_layer_ids": [4, 2, 5]}, {}, "strictly ascending"),
            ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, {}, "dynamic"),
            ({}, {"fc.bias": torch.zeros(H)}, "biases"),
            ({}, {"something.weight": torch.zeros(3)}, "extra tensor `something.weight`"),
            ({}, {"norm.weight": torch.zeros(H + 1)}, r"`norm.weight` has shape \(33,\), expected \(32,\)"),
        ],
    )
    def test_named(self, tmp_path, policy, config, tensors, message):
        folder = write(tmp_path, flat_config(**config), flat_tensors() | tensors)
        with pytest.raises(ValueError, match=message):
            load(folder, policy)

    @pytest.mark.parametrize(
        "size", [{"hidden_size": 64}, {"vocab_size": 96, "pad_token_id": 0}], ids=["hidden_size", "vocab_size"]
    )
    def test_other_sizes_than_the_policys(self, tmp_path, size):
        folder = write(tmp_path, flat_config(), flat_tensors())
        with pytest.raises(ValueError, match=f"`{next(iter(size))}` is .* but the policy's"):
            load(folder, tiny_policy(num_hidden_layers=8, **size))

    def test_every_missing_tensor_is_named(self, tmp_path, policy):
        tensors = flat_tensors()
        del tensors["fc.weight"], tensors["midlayer.mlp.up_proj.weight"]
        with pytest.raises(ValueError, match="`fc.weight`.*`layers.0.mlp.up_proj.weight`"):
            load(write(tmp_path, flat_config(), tensors), policy)


def test_head_left_to_the_policy(tmp_path, policy):
    tensors = flat_tensors()
    del tensors["lm_head.weight"]
    folder = write(tmp_path, flat_config(), tensors)
    assert torch.equal(load(folder, policy).lm_head.weight, policy.get_output_embeddings().weight)
    with pytest.raises(ValueError, match="`lm_head.weight`"):
        load(folder)


def test_reduced_head_is_never_left_to_the_policy(tmp_path, policy):
    tensors = flat_tensors(draft_vocab=20)
    del tensors["lm_head.weight"]
    with pytest.raises(ValueError, match="`lm_head.weight`"):
        load(write(tmp_path, flat_config(draft_vocab_size=20), tensors), policy)


def test_logit_scale_is_folded_into_the_head(tmp_path, policy):
    draft = load(write(tmp_path, flat_config(logit_scale=0.5), flat_tensors()), policy)
    assert torch.equal(draft.lm_head.weight, flat_tensors()["lm_head.weight"] * 0.5)


def test_logit_scale_of_null_is_none(tmp_path, policy):
    draft = load(write(tmp_path, flat_config(logit_scale=None), flat_tensors()), policy)
    assert torch.equal(draft.lm_head.weight, flat_tensors()["lm_head.weight"].float())


def test_a_policy_folder_with_a_draft_in_it_is_told_from_a_draft(tmp_path):
    tiny_policy().save_pretrained(tmp_path)
    write(tmp_path / "draft", flat_config(), flat_tensors())
    with pytest.raises(ValueError, match="holds a policy. Its draft lies in .*draft: give that folder"):
        Eagle3DraftModel.from_pretrained(tmp_path)
    assert validate_draft(tmp_path) == [
        f"{tmp_path} holds a policy. Its draft lies in {tmp_path}/draft: give that folder."
    ]


def test_a_name_that_is_neither_a_folder_nor_a_repository_is_named(monkeypatch):
    def snapshot_download(repo_id, **kwargs):
        raise LocalEntryNotFoundError("offline")

    monkeypatch.setattr(draft_folder, "snapshot_download", snapshot_download)
    with pytest.raises(ValueError, match="no folder 'nothere' here, and no repository"):
        Eagle3DraftModel.from_pretrained("nothere")
