"""
Ranks of `test_cp_checkpoints.py`: `python checkpoint_worker.py OUT` trains a policy with eager attention under context
parallelism, with a pretrained draft that rolls out and checkpoints, then resumes, and lets a reward fail. It saves the
records of each rank.
"""

import sys
from pathlib import Path

import torch
from cp.trainer_worker import DRAFT, save_policies
from forked_ranks import fork_ranks
from fsdp2_on_cpu import whole
from replay import token_reward
from replay_worker import prepare
from transformers import AutoModelForCausalLM

from trl_codraft import CoDraftGRPOConfig, CoDraftGRPOTrainer


CASE = {
    # Servers read no fp64, so a draft in it is not saved.
    "dtype": "float32",
    "max_steps": 4,
    "gradient_accumulation_steps": 1,
    "max_completion_length": 6,
    "save_strategy": "steps",
    "save_steps": 2,
    **DRAFT,
    "draft_tap_layers": [0, 2],
    "draft_pretrain_steps": 2,
    "num_draft_tokens": "2",
}


def build(folder, world_size, output, size=2, reward=token_reward, **config):
    """A trainer of the case on a policy that the user loaded with eager attention."""
    policy = AutoModelForCausalLM.from_pretrained(folder / "llama", dtype=torch.float32, attn_implementation="eager")
    arguments, settings = prepare({**CASE, **config}, folder, world_size, model=policy, reward_funcs=reward)
    arguments["rollout_func"] = None
    settings["output_dir"] = str(folder / output)
    return CoDraftGRPOTrainer(args=CoDraftGRPOConfig(context_parallel_size=size, **settings), **arguments)


def state(trainer):
    """What a run ends with."""
    weights = {name: whole(p) for name, p in trainer.model.named_parameters()}
    weights |= {f"draft.{name}": p.detach().clone() for name, p in trainer.draft_model.named_parameters()}
    return {
        "weights": weights,
        "attention": trainer.model.config._attn_implementation,
        "pretrained": len(trainer.draft_pretraining_log),
        "logs": [entry for entry in trainer.state.log_history if "loss" in entry],
    }


def failing(rank):
    """A reward that fails on the second rank in the second step."""

    def reward(completion_ids, trainer_state, **kwargs):
        if rank == 1 and trainer_state.global_step == 1:
            raise TimeoutError("the judge did not answer")
        return token_reward(completion_ids)

    return reward


def see(rank, world_size, folder):
    seen = {}
    for name, size in (("plain", 1), ("whole", 2)):
        trainer = build(folder, world_size, name, size)
        trainer.train()
        seen[name] = state(trainer)
    trainer = build(folder, world_size, "resumed")
    trainer.train(resume_from_checkpoint=str(folder / "whole" / "checkpoint-2"))
    seen["resumed"] = state(trainer)
    trainer = build(folder, world_size, "failed", reward=failing(rank), save_strategy="no")
    try:
        trainer.train()
    except RuntimeError as error:
        seen["failed"] = (str(error), trainer.model.config._attn_implementation)
    return seen


if __name__ == "__main__":
    out = Path(sys.argv[1])
    save_policies(out)
    fork_ranks(see, 2, out, out)
