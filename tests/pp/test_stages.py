"""What a trainer does with the stages of a policy, against the whole policy in one process."""

import math

import pytest
from forked import run_script, succeeded
from stage_worker import REPLICAS, RUNS


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    return run_script("stage_worker.py", tmp_path_factory.mktemp("stages"))


@pytest.mark.parametrize("run", RUNS)
def test_reduced_gradients_and_clipping_equal_one_process(outcomes, run):
    results = succeeded(outcomes[run])
    for result in results:
        assert result["reduced"] <= 1e-6
        assert result["norm"] > 0.5
        assert abs(result["norm ratio"] - 1) <= 1e-6
        assert result["clipped"] <= 1e-6
        assert abs(result["clipped norm"] - 0.5) <= 1e-5
        assert result["unclipped"] <= 1e-6
    assert len({result["norm"] for result in results}) == 1


@pytest.mark.parametrize("run", RUNS)
def test_a_norm_that_is_not_finite_on_one_stage_is_so_on_all(outcomes, run):
    for result in succeeded(outcomes[run]):
        infinite, undefined = result["not finite"]
        assert infinite == math.inf
        assert math.isnan(undefined)


def test_a_gradient_that_is_missing_counts_as_zero_unless_all_lack_it(outcomes):
    for result in succeeded(outcomes["4 ranks"]):
        assert result["missing"] == [[1.5, 1.5], None]


@pytest.mark.parametrize("run", REPLICAS)
def test_a_replica_is_the_whole_policy_and_generates_the_same_tokens(outcomes, run):
    results = succeeded(outcomes[run])
    for result in results:
        assert result["equal"] == [True] * 3
        for generated, expected in result["tokens"]:
            assert generated == expected
        # What is frozen is sent once, when the replica is made.
        assert result["sent"] == [result["trained"]] * 2
        assert result["in place"]
        assert result["tied"]
        assert result["random state kept"]
        assert not result["gradients"]
    # The refreshes change what is generated, or the comparison would say little.
    assert len({str(generated) for generated, _ in results[0]["tokens"]}) > 1


def test_weights_of_the_first_rank_that_holds_a_stage_count(outcomes):
    for result in succeeded(outcomes["aligned"]):
        assert "model.embed_tokens.weight" in result
        assert len(result) > 18
        assert all(result.values()), result


def test_a_checkpoint_of_two_stages_loads_as_a_whole_policy(outcomes):
    for result in succeeded(outcomes["checkpoints"]):
        assert result["files"] == [
            "config.json",
            "generation_config.json",
            "model-00001-of-00002.safetensors",
            "model-00002-of-00002.safetensors",
            "model.safetensors.index.json",
            "optimizer-00001-of-00002.pt",
            "optimizer-00002-of-00002.pt",
        ]
        assert result["weights"]
        assert result["tied"]
        assert result["config"] == (["LlamaForCausalLM"], "torch.float32", 4)


def test_a_run_resumes_under_another_number_of_stages_to_the_same_step(outcomes):
    for rank, result in enumerate(succeeded(outcomes["checkpoints"])):
        # By ranks: one stage; four stages; four stages on two ranks.
        assert result["resumed"] == {ranks: True for ranks in (1, 4, 2) if rank < ranks}


def test_saving_on_one_rank_only_is_an_error_soon(outcomes):
    for rank, result in enumerate(succeeded(outcomes["checkpoints"])[:2]):
        message, seconds = result["alone"]
        assert f"`save_policy` was called on rank {rank} of a pipeline, but not all of its 2 ranks came" in message
        assert seconds < 20


def test_checkpoints_refuse_by_name(outcomes):
    first, second = succeeded(outcomes["checkpoints"])[:2]
    for result in (first, second):
        assert "The stages together are not a LlamaForCausalLM" in result["adapters"]
        assert "with adapters" in result["adapters"]
        assert "not in the stages of this rank" in result["other parameters"]
    assert "does not hold the optimizer files of all stages" in first["missing file"]


def test_a_replica_without_the_adapters_is_refused_on_all_ranks(outcomes):
    for result in succeeded(outcomes["replica, interleaved, adapters"]):
        assert "lora_A.default.weight" in result["refused"]
        assert "same class, config and adapters" in result["refused"]
