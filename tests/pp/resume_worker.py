"""
Ranks of `test_pp_resume.py`: `python resume_worker.py OUT WORLD_SIZE PAIRS` trains under the first size of each pair
(`2-1,1-2p`: ranks per pipeline, 1 for none, a `p` if no rank has the whole policy, a `z` before it if ranks share the
state of the optimizer), saving on the way, and continues from there under the second.
"""

import shutil
import sys
from pathlib import Path
from unittest import mock

import torch
from forked_ranks import fork_ranks
from pp.trainer_worker import ShardedTrainer, StagedTrainer, build, save_policies
from replay import Rollouts

from trl_codraft import CoDraftGRPOTrainer


SAVED, LAST = 2, 4
MOMENTUM = {"lr": 0.5, "momentum": 0.9}


class RolloutsOfStep(Rollouts):
    """Replays by optimizer step, so that a resumed run sees what an uninterrupted one does."""

    def __call__(self, prompts, trainer):
        self.calls = trainer.state.global_step
        return super().__call__(prompts, trainer)


class Momentum:
    """State that matters, in optimizers of policy and draft that do not make full steps of rounding."""

    @staticmethod
    def get_optimizer_cls_and_kwargs(args, model=None):
        return torch.optim.SGD, dict(MOMENTUM)

    def _start_draft(self):
        start = self.learner.start

        def start_with_momentum(resumes):
            start(resumes)
            self.draft_trainer.optimizer = torch.optim.SGD(self.draft_trainer.parameters, **MOMENTUM)

        with mock.patch.object(self.learner, "start", start_with_momentum):
            CoDraftGRPOTrainer._start_draft(self)


class PlainMomentum(Momentum, ShardedTrainer):
    pass


class StagedMomentum(Momentum, StagedTrainer):
    pass


def trained(out, world_size, size, lora, resume_from=None, **config):
    """What a run of `LAST` steps leaves, from its start or from a checkpoint."""
    case = {"max_steps": LAST, "save_strategy": "steps", "save_steps": SAVED, "dtype": "float32", **config}
    case |= {"lora": True, "learning_rate": 0.5} if lora else {}
    classes = PlainMomentum, StagedMomentum
    case |= {"pipeline_shard_optimizer": True} if "z" in size else {}
    trainer = build(case, out, world_size, size.replace("z", ""), classes, rollout_func=RolloutsOfStep())
    trainer.train(resume_from_checkpoint=resume_from)
    optimizer = trainer.optimizer.optimizer
    if "z" in size:
        assert not optimizer.state
        optimizer = optimizer.optim
    momenta = {
        name: optimizer.state[parameter]["momentum_buffer"].clone()
        for name, parameter in trainer.model.named_parameters()
        if parameter in optimizer.state
    }
    weights = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    weights |= {f"draft.{name}": p.detach().clone() for name, p in trainer.draft_model.named_parameters()}
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    return {"weights": weights, "momenta": momenta, "logs": logs}


def run(rank, world_size, out, pairs):
    seen = {}
    for lora in (False, True):
        for start in dict.fromkeys(first for first, _ in pairs):
            folder = out / f"{start} {lora}"
            if rank == 0:
                shutil.rmtree(out / "run", ignore_errors=True)
            torch.distributed.barrier()
            seen[start, lora, None] = trained(out, world_size, start, lora)
            torch.distributed.barrier()
            if rank == 0:
                shutil.copytree(out / "run" / f"checkpoint-{SAVED}", folder)
                seen["files", start, lora] = sorted(path.name for path in folder.iterdir())
            torch.distributed.barrier()
            for size in (second for first, second in pairs if first == start):
                seen[start, lora, size] = trained(out, world_size, size, lora, resume_from=str(folder))
    return seen


if __name__ == "__main__":
    folder, count, pairs = sys.argv[1:]
    save_policies(Path(folder))
    fork_ranks(run, int(count), folder, Path(folder), [pair.split("-") for pair in pairs.split(",")])
