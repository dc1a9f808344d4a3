"""
Invariants 1 and 2: the policy's weights and logs are bit for bit those of `trl.GRPOTrainer`. One exception, on
purpose: runs of expert policies that resume or take their best model (`test_checkpoints.py`), where TRL's are not
those of an uninterrupted run.
"""

import pytest
import torch
from grpo_runs import assert_same_run, codraft_trainer, plain_trainer, policy_logs, prompt_dataset, weights
from peft import LoraConfig
from tiny import tiny_policy
from trl import GRPOTrainer

from trl_codraft import CoDraftGRPOTrainer


def run(trainer):
    trainer.train()
    return trainer


@pytest.fixture(scope="module")
def plain_run(tmp_path_factory):
    return run(plain_trainer(tmp_path_factory.mktemp("plain")))


def test_plain_run_moves_the_policy_and_logs_nonzero_gradients(plain_run):
    """Guards the comparisons below: two runs that learn nothing would be equal too."""
    before = tiny_policy().state_dict()
    assert any(not torch.equal(before[name], after) for name, after in weights(plain_run).items())
    assert all(entry["grad_norm"] > 0 for entry in policy_logs(plain_run) if "grad_norm" in entry)


def test_without_draft_the_run_is_grpo_trainers(plain_run, tmp_path):
    ours = run(codraft_trainer(tmp_path, use_draft=False))
    assert ours.draft_model is None
    assert ours.draft_trainer is None
    assert not any("draft/" in key or "rollout/" in key for entry in ours.state.log_history for key in entry)
    assert_same_run(ours, plain_run)


def test_draft_does_not_change_policy_update(plain_run, tmp_path):
    ours = run(codraft_trainer(tmp_path, speculative_rollouts="false"))
    assert_same_run(ours, plain_run)
    losses = [entry["draft/loss"] for entry in ours.state.log_history if "draft/loss" in entry]
    assert len(losses) == 3
    assert losses[-1] < losses[0]


def test_pretraining_and_reduced_vocabulary_do_not_change_policy_update(plain_run, tmp_path):
    ours = run(codraft_trainer(tmp_path, speculative_rollouts="false", draft_pretrain_steps=3, draft_vocab_size=48))
    assert len(ours.draft_pretraining_log) == 3
    assert_same_run(ours, plain_run)


@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dr_grpo", "cispo", "sapo", "luspo", "vespo"])
def test_draft_does_not_change_policy_update_for_loss_type(loss_type, tmp_path):
    config = {"loss_type": loss_type, "max_steps": 3}
    if loss_type == "luspo":
        config["importance_sampling_level"] = "sequence"
    plain = run(plain_trainer(tmp_path / "plain", **config))
    ours = run(codraft_trainer(tmp_path / "ours", speculative_rollouts="false", **config))
    assert_same_run(ours, plain)


@pytest.mark.parametrize(
    ("model", "config"),
    [
        ("llama", {"gradient_checkpointing": True}),
        ("llama", {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}),
        ("llama", {"top_entropy_quantile": 0.5, "mask_truncated_completions": True}),
        ("llama", {"disable_dropout": True, "scale_rewards": "none", "steps_per_generation": 4}),
        ("mixtral", {"router_aux_loss_coef": 0.01}),
        ("gemma2", {}),
        ("gemma4_text", {}),
        ("llama", {"bf16": True}),
        ("llama", {"cast_lm_head_to_fp32": True, "use_adaptive_entropy": True}),
    ],
    ids=[
        "checkpointing",
        "reentrant-checkpointing",
        "entropy-quantile-masked",
        "long-window",
        "moe-aux",
        "gemma2",
        "gemma4",
        "bf16-autocast",
        "fp32-head-adaptive-entropy",
    ],
)
def test_draft_does_not_change_policy_update_with(model, config, tmp_path):
    plain = run(plain_trainer(tmp_path / "plain", tiny_policy(model), **config))
    ours = run(codraft_trainer(tmp_path / "ours", tiny_policy(model), speculative_rollouts="false", **config))
    assert_same_run(ours, plain)


def test_bf16_policy_trains_and_speculates(tmp_path):
    ours = run(
        codraft_trainer(
            tmp_path, tiny_policy(dtype=torch.bfloat16), bf16=True, draft_learning_rate=1e-2, draft_warmup_steps=0
        )
    )
    assert ours.draft_model.compute_dtype == torch.bfloat16
    assert ours.draft_model.lm_head.weight.dtype == torch.float32
    assert ours.draft_trainer.rollout_draft.lm_head.weight.dtype == torch.bfloat16
    steps = [entry for entry in ours.state.log_history if "draft/loss" in entry]
    assert [entry["rollout/speculation_on"] for entry in steps] == [1.0] * 3
    assert steps[-1]["draft/loss"] < steps[0]["draft/loss"]


def test_draft_does_not_change_lora_update(tmp_path):
    lora = {"peft_config": LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")}
    config = {"beta": 0.1, "gradient_checkpointing": True}
    plain = run(plain_trainer(tmp_path / "plain", trainer=lora, **config))
    ours = run(codraft_trainer(tmp_path / "ours", trainer=lora, speculative_rollouts="false", **config))
    assert_same_run(ours, plain)


def test_draft_does_not_change_update_with_reference_model_and_two_iterations(tmp_path):
    tiny_policy().save_pretrained(tmp_path / "policy")
    config = {"beta": 0.1, "num_iterations": 2, "steps_per_generation": 4, "max_steps": 4}
    chat = {"train_dataset": prompt_dataset(conversational=True)}
    path = str(tmp_path / "policy")
    plain = run(plain_trainer(tmp_path / "plain", path, chat, **config))
    ours = run(
        codraft_trainer(tmp_path / "ours", path, chat, speculative_rollouts="false", draft_pretrain_steps=3, **config)
    )
    assert_same_run(ours, plain)


def test_evaluation_in_between_changes_nothing(tmp_path):
    config = {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 4}
    data = {"eval_dataset": prompt_dataset(copies=1).select(range(4))}
    plain = run(plain_trainer(tmp_path / "plain", trainer=data, **config))
    ours = run(codraft_trainer(tmp_path / "ours", trainer=data, speculative_rollouts="false", **config))
    assert_same_run(ours, plain)
    assert any("eval_rollout/tokens_per_second" in entry for entry in ours.state.log_history)


def test_speculative_rollouts_with_replayed_completions_do_not_change_the_update(plain_run, tmp_path):
    """Records the plain run's completions and replays them after the draft's own rollouts."""
    recorded = []
    plain = plain_trainer(tmp_path / "plain")
    generate = plain._generate_single_turn

    def record(*args, **kwargs):
        recorded.append((generate(*args, **kwargs), torch.get_rng_state()))
        return recorded[-1][0]

    plain._generate_single_turn = record
    plain.train()

    ours = codraft_trainer(tmp_path / "ours", draft_pretrain_steps=1)
    speculate = ours._generate_single_turn
    drafted, replay = [], iter(recorded)

    def replayed(*args, **kwargs):
        if ours.draft_trainer is None or ours.draft_trainer._pretraining:
            return speculate(*args, **kwargs)
        speculate(*args, **kwargs)
        drafted.append(ours.rollouts.decoder.stats.drafted)
        completions, state = next(replay)
        torch.set_rng_state(state)
        return completions

    ours._generate_single_turn = replayed
    ours.train()
    assert drafted
    assert min(drafted) > 0
    assert_same_run(ours, plain)


def test_methods_of_trl_run_without_a_constructor(monkeypatch):
    # TRL's own tests call them on trainers that were made with `__new__`.
    monkeypatch.setattr(GRPOTrainer, "_generate", lambda trainer, prompts: prompts)
    trainer = CoDraftGRPOTrainer.__new__(CoDraftGRPOTrainer)
    trainer.rollout_func = None
    assert trainer._generate(["a"]) == ["a"]
