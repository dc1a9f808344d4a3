"""
A run in which no rank has the whole policy and a vLLM server generates equals plain data parallelism: what is trained,
what the server is sent, and what lies in the folder. `test_pp_trainer.py` has the settings of the loss.
"""

import pytest
import torch
from forked_ranks import parameters_of, started_once
from group.comparison import assert_close, assert_same_training
from pp.test_pp_trainer import comparable, gradients_of_all_stages, weights_of
from pp.trainer_cases import IMPOSSIBLE, SERVED_CASES, TOLERANCE, TOLERANCES


DEFAULT_CASES = ["full", "lora", "experts"]
# World size, sizes of pipelines, cases, seconds. Each line is one start of processes.
DEFAULT_RUNS = {"2 ranks": (2, ("2p",), DEFAULT_CASES, 280)}
SLOW_RUNS = {
    "2 ranks, every case": (2, ("2p",), list(SERVED_CASES), 280),
    "4 ranks, every case": (4, ("2p", "4p", "2x2p"), list(SERVED_CASES), 900),
}


def tolerance_of(name):
    return TOLERANCES.get(name, TOLERANCE)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """What the ranks of a line saw, started when it is first asked for."""
    return started_once(tmp_path_factory, {**DEFAULT_RUNS, **SLOW_RUNS}, "stages_alone_worker.py", folder="pp")


PARAMETERS = parameters_of(DEFAULT_RUNS, SLOW_RUNS, 1000, IMPOSSIBLE)


@pytest.mark.parametrize(("line", "name", "size"), PARAMETERS)
def test_parts_train_what_the_whole_policy_does(runs, line, name, size):
    ranks = runs(line)
    gradients = gradients_of_all_stages(ranks, name, size)
    for rank in ranks:
        plain = rank[name]["1"]
        assert plain["whole"]
        assert not rank[name][size]["whole"]
        ours = comparable(rank[name][size], gradients, weights_of(ranks, name, size, rank))
        assert_same_training(ours, comparable(plain, plain["gradients"], plain["weights"]), tolerance_of(name))
        assert rank[name][size]["best"] == plain["best"]
        for key, weight in plain["weights"].items():
            if key.startswith("draft."):
                assert_close(rank[name][size]["weights"][key], weight, tolerance_of(name), key)


@pytest.mark.parametrize(("line", "name", "size"), PARAMETERS)
def test_the_server_is_sent_every_tensor_of_the_policy(runs, line, name, size):
    first, *others = (rank[name] for rank in runs(line))
    assert len(first["1"]["pushes"]) >= 3
    assert [len(push) for push in first[size]["pushes"]] == [len(push) for push in first["1"]["pushes"]]
    for ours, plain in zip(first[size]["pushes"], first["1"]["pushes"], strict=True):
        for key, tensor in plain.items():
            assert ours[key].dtype == tensor.dtype
            assert_close(ours[key], tensor, tolerance_of(name), key)
    moved = [
        name for name, tensor in first[size]["pushes"][-2].items() if (tensor != first[size]["pushes"][0][name]).any()
    ]
    assert any("layers.0." in name for name in moved)
    assert any("layers.5." in name for name in moved)
    assert all(other[size]["pushes"] == [] for other in others)


@pytest.mark.parametrize(("line", "name", "size"), PARAMETERS)
def test_the_server_is_sent_the_draft_with_every_policy(runs, line, name, size):
    ranks = [rank[name] for rank in runs(line)]
    drafts, plain = ranks[0][size]["drafts"], ranks[0]["1"]["drafts"]
    assert len(drafts) == len(plain) == (0 if "no draft" in name else len(ranks[0][size]["pushes"]))
    for ours, theirs in zip(drafts, plain, strict=True):
        assert ours.keys() == theirs.keys()
        for key, tensor in theirs.items():
            assert_close(ours[key], tensor, tolerance_of(name), key)
    assert all(rank[size]["drafts"] == [] for rank in ranks[1:])
    if not drafts:
        return
    for key in drafts[0].keys() - {"d2t"}:
        assert (drafts[-1][key] != drafts[0][key]).any(), key
        # The last push is of the draft that the run ends with, which every rank has.
        for rank in ranks:
            assert torch.equal(drafts[-1][key], rank[size]["weights"][f"draft.{key}"]), key


@pytest.mark.parametrize(("line", "name", "size"), PARAMETERS)
def test_the_folder_holds_the_whole_policy(runs, line, name, size):
    first = runs(line)[0][name]
    for key, tensor in first["1"]["saved"].items():
        assert_close(first[size]["saved"][key], tensor, tolerance_of(name), key)
    weights = {"model.safetensors", "model.safetensors.index.json"}
    for folder, files in first["1"]["files"].items():
        theirs = {file for file in files if not file.startswith("optimizer")} - weights
        assert theirs <= set(first[size]["files"][folder])
    if name != "lora":
        assert "model.safetensors.index.json" in first[size]["files"]["run"]
    if name == "experts":
        # As the server and other libraries know it, not as Transformers has it in memory.
        assert first[size]["disk"] == first["1"]["disk"]
