"""
Ranks of `test_cp_trainer_faults.py`: `python trainer_fault_worker.py OUT` lets the second of two ranks die or
stall in the middle of a run, fault after fault, and saves how the other one ended.
"""

import sys
from pathlib import Path
from unittest import mock

from cp.trainer_worker import build, save_policies
from faults import TIMEOUT, save_endings, strike
from replay import token_reward

from trl_codraft.cp import routing as model
from trl_codraft.training.draft_trainer import DraftTrainer


# Every row is split, so that the ranks wait for each other in every attention.
CASE = {
    "max_steps": 3,
    "ddp_timeout": TIMEOUT,
    "gradient_checkpointing": True,
    "context_parallel_layout": "document",
}
FAULTS = (
    "killed in attention",
    "stalled in attention",
    "killed in a reward",
    "stalled in a reward",
    "plain run, killed in a reward",
    "plain run, killed in the draft",
)


def train(rank, world_size, out, fault):
    calls = iter(range(10**6))
    attention, accumulate = model.ring_attention, DraftTrainer.accumulate

    def faulty_attention(*arguments, **settings):
        if rank == 1 and "attention" in fault and next(calls) == 21:
            strike(out, fault)
        return attention(*arguments, **settings)

    def faulty_reward(completion_ids, trainer_state, **kwargs):
        if rank == 1 and "reward" in fault and trainer_state.global_step == 1:
            strike(out, fault)
        return token_reward(completion_ids)

    def faulty_learning(self, *arguments):
        if rank == 1 and "the draft" in fault and next(calls) == 2:
            strike(out, fault)
        return accumulate(self, *arguments)

    size = 1 if fault.startswith("plain") else 2
    trainer = build({**CASE, "steps_per_generation": 1}, out, world_size, size, reward_funcs=faulty_reward)
    with (
        mock.patch.object(model, "ring_attention", faulty_attention),
        mock.patch.object(DraftTrainer, "accumulate", faulty_learning),
    ):
        trainer.train()


if __name__ == "__main__":
    save_policies(Path(sys.argv[1]))
    save_endings(train, FAULTS)
