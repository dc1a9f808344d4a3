"""DDP over gloo: two processes, the trainer as a user launches it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch


TESTS = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    out = tmp_path_factory.mktemp("ddp")
    environment = {
        **os.environ,
        "ACCELERATE_USE_CPU": "true",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent)]),
    }
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command = [*launch, str(TESTS / "distributed" / "grpo_worker.py"), str(out)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return [torch.load(out / f"rank{rank}.pt", weights_only=False) for rank in range(2)]


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
