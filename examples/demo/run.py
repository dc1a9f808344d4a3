"""The demo: SmolLM2-135M-Instruct and its draft, trained together on a small verifiable task, on two CPU cores."""

import json
import os
import time
from pathlib import Path

import torch
from accelerate import PartialState
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, ProgressCallback

from trl_codraft import CoDraftGRPOConfig, CoDraftGRPOTrainer, validate_draft
from trl_codraft.scripts.grpo import make_parser

from .model import smollm2_path
from .progress import StepBudget
from .report import compare_rollouts, plot_history, table
from .task import correct_reward, ending_reward, format_reward, word_problems


CONFIG = Path(__file__).with_name("config.yaml")
TRAINED_LAYERS = 8
NUM_TRAIN_PROMPTS = 512
GRPO_SECONDS = 280
MIN_STEPS = 8
COMPARISON_SECONDS = 50
COMPARISON_BATCH = 4


def freeze_lower_layers(policy: PreTrainedModel, trained_layers: int) -> str:
    """Leaves only the top layers and the final norm to train: most of a step's backward is saved."""
    policy.requires_grad_(False)
    for layer in policy.model.layers[-trained_layers:]:
        layer.requires_grad_(True)
    policy.model.norm.requires_grad_(True)
    trained = sum(weight.numel() for weight in policy.parameters() if weight.requires_grad)
    return (
        f"top {trained_layers} of {len(policy.model.layers)} layers and the final norm are trained "
        f"({trained / 1e6:.0f}M of {policy.num_parameters() / 1e6:.0f}M weights), the rest is frozen to fit in minutes"
    )


def build_trainer(args: CoDraftGRPOConfig, num_test: int) -> tuple[CoDraftGRPOTrainer, list[list[dict]]]:
    """The trainer, and the held-out prompts."""
    with PartialState().local_main_process_first():
        path = smollm2_path()
    tokenizer = AutoTokenizer.from_pretrained(path)
    policy = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    train_set, test_set = word_problems(NUM_TRAIN_PROMPTS, num_test)
    said = freeze_lower_layers(policy, TRAINED_LAYERS)
    trainer = CoDraftGRPOTrainer(
        model=policy,
        reward_funcs=[format_reward, correct_reward, ending_reward(tokenizer.eos_token_id)],
        args=args,
        train_dataset=train_set,
        processing_class=tokenizer,
    )
    trainer.accelerator.print(f"[policy] {said}")
    trainer.remove_callback(ProgressCallback)
    return trainer, test_set["prompt"]


def run_demo(arguments: list[str]) -> None:
    """
    Trains, saves and compares.

    Args:
        arguments (`list[str]`):
            Command-line arguments that override `config.yaml`. The environment variables `DEMO_STEPS` (GRPO steps) and
            `DEMO_EVAL_PROMPTS` (held-out prompts) make it longer or shorter.
    """
    began = time.monotonic()
    args = make_parser().parse_args_and_config(args=["--config", str(CONFIG), *arguments])[1]
    steps = int(os.environ["DEMO_STEPS"]) if os.environ.get("DEMO_STEPS") else None
    num_test = int(os.environ.get("DEMO_EVAL_PROMPTS") or 32)
    trainer, test_prompts = build_trainer(args, num_test)
    marks = {"load": time.monotonic() - began}
    trainer.accelerator.print(
        f"[model] loaded in {marks['load']:.0f} s; pretraining the draft on the policy's own rollouts ..."
    )

    budget = StepBudget(trainer, GRPO_SECONDS, MIN_STEPS, steps)
    trainer.add_callback(budget)
    started = time.monotonic()
    trainer.train()
    marks["draft pretraining"] = budget.began - started
    marks["GRPO"] = time.monotonic() - budget.began

    trainer.save_model(args.output_dir)
    if trainer.is_world_process_zero():
        report(trainer, budget, test_prompts, marks, fixed_length=steps is not None)


def report(
    trainer: CoDraftGRPOTrainer,
    budget: StepBudget,
    test_prompts: list[list[dict]],
    marks: dict[str, float],
    fixed_length: bool,
) -> None:
    """Validates the draft, plots the run, compares rollouts on held-out prompts, writes and prints the results."""
    args, output = trainer.args, Path(trainer.args.output_dir)
    print(f"[saved] policy in {output}, draft in {output / 'draft'}")
    for message in validate_draft(output / "draft", trainer.model) or ["valid for vLLM, SGLang and speculators"]:
        print(f"[saved] draft: {message}")
    plot_history(budget.history, str(output / "training.png"))

    print("[comparison] rolling out held-out prompts ...")
    began = time.monotonic()
    comparison = compare_rollouts(
        trainer.model,
        trainer.processing_class,
        {"pretrained, then frozen": budget.pretrained_draft, "co-trained": trainer.draft_model},
        test_prompts,
        batch_size=COMPARISON_BATCH,
        num_draft_tokens=2 if args.num_draft_tokens == "auto" else int(args.num_draft_tokens),
        max_new_tokens=args.max_completion_length,
        seconds=float("inf") if fixed_length else COMPARISON_SECONDS,
    )
    marks["comparison"] = time.monotonic() - began
    results = {
        "seconds": marks,
        "comparison": comparison,
        "pretraining": trainer.draft_pretraining_log,
        "history": budget.history,
    }
    (output / "results.json").write_text(json.dumps(results, indent=2))
    print(f"[saved] {output / 'training.png'}, {output / 'results.json'}")
    print("[time] " + ", ".join(f"{name} {seconds:.0f} s" for name, seconds in marks.items()))
    print("\n" + table(comparison))
