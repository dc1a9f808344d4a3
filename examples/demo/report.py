"""What the demo leaves behind: a plot of the run, and rollouts with and without a draft on held-out prompts."""

import time
from dataclasses import dataclass, field

import torch
from matplotlib.figure import Figure
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from trl_codraft import Eagle3DraftModel, speculative_generate
from trl_codraft.rollout.stats import SpeculativeStats


MIN_PROMPTS = 16
PANELS = {
    "reward": "reward",
    "draft/loss": "draft loss",
    "rollout/accept_length": "accept length (tokens per verification)",
    "rollout/tokens_per_second": "rollout tokens / second",
}


def plot_history(history: list[dict], path: str) -> None:
    """Writes a PNG with reward, draft loss, accept length and rollout speed of every GRPO step."""
    figure = Figure(figsize=(10, 6), layout="constrained")
    axes = figure.subplots(2, 2, sharex=True)
    steps = [entry["step"] for entry in history]
    for axis, (name, title) in zip(axes.flat, PANELS.items(), strict=True):
        axis.plot(steps, [float(entry[name]) for entry in history], marker="o", markersize=3)
        axis.set_title(title)
        axis.grid(alpha=0.3)
    for axis in axes[1]:
        axis.set_xlabel("GRPO step")
    figure.savefig(path, dpi=120)


@dataclass
class Arm:
    """One way of rolling out, with what was measured so far."""

    name: str
    draft: Eagle3DraftModel | None
    tokens: int = 0
    cpu_seconds: float = 0.0
    stats: SpeculativeStats = field(default_factory=SpeculativeStats)


def compare_rollouts(
    policy: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    drafts: dict[str, Eagle3DraftModel],
    prompts: list[list[dict]],
    *,
    batch_size: int,
    num_draft_tokens: int,
    max_new_tokens: int,
    seconds: float,
) -> dict:
    """
    Rolls out held-out prompts without a draft and with each of `drafts`, at temperature 1.

    The arms take turns on every batch, in an order that rotates, so that a slow moment of the machine hits all of
    them. Processor time of one thread is counted, not wall-clock time, and the prefill is part of it. Without a draft
    that is `generate`, whose prefill reads in every row what the loop reads once for all.

    Args:
        seconds (`float`):
            No batch is begun after this much time, except for the first 16 prompts.

    Returns:
        `dict`: the settings, the number of `prompts` used, and `arms`, one entry per way of rolling out.
    """
    policy.eval()
    # Threads that wait for each other use processor time, too.
    torch.set_num_threads(1)
    arms = [Arm("no draft", None), *(Arm(name, draft) for name, draft in drafts.items())]
    sampling = {
        "do_sample": True,
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "max_new_tokens": max_new_tokens,
        "pad_token_id": tokenizer.pad_token_id,
    }
    began, done = time.monotonic(), 0
    for turn, start in enumerate(range(0, len(prompts), batch_size)):
        if done >= MIN_PROMPTS and time.monotonic() - began > seconds:
            break
        chats = prompts[start : start + batch_size]
        texts = tokenizer.apply_chat_template(chats, add_generation_prompt=True, tokenize=False)
        batch = tokenizer(texts, add_special_tokens=False, padding=True, padding_side="left", return_tensors="pt").to(
            policy.device
        )
        batch.pop("token_type_ids", None)
        for offset in range(len(arms)):
            torch.manual_seed(turn)
            roll_out(arms[(turn + offset) % len(arms)], policy, batch, num_draft_tokens, sampling)
        done += len(batch["input_ids"])
    speed = [arm.tokens / arm.cpu_seconds for arm in arms]
    return {
        "prompts": done,
        "batch_size": batch_size,
        "num_draft_tokens": num_draft_tokens,
        "max_new_tokens": max_new_tokens,
        "threads": torch.get_num_threads(),
        "arms": [
            {
                "name": arm.name,
                "accept_length": arm.stats.accept_length if arm.draft is not None else None,
                "tokens_per_cpu_second": speed[index],
                "ratio": speed[index] / speed[0],
                "tokens": arm.tokens,
                "cpu_seconds": arm.cpu_seconds,
                "verifications": arm.stats.verifications,
                "accepted": arm.stats.accepted,
            }
            for index, arm in enumerate(arms)
        ],
    }


def roll_out(arm: Arm, policy: PreTrainedModel, batch: dict, num_draft_tokens: int, sampling: dict) -> None:
    """Adds one batch to an arm: plain `generate` without a draft, the speculative loop with one."""
    start = time.process_time()
    if arm.draft is None:
        with torch.no_grad():
            sequences = policy.generate(**batch, **sampling)
    else:
        output = speculative_generate(policy, arm.draft, **batch, num_draft_tokens=num_draft_tokens, **sampling)
        sequences = output.sequences
        arm.stats.add(output.stats)
    arm.cpu_seconds += time.process_time() - start
    is_eos = sequences[:, batch["input_ids"].shape[1] :] == policy.generation_config.eos_token_id
    # A row's own tokens are those with no EOS before them.
    arm.tokens += int((is_eos.cumsum(1) - is_eos.long() == 0).sum())


def table(comparison: dict) -> str:
    """The comparison as aligned text."""
    lines = [
        f"Rollouts on {comparison['prompts']} held-out prompts after training: batches of {comparison['batch_size']}, "
        f"temperature 1, {comparison['num_draft_tokens']} draft tokens, one seed",
        f"{'':<28}{'accept length':>14}{'tokens / CPU s':>16}{'ratio':>8}",
    ]
    for arm in comparison["arms"]:
        length = "-" if arm["accept_length"] is None else f"{arm['accept_length']:.2f}"
        lines.append(f"{arm['name']:<28}{length:>14}{arm['tokens_per_cpu_second']:>16.1f}{arm['ratio']:>8.2f}")
    lines.append("tokens / CPU s: one thread, prefills included; the log's tokens/s are wall clock, on all threads")
    lines.append(
        "without a draft `generate` reads the worked example in every row; the other arms read it once a batch"
    )
    return "\n".join(lines)
