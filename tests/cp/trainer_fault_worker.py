"""
Ranks of `test_cp_trainer_faults.py`: `python trainer_fault_worker.py OUT` lets the second of two ranks die or stall in
the middle of a run, fault after fault, and saves how the other one ended.
"""

import os
import sys
import time
from pathlib import Path
from unittest import mock

import torch
from cp.trainer_worker import build, save_policies
from forked_ranks import start_ranks
from replay import token_reward

from trl_codraft.cp import routing as model
from trl_codraft.training.draft_trainer import DraftTrainer


TIMEOUT = 10
# Every row is split, so that the ranks wait for each other in every attention.
CASE = {
    "max_steps": 3,
    "ddp_timeout": TIMEOUT,
    "gradient_checkpointing": True,
    "context_parallel_layout": "document",
}


def strike(out, fault):
    """The end of the second rank."""
    (out / "struck").write_text(str(time.time()))
    if "killed" in fault:
        os._exit(9)
    time.sleep(3600)


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
    try:
        with (
            mock.patch.object(model, "ring_attention", faulty_attention),
            mock.patch.object(DraftTrainer, "accumulate", faulty_learning),
        ):
            trainer.train()
    except RuntimeError as error:
        (out / "message").write_text(str(error))
        raise


def see(out, fault):
    """Exit code of the first rank, seconds after the fault, and what it said."""
    for name in ("struck", "message"):
        (out / name).unlink(missing_ok=True)
    survivor, culprit = start_ranks(train, 2, out, out, fault, timeout=TIMEOUT)
    survivor.join(240)
    ended = time.time()
    culprit.kill()
    return survivor.exitcode, ended - float((out / "struck").read_text()), (out / "message").read_text()


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    save_policies(folder)
    faults = (
        "killed in attention",
        "stalled in attention",
        "killed in a reward",
        "stalled in a reward",
        "plain run, killed in a reward",
        "plain run, killed in the draft",
    )
    torch.save({fault: see(folder, fault) for fault in faults}, folder / "rank0.pt")
