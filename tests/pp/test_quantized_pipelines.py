"""
Adapters on quantised policies train in a pipeline as without one: `pip install bitsandbytes`, then
`pytest -m peers tests/pp/test_quantized_pipelines.py`.
"""

import pytest
import torch
from forked_ranks import run_script
from group.comparison import assert_same_training
from pp.test_pp_trainer import comparable, gradients_of_all_stages, weights_of


pytestmark = pytest.mark.peers
# Relative and absolute: everything that is not packed is in float32.
TOLERANCE = (1e-5, 2e-7)

# What weights are packed into.
CASES = {"nf4": torch.uint8, "nf4 twice": torch.uint8, "int8": torch.int8}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    pytest.importorskip("bitsandbytes")
    return run_script("quantized_worker.py", tmp_path_factory.mktemp("ranks"), *CASES, timeout=280, folder="pp")


@pytest.mark.parametrize("size", ["2", "2p"])
@pytest.mark.parametrize("name", CASES)
def test_a_pipeline_trains_adapters_of_a_quantised_policy_as_the_plain_run_does(ranks, name, size):
    gradients = gradients_of_all_stages(ranks, name, size)
    assert all(gradients)
    for rank in ranks:
        plain = rank[name]["1"]
        assert CASES[name] in plain["dtypes"]
        assert CASES[name] in rank[name][size]["dtypes"]
        ours = comparable(rank[name][size], gradients, weights_of(ranks, name, size, rank))
        expected = comparable(plain, plain["gradients"], plain["weights"])
        assert_same_training(ours, expected, TOLERANCE)
