"""
A whole run under context parallelism with the user's eager attention: pretraining of the draft, speculative rollouts,
checkpoints, resume, and a reward that fails on one rank.
"""

import json

import pytest
import torch
from cp.trainer_cases import TOLERANCES
from forked_ranks import run_script
from group.comparison import CLOCK, assert_close


pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def ranks(folder):
    return run_script("checkpoint_worker.py", folder, timeout=360, folder="cp")


def timeless(entry):
    return {key: value for key, value in entry.items() if not any(word in key for word in CLOCK)}


def test_eager_attention_under_context_parallelism_equals_plain_data_parallelism(ranks):
    """The first step: afterwards Adam has made full steps of rounding, in the draft and so in what it proposes."""
    for rank in ranks:
        ours, plain = (timeless(rank[name]["logs"][0]) for name in ("whole", "plain"))
        assert ours.keys() == plain.keys()
        assert {"loss", "grad_norm", "draft/loss", "draft/grad_norm", "rollout/accept_length"} <= plain.keys()
        for key, value in plain.items():
            assert_close(ours[key], value, TOLERANCES["speculative"], key)
        assert max(entry["rollout/accept_length"] for entry in rank["whole"]["logs"]) > 1.0


def test_a_resumed_run_repeats_the_uninterrupted_one(ranks):
    for rank in ranks:
        whole, resumed = rank["whole"], rank["resumed"]
        assert (whole["pretrained"], resumed["pretrained"]) == (2, 0)
        assert resumed["weights"].keys() == whole["weights"].keys()
        assert [n for n, weight in whole["weights"].items() if not torch.equal(weight, resumed["weights"][n])] == []
        assert [*map(timeless, resumed["logs"])] == [*map(timeless, whole["logs"])]


def test_checkpoints_hold_the_configuration_of_the_user(ranks, folder):
    plain = json.loads((folder / "plain" / "checkpoint-2" / "config.json").read_text())
    for checkpoint in ("whole/checkpoint-2", "whole/checkpoint-4", "resumed/checkpoint-4"):
        text = (folder / checkpoint / "config.json").read_text()
        assert "context_parallel" not in text
        assert json.loads(text) == plain
        assert "context_parallel" not in (folder / checkpoint / "draft" / "config.json").read_text()
    assert {rank[name]["attention"] for rank in ranks for name in ("plain", "whole", "resumed")} == {"eager"}


def test_a_reward_that_fails_on_one_rank_stops_both_and_leaves_the_attention_of_the_user(ranks):
    message = "Training stops on all ranks because of rank 1: TimeoutError: the judge did not answer"
    assert [rank["failed"] for rank in ranks] == [(message, "eager")] * 2
