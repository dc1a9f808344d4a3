"""What goes wrong on one rank stops all ranks, at once and with its message: nobody waits for a rank that gave up."""

import pytest
from forked_ranks import run_script


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    # Collectives give up after 60 s, so a fault that makes one rank wait for the other takes longer than this.
    return run_script("fault_worker.py", tmp_path_factory.mktemp("faults"), timeout=240)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("rollout", "rank 1: ConnectionError: the sandbox is gone"),
        ("rollout before log-probs", "rank 0: ConnectionError: the sandbox is gone"),
        ("reward", "rank 0: ZeroDivisionError: no tests were run"),
        ("reward of two", "rank 1: TimeoutError: the judge did not answer"),
        ("evaluation", "rank 1: TimeoutError: the judge did not answer"),
    ],
)
def test_exception_of_one_rank_is_raised_on_all_with_its_message(ranks, fault, message):
    culprit, cause = int(message[5]), message.split(": ")[1]
    for rank, seen in enumerate(ranks):
        assert seen[fault][0] == "RuntimeError"
        assert seen[fault][1] == f"Training stops on all ranks because of {message}"
        # The traceback of the original exception is shown where it happened.
        assert seen[fault][2] == (cause if rank == culprit else "NoneType")


def test_ranks_with_other_settings_are_refused_before_training(ranks):
    for seen in ranks:
        assert seen["other settings"][0] == "ValueError"
        assert "`num_iterations` is 1 on rank 0 and 2 on rank 1" in seen["other settings"][1]


def test_ranks_that_are_about_to_do_different_things_all_raise(ranks):
    for seen in ranks:
        assert seen["schedule"][0] == "RuntimeError"
        assert "the phase: loss on rank 0, rollout on rank 1" in seen["schedule"][1]
