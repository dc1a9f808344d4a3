"""DDP over gloo: two processes with the environment of torchrun, from which the trainer makes all it needs."""

import pytest
import torch
from group.forked_ranks import run_script


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return run_script("grpo_worker.py", tmp_path_factory.mktemp("ddp"), timeout=240, folder="distributed")


def test_two_processes_ran(ranks):
    assert [rank["world_size"] for rank in ranks] == [2, 2]


def test_draft_does_not_change_policy_update_under_ddp(ranks):
    for rank in ranks:
        (plain, plain_logs), (ours, our_logs) = rank["plain"], rank["quiet"]
        assert [name for name in plain if not torch.equal(plain[name], ours[name])] == []
        assert our_logs == plain_logs


@pytest.mark.parametrize("run", ["quiet_draft", "drafting_draft"])
def test_draft_is_the_same_on_all_ranks(ranks, run):
    first, second = ranks[0][run], ranks[1][run]
    assert [name for name in first if not torch.equal(first[name], second[name])] == []


def test_rollouts_speculate_and_counters_are_summed_over_ranks(ranks):
    assert all(rank["speculated"] for rank in ranks)
    steps = [entry for entry in ranks[0]["drafting_logs"] if "draft/loss" in entry]
    assert len(steps) == 3
    for entry in steps:
        assert entry["rollout/accept_length"] > 1
        # Both ranks decode 8 rows of at most 10 tokens; one alone makes at most 10 forwards.
        assert 2 <= entry["rollout/policy_forwards"] <= 20
    evaluations = [entry for entry in ranks[0]["drafting_logs"] if "eval_rollout/accept_length" in entry]
    assert evaluations


def test_one_rank_writes_one_draft(ranks):
    assert {"config.json", "model.safetensors", "draft_state.pt"} <= set(ranks[0]["drafting_files"])
