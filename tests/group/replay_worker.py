"""
Processes of `test_replay.py`: `python replay_worker.py OUT WORLD_SIZE CASE...` runs each case in plain data
parallelism and in groups of every size, and writes what each rank saw to `OUT/rank{R}.pt`.

TRL is imported once and the ranks are forked, because importing it takes longer than several cases do.
"""

import multiprocessing
import os
import socket
import sys
import warnings
from pathlib import Path


os.environ["ACCELERATE_USE_CPU"] = "true"

import torch
from cases import CASES
from datasets import Dataset
from grpo_runs import PROMPTS, settings
from peft import LoraConfig
from replay import GroupedTrainer, PlainTrainer, Rollouts, token_reward
from tiny import tiny_policy, tiny_tokenizer
from transformers import AutoModelForCausalLM
from transformers.utils import logging
from trl import GRPOConfig


SIZES = {"num_hidden_layers": 2, "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2}


def run(case, out, world_size, group_size=None):
    """One training run: what it saw at each step, its logs and its final weights."""
    config = {"optim": "sgd", "learning_rate": 0.5, "per_device_train_batch_size": 2, "num_generations": 2, **case}
    evaluate = config.pop("evaluate", False)
    prompts = (PROMPTS * 6)[: config.pop("prompts_per_rank", 12) * world_size]
    arguments = {
        "model": AutoModelForCausalLM.from_pretrained(out / config.pop("model_type", "llama")),
        "reward_funcs": token_reward,
        "train_dataset": Dataset.from_dict({"prompt": prompts}),
        "processing_class": tiny_tokenizer(),
        "rollout_func": Rollouts(environment=config.pop("environment", False)),
        "peft_config": LoraConfig(r=2, init_lora_weights=False) if config.pop("lora", False) else None,
    }
    if evaluate:
        # One prompt more than fills the batches of all ranks.
        arguments["eval_dataset"] = Dataset.from_dict({"prompt": PROMPTS[: 2 * world_size + 1]})
        config |= {"eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 4}
    args = GRPOConfig(**settings(out / "run", ddp_timeout=60, **config))
    torch.manual_seed(1)
    if group_size is None:
        trainer = PlainTrainer(args=args, **arguments)
    else:
        trainer = GroupedTrainer(args=args, group_size=group_size, **arguments)
    trainer.train()
    weights = {name: p.detach().clone() for name, p in trainer.model.named_parameters() if p.requires_grad}
    return {**trainer.seen, "logs": trainer.state.log_history, "weights": weights}


def run_rank(rank, world_size, out, names, port):
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.set_verbosity_error()
    sizes = [size for size in (1, 2, 4) if size <= world_size]
    results = {name: {size: run(CASES[name], out, world_size, size) for size in [None, *sizes]} for name in names}
    torch.save(results, out / f"rank{rank}.pt")
    torch.distributed.destroy_process_group()


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def main(out, world_size, names):
    for model_type in ("llama", "mixtral"):
        tiny_policy(model_type, scale=12.0, **SIZES).save_pretrained(out / model_type)
    ranks = multiprocessing.get_context("fork")
    port = free_port()
    processes = [
        ranks.Process(target=run_rank, args=(rank, world_size, out, names, port)) for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    sys.exit(max(abs(process.exitcode) for process in processes))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
