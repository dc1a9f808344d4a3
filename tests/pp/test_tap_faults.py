"""One rank of three does something wrong: every other ends soon, with a non-zero code, and names the culprit."""

import re

import pytest
import tap_fault_worker
from forked_ranks import run_script


LATEST = tap_fault_worker.TIMEOUT + 10


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    return run_script("tap_fault_worker.py", tmp_path_factory.mktemp("faults"), folder="pp")


RUNS = [(transport, fault) for transport, faults in tap_fault_worker.OVER.items() for fault in faults]


def culprit_of(fault):
    return int(fault.split("rank ")[1][0]) if "rank " in fault else 0


@pytest.mark.parametrize(("transport", "fault"), RUNS)
def test_every_survivor_ends_in_time_and_names_the_culprit(outcomes, transport, fault):
    culprit = culprit_of(fault)
    for rank, outcome in enumerate(outcomes[transport, fault]):
        if rank == culprit and outcome.exitcode == -9:
            continue  # killed, or still asleep when the others had gone
        assert outcome.exitcode == 1, (rank, outcome)
        assert outcome.seconds < LATEST
        last = outcome.errors.strip().splitlines()[-1]
        if rank != culprit:
            assert f"rank {culprit}" in last or f"rank(s) [{culprit}]" in last, last


WHERE = r".*stage 0, rank 0, microbatch 2, step 2"
MESSAGES = {
    "dropped": "sequence 8 instead of 7, microbatch 3 instead of 2" + WHERE,
    "duplicated": "sequence 7 instead of 8, microbatch 2 instead of 3.*stage 0, rank 0, microbatch 3, step 2",
    "reordered": "sequence 8 instead of 7" + WHERE,
    "cut header": "checksum is wrong" + WHERE,
    "cut payload": "num_bytes 64 instead of 128" + WHERE,
    "other bytes": "checksum is wrong" + WHERE,
    "killed source": "connection to rank 0 (broke|is broken)" + WHERE,
    "stalled source": f"waited {tap_fault_worker.TIMEOUT:g} s for rank 0" + WHERE,
    "broken model": r"rank 0 gave up: rank 0 \(stages \[0\]\): the model is broken",
    "other plan (rank 1)": r"The tap plan of rank\(s\) \[1\] differs",
    "other shapes": "another plan or other shapes",
    "never joins": f"waited {tap_fault_worker.TIMEOUT:g} s for rank 0.*stage 0, rank 0, microbatch 0, step 1",
}


@pytest.mark.parametrize(("transport", "fault"), [run for run in RUNS if run[1] in MESSAGES])
def test_the_rank_of_the_draft_says_what_is_wrong_where(outcomes, transport, fault):
    last = outcomes[transport, fault][2].errors.strip().splitlines()[-1]
    message = MESSAGES[fault]
    if fault == "killed source" and transport != "gloo":
        # Its forward was ahead of its thread, which had not sent all of them yet.
        message = message.replace("microbatch 2", "microbatch [0-2]")
    assert re.search(message, last), last
