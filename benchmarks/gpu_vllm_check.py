"""
GRPO with rollouts by vLLM on a GPU, with and without the co-trained draft, awake and with sleep mode.

    python benchmarks/gpu_vllm_check.py                        # one GPU, vLLM 0.27 to 0.30, about 10 minutes
    python benchmarks/gpu_vllm_check.py --dry-run              # a CPU without vLLM: everything but the engine

For each run, correctness first: the engine holds the trainer's policy head and draft, bit for bit in the engine's
dtype, and gives the logprobs that the trainer computes. Then rollout tokens per second, and their ratio to the run
without a draft.
"""

import argparse
import gc
import logging
import statistics
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import torch
from datasets import Dataset

from trl_codraft import CoDraftGRPOConfig, CoDraftGRPOTrainer
from trl_codraft.vllm.refit import refit_tensors


RUNS = {
    "no draft": {"use_draft": False},
    "draft": {},
    "draft, sleep": {"vllm_enable_sleep_mode": True},
}
# bf16 forwards of vLLM and of transformers differ this much in a token's logprob, in the mean.
LARGEST_MEAN_DIFFERENCE = 0.05
PROMPTS = [f"What is {first} times {second}? Think step by step." for first in range(12, 28) for second in (7, 13)]


def reward(completions, **kwargs):
    return [float(len(set(text.split()))) for text in completions]


def install_stand_in() -> None:
    """The engine of the tests, in the place of vLLM's."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "trainer"))
    from fake_vllm import engine_class
    from trl.generation import vllm_generation

    from trl_codraft.vllm import generation as vllm_rollouts

    vllm_generation.LLM, vllm_generation.SamplingParams = engine_class(), SimpleNamespace
    vllm_generation.is_vllm_available = lambda: True
    vllm_rollouts.CPU_SAMPLES_WRONGLY = False


def small_policy(folder: str) -> str:
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    from tiny import tiny_policy, tiny_tokenizer

    tiny_policy(scale=3.0).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def build(args: argparse.Namespace, model: str, overrides: dict, output: str) -> CoDraftGRPOTrainer:
    small = {"use_cpu": True, "bf16": False, "draft_tap_layers": [1, 2, 3]} if args.dry_run else {}
    settings = {
        "output_dir": output,
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_gpu_memory_utilization": 0.35,
        "vllm_max_model_length": args.tokens + 256,
        "max_completion_length": args.tokens,
        "max_steps": args.steps,
        "draft_pretrain_steps": args.pretrain,
        "num_draft_tokens": "3",
        "per_device_train_batch_size": 8,
        "num_generations": 8,
        "report_to": "none",
        "save_strategy": "no",
        "logging_steps": 1,
        "disable_tqdm": True,
        **small,
        **overrides,
    }
    if settings.get("use_draft", True):
        settings["speculative_rollouts"] = "true"
    dataset = Dataset.from_dict({"prompt": PROMPTS})
    return CoDraftGRPOTrainer(
        model=model, reward_funcs=reward, args=CoDraftGRPOConfig(**settings), train_dataset=dataset
    )


def check_engine(trainer: CoDraftGRPOTrainer) -> None:
    """After one more refit, the engine's models are the trainer's."""
    generation = trainer.vllm_generation
    generation.sync_weights()
    worker = generation.llm.llm_engine.model_executor.driver_worker
    draft = worker.get_draft_model()
    expected = dict(refit_tensors(trainer.draft_model, draft.lm_head.weight.dtype))["lm_head.weight"]
    assert torch.equal(draft.lm_head.weight[: len(expected)], expected), "the engine's draft is not the trainer's"
    policy_head, own = worker.model_runner.model.lm_head.weight, trainer.model.lm_head.weight
    assert torch.equal(policy_head[: len(own)], own.to(policy_head.dtype)), "the draft's refit changed the policy"


def run(args: argparse.Namespace, model: str, name: str) -> float:
    with tempfile.TemporaryDirectory() as output:
        trainer = build(args, model, RUNS[name], output)
        trainer.train()
        log = [entry for entry in trainer.state.log_history if "loss" in entry]
        difference = max(entry["sampling/sampling_logp_difference/mean"] for entry in log)
        assert difference < LARGEST_MEAN_DIFFERENCE, f"{name}: logprobs differ by {difference} in the mean"
        seconds = statistics.median(entry["step_time"] for entry in log[1:] or log)
        tokens = statistics.median(entry["completions/mean_length"] for entry in log)
        line = f"{name:14} logprob difference {difference:.1e}, step {seconds:.2f} s, mean length {tokens:.0f}"
        if trainer.draft_model is not None:
            check_engine(trainer)
            lengths = [entry["rollout/accept_length"] for entry in log]
            assert max(lengths) > 1.0, f"{name}: nothing was accepted"
            line += f", accept length {statistics.median(lengths):.2f}"
        print(line, flush=True)
        del trainer
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[1])
    parser.add_argument("--model", default="Qwen/Qwen3-0.6B")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--pretrain", type=int, default=100)
    parser.add_argument("--dry-run", action="store_true", help="tiny policy on the CPU, stand-in for the engine")
    args = parser.parse_args()
    logging.getLogger("vllm").setLevel(logging.ERROR)
    if args.dry_run:
        install_stand_in()
        args.steps, args.tokens, args.pretrain = 1, 6, 1
    elif not torch.cuda.is_available():
        print("no GPU: nothing measured (--dry-run checks everything but the engine)")
        return
    with tempfile.TemporaryDirectory() as folder:
        model = small_policy(folder) if args.dry_run else args.model
        print("stand-in engine, CPU" if args.dry_run else torch.cuda.get_device_name())
        seconds = {name: run(args, model, name) for name in RUNS}
    for name in list(RUNS)[1:]:
        print(f"step time, {name} / no draft: {seconds[name] / seconds['no draft']:.2f}")


if __name__ == "__main__":
    main()
