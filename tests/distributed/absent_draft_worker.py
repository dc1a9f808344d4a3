"""
Ranks of `test_absent_drafts.py`: `python absent_draft_worker.py OUT`. Rank 1 sees a checkpoint with less of a draft
than rank 0.
"""

import os
import shutil
import sys
from pathlib import Path

from forked_ranks import fork_ranks
from grpo_runs import codraft_trainer, draft_of
from transformers.utils import logging


def spoil(draft, missing):
    if missing == "draft":
        shutil.rmtree(draft)
    elif missing == "damaged":
        os.truncate(draft / "draft_state.pt", 100)
    else:
        (draft / missing).unlink()


def see(rank, world_size, out):
    config = {"ddp_timeout": 60, "draft_shard_optimizer": True}
    trainer = codraft_trainer(out / "run", save_strategy="steps", save_steps=1, max_steps=1, **config)
    trainer.train()
    seen, said = {}, []
    logging.get_logger("trl_codraft.grpo.draft_checkpoints").warning = said.append
    for missing in ("draft", "draft_state.pt", "damaged"):
        checkpoint = out / missing / f"of rank {rank}" / "checkpoint-1"
        shutil.copytree(out / "run" / "checkpoint-1", checkpoint)
        if rank == 1:
            spoil(checkpoint / "draft", missing)
        said.clear()
        resumed = codraft_trainer(out / missing / "resumed", max_steps=2, **config)
        error, best = None, None
        try:
            resumed.train(resume_from_checkpoint=str(checkpoint))
        except ValueError as raised:
            error = str(raised).replace("of rank 1", "").replace("of rank 0", "")
        else:
            resumed.state.best_model_checkpoint = str(checkpoint)
            best = draft_of(resumed)
        seen[missing] = {"error": error, "warnings": list(said), "draft": draft_of(resumed), "best": best}
        if error is None:
            seen[missing]["updates"] = resumed.draft_trainer.num_updates
            resumed._load_best_model()
            seen[missing]["best"] = draft_of(resumed)
    return seen


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    fork_ranks(see, 2, folder, folder, timeout=None)
