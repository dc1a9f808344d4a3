"""A rank that is killed while weights travel in a pipeline is named by the one that waits for it."""

import pytest
import weights_fault_worker
from forked_ranks import run_script


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    return run_script("weights_fault_worker.py", tmp_path_factory.mktemp("weights"), folder="pp")


LOST = {"stream": "weight 1.3", "embedding": "the input embedding", "replica": "model.embed_tokens.weight"}


@pytest.mark.parametrize("case", weights_fault_worker.CASES)
def test_rank_that_dies_while_weights_travel_is_named(outcomes, case):
    culprit = int(case[-2])
    ranks = outcomes[case]
    assert ranks[culprit].exitcode == -9
    assert ranks[1 - culprit].exitcode == 1
    error = ranks[1 - culprit].errors.strip().splitlines()[-1]
    assert f"rank {culprit}" in error or f"rank(s) [{culprit}]" in error, error
    assert LOST[case.split(" ")[0]] in error, error
    assert "has ended" in error
