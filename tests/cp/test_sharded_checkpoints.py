"""
A whole run with a policy that FSDP2 shards, alone and under context parallelism: pretraining of the draft, speculative
rollouts, checkpoints and resume.
"""

import pytest
import torch
from cp.test_cp_checkpoints import timeless
from cp.trainer_cases import LOCKSTEP, TOLERANCES
from forked_ranks import run_script
from group.comparison import assert_close
from transformers import AutoModelForCausalLM

from trl_codraft import Eagle3DraftModel, validate_draft


@pytest.fixture(scope="module", params=[pytest.param(1, marks=pytest.mark.slow), 2], ids=["alone", "under CP"])
def run(request, tmp_path_factory):
    """Its folder, and what its ranks saw."""
    folder = tmp_path_factory.mktemp("sharded")
    script = "sharded_checkpoint_worker.py"
    return folder, run_script(script, folder, request.param, timeout=240, folder="cp")


def test_the_first_step_equals_that_of_plain_data_parallelism(run):
    """Afterwards Adam has made full steps of rounding."""
    for rank in run[1]:
        ours, plain = (timeless(rank[name]["logs"][0]) for name in ("whole", "plain"))
        assert ours.pop(LOCKSTEP) >= plain.pop(LOCKSTEP) > 0
        assert ours.keys() == plain.keys()
        for key, value in plain.items():
            assert_close(ours[key], value, TOLERANCES["speculative"], key)
        assert max(entry["rollout/accept_length"] for entry in rank["whole"]["logs"]) > 1.0


def test_a_resumed_run_repeats_the_uninterrupted_one(run):
    for rank in run[1]:
        whole, resumed = rank["whole"], rank["resumed"]
        assert (whole["pretrained"], resumed["pretrained"]) == (2, 0)
        assert [n for n, weight in whole["weights"].items() if not torch.equal(weight, resumed["weights"][n])] == []
        assert [*map(timeless, resumed["logs"])] == [*map(timeless, whole["logs"])]


@pytest.mark.parametrize("place", ["whole", "whole/checkpoint-4", "resumed/checkpoint-4"])
def test_what_is_saved_holds_the_whole_policy_and_a_valid_draft(run, place):
    folder, ranks = run
    weights = ranks[0]["whole"]["weights"]
    policy = AutoModelForCausalLM.from_pretrained(folder / place, dtype=torch.float32)
    for name, weight in policy.named_parameters():
        assert torch.equal(weight, weights[name]), name
    messages = validate_draft(folder / place / "draft", policy)
    assert [message for message in messages if not message.startswith("note:")] == []
    draft = Eagle3DraftModel.from_pretrained(folder / place / "draft", policy=policy)
    for name, weight in draft.named_parameters():
        assert torch.equal(weight, weights[f"draft.{name}"]), name
