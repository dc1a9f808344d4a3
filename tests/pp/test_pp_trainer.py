"""
The trainer with a pipeline equals plain data parallelism with the same number of processes: losses and gradients of
policy and draft, every logged metric, and the weights, on replayed rollouts.
"""

import math

import pytest
import torch
from forked_ranks import parameters_of, started_once
from group.comparison import assert_close, assert_same_training
from pp.trainer_cases import CASES, DEFAULT_CASES, IMPOSSIBLE, TOLERANCE, TOLERANCES


# World size, ranks per pipeline, cases, seconds. Each line is one start of processes.
DEFAULT_RUNS = {"2 ranks": (2, ("2", "2p"), DEFAULT_CASES, 280)}
SLOW_RUNS = {
    "2 ranks, every case": (2, ("2", "2p"), list(CASES), 1500),
    "4 ranks, every case": (4, ("2", "4", "2x2", "2p", "4p", "2x2p"), list(CASES), 6000),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """What the ranks of a line saw, started when it is first asked for."""
    return started_once(tmp_path_factory, {**DEFAULT_RUNS, **SLOW_RUNS}, "trainer_worker.py", folder="pp")


PARAMETERS = parameters_of(DEFAULT_RUNS, SLOW_RUNS, 3100, IMPOSSIBLE)


def windows(losses, size):
    """Sums over accumulation windows: a pipeline returns a window's losses together."""
    return [sum(losses[start : start + size]) for start in range(0, len(losses), size)]


def comparable(run, gradients, weights):
    """What can be compared between runs with and without stages: losses by window, gradients of all stages."""
    return {
        **run,
        "losses": windows(run["losses"], run["window"]),
        "gradients": gradients,
        "weights": weights,
        "reductions": 0,
    }


def first_pipelines(ranks, name, size):
    """The runs of the ranks that compute losses together with the first one."""
    count = math.prod(int(number) for number in size.removesuffix("p").split("x"))
    return [rank[name][size] for rank in ranks[:count]]


def gradients_of_all_stages(ranks, name, size):
    """By step."""
    steps = zip(*(run["gradients"] for run in first_pipelines(ranks, name, size)), strict=True)
    return [{key: value for stage in stages for key, value in stage.items()} for stages in steps]


def weights_of(ranks, name, size, rank):
    """Final weights on a rank, or where it has a part of them, those of all stages."""
    if not size.endswith("p"):
        return rank[name][size]["weights"]
    together = {}
    for run in first_pipelines(ranks, name, size):
        for key, weight in run["weights"].items():
            # What two ranks hold, they hold alike: a tied embedding, or one that the draft reads.
            assert torch.equal(together.setdefault(key, weight), weight), key
    return together


@pytest.mark.parametrize(("line", "name", "size"), PARAMETERS)
def test_a_pipeline_changes_no_loss_gradient_metric_or_weight(runs, line, name, size):
    ranks, tolerance = runs(line), TOLERANCES.get(name, TOLERANCE)
    gradients = gradients_of_all_stages(ranks, name, size)
    for rank in ranks:
        plain = rank[name]["1"]
        weights = weights_of(ranks, name, size, rank)
        ours = comparable(rank[name][size], gradients, weights)
        assert_same_training(ours, comparable(plain, plain["gradients"], plain["weights"]), tolerance)
        mine, expected = (rank[name][s].get("draft gradients", []) for s in (size, "1"))
        for step, (a, b) in enumerate(zip(mine, expected, strict=True)):
            # The draft is in float32, and what its steps of SGD differ by adds up.
            draft_tolerance = (tolerance[0], 5 * tolerance[1])
            assert_close(a, b, draft_tolerance, f"gradients and counters of the draft at step {step}")


@pytest.mark.parametrize("name", [name for name in DEFAULT_CASES if not IMPOSSIBLE & {(name, "2"), (name, "2p")}])
def test_parts_of_a_policy_lose_no_digits_to_a_replica(runs, name):
    # What ranks send each other of a policy in float64 is in float64. Later steps begin with other rounding.
    ranks = runs("2 ranks")
    whole, parts = (gradients_of_all_stages(ranks, name, size)[0] for size in ("2", "2p"))
    assert whole.keys() == parts.keys()
    tolerance = (0, 1e-12) if {grad.dtype for grad in whole.values()} == {torch.float64} else TOLERANCES[name]
    for key, gradient in whole.items():
        assert_close(parts[key], gradient, tolerance, key)


def test_parts_of_a_policy_are_no_more_than_its_stages(runs):
    first, second = (run["weights"].keys() for run in first_pipelines(runs("2 ranks"), "dapo", "2p"))
    policy = {name for name in first & second if not name.startswith("draft.")}
    assert policy == {"model.embed_tokens.weight"}  # the draft reads it on the last stage
    assert any("layers.0." in name for name in first)
    assert any("layers.5." in name for name in second)


def test_each_rank_trains_the_layers_of_its_stage_alone(runs):
    first, second = (rank["dapo"]["2"]["gradients"][0].keys() for rank in runs("2 ranks"))
    assert first
    assert second
    assert first.isdisjoint(second)


def test_weights_are_the_same_on_all_ranks(runs):
    first, second = (rank["dapo"]["2"]["weights"] for rank in runs("2 ranks"))
    for key, weight in first.items():
        assert torch.equal(weight, second[key]), key
