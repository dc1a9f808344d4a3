"""Breaks pipelines in the trainer on purpose: evidence that the comparison with the plain run can fail."""

import pytest
from group.comparison import assert_close, assert_same_training
from group.forked_ranks import run_script
from pp.test_pp_trainer import comparable, of_all_stages
from pp.trainer_cases import TOLERANCE


MUTATIONS = {
    "loss not divided": "dapo",
    "other stages' weights stay old": "dapo",
    "norm of the own stage": "tight clipping",
    "metrics of other rows": "dapo",
    "controllers act in every micro-step": "adaptive entropy",
    "positions of added columns": "longrope",
    "states a column late": "dapo",
    "draft learns from the last microbatch": "dapo",
    "gradients of one pipeline only": "two pipelines",
    "threshold of the member": "entropy quantile",
}
OF_THE_DRAFT = ("states a column late", "draft learns from the last microbatch")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return run_script("trainer_mutation_worker.py", tmp_path_factory.mktemp("broken"), timeout=900, folder="pp")


@pytest.mark.slow
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("mutation", MUTATIONS)
def test_comparison_notices(ranks, mutation):
    # It ran to its end, and what differs is what the mutation is about.
    assert not any(isinstance(rank[mutation], Exception) for rank in ranks), ranks[0][mutation]
    gradients = of_all_stages([{mutation: {"2": rank[mutation]}} for rank in ranks], mutation, "2")
    noticed = 0
    for rank in ranks:
        broken, plain = rank[mutation], rank[None][MUTATIONS[mutation]]
        try:
            if mutation in OF_THE_DRAFT:
                assert_close(broken["draft gradients"][0], plain["draft gradients"][0], TOLERANCE, "the draft")
            else:
                assert_same_training(comparable(broken, gradients), comparable(plain, plain["gradients"]), TOLERANCE)
        except AssertionError:
            noticed += 1
    assert noticed
