"""DDP over gloo: two processes with the environment of torchrun, from which the trainer makes all it needs."""

import math

import pytest
import torch
from forked_ranks import run_script


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


TIMED = ("time", "runtime", "per_second", "total_flos")


def steps_of(run, first=0):
    """Logs of the steps from a step on, without clock readings."""
    return [
        {key: value for key, value in entry.items() if not any(word in key for word in TIMED)}
        for entry in run["logs"]
        if "loss" in entry and entry["step"] > first
    ]


def assert_same_end(run, expected, first=0):
    assert len(steps_of(run, first)) == 3 - first
    for ours, theirs in zip(steps_of(run, first), steps_of(expected, first), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-6)
    for name, weight in expected["draft"].items():
        torch.testing.assert_close(run["draft"][name], weight, rtol=1e-6, atol=1e-7)


def test_shared_optimizer_state_changes_no_loss_and_no_draft(ranks):
    for rank in ranks:
        assert "draft/grad_norm" in steps_of(rank["drafting"])[0]
        assert_same_end(rank["shared"], rank["drafting"])
        whole, part = (rank[run]["elements"] for run in ("drafting", "shared"))
        assert part in (math.floor(whole / 2), math.ceil(whole / 2))
    assert sum(rank["shared"]["elements"] for rank in ranks) == ranks[0]["drafting"]["elements"]
    for name, weight in ranks[0]["shared"]["draft"].items():
        assert torch.equal(weight, ranks[1]["shared"]["draft"][name])


@pytest.mark.parametrize("run", ["shared, resumed", "resumed without"])
def test_a_checkpoint_of_shared_state_goes_on_with_and_without(ranks, run):
    for rank in ranks:
        assert_same_end(rank[run], rank["shared"], first=2)
        assert rank[run]["elements"] == rank["shared" if run.startswith("shared") else "drafting"]["elements"]


def test_sums_over_ranks_take_no_second_copy(ranks):
    assert [rank["summed in place"] for rank in ranks] == [[2.0] * 3] * 2


def test_the_best_model_comes_with_its_shared_state(ranks):
    for rank in ranks:
        best, saved = rank["best"], rank["saved"]
        assert best["num_updates"] == saved["num_updates"] == 3
        for number, moments in saved["optimizer"]["state"].items():
            for name, value in moments.items():
                assert torch.equal(best["optimizer"]["state"][number][name], value)
        for name, weight in saved["draft"].items():
            assert torch.equal(best["draft"][name], weight)
