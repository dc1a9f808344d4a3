"""
Ranks of `test_pp_trainer_faults.py`: `python trainer_fault_worker.py OUT FAULT...` lets the second of two ranks fail,
die or stall in the middle of a run, fault after fault, and saves how the others ended.
"""

import sys
from pathlib import Path
from unittest import mock

import torch
from faults import TIMEOUT, save_endings, strike
from pp.trainer_worker import build, save_policies
from replay import token_reward

from trl_codraft.pp.stages.view import StageView
from trl_codraft.training.draft_trainer import DraftTrainer


CASE = {"max_steps": 3, "ddp_timeout": TIMEOUT, "steps_per_generation": 1, "evaluate": True}


def train(rank, world_size, out, fault):
    calls = iter(range(10**6))
    forward, accumulate = StageView.run, DraftTrainer.accumulate

    def faulty_forward(self, arguments, extras):
        if rank == 1 and "forward" in fault and torch.is_grad_enabled() and next(calls) == 5:
            strike(out, fault)
        return forward(self, arguments, extras)

    def faulty_reward(completion_ids, trainer_state, **kwargs):
        training = trainer.model.training
        if rank == 1 and (("a reward" in fault and training) or ("evaluation" in fault and not training)):
            if trainer_state.global_step >= 1:
                strike(out, fault)
        return token_reward(completion_ids)

    def faulty_learning(self, *arguments):
        # Where the draft learns: on the last stage, while the other rank may still run backwards.
        if "the draft" in fault and next(calls) == 5:
            strike(out, fault)
        return accumulate(self, *arguments)

    trainer = build(CASE, out, world_size, "2", reward_funcs=faulty_reward)
    with (
        mock.patch.object(StageView, "run", faulty_forward),
        mock.patch.object(DraftTrainer, "accumulate", faulty_learning),
    ):
        trainer.train()


if __name__ == "__main__":
    save_policies(Path(sys.argv[1]))
    save_endings(train, sys.argv[2:])
