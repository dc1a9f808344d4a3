"""What a trainer does with the stages of a policy, against the whole policy in one process."""

import math

import pytest
from forked import run_script, succeeded
from stage_worker import RUNS


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    return run_script("stage_worker.py", tmp_path_factory.mktemp("stages"))


@pytest.mark.parametrize("run", RUNS)
def test_reduced_gradients_and_clipping_equal_one_process(outcomes, run):
    results = succeeded(outcomes[run])
    for result in results:
        assert result["reduced"] <= 1e-6
        assert result["norm"] > 0.5
        assert abs(result["norm ratio"] - 1) <= 1e-6
        assert result["clipped"] <= 1e-6
        assert abs(result["clipped norm"] - 0.5) <= 1e-5
        assert result["unclipped"] <= 1e-6
    assert len({result["norm"] for result in results}) == 1


@pytest.mark.parametrize("run", RUNS)
def test_a_norm_that_is_not_finite_on_one_stage_is_so_on_all(outcomes, run):
    for result in succeeded(outcomes[run]):
        infinite, undefined = result["not finite"]
        assert infinite == math.inf
        assert math.isnan(undefined)


def test_a_gradient_that_is_missing_counts_as_zero_unless_all_lack_it(outcomes):
    for result in succeeded(outcomes["4 ranks"]):
        assert result["missing"] == [[1.5, 1.5], None]
