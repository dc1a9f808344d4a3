"""A rank's part of a policy, loaded from a checkpoint without the rest, against the whole policy."""

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from tiny import BALANCED_EXPERTS, tiny_policy
from torch import nn
from transformers import core_model_loading

from trl_codraft.pp.stages.checkpoint import save_policy
from trl_codraft.pp.stages.replica import PolicyReplica
from trl_codraft.pp.stages.split import PolicyStage, keep_stages
from trl_codraft.pp.stages.view import StageView
from trl_codraft.pp.stages.weights import load_stage_weights


LAYERS = (1, 2, 1)
# Tied with norms of its own kind, one matrix for several, experts that are one tensor in memory; and others.
FAMILIES = ["gemma3_text", "phi3", "mixtral"]
OTHERS = ["llama", "qwen2", "qwen3", "mistral", "gemma", "gemma2", "smollm3", "olmo2", "qwen3_moe"]


def part_of(policy, folder, stages, embedding=False, **kwargs):
    def keep(whole):
        return keep_stages(whole, LAYERS, stages, embedding=embedding)

    return load_stage_weights(type(policy), str(folder), keep, **kwargs)


@pytest.fixture(params=[*FAMILIES, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)])
def saved(request, tmp_path):
    policy = tiny_policy(request.param)
    policy.save_pretrained(tmp_path)
    return policy.eval(), tmp_path


def test_parts_have_the_weights_of_the_checkpoint_and_compute_what_the_whole_does(saved):
    policy, folder = saved
    weights, buffers = dict(policy.named_parameters()), dict(policy.named_buffers())
    hidden = ids = torch.arange(3, 15).view(1, -1)
    seen = set()
    for stage in range(len(LAYERS)):
        part = part_of(policy, folder, (stage,)).eval()
        assert type(part) is type(policy)
        for name, parameter in part.named_parameters():
            assert torch.equal(parameter, weights[name]), name
            seen.add(name)
        for name, buffer in part.named_buffers():
            assert torch.equal(buffer, buffers[name]), name
        hidden = PolicyStage(part, stage, len(LAYERS))(hidden)
    assert seen == weights.keys()
    torch.testing.assert_close(hidden, policy(ids).logits)


def test_a_part_is_the_stages_that_were_asked_for_and_no_more(tmp_path):
    policy = tiny_policy("llama", tie_word_embeddings=False)
    policy.save_pretrained(tmp_path)

    def modules(stages, **settings):
        names = {
            name.rpartition(".")[0] for name, _ in part_of(policy, tmp_path, stages, **settings).named_parameters()
        }
        return {".".join(name.split(".")[:3]) for name in names}

    assert modules((0,)) == {"model.embed_tokens", "model.layers.0"}
    assert modules((1,)) == {"model.layers.1", "model.layers.2"}
    assert modules((2,)) == {"model.layers.3", "model.norm", "lm_head"}
    assert modules((0, 2)) == modules((0,)) | modules((2,))
    assert modules((2,), embedding=True) == modules((2,)) | {"model.embed_tokens"}
    last = part_of(policy, tmp_path, (2,), embedding=True)
    assert not last.model.embed_tokens.weight.requires_grad
    assert last.lm_head.weight.requires_grad


def test_a_tied_embedding_is_on_the_first_and_the_last_part(tmp_path):
    policy = tiny_policy("llama", tie_word_embeddings=True)
    policy.save_pretrained(tmp_path)
    first, middle, last = (part_of(policy, tmp_path, (stage,)) for stage in range(3))
    assert torch.equal(first.model.embed_tokens.weight, last.lm_head.weight)
    assert last.lm_head.weight is last.model.embed_tokens.weight
    assert last.lm_head.weight.requires_grad
    assert not any("embed" in name for name, _ in middle.named_parameters())
    # What TRL does to the head (`cast_lm_head_to_fp32`) it does to both.
    assert first.lm_head.weight is first.model.embed_tokens.weight


def test_what_other_stages_own_is_not_read(tmp_path, monkeypatch):
    policy = tiny_policy("llama", tie_word_embeddings=False)
    policy.save_pretrained(tmp_path)
    loaded = []
    materialize = core_model_loading.convert_and_load_state_dict_in_model

    def watch(model, state_dict, *args, **kwargs):
        slices = {name: Watched(name, values, loaded) for name, values in state_dict.items()}
        return materialize(model, slices, *args, **kwargs)

    monkeypatch.setattr("transformers.modeling_utils.convert_and_load_state_dict_in_model", watch)
    own = {name for name, _ in part_of(policy, tmp_path, (1,)).named_parameters()}
    assert set(loaded) == own


class Watched:
    """A slice of a checkpoint's file that notes when its values are read."""

    def __init__(self, name, values, loaded):
        self.name, self.values, self.loaded = name, values, loaded

    def __getitem__(self, index):
        self.loaded.append(self.name)
        return self.values[index]

    def __getattr__(self, name):
        return getattr(self.values, name)


def test_tensors_that_are_missing_or_unknown_are_reported_as_ever(tmp_path, caplog):
    policy = tiny_policy("llama", tie_word_embeddings=False)
    policy.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.1.strange.weight"] = tensors.pop("model.layers.1.mlp.up_proj.weight")
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with caplog.at_level("WARNING"):
        part_of(policy, tmp_path, (0,))
    assert "strange" not in caplog.text
    assert "layers.3" not in caplog.text
    with caplog.at_level("WARNING"):
        part_of(policy, tmp_path, (1,))
    assert "strange" in caplog.text
    assert "up_proj" in caplog.text


def test_an_object_is_cut_down_in_place():
    policy = tiny_policy("llama", tie_word_embeddings=False)
    head = policy.lm_head
    dropped = keep_stages(policy, LAYERS, (0, 1))
    assert dropped == ["model.layers.3", "model.norm", "lm_head"]
    assert policy.lm_head is not head
    assert len(policy.model.layers) == 4
    assert not list(policy.model.layers[3].parameters())
    assert isinstance(policy.model.embed_tokens, nn.Embedding)


@pytest.fixture
def alone():
    """A group of this process."""
    # A trainer that ran in it before may have left one.
    is_first = not dist.is_initialized()
    if is_first:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.new_group([0], backend="gloo")
    if is_first:
        dist.destroy_process_group()


def test_quantised_weights_are_replicated_by_views_alone(alone):
    policy, other = tiny_policy(), tiny_policy(seed=1)
    for whole in (policy, other):
        # As those of bitsandbytes, which writes scales beside them.
        whole.lm_head.register_state_dict_post_hook(
            lambda module, state, prefix, _: state.update({f"{prefix}weight.absmax": torch.ones(1)})
        )
    stages = [StageView(policy, LAYERS, stage) for stage in range(3)]
    with pytest.raises(ValueError, match="lm_head.weight.absmax.*quantised weights need stages that are views"):
        PolicyReplica(stages, alone, whole=other)
    assert PolicyReplica(stages, alone, whole=policy).model is policy


def test_buffers_that_checkpoints_hold_are_saved_with_their_stages(tmp_path, alone):
    policy = tiny_policy("glm4_moe", **BALANCED_EXPERTS)
    buffers = {name: buffer for name, buffer in policy.named_buffers() if name.endswith("e_score_correction_bias")}
    assert len(buffers) == 3
    for number, buffer in enumerate(buffers.values(), 1):
        buffer.fill_(number)
    save_policy([StageView(policy, LAYERS, stage) for stage in range(3)], tmp_path, alone)
    saved = type(policy).from_pretrained(tmp_path)
    for name, tensor in policy.state_dict().items():
        assert torch.equal(saved.state_dict()[name], tensor), name
    for stage in range(3):
        own = dict(PolicyStage(part_of(policy, tmp_path, (stage,)), stage, 3).named_own_buffers())
        assert own.keys() == dict(StageView(policy, LAYERS, stage).named_own_buffers()).keys()
        assert all(torch.equal(tensor, buffers[name]) for name, tensor in own.items())
