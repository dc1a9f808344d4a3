"""Small GRPO runs on tiny policies, and what to compare between two of them."""

import os


os.environ.setdefault("CI", "1")  # no telemetry
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from datasets import Dataset
from tiny import tiny_policy, tiny_tokenizer
from trl import GRPOConfig, GRPOTrainer

from trl_codraft import CoDraftGRPOConfig, CoDraftGRPOTrainer


PROMPTS = ["add 2 and 3", "hi", "what is the capital", "1+1=", "count to ten please", "abc", "x", "say something long"]


def letter_reward(completions, **kwargs):
    """Deterministic and different between completions: the share of lower-case letters, plus a little for length."""
    texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
    return [sum(ch.islower() for ch in text) / max(len(text), 1) + 0.01 * len(text) for text in texts]


def prompt_dataset(conversational=False, copies=3):
    prompts = PROMPTS * copies
    if conversational:
        prompts = [[{"role": "user", "content": prompt}] for prompt in prompts]
    return Dataset.from_dict({"prompt": prompts})


def settings(output_dir, **overrides):
    """Arguments of a 3-step run of 2 microbatches per step on CPU in fp32."""
    return {
        "output_dir": str(output_dir),
        "use_cpu": True,
        "bf16": False,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "logging_steps": 1,
        "max_steps": 3,
        "learning_rate": 1e-3,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "num_generations": 4,
        "max_completion_length": 10,
        "temperature": 1.0,
        "gradient_checkpointing": False,
        **overrides,
    }


def draft_settings(**overrides):
    """Draft arguments fit for a policy of four layers."""
    return {"draft_tap_layers": [1, 2, 3], "draft_ttt_steps": 3, "num_draft_tokens": "2", **overrides}


def plain_trainer(output_dir, model=None, trainer=None, **config):
    return build(GRPOTrainer, GRPOConfig, settings(output_dir, **config), model, trainer)


def codraft_trainer(output_dir, model=None, trainer=None, **config):
    merged = settings(output_dir, **{**(draft_settings() if config.get("use_draft", True) else {}), **config})
    return build(CoDraftGRPOTrainer, CoDraftGRPOConfig, merged, model, trainer)


def build(trainer_class, config_class, config, model, trainer):
    arguments = {
        "model": tiny_policy() if model is None else model,
        "reward_funcs": letter_reward,
        "train_dataset": prompt_dataset(),
        "processing_class": tiny_tokenizer(),
        **(trainer or {}),
    }
    return trainer_class(args=config_class(**config), **arguments)


def weights(trainer):
    return {name: p.detach().clone() for name, p in trainer.model.state_dict().items()}


def policy_logs(trainer):
    """The log history without clock readings and without the draft's own entries."""
    clock = ("runtime", "per_second", "step_time", "total_flos")
    return [
        {
            key: value
            for key, value in entry.items()
            if not key.removeprefix("eval_").startswith(("draft/", "rollout/")) and not any(c in key for c in clock)
        }
        for entry in trainer.state.log_history
    ]


def draft_of(trainer):
    return {name: tensor.clone() for name, tensor in trainer.draft_model.state_dict().items()}


def assert_equal_tensors(ours, theirs):
    """The same names, and bit-identical tensors."""
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


def assert_same_run(first, second):
    """Bit-identical weights and logs."""
    assert_equal_tensors(weights(first), weights(second))
    assert policy_logs(first) == policy_logs(second)
