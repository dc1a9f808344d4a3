"""
Folders that cannot be read, or that readers read differently: named by `validate_draft`, refused by `from_pretrained`.
"""

import re
from random import Random

import pytest
import torch
from breaks import WEIGHTS, eagle, index, messages, older, put, tensor, theta
from safetensors.torch import save_file

from trl_codraft.modeling.disk.folder import load_pickled
from trl_codraft.modeling.modeling_eagle3 import Eagle3DraftModel
from trl_codraft.serving.validation import problems, validate_draft


def error_of(call):
    """What a call refuses with, None if it does not."""
    try:
        call()
    except ValueError as error:
        return str(error)
    return None


def test_unreadable_folders(tmp_path):
    assert "holds no config.json" in validate_draft(tmp_path)[0]
    (tmp_path / "config.json").write_text("[]")
    assert "must hold a JSON object" in validate_draft(tmp_path)[0]
    (tmp_path / "config.json").write_text("{}")
    assert "holds no weights" in validate_draft(tmp_path)[0]
    save_file({}, tmp_path / "model.safetensors")
    assert any("`model_type` is missing" in message for message in validate_draft(tmp_path))


def test_damaged_weights(good, policy, tmp_path):
    messages(good, policy, tmp_path, lambda config, tensors: None)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    assert "damaged or incomplete" in validate_draft(tmp_path)[0]
    weights.rename(tmp_path / "pytorch_model.bin")
    assert "damaged or incomplete" in validate_draft(tmp_path)[0]


@pytest.mark.parametrize(
    ("break_files", "words"),
    [
        (lambda folder: (folder / "config.json").write_bytes(b'{"a": "\xe9"}'), "config.json is not valid JSON"),
        (lambda folder: (folder / "config.json").write_text("[" * 100_000), "config.json is not valid JSON"),
        (
            index({"weight_map": {"fc.weight": "lost.safetensors"}}),
            "names shards that are not there: lost.safetensors",
        ),
        (
            lambda folder: index({"weight_map": {"fc.weight": f"../{folder.name}/{WEIGHTS}"}})(folder),
            "names shards that are not there: ../",
        ),
        (index({"weight_map": ["model.safetensors"]}), "is not an index of shards"),
        (index({"weight_map": {"fc.weight": 3}}), "is not an index of shards"),
        (index({"weight_map": {}}), "is not an index of shards"),
        (index([]), "must hold a JSON object, not a list"),
        (lambda folder: (folder / WEIGHTS).write_text("version https://git-lfs.github.com/spec/v1\n"), "git lfs pull"),
        (lambda folder: (folder / WEIGHTS).write_bytes(b""), "damaged or incomplete"),
        (older({"state_dict": {"fc.weight": torch.ones(1)}}), "does not hold a dict of named tensors"),
        (older([1, 2]), "does not hold a dict of named tensors"),
        (older({1: torch.ones(1)}), "does not hold a dict of named tensors"),
    ],
)
def test_broken_files_are_named_and_not_read(good, policy, tmp_path, break_files, words):
    assert messages(good, policy, tmp_path, lambda config, tensors: None) == []
    break_files(tmp_path)
    found = validate_draft(tmp_path, policy)
    assert len(found) == 1
    assert words in found[0]
    with pytest.raises(ValueError, match=re.escape(words)):
        Eagle3DraftModel.from_pretrained(tmp_path, policy=policy)


@pytest.mark.parametrize("mapped", [False, True])
def test_whatever_bytes_a_pickled_file_holds_its_name_is_in_the_error(tmp_path, mapped):
    file = tmp_path / "state.pt"
    torch.save({"draft": {"a": torch.ones(20, 3)}, "groups": [{"lr": 1.0, "params": [0]}]}, file)
    whole, random = file.read_bytes(), Random(0)
    assert load_pickled(file, mapped=mapped)["draft"]["a"].sum() == 60
    damaged = [b"", b"a text\n" * 30, bytes(5000), *(whole[:end] for end in range(0, len(whole), 97))]
    damaged += [b"\x80\x02" + random.randbytes(40) for _ in range(100)]
    for content in damaged:
        file.write_bytes(content)
        with pytest.raises(ValueError, match="state.pt cannot be read, it is damaged or incomplete") as caught:
            load_pickled(file, mapped=mapped)
        assert len(str(caught.value)) < 600
    # Flipped bytes of a tensor are another tensor; all others are an error that names the file.
    for _ in range(200):
        flipped = bytearray(whole)
        flipped[random.randrange(len(whole))] = random.randrange(256)
        file.write_bytes(flipped)
        message = error_of(lambda: load_pickled(file, mapped=mapped))
        assert message is None or "state.pt cannot be read" in message


@pytest.mark.parametrize("name", ["bad repo id!!", " ", "-x", "me/..x", "x" * 300])
def test_names_that_can_be_neither_a_folder_nor_a_repository_are_refused(name):
    with pytest.raises(ValueError, match=f"There is no folder '{name}' here"):
        Eagle3DraftModel.from_pretrained(name)


def test_a_tensor_in_two_shards_is_named(good, policy, tmp_path):
    messages(good, policy, tmp_path, lambda config, tensors: None)
    save_file({"fc.weight": torch.zeros(1)}, tmp_path / "other.safetensors")
    index({"weight_map": {"norm.weight": WEIGHTS, "fc.weight": "other.safetensors"}})(tmp_path)
    assert "repeats tensors of another shard: fc.weight" in validate_draft(tmp_path)[0]


def test_weights_that_only_servers_would_load_are_named(good, policy, tmp_path):
    messages(good, policy, tmp_path, lambda config, tensors: None)
    save_file({"fc.weight": torch.zeros(1)}, tmp_path / "older.safetensors")
    assert "older.safetensors beside model.safetensors" in problems(validate_draft(tmp_path, policy))[0]
    index({"weight_map": dict.fromkeys(good[1], WEIGHTS)})(tmp_path)
    assert validate_draft(tmp_path, policy) == []


def test_quantised_weights_are_not_read(good, policy, tmp_path):
    for dtype in (torch.int8, torch.float8_e4m3fn):
        messages(good, policy, tmp_path, tensor("fc.weight", lambda old, dtype=dtype: old.mul(9).to(dtype)))
        with pytest.raises(ValueError, match="`fc.weight` has dtype .*quantised weights are not read"):
            Eagle3DraftModel.from_pretrained(tmp_path, policy=policy)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (put("norm_output", "false"), "`norm_output`.*must be true or false"),
        (eagle(norm_output=True), "`norm_output`.*the same at top level and in `eagle_config`"),
        (eagle(use_aux_hidden_state=False), "reads no hidden states of inner layers"),
        (theta(0.0), "`rope_theta`.*must be a positive number"),
        (put("rope_parameters", {"rope_type": "linear", "rope_theta": 1e4}), "`factor`.*must be a positive number"),
        (put("rms_norm_eps", -1e-6), "`rms_norm_eps` must be a positive number"),
        (put("logit_scale", "1"), "`logit_scale`.*must be a number"),
    ],
)
def test_what_cannot_be_meant_is_not_read(good, policy, tmp_path, change, words):
    assert messages(good, policy, tmp_path, change)
    with pytest.raises(ValueError, match=words):
        Eagle3DraftModel.from_pretrained(tmp_path, policy=policy)


def test_a_rope_type_of_null_is_named(good, policy, tmp_path):
    change = put("rope_parameters", {"rope_type": None, "rope_theta": 1e4})
    assert any("None" in message for message in messages(good, policy, tmp_path, change))
