"""A process that dies or stalls ends the others, soon and with an error: nobody waits forever."""

import pytest
from cp.trainer_fault_worker import FAULTS
from faults import TIMEOUT
from forked_ranks import run_script


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    return run_script("trainer_fault_worker.py", tmp_path_factory.mktemp("faults"), timeout=900, folder="cp")[0]


@pytest.mark.slow
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("fault", FAULTS)
def test_the_other_rank_ends_with_an_error_that_names_it_within_the_timeout(seen, fault):
    assert seen[fault].exitcodes[0] not in (0, None)
    assert seen[fault].seconds <= TIMEOUT + 10
    message = seen[fault].messages[0]
    if "attention" in fault:
        assert "no answer from rank 1" in message
        assert "No rank has come less far than this one, rank 0: 'loss' of micro-step 2" in message
    elif "draft" in fault:
        assert "come least far: rank 1: 'draft' of micro-step 2" in message
        # Gradients of the draft are summed at the end of a window only.
        assert "This one, rank 0: 'rollouts done' of micro-step 3" in message
    else:
        assert "come least far: rank 1: 'rewards' of micro-step 2" in message
        assert "This one, rank 0: 'rewards done' of micro-step 2" in message
