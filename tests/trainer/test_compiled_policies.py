"""Policies under `torch.compile`: taps are those of the forward that ran, whatever was compiled before."""

import pytest
import torch
from grpo_runs import codraft_trainer, plain_trainer
from tiny import tiny_policy

from trl_codraft.modeling.policy import base_policy
from trl_codraft.modeling.taps import TapRecorder, let_compiled_forwards_see_hooks


SMALL = {"num_hidden_layers": 2, "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2}


@pytest.fixture(autouse=True)
def as_in_a_new_process():
    """Dynamo as it starts: nothing compiled, hooks not looked at."""
    with torch._dynamo.config.patch(skip_nnmodule_hook_guards=True):
        torch.compiler.reset()
        yield
    torch.compiler.reset()


def taps_of(recorder, forward, ids):
    with recorder.record() as record, torch.no_grad():
        forward(input_ids=ids)
    return record.taps


def test_a_forward_compiled_for_another_policy_does_not_hide_the_taps_of_this_one():
    ids = torch.arange(3, 11)[None]
    other = torch.compile(tiny_policy(**SMALL).model, backend="eager")
    with torch.no_grad():
        other(input_ids=ids)
    policy = tiny_policy(seed=1, **SMALL)
    with torch.no_grad():
        expected = policy(input_ids=ids, output_hidden_states=True).hidden_states[:2]
    recorder, compiled = TapRecorder(policy, [0, 1]), torch.compile(policy.model, backend="eager")
    with pytest.raises(RuntimeError, match=r"did not deliver the taps of layers \[0, 1\]"):
        taps_of(recorder, compiled, ids)
    let_compiled_forwards_see_hooks()
    taps = taps_of(recorder, compiled, ids)
    # A forward that is compiled afterwards is told apart.
    with torch.no_grad():
        other(input_ids=ids)
    again = taps_of(recorder, compiled, ids)
    for ours, later, theirs in zip(taps, again, expected, strict=True):
        assert torch.equal(ours, theirs)
        assert torch.equal(later, theirs)


def compiled_whole():
    return torch.compile(tiny_policy(**SMALL), backend="eager")


def compiled_in_place():
    policy = tiny_policy(**SMALL)
    policy.compile(backend="eager")
    return policy


def compiled_in_part():
    policy = tiny_policy(**SMALL)
    policy.model.layers[1].compile(backend="eager")
    return policy


@pytest.mark.parametrize("build", [compiled_whole, compiled_in_place, compiled_in_part])
def test_a_policy_that_the_user_compiled_is_noticed_at_construction(tmp_path, build):
    codraft_trainer(tmp_path / "plain", tiny_policy(**SMALL), draft_tap_layers=[0, 1])
    assert torch._dynamo.config.skip_nnmodule_hook_guards
    trainer = codraft_trainer(tmp_path / "compiled", build(), draft_tap_layers=[0, 1])
    assert not torch._dynamo.config.skip_nnmodule_hook_guards
    assert trainer.rollouts.decoder.policy is base_policy(trainer.model)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("build", [compiled_whole, compiled_in_part])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_compiled_policy_trains_as_the_plain_one_after_plain_training_of_another(tmp_path, build, checkpointing):
    plain_trainer(tmp_path / "trl", compiled_whole(), max_steps=1).train()
    runs = []
    for name, policy in (("plain", tiny_policy(**SMALL)), ("compiled", build())):
        trainer = codraft_trainer(
            tmp_path / name, policy, draft_tap_layers=[0, 1], max_steps=2, gradient_checkpointing=checkpointing
        )
        trainer.train()
        runs.append((trainer.state.log_history[1], dict(base_policy(trainer.model).named_parameters())))
    (plain, weights), (compiled, own) = runs
    for name in ("loss", "draft/loss", "draft/rows", "rollout/accept_length"):
        assert compiled[name] == pytest.approx(plain[name], abs=1e-5), name
    for name, weight in weights.items():
        torch.testing.assert_close(own[name], weight, atol=1e-5, rtol=1e-5)
