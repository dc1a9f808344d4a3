"""One rank of `test_vllm_two_processes.py`: GRPO with the stand-in engine of tests/trainer, one engine per rank."""

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
from fake_vllm import engine_class
from grpo_runs import codraft_trainer
from transformers import AutoModelForCausalLM
from trl.generation import vllm_generation

from trl_codraft.vllm import generation as vllm_rollouts


def main(out: Path) -> None:
    vllm_generation.LLM, vllm_generation.SamplingParams = engine_class(), SimpleNamespace
    vllm_generation.is_vllm_available = lambda: True
    vllm_rollouts.CPU_SAMPLES_WRONGLY = False
    trainer = codraft_trainer(
        out / "run",
        AutoModelForCausalLM.from_pretrained(out / "policy", dtype=torch.float32),
        ddp_timeout=60,
        use_vllm=True,
        speculative_rollouts="true",
        max_steps=2,
        max_completion_length=6,
        draft_shard_optimizer=True,
        gradient_accumulation_steps=1,
    )
    llm = trainer.vllm_generation.llm
    trainer.train()
    trainer.vllm_generation.sync_weights()
    result = {
        "folder": llm.speculative_config["model"],
        "folder_left": os.path.exists(llm.speculative_config["model"]),
        "counters": llm.stats.as_tensor(),
        "logs": [entry for entry in trainer.state.log_history if "loss" in entry],
        "draft": llm.draft.lm_head.weight.detach(),
        "own": trainer.draft_model.lm_head.weight.detach(),
    }
    torch.save(result, out / f"rank{trainer.accelerator.process_index}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
