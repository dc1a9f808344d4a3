"""
Ranks of `test_sharded_checkpoints.py`: `python sharded_checkpoint_worker.py OUT SIZE` trains a policy that FSDP2
shards, with a pretrained draft that rolls out and checkpoints, resumes, and saves the records of each rank.
"""

import sys
from pathlib import Path

from cp.checkpoint_worker import build, state
from cp.trainer_worker import save_policies
from forked_ranks import fork_ranks
from fsdp2_on_cpu import fsdp2_on_cpu


# torch cannot read back the whole state of a sharded optimizer that has none, as SGD's.
ADAM = {"optim": "adamw_torch", "learning_rate": 1e-2}


def see(rank, world_size, folder, size):
    seen = {}
    trainer = build(folder, world_size, "plain", 1, **ADAM)
    trainer.train()
    seen["plain"] = state(trainer)
    # With both ways to keep the state of the draft's optimizer.
    config = {**ADAM, "draft_shard_optimizer": size > 1}
    with fsdp2_on_cpu():
        trainer = build(folder, world_size, "whole", size, **config)
        trainer.train()
        trainer.save_model(str(folder / "whole"))
        seen["whole"] = state(trainer)
        trainer = build(folder, world_size, "resumed", size, **config)
        trainer.train(resume_from_checkpoint=str(folder / "whole" / "checkpoint-2"))
        seen["resumed"] = state(trainer)
    return seen


if __name__ == "__main__":
    out, size = Path(sys.argv[1]), int(sys.argv[2])
    save_policies(out)
    fork_ranks(see, 2, out, out, size)
