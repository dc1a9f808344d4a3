"""Policies under a pipeline against the whole policy in one process: taps, losses, gradients, names."""

import re

import pytest
import torch
from forked_ranks import run_script, succeeded
from pipeline_worker import ARCHITECTURES, CASES, USUAL, ragged_microbatches
from tiny import tiny_policy

from trl_codraft.pp.padding import PaddedMicrobatch, pad_microbatches
from trl_codraft.pp.stages.split import split_policy, verify_split


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    return run_script("pipeline_worker.py", tmp_path_factory.mktemp("pipeline"), "usual", timeout=280, folder="pp")


@pytest.fixture(scope="module")
def other_outcomes(tmp_path_factory):
    return run_script("pipeline_worker.py", tmp_path_factory.mktemp("pipeline"), "others", timeout=900, folder="pp")


@pytest.mark.parametrize("case", USUAL)
def test_taps_losses_gradients_and_names_are_those_of_one_process(outcomes, case):
    assert succeeded(outcomes[case]) == [None] * CASES[case].num_ranks


@pytest.mark.slow
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("case", [case for case in CASES if case not in USUAL])
def test_the_same_of_other_pipelines(other_outcomes, case):
    assert succeeded(other_outcomes[case]) == [None] * CASES[case].num_ranks


def test_draft_gradients_equal_one_process(outcomes):
    succeeded(outcomes["draft"])


def test_pipeline_refuses_by_name_goes_on_and_keeps_no_output_and_few_shapes(outcomes):
    succeeded(outcomes["without channel"])


@pytest.mark.parametrize("fault", ["killed", "broken"])
def test_a_rank_that_fails_in_the_pipeline_ends_all_ranks(outcomes, fault):
    ranks = outcomes[fault]
    assert [rank.exitcode for rank in ranks] == [1, -9 if fault == "killed" else 1, 1]
    for rank in (0, 2):
        assert ranks[rank].seconds < 30
        assert "when the process of rank(s) [1" in ranks[rank].errors.strip().splitlines()[-1]
    if fault == "broken":
        assert "ZeroDivisionError: layer 1 is broken" in ranks[1].errors


@pytest.mark.parametrize("model", ARCHITECTURES)
def test_a_split_that_is_verified_computes_what_the_whole_policy_does(model):
    verify_split(tiny_policy(model, **ARCHITECTURES[model]))
    hidden = ids = torch.arange(3, 15).view(1, -1)
    for stage in range(2):
        hidden = split_policy(tiny_policy(model, **ARCHITECTURES[model]).eval(), (2, 2), stage)(hidden)
    torch.testing.assert_close(hidden, tiny_policy(model, **ARCHITECTURES[model]).eval()(ids).logits)


def granite():
    return tiny_policy("granite", embedding_multiplier=12.0)


def shared_cache():
    policy = tiny_policy("llama")
    policy.config.num_kv_shared_layers = 2
    return policy


def router_loss():
    return tiny_policy("mixtral", output_router_logits=True)


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (granite, "logits of two stages differ from those of the whole model by up to .*scaling embeddings"),
        (shared_cache, "share keys and values"),
        (router_loss, "load-balancing loss"),
    ],
)
def test_models_that_cannot_be_split_are_refused_by_name(policy, message):
    with pytest.raises(ValueError, match=message + "|" + message + ".*pipeline_parallel_size=1"):
        verify_split(policy())


def test_verification_leaves_policy_and_random_state_alone():
    policy = tiny_policy("gemma3_text")
    before = {name: value.clone() for name, value in policy.state_dict().items()}
    torch.manual_seed(5)
    verify_split(policy)
    drawn = torch.rand(3)
    torch.manual_seed(5)
    assert torch.equal(drawn, torch.rand(3))
    assert all(torch.equal(value, before[name]) for name, value in policy.state_dict().items())


@pytest.mark.parametrize("layers", [(2, 3), (4, 0), (1, 1, 1)])
def test_layers_that_do_not_add_up_are_refused(layers):
    with pytest.raises(ValueError, match=re.escape(f"`layers_per_stage={list(layers)}` does not split 4 layers")):
        split_policy(tiny_policy("llama"), layers, 0)


def test_padding_keeps_rows_and_rounds_columns_up():
    batches = [*ragged_microbatches(CASES["1F1B, 2 ranks"], 0)[:2]]
    batches.append(PaddedMicrobatch(torch.full((1, 5), 7), torch.ones(1, 5, dtype=torch.long), 4))
    padded = pad_microbatches(batches, bucket=16, pad_token_id=9)
    assert len({(rows.input_ids.shape, rows.attention_mask.shape, rows.completion_length) for rows in padded}) == 1
    assert padded[0].input_ids.shape[1] % 16 == 0
    for own, rows in zip(batches, padded, strict=True):
        start = rows.input_ids.shape[1] - rows.completion_length - (own.input_ids.shape[1] - own.completion_length)
        window = (slice(None, len(own.input_ids)), slice(start, start + own.input_ids.shape[1]))
        assert torch.equal(rows.input_ids[window], own.input_ids)
        assert torch.equal(rows.attention_mask[window], own.attention_mask)
        assert rows.attention_mask.sum(1)[: len(own.input_ids)].tolist() == own.attention_mask.sum(1).tolist()
        # Rows that are missing repeat the first, so that no row is without tokens.
        assert (rows.attention_mask.sum(1) > 0).all()
    assert (padded[2].input_ids[:, 0] == 9).all()
