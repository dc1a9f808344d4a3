"""Breaks the group machinery on purpose: evidence that the comparison with plain data parallelism can fail."""

import pytest
from comparison import assert_same_training
from forked_ranks import run_script
from mutation_worker import MUTATIONS
from replay_cases import TOLERANCE


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return run_script("mutation_worker.py", tmp_path_factory.mktemp("mutations"), timeout=500)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("mutation", MUTATIONS)
def test_comparison_notices(ranks, mutation):
    case = MUTATIONS[mutation].case
    # It ran to its end: a crash says nothing about the comparison.
    assert not [rank[mutation] for rank in ranks if isinstance(rank[mutation], Exception)]

    def compare():
        for rank in ranks:
            assert_same_training(rank[mutation], rank[None][case], TOLERANCE)

    with pytest.raises(AssertionError):
        compare()
