"""
Ranks of `test_group_replay.py`: `python replay_worker.py OUT WORLD_SIZE SIZES CASE...` runs each case in plain data
parallelism and in groups of each of the sizes (`1,2`), and saves what each rank saw.
"""

import os
import sys
import warnings
from pathlib import Path
from types import MappingProxyType

import torch
from accelerate.state import AcceleratorState
from datasets import Dataset
from float64_loss import keep_float64
from forked_ranks import fork_ranks
from grpo_runs import PROMPTS, settings
from peft import LoraConfig
from replay import GroupedTrainer, PlainTrainer, Rollouts, token_reward
from replay_cases import CASES
from tiny import tiny_policy, tiny_tokenizer
from transformers import AutoModelForCausalLM
from transformers.utils import logging
from trl import GRPOConfig


SIZES = {"num_hidden_layers": 2, "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2}


def prepare(case, out, world_size, **overrides):
    """Arguments of a trainer of a case, and the settings of its configuration."""
    config = {"optim": "sgd", "learning_rate": 0.5, "per_device_train_batch_size": 2, "num_generations": 2, **case}
    evaluate = config.pop("evaluate", False)
    model_type = config.pop("model_type", "llama")
    dtype = getattr(torch, config.pop("dtype", "float64"))
    keep_float64(dtype)
    lora = config.pop("lora", False)
    rollouts = {name: config.pop(name) for name in ("longest", "environment", "ends") if name in config}
    prompts = (config.pop("prompts", PROMPTS) * 24)[: config.pop("prompts_per_rank", 12) * world_size]
    arguments = {
        "model": AutoModelForCausalLM.from_pretrained(out / model_type, dtype=dtype),
        "reward_funcs": token_reward,
        "train_dataset": Dataset.from_dict({"prompt": prompts}),
        "processing_class": tiny_tokenizer(),
        "rollout_func": Rollouts(**rollouts),
        "peft_config": LoraConfig(r=2, init_lora_weights=False, **({} if lora is True else lora)) if lora else None,
        **overrides,
    }
    if dtype == torch.float64 and hasattr(arguments["model"].config, "num_experts_per_tok"):
        arguments["model"].set_experts_implementation("eager")  # the grouped kernels do not take fp64
    if evaluate:
        # One prompt more than fills the batches of all ranks.
        arguments["eval_dataset"] = Dataset.from_dict({"prompt": PROMPTS[: 2 * world_size + 1]})
        config |= {"eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 4}
    # Accelerate keeps the precision of a process's first run in a singleton and in the environment.
    AcceleratorState._reset_state()
    os.environ["ACCELERATE_MIXED_PRECISION"] = "no"
    torch.manual_seed(1)
    return arguments, settings(out / "run", **{"ddp_timeout": 60, **config})


def build(case, out, world_size, group_size, **overrides):
    """A trainer of a case: plain data parallelism without a `group_size`."""
    arguments, config = prepare(case, out, world_size, **overrides)
    arguments["args"] = GRPOConfig(**config)
    if group_size is None:
        trainer = PlainTrainer(**arguments)
    else:
        trainer = GroupedTrainer(group_size=group_size, **arguments)
    assert trainer.accelerator.mixed_precision == ("bf16" if config.get("bf16") else "no")
    return trainer


def run(case, out, world_size, group_size):
    """One training run: what it saw at each step, its logs and its final weights."""
    trainer = build(case, out, world_size, group_size)
    trainer.train()
    weights = {name: p.detach().clone() for name, p in trainer.model.named_parameters() if p.requires_grad}
    return {**trainer.seen, "logs": trainer.state.log_history, "weights": weights}


def run_all(run, cases, alone="1", size_of=str, impossible=()):
    """
    Of a worker that is started as `WORKER OUT WORLD_SIZE SIZES CASE...`: saves what `run(case, out, world_size, size)`
    of each case returns on each rank, by name and size, `alone` being the plain run. `impossible` are pairs of both.
    """
    folder, count, sizes, *names = sys.argv[1:]
    sizes = [alone, *map(size_of, sizes.split(","))]
    runs = {name: [size for size in sizes if (name, size) not in impossible] for name in names}
    fork_ranks(_run_all, int(count), folder, Path(folder), run, cases, runs)


def _run_all(rank, world_size, out, run, cases, runs):
    return {name: {size: run(cases[name], out, world_size, size) for size in sizes} for name, sizes in runs.items()}


def save_policies(out, policies=MappingProxyType({"llama": {}, "mixtral": {}}), scale=12.0):
    """Policies as files: a reference model is loaded from where its policy came from. By name, sizes that differ."""
    warnings.simplefilter("ignore")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    for name, config in policies.items():
        sizes = {**SIZES, **config}
        tiny_policy(sizes.pop("model_type", name), scale=scale, **sizes).save_pretrained(out / name)


if __name__ == "__main__":
    save_policies(Path(sys.argv[1]))
    run_all(run, CASES, alone=None, size_of=int)
