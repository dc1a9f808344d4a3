"""Takes single waits out of the transports of GPUs; the comparisons with known taps have to notice each."""

import emulated_mutation_worker
import pytest
from forked import run_script


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    return run_script("emulated_mutation_worker.py", tmp_path_factory.mktemp("mutations"))


def notices(ranks):
    """Whether a rank ended on a wrong tap, or bytes of the probe were wrong, or memory is left."""
    last = [(rank.errors.strip().splitlines() or [""])[-1] for rank in ranks]
    left = [rank.result for rank in ranks if isinstance(rank.result, int)]
    return any("AssertionError: (" in line or "arrived wrong" in line for line in last) or any(left)


@pytest.mark.parametrize("mutation", emulated_mutation_worker.MUTATIONS)
def test_comparison_with_known_taps_notices_a_wait_that_is_missing(outcomes, mutation):
    ranks = outcomes[mutation, False]
    assert notices(ranks) == (not mutation.startswith("nothing")), ranks
    if mutation.startswith("nothing"):
        assert [rank.exitcode for rank in ranks] == [0, 0]


@pytest.mark.parametrize(
    "mutation",
    [
        "the source does not wait until the slot is empty",
        "a filled slot is not recorded",
        "the draft's rank does not wait until the slot is filled",
        "an emptied slot is not recorded",
    ],
)
def test_probe_notices_events_that_do_nothing(outcomes, mutation):
    for rank in outcomes[mutation, True]:
        assert "TransportUnavailable: rank 1: TapMismatch" in rank.errors.strip().splitlines()[-1]
