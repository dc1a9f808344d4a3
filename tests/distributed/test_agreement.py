"""Ranks that were started differently all raise the same error, at once, which says where they differ."""

import dataclasses

import pytest
from distributed.agreement_worker import RUNS
from forked_ranks import run_script

from trl_codraft import CoDraftGRPOConfig
from trl_codraft.grpo.agreement import MAY_DIFFER


FREE = set().union(*MAY_DIFFER.values())
FIELDS = [spec.name for spec in dataclasses.fields(CoDraftGRPOConfig)]
# What runs with another value than rank 0 on rank 1 say; those that are not named run.
SAID = {
    "draft_detach_passes": "`draft_detach_passes` is False on rank 0 and True on rank 1",
    "draft_vocab_size": "`draft_vocab_size` is None on rank 0 and 48 on rank 1",
    "draft_fc_norm": "`draft_fc_norm` is False on rank 0 and True on rank 1",
    "draft_norm_output": "`draft_norm_output` is False on rank 0 and True on rank 1",
    "use_draft": "`use_draft` is True on rank 0 and False on rank 1",
    "learning_rate": "`learning_rate` is 0.001 on rank 0 and 0.5 on rank 1",
    "context group": "`draft_detach_passes` is False on rank 0 and True on rank 1",
    "context group without draft": "`num_iterations` is 1 on rank 0 and 2 on rank 1",
    "context_parallel_size": "`context_parallel_size` is 1 on rank 0 and 2 on rank 1",
    "groups that do not fill": "`context_parallel_size` is 1 on rank 0 and 3 on rank 1",
    "pipeline": "`draft_ttt_decay` is 0.8 on rank 0 and 0.5 on rank 1",
    "loaded draft": "the draft's `fc_norm` is False on rank 0 and True on rank 1",
    "a draft on one rank": "(no `draft_model`, no `draft_model_name_or_path`) is True on rank 0 and False on rank 1",
    "policy": "the policy's `hidden_size` is 32 on rank 0 and 48 on rank 1",
    "policy's layers": "the policy's `num_hidden_layers` is 4 on rank 0 and 3 on rank 1",
    "policy's rope": "the policy's `rope_parameters` is {'rope_theta': 10000.0, 'rope_type': 'default'} on rank 0",
    "policy's dtype": "the policy's `dtype` is float32 on rank 0 and float64 on rank 1",
    "frozen parameters": "the number of parameters that are trained is",
    "adapter": "the list of adapters (`peft_config`) is [] on rank 0 and ['default'] on rank 1",
    "adapter's factor": "adapter default's `lora_alpha` is 8 on rank 0 and 4 on rank 1",
    "prompts": "the length of `train_dataset` is 24 on rank 0 and 32 on rank 1",
    "evaluation": "the length of `eval_dataset` is no such dataset on rank 0 and 8 on rank 1",
    "rollout function": "whether there is a `rollout_func` is False on rank 0 and True on rank 1",
    "reward functions": "the number of reward functions is 1 on rank 0 and 2 on rank 1",
    "tokenizer": "the number of tokens of the tokenizer is 104 on rank 0 and 90 on rank 1",
}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    # Collectives give up after 60 s: what waits for another rank takes longer than the test allows.
    return run_script("agreement_worker.py", tmp_path_factory.mktemp("ranks"), timeout=240, folder="distributed")


@pytest.mark.parametrize("name", [name for name in FIELDS if name not in FREE])
def test_a_setting_that_differs_is_named_with_both_values_on_all_ranks(ranks, name):
    (message, first), (theirs, second) = (rank["fields"][name] for rank in ranks)
    assert message == theirs
    assert first != second
    assert f"`{name}` is " in message
    assert "on rank 0 and " in message
    assert "on rank 1." in message


@pytest.mark.parametrize("name", sorted(FREE))
def test_a_setting_that_steers_nothing_may_differ(ranks, name):
    assert name in FIELDS
    (message, first), (theirs, second) = (rank["fields"][name] for rank in ranks)
    assert message is theirs is None
    assert first != second


@pytest.mark.parametrize("name", RUNS)
def test_runs_whose_ranks_disagree_end_at_construction_with_one_message(ranks, name):
    (message, seconds), (theirs, _) = (rank["runs"][name] for rank in ranks)
    assert message == theirs
    assert seconds < 30
    if name in SAID:
        assert message.startswith("Ranks disagree: ")
        assert SAID[name] in message
    elif name == "several":
        named = ("`beta` is 0.0", "`temperature` is 1.0", "`draft_ttt_steps` is 3")
        assert all(text in message for text in named)
        assert "output_dir" not in message
    else:
        assert message is None


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("same", None),
        ("step", "the step that training starts from is 0 on rank 0 and 4 on rank 1"),
        ("checkpoint", "whether the draft goes on from a checkpoint is False on rank 0 and True on rank 1"),
    ],
)
def test_ranks_that_resume_differently_are_told_apart(ranks, name, said):
    (message, _), (theirs, _) = (rank["starts"][name] for rank in ranks)
    assert message == theirs
    assert message is None if said is None else said in message
