"""Losses computed in groups equal plain data-parallel TRL with the same number of processes, on replayed rollouts."""

import math
from itertools import pairwise

import pytest
from comparison import assert_same_training
from forked_ranks import parameters_of, started_once
from replay_cases import CASES, DEFAULT_CASES, TOLERANCE, TOLERANCES


# World size, group sizes, cases, seconds. Each line is one start of processes.
DEFAULT_RUNS = {"2 ranks": (2, (2,), DEFAULT_CASES, 280)}
SLOW_RUNS = {
    "2 ranks, every case": (2, (1, 2), list(CASES), 900),
    "4 ranks, every case": (4, (1, 2, 4), list(CASES), 900),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """What the ranks of a line saw, started when it is first asked for."""
    return started_once(tmp_path_factory, {**DEFAULT_RUNS, **SLOW_RUNS}, "replay_worker.py")


PARAMETERS = parameters_of(DEFAULT_RUNS, SLOW_RUNS, 1000)


@pytest.mark.parametrize(("line", "name", "size"), PARAMETERS)
def test_groups_change_no_loss_gradient_metric_or_weight(runs, line, name, size):
    for rank in runs(line):
        assert_same_training(rank[name][size], rank[name][None], TOLERANCES.get(name, TOLERANCE))


def test_microbatches_are_split_and_some_shards_are_empty(runs):
    for name, by_size in runs("2 ranks")[1].items():
        assert by_size[2]["sharding"].split, name
    assert sum(by_size[2]["sharding"].empty for by_size in runs("2 ranks")[1].values()) >= 5


def logged(rank, name, key):
    return [entry[key] for entry in rank[name][None]["logs"] if key in entry]


def test_cases_do_what_their_names_say(runs):
    rank = runs("2 ranks")[0]
    assert max(logged(rank, "dapo", "clip_ratio/region_mean")) > 0
    assert max(logged(rank, "reference", "kl")) > 0
    assert len(logged(rank, "evaluation", "eval_loss")) == 2
    coefficients = [0.05, *logged(rank, "adaptive entropy", "entropy_coef")]
    changes = [math.copysign(1, after - before) for before, after in pairwise(coefficients)]
    assert set(changes) == {-1.0, 1.0}
    assert len(rank["short window"][None]["losses"]) == 3
    assert len(rank["short window"][None]["gradients"]) == 2
    assert min(logged(rank, "truncated", "completions/min_length")) == 1
    assert 0 < logged(rank, "truncated", "completions/clipped_ratio")[0] < 1
