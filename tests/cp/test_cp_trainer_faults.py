"""A process that dies or stalls ends the others, soon and with an error: nobody waits forever."""

import pytest
from group.forked_ranks import run_script


TIMEOUT = 10


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    return run_script("trainer_fault_worker.py", tmp_path_factory.mktemp("faults"), timeout=900, folder="cp")[0]


@pytest.mark.slow
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("place", ["attention", "a reward"])
@pytest.mark.parametrize("end", ["killed", "stalled"])
def test_the_other_rank_ends_with_an_error_within_the_timeout(seen, end, place):
    exit_code, seconds, message = seen[f"{end} in {place}"]
    assert exit_code not in (0, None)
    assert seconds <= TIMEOUT + 10
    assert message
    if place == "attention":
        assert "no answer from rank 1" in message
