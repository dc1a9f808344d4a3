"""Breaks pipeline and channel on purpose; the comparisons of the other tests have to notice."""

import pp_mutation_worker
import pytest
from forked import run_script


pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    return run_script("pp_mutation_worker.py", tmp_path_factory.mktemp("mutations"), timeout=280)


@pytest.mark.parametrize("mutation", pp_mutation_worker.PIPELINES)
def test_comparison_with_one_process_notices(outcomes, mutation):
    ranks = outcomes["pipeline", mutation]
    assert [rank.exitcode for rank in ranks] == [0, 0], ranks[1].errors[-2000:]
    results = [rank.result for rank in ranks]
    noticed = (
        not all(results[1]["taps"])
        or not all(results[1]["evaluations"])
        or max(results[1]["losses"]) > 1e-6
        or max(result["gradients"] for result in results) > 1e-6
    )
    assert noticed == (mutation != "nothing")


@pytest.mark.parametrize("mutation", pp_mutation_worker.CHANNELS)
def test_comparison_with_known_taps_notices(outcomes, mutation):
    ranks = outcomes["channel", mutation]
    if mutation == "nothing":
        assert [rank.exitcode for rank in ranks] == [0, 0], [rank.errors for rank in ranks]
        return
    # The draft's rank ended on a wrong tap or a header that is not the planned one, not on some other error.
    error = ranks[1].errors.strip().splitlines()[-1]
    assert error.startswith(("AssertionError: (", "trl_codraft.pp.taps.message.TapMismatch")), error
