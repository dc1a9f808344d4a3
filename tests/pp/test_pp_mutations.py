"""Breaks pipeline and channel on purpose; the comparisons of the other tests have to notice."""

import pp_mutation_worker
import pytest
from forked_ranks import run_script, succeeded


pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    return run_script("pp_mutation_worker.py", tmp_path_factory.mktemp("mutations"), timeout=280, folder="pp")


@pytest.mark.parametrize("mutation", pp_mutation_worker.PIPELINES)
def test_comparison_with_one_process_notices(outcomes, mutation):
    # A rank ended on a difference; the other with it, or well.
    last_lines = [rank.errors.strip().rpartition("\n")[2] for rank in outcomes[mutation]]
    assert any(line.startswith("AssertionError") for line in last_lines), last_lines


@pytest.mark.parametrize("mutation", pp_mutation_worker.CHANNELS)
def test_comparison_with_known_taps_notices(outcomes, mutation):
    if mutation.startswith("nothing"):
        succeeded(outcomes[mutation])
        return
    # The draft's rank ended on a wrong tap or a header that is not the planned one, not on some other error.
    error = outcomes[mutation][1].errors.strip().splitlines()[-1]
    assert error.startswith(("AssertionError: (", "trl_codraft.pp.taps.message.TapMismatch")), error
