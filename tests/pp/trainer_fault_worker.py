"""
Ranks of `test_pp_trainer_faults.py`: `python trainer_fault_worker.py OUT FAULT...` lets the second of two ranks fail,
die or stall in the middle of a run, fault after fault, and saves how the others ended.
"""

import os
import sys
import time
from pathlib import Path
from unittest import mock

import torch
from forked_ranks import start_ranks
from pp.trainer_worker import build, save_policies
from replay import token_reward

from trl_codraft.pp.stages.view import StageView
from trl_codraft.training.draft_trainer import DraftTrainer


TIMEOUT = 10
CASE = {"max_steps": 3, "ddp_timeout": TIMEOUT, "steps_per_generation": 1, "evaluate": True}


def strike(out, fault):
    """The end of the second rank."""
    (out / "struck").write_text(str(time.time()))
    if fault.startswith("raised"):
        raise ValueError("this rank gives up")
    if fault.startswith("killed"):
        os._exit(9)
    time.sleep(3600)


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
    try:
        with (
            mock.patch.object(StageView, "run", faulty_forward),
            mock.patch.object(DraftTrainer, "accumulate", faulty_learning),
        ):
            trainer.train()
    except RuntimeError as error:
        (out / f"message{rank}").write_text(str(error))
        raise


def see(out, fault):
    """Exit code of the first rank, seconds after the fault, and what the ranks said."""
    for name in ("struck", "message0", "message1"):
        (out / name).unlink(missing_ok=True)
    survivor, culprit = start_ranks(train, 2, out, out, fault, timeout=TIMEOUT)
    survivor.join(240)
    ended = time.time()
    if fault.startswith("raised"):
        culprit.join(30)
    culprit.kill()
    messages = [(out / f"message{rank}").read_text() for rank in (0, 1) if (out / f"message{rank}").exists()]
    return survivor.exitcode, ended - float((out / "struck").read_text()), messages


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    save_policies(folder)
    torch.save({fault: see(folder, fault) for fault in sys.argv[2:]}, folder / "rank0.pt")
