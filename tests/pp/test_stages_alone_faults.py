"""
What fails on one rank that has a part or a shard of the policy ends all ranks soon, and all of them say what it was.
"""

import pytest
from faults import TIMEOUT
from forked_ranks import run_script


RAISED = "ValueError: this rank gives up"
PUSH = "ServerFailure: Weights were not pushed because of"
FAULTS = {
    "raised before a push": f"{PUSH} rank 0: {RAISED}",
    "raised late in a push": f"{PUSH} rank 0: {RAISED}",
    "raised in a layer that is pushed": f"{PUSH} rank 1: {RAISED}",
    "raised late in a push of shards": f"Weights were not pushed because of rank 0: {RAISED}",
    "raised in a draft's push, before the first of shards": f"{PUSH} rank 0: {RAISED}",
    "silent in a push": f"{PUSH} rank 0: RuntimeError: The vLLM server was given 9 s while weights were sent to it",
    "raised in generate": f"rank 0: ServerFailure: The vLLM server did not generate. {RAISED}",
    "raised in generate, no draft": f"rank 0: ServerFailure: The vLLM server did not generate. {RAISED}",
    "raised in a reward": f"rank 1: {RAISED}",
}


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    (outcomes,) = run_script(
        "stages_alone_fault_worker.py", tmp_path_factory.mktemp("faults"), *FAULTS, timeout=280, folder="pp"
    )
    return outcomes


@pytest.mark.parametrize("fault", FAULTS)
def test_all_ranks_end_with_the_cause_within_the_timeout(seen, fault):
    assert seen[fault].exitcodes == [1, 1]
    assert seen[fault].seconds <= TIMEOUT
    for message in seen[fault].messages:
        assert FAULTS[fault] in message
