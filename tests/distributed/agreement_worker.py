"""
Ranks of `test_agreement.py`: `python agreement_worker.py OUT` starts two of them in ways that differ, and saves what
each raised and how long that took.
"""

import copy
import dataclasses
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import torch
from forked_ranks import fork_ranks
from grpo_runs import codraft_trainer, letter_reward, prompt_dataset, settings
from peft import LoraConfig
from tiny import tiny_policy, tiny_tokenizer

from trl_codraft import CoDraftGRPOConfig, Eagle3DraftConfig, Eagle3DraftModel
from trl_codraft.grpo.agreement import require_same_settings, require_same_start


def other(value):
    """Some value that is not this one, of its kind where it has one."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return value + 1
    if isinstance(value, (list, tuple)):
        return [*value, 99]
    if isinstance(value, dict):
        return {**value, "other": 1}
    if isinstance(value, str) or dataclasses.is_dataclass(value):
        return "another"
    return 7


def outcome(start):
    """What went wrong, if anything did, and after how many seconds."""
    begin, message = time.time(), None
    try:
        start()
    except ValueError as error:
        message = str(error)
    return message, time.time() - begin


def see_fields(rank, out):
    """By field of the configuration, what a run raises in which it differs on rank 1."""
    args, seen = CoDraftGRPOConfig(**settings(out)), {}
    for spec in dataclasses.fields(args):
        own = copy.copy(args)
        if rank == 1:
            object.__setattr__(own, spec.name, other(getattr(own, spec.name)))
        message, _ = outcome(lambda own=own: require_same_settings(own, fresh_draft=True))
        seen[spec.name] = message, repr(getattr(own, spec.name))
    return seen


def draft(**shape):
    with torch.random.fork_rng():
        return Eagle3DraftModel(
            Eagle3DraftConfig.from_policy(tiny_policy().config, **{"tap_layers": [1, 2, 3], **shape})
        )


def rollout(prompts, trainer):
    raise AssertionError


TRAINER = "trainer"
# By name: what rank 1 has besides what both have, and what both have.
RUNS = {
    "draft_detach_passes": ({"draft_detach_passes": True}, {}),
    "draft_vocab_size": ({"draft_vocab_size": 48}, {}),
    "draft_fc_norm": ({"draft_fc_norm": True}, {}),
    "draft_norm_output": ({"draft_norm_output": True}, {}),
    "use_draft": ({"use_draft": False}, {}),
    "learning_rate": ({"learning_rate": 0.5}, {}),
    "several": ({"draft_ttt_steps": 2, "beta": 0.5, "temperature": 0.5, "output_dir": "elsewhere"}, {}),
    "context group": ({"draft_detach_passes": True}, {"context_parallel_size": 2}),
    "context group without draft": ({"num_iterations": 2}, {"context_parallel_size": 2, "use_draft": False}),
    "context_parallel_size": ({"context_parallel_size": 2}, {}),
    "groups that do not fill": ({"context_parallel_size": 3}, {}),
    "pipeline": ({"draft_ttt_decay": 0.5}, {"pipeline_parallel_size": 2}),
    "loaded draft": (
        lambda: {TRAINER: {"draft_model": draft(fc_norm=True)}},
        lambda: {TRAINER: {"draft_model": draft()}},
    ),
    "a draft on one rank": (lambda: {TRAINER: {"draft_model": draft()}}, {}),
    "policy": (lambda: {"model": tiny_policy(hidden_size=48)}, {}),
    "policy's layers": (lambda: {"model": tiny_policy(num_hidden_layers=3)}, {"pipeline_parallel_size": 2}),
    "policy's rope": (lambda: {"model": tiny_policy(rope_parameters={"rope_type": "default", "rope_theta": 5.0})}, {}),
    "policy's dtype": (lambda: {"model": tiny_policy(dtype=torch.float64)}, {}),
    "frozen parameters": (lambda: {"model": tiny_policy().requires_grad_(False)}, {}),
    "adapter": (lambda: {TRAINER: {"peft_config": LoraConfig(r=2)}}, {}),
    "adapter's factor": (
        lambda: {TRAINER: {"peft_config": LoraConfig(r=2, lora_alpha=4)}},
        lambda: {TRAINER: {"peft_config": LoraConfig(r=2, lora_alpha=8)}},
    ),
    "prompts": (lambda: {TRAINER: {"train_dataset": prompt_dataset(copies=4)}}, {}),
    "evaluation": (lambda: {TRAINER: {"eval_dataset": prompt_dataset(copies=1)}}, {}),
    "rollout function": (lambda: {TRAINER: {"rollout_func": rollout}}, {}),
    "reward functions": (lambda: {TRAINER: {"reward_funcs": [letter_reward, letter_reward]}}, {}),
    "tokenizer": (lambda: {TRAINER: {"processing_class": tiny_tokenizer(90)}}, {}),
    # What may differ.
    "paths and logs": (
        {"output_dir": "elsewhere", "run_name": "mine", "disable_tqdm": False, "log_level": "error"},
        {},
    ),
    "another copy of the draft": (
        lambda: {"draft_model_name_or_path": "here"},
        lambda: {"draft_model_name_or_path": "there"},
    ),
    "no draft": ({"learning_rate": 0.5}, {"use_draft": False}),
    "reward functions of other names": (lambda: {TRAINER: {"reward_funcs": lambda completions, **_: [0.0]}}, {}),
}


def see_run(rank, out, name):
    own, common = (arguments() if callable(arguments) else arguments for arguments in RUNS[name])
    arguments = {**common, **own} if rank else dict(common)
    for setting in ("draft_model_name_or_path", "output_dir"):
        if setting in arguments:
            arguments[setting] = str(out / arguments[setting])
    config = {"output_dir": out / "run", "ddp_timeout": 60, **arguments}
    return outcome(lambda: codraft_trainer(**config))


def see_start(rank, step=0, checkpoint=None):
    """Training that begins at another step, or with another checkpoint of the draft, on rank 1."""
    state = SimpleNamespace(global_step=step * rank, max_steps=10)
    trainer = SimpleNamespace(
        state=state, learner=SimpleNamespace(trainer=None, resumes_from=checkpoint if rank else None)
    )
    return outcome(lambda: require_same_start(trainer))


def see(rank, world_size, out):
    if rank == 0:
        for name in ("here", "there"):
            draft().save_pretrained(out / name)
    torch.distributed.barrier()
    return {
        "fields": see_fields(rank, out),
        "runs": {name: see_run(rank, out, name) for name in RUNS},
        "starts": {
            "same": see_start(rank),
            "step": see_start(rank, step=4),
            "checkpoint": see_start(rank, checkpoint="out/checkpoint-4"),
        },
    }


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    fork_ranks(see, 2, folder, folder)
