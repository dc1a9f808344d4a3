"""
Ranks of `test_quantized_pipelines.py`: `python quantized_worker.py OUT CASE...` trains adapters on a policy that
bitsandbytes has quantised, without a pipeline, with the whole policy on both ranks, and with parts of it, and saves
what each rank saw.
"""

import sys
from pathlib import Path

import torch
from cp.trainer_worker import DRAFT, ShardedTrainer
from forked_ranks import fork_ranks
from pp.trainer_worker import LAYERS, TAPS, StagedTrainer, draw_adapters, release, weights_here
from replay_worker import prepare
from tiny import tiny_policy
from transformers import BitsAndBytesConfig
from transformers.utils import logging

from trl_codraft import CoDraftGRPOConfig, Eagle3DraftConfig, Eagle3DraftModel


# Blocks of 64 values share a scale.
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "head_dim": 16, **LAYERS}
NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.float32}
CASES = {"nf4": NF4, "nf4 twice": {**NF4, "bnb_4bit_use_double_quant": True}, "int8": {"load_in_8bit": True}}


def build(quantization, out, size):
    arguments, config = prepare(
        {"lora": True, "dtype": "float32"}, out, 2, quantization_config=BitsAndBytesConfig(**quantization)
    )
    shape = Eagle3DraftConfig.from_policy(arguments["model"].config, tap_layers=TAPS)
    arguments |= {"model": str(out / "llama"), "draft_model": Eagle3DraftModel(shape)}
    config |= {**DRAFT, "model_init_kwargs": {"dtype": "float32"}}
    if size != "1":
        config |= {"pipeline_parallel_size": 2, "pipeline_replica": size == "2"}
    trainer = (ShardedTrainer if size == "1" else StagedTrainer)(args=CoDraftGRPOConfig(**config), **arguments)
    for parameter in trainer.model.parameters():
        if parameter.requires_grad:
            # TRL makes adapters of quantised policies bf16, which would round sums of two ranks.
            parameter.data = parameter.data.float()
    draw_adapters(trainer)
    return trainer


def run(quantization, out, size):
    """One training run: what it saw at each step, its logs, and the weights that it trained."""
    trainer = build(quantization, out, size)
    trainer.train()
    trainer.save_model()
    trained = {name for name, parameter in trainer.model.named_parameters() if parameter.requires_grad}
    kinds = {p.dtype for p in trainer.model.parameters()}
    weights = {
        name: weight for name, weight in weights_here(trainer).items() if name in trained or name.startswith("draft.")
    }
    seen = {
        **trainer.seen,
        "window": trainer.args.gradient_accumulation_steps,
        "logs": trainer.state.log_history,
        "weights": weights,
        "dtypes": kinds,
    }
    release(trainer)
    return seen


def run_cases(rank, world_size, out, names):
    return {name: {size: run(CASES[name], out, size) for size in ("1", "2", "2p")} for name in names}


if __name__ == "__main__":
    folder, *names = sys.argv[1:]
    logging.set_verbosity_error()
    tiny_policy(scale=3.0, **SIZES).save_pretrained(Path(folder) / "llama")
    fork_ranks(run_cases, 2, folder, Path(folder), names)
