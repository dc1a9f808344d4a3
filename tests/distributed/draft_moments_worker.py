"""
Ranks of `test_draft_moments.py`: `python draft_moments_worker.py OUT` saves a run that shares moments without them,
and resumes.
"""

import sys
from pathlib import Path

import torch
from forked_ranks import fork_ranks
from grpo_runs import codraft_trainer
from transformers.utils import logging


def see(rank, world_size, out):
    said = []
    logging.get_logger("trl_codraft.grpo.draft_checkpoints").warning = said.append
    config = {
        "ddp_timeout": 60,
        "draft_shard_optimizer": True,
        "draft_save_optimizer": False,
        "save_strategy": "steps",
    }
    codraft_trainer(out / "run", save_steps=1, max_steps=1, **config).train()
    checkpoint = out / "run" / "checkpoint-1"
    state = torch.load(checkpoint / "draft" / "draft_state.pt", weights_only=True)["draft_trainer"]
    said.clear()
    resumed = codraft_trainer(out / "resumed", save_steps=2, max_steps=2, **config)
    load, seen = resumed.draft_checkpoints.load, {}

    def look(read):
        load(read)
        seen["resumed from"] = {name: tensor.clone() for name, tensor in resumed.draft_model.state_dict().items()}

    resumed.draft_checkpoints.load = look
    resumed.train(resume_from_checkpoint=str(checkpoint))
    moments = [entry["exp_avg"].numel() for entry in resumed.draft_trainer.optimizer.state.values()]
    return {
        **seen,
        "optimizer": state["optimizer"],
        "saved": state["draft"],
        "draft": resumed.draft_model.state_dict(),
        "moments after a step": sum(moments),
        "weights": sum(parameter.numel() for parameter in resumed.draft_trainer.parameters),
        "warnings": [text for text in said if "fresh moments" in text],
    }


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    fork_ranks(see, 2, folder, folder, timeout=None)
