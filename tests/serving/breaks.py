"""Ways to break a draft folder: each changes the content of `config.json` and the tensors, or the files."""

import copy
import json

import torch
from safetensors.torch import save_file

from trl_codraft.serving.validation import validate_draft


WEIGHTS = "model.safetensors"


def messages(good, policy, tmp_path, change):
    config, tensors = copy.deepcopy(good[0]), dict(good[1])
    change(config, tensors)
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(tensors, tmp_path / "model.safetensors")
    return validate_draft(tmp_path, policy)


def drop(key):
    return lambda config, tensors: (config.pop(key, None), tensors.pop(key, None))


def put(key, value):
    """Sets a config key, in the layer section too if it is there."""

    def change(config, tensors):
        config[key] = value
        if key in config["transformer_layer_config"]:
            config["transformer_layer_config"][key] = value

    return change


def nested(section, key, value):
    return lambda config, tensors: config[section].__setitem__(key, value)


def eagle(**values):
    """An `eagle_config` with these values."""
    return lambda config, tensors: config.__setitem__("eagle_config", values)


def theta(value):
    """RoPE's base, wherever it stands."""

    def change(config, tensors):
        put("rope_theta", value)(config, tensors)
        put("rope_parameters", {"rope_type": "default", "rope_theta": value})(config, tensors)

    return change


def tensor(name, function):
    return lambda config, tensors: tensors.__setitem__(name, function(tensors.get(name)).contiguous())


def taps(*ids, inner=None):
    def change(config, tensors):
        config["eagle_aux_hidden_state_layer_ids"] = list(ids)
        if inner is not None:
            config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": inner}

    return change


def index(content):
    """Puts an index of shards beside the weights."""
    return lambda folder: (folder / "model.safetensors.index.json").write_text(json.dumps(content))


def older(content):
    """Puts a `.bin` file in the place of the weights."""

    def change(folder):
        (folder / WEIGHTS).unlink()
        torch.save(content, folder / "pytorch_model.bin")

    return change


def poison(old):
    old = old.clone()
    old[0] = float("nan")
    return old


def swap(old):
    """Offsets of the same ids in another order."""
    ids = torch.arange(len(old)) + old
    ids[[0, 1]] = ids[[1, 0]]
    return ids - torch.arange(len(old))
