"""Breaks context parallelism in the trainer on purpose: evidence that the comparison with the plain run can fail."""

import pytest
from cp.trainer_cases import TOLERANCE, TOLERANCES
from cp.trainer_mutation_worker import MUTATIONS
from forked_ranks import run_script
from group.comparison import assert_close, assert_same_training


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return run_script("trainer_mutation_worker.py", tmp_path_factory.mktemp("broken"), timeout=900, folder="cp")


def assert_same_draft(ours, plain, tolerance):
    assert_close(ours["draft gradients"][0], plain["draft gradients"][0], tolerance, "the draft's first gradients")


@pytest.mark.slow
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("mutation", MUTATIONS)
def test_comparison_notices(ranks, mutation):
    case = MUTATIONS[mutation].case
    tolerance = TOLERANCES.get(case, TOLERANCE)
    for rank in ranks:
        broken, plain = rank[mutation], rank[None][case]
        # It ran to its end, and what differs is what the mutation is about.
        assert not isinstance(broken, Exception)
        compare = assert_same_draft if mutation == "draft learns from one member" else assert_same_training
        with pytest.raises(AssertionError):
            compare(broken, plain, tolerance)
