"""
A process that fails, dies or stalls under a pipeline ends the others, soon and with an error: nobody waits forever.
"""

import pytest
from faults import TIMEOUT
from forked_ranks import run_script


PLACES = ("a forward", "a reward", "the draft")
SLOW = tuple(f"{what} in {place}" for place in PLACES for what in ("killed", "stalled"))


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    found = {}

    def outcome_of(*faults):
        if faults not in found:
            out = tmp_path_factory.mktemp("faults")
            found[faults] = run_script("trainer_fault_worker.py", out, *faults, timeout=900, folder="pp")[0]
        return found[faults]

    return outcome_of


RAISED = ("raised in a reward", "raised in an evaluation", "raised in a forward", "raised in the draft")


@pytest.mark.parametrize("fault", RAISED)
def test_an_exception_of_one_rank_ends_all_with_its_message(seen, fault):
    ending = seen(*RAISED)[fault]
    messages = [message for message in ending.messages if message]
    assert ending.exitcodes[0] == 1
    assert ending.seconds <= TIMEOUT
    if fault == "raised in the draft":
        assert "least far: rank 1: 'draft' of micro-step 3" in messages[0]
    elif fault == "raised in a forward":
        # Whichever is first: the other rank's message, or that its process has ended.
        assert "rank 1 (stages [1])" in messages[0] or "rank(s) [1] had ended" in messages[0]
    else:
        assert len(messages) == 2
        assert all("rank 1: ValueError: this rank gives up" in message for message in messages)


@pytest.mark.slow
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("fault", SLOW)
def test_the_other_rank_ends_with_an_error_within_the_timeout(seen, fault):
    ending = seen(*SLOW)[fault]
    assert ending.exitcodes[0] not in (0, None)
    assert ending.seconds <= TIMEOUT + 10
    if "draft" in fault:
        assert "least far: rank 1: 'draft' of micro-step 3" in ending.messages[0]
    if "forward" in fault:
        assert "rank(s) [1]" in ending.messages[0] or "rank 1" in ending.messages[0]
