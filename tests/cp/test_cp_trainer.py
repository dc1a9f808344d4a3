"""
The trainer under context parallelism, and with a policy that FSDP2 shards (sizes with an `s`), equals plain data
parallelism with the same number of processes: losses and gradients of policy and draft, every logged metric, and the
weights, on replayed rollouts.
"""

import pytest
import torch
from cp.trainer_cases import CASES, DEFAULT_CASES, DRAFT_PASSES, LOCKSTEP, SHARDED_CASES, TOLERANCE, TOLERANCES
from forked_ranks import started_once
from group.comparison import assert_close, assert_same_training

from trl_codraft.modeling.losses import PASS_COUNTERS, SCALAR_COUNTERS


# World size, ranks per microbatch, cases, seconds. Each line is one start of processes.
DEFAULT_RUNS = {
    "2 ranks": (2, ("2",), DEFAULT_CASES, 280),
    "2 ranks, sharded policy": (2, ("1s", "2s"), SHARDED_CASES, 280),
}
SLOW_RUNS = {
    "2 ranks, every case": (2, ("2", "1s", "2s"), list(CASES), 2400),
    "4 ranks, every case": (4, ("2", "4", "2s", "4s"), list(CASES), 2400),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """What the ranks of a line saw, started when it is first asked for."""
    return started_once(tmp_path_factory, {**DEFAULT_RUNS, **SLOW_RUNS}, "trainer_worker.py", folder="cp")


def assert_top1_within_a_token(ours, plain):
    """Under bf16 a draft may guess one token more or less of the 37 or more of a step."""
    for entry, expected in zip(ours["logs"], plain["logs"], strict=True):
        for key in [key for key in expected if key.startswith("draft/top1")]:
            assert abs(entry[key] - expected[key]) <= 1 / 36, key
    for mine, theirs in zip(ours["draft gradients"], plain["draft gradients"], strict=True):
        assert ((top1_counters(mine) - top1_counters(theirs)).abs() <= 1).all()


def without_top1(run):
    """The run, without what [`assert_top1_within_a_token`] compares."""
    gradients = [flat.clone() for flat in run["draft gradients"]]
    for flat in gradients:
        top1_counters(flat).zero_()
    logs = [{key: value for key, value in entry.items() if "draft/top1" not in key} for entry in run["logs"]]
    return {**run, "logs": logs, "draft gradients": gradients}


# A draft sums over ranks its gradients, and behind them these counters.
NUM_COUNTERS = len(PASS_COUNTERS) * DRAFT_PASSES + len(SCALAR_COUNTERS)


def top1_counters(flat):
    """Those of each pass."""
    start = PASS_COUNTERS.index("top1") * DRAFT_PASSES
    return flat[-NUM_COUNTERS:][start : start + DRAFT_PASSES]


def draft_tolerance(tolerance, flat):
    """The draft is in float32; what it reads under bf16 is rounded in units of the largest entries."""
    relative, absolute = tolerance
    if absolute >= 1e-2:
        return relative, relative * flat[:-NUM_COUNTERS].abs().max().item()
    return relative, 5 * absolute


PARAMETERS = [
    pytest.param(line, name, size, marks=marks, id=f"{line}-{name}-{size} to a microbatch")
    for marks, lines in (((), DEFAULT_RUNS), ((pytest.mark.slow, pytest.mark.timeout(2500)), SLOW_RUNS))
    for line, (_, sizes, names, _) in lines.items()
    for name in names
    for size in sizes
]


def assert_same_run(ours, plain, tolerance):
    """Policy and draft."""
    assert_same_training(ours, plain, tolerance)
    gradients, expected = ours.get("draft gradients", []), plain.get("draft gradients", [])
    assert len(gradients) == len(expected)
    for step, (mine, theirs) in enumerate(zip(gradients, expected, strict=True)):
        what = f"gradients and counters of the draft at step {step}"
        assert_close(mine, theirs, draft_tolerance(tolerance, theirs), what)


@pytest.mark.parametrize(("line", "name", "size"), PARAMETERS)
def test_context_parallelism_changes_no_loss_gradient_metric_or_weight(runs, line, name, size):
    for rank in runs(line):
        ours, plain = rank[name][size], rank[name]["1"]
        if name == "bf16":
            assert_top1_within_a_token(ours, plain)
            ours, plain = without_top1(ours), without_top1(plain)
        if size.endswith("s"):
            # FSDP2 reduces gradients without DDP's hook.
            assert ours["reductions"] is None
            logs = list(zip(ours["logs"], plain["logs"], strict=True))
            assert all(entry.get(LOCKSTEP, 0) >= expected.get(LOCKSTEP, 0) for entry, expected in logs)
            logs = [entry | {key: expected[key] for key in expected if key == LOCKSTEP} for entry, expected in logs]
            ours = {**ours, "reductions": plain["reductions"], "logs": logs}
        assert_same_run(ours, plain, TOLERANCES.get(name, TOLERANCE))


def test_tokens_are_split_and_some_shards_are_empty(runs):
    """Rows run by this rank, those of the microbatch among them, and how many of each rank travel."""
    ranks = runs("2 ranks")
    by_case = {name: [rank[name]["2"]["shards"] for rank in ranks] for name in DEFAULT_CASES}
    assert any(sum(split) for shards in by_case.values() for step in shards[0] for split in [step[2]])
    empty = [step for shards in by_case["short rows"] for step in shards if step[1] == 0]
    assert empty
    assert all(num_rows == 1 for num_rows, *_ in empty)
    for name, (first, second) in by_case.items():
        assert len(first) == len(second), name
        # Two microbatches at every micro-step, each split over both ranks.
        assert len(first) == 2 * len(ranks[0][name]["2"]["losses"]), name


def test_draft_learns_on_every_rank_alike(runs):
    first, second = runs("2 ranks")
    for name in DEFAULT_CASES:
        weights = {key for key in first[name]["2"]["weights"] if key.startswith("draft.")}
        assert weights
        for key in weights:
            assert torch.equal(first[name]["2"]["weights"][key], second[name]["2"]["weights"][key])
    steps = [entry["draft/loss"] for entry in first["dapo"]["2"]["logs"] if "draft/loss" in entry]
    assert len(steps) == 3
    assert steps[-1] < steps[0]


@pytest.mark.slow
@pytest.mark.timeout(2500)
def test_speculative_case_speculates(runs):
    for rank in runs("2 ranks, every case"):
        logs = rank["speculative"]["2"]["logs"]
        assert max(entry.get("rollout/accept_length", 0.0) for entry in logs) > 1.0
        assert {entry["rollout/speculation_on"] for entry in logs if "rollout/speculation_on" in entry} == {1.0}
