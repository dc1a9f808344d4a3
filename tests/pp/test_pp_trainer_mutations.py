"""Breaks pipelines in the trainer on purpose: evidence that the comparison with the plain run can fail."""

import pytest
from forked_ranks import run_script
from group.comparison import assert_close, assert_same_training
from pp.test_pp_trainer import comparable, gradients_of_all_stages, weights_of
from pp.trainer_cases import TOLERANCE
from pp.trainer_mutation_worker import ALL, IN_PARTS


OF_THE_DRAFT = ("states a column late", "draft learns from the last microbatch")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return run_script("trainer_mutation_worker.py", tmp_path_factory.mktemp("broken"), timeout=900, folder="pp")


@pytest.mark.slow
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("mutation", ALL)
def test_comparison_notices(ranks, mutation):
    # It ran to its end, and what differs is what the mutation is about.
    assert not any(isinstance(rank[mutation], Exception) for rank in ranks), ranks[0][mutation]
    size = "2p" if mutation in IN_PARTS else "2"
    seen = [{mutation: {size: rank[mutation]}} for rank in ranks]
    gradients = gradients_of_all_stages(seen, mutation, size)
    noticed = 0
    for rank, own in zip(ranks, seen, strict=True):
        broken, plain = rank[mutation], rank[None][ALL[mutation].case]
        try:
            if mutation in OF_THE_DRAFT:
                assert_close(broken["draft gradients"][0], plain["draft gradients"][0], TOLERANCE, "the draft")
            else:
                ours = comparable(broken, gradients, weights_of(seen, mutation, size, own))
                assert_same_training(ours, comparable(plain, plain["gradients"], plain["weights"]), TOLERANCE)
        except AssertionError:
            noticed += 1
    assert noticed
