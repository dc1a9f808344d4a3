"""What the demo leaves behind: a plot of the run, and rollouts with and without a draft on held-out prompts."""

import time
from dataclasses import asdict, dataclass

import matplotlib
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from trl_codraft import Eagle3DraftModel, speculative_generate


matplotlib.use("Agg")
from matplotlib import pyplot  # noqa: E402  (the backend comes first)


PANELS = {
    "reward": "reward",
    "draft/loss": "draft loss",
    "rollout/accept_length": "accept length (tokens per verification)",
    "rollout/tokens_per_second": "rollout tokens / second",
}


def plot_history(history: list[dict], path: str) -> None:
    """Writes a PNG with reward, draft loss, accept length and rollout speed of every GRPO step."""
    figure, axes = pyplot.subplots(2, 2, figsize=(10, 6), sharex=True, layout="constrained")
    steps = [entry["step"] for entry in history]
    for axis, (name, title) in zip(axes.flat, PANELS.items(), strict=True):
        axis.plot(steps, [float(entry[name]) for entry in history], marker="o", markersize=3)
        axis.set_title(title)
        axis.grid(alpha=0.3)
    for axis in axes[1]:
        axis.set_xlabel("GRPO step")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


@dataclass
class Arm:
    """One way of rolling out, with what was measured so far."""

    name: str
    draft: Eagle3DraftModel | None
    tokens: int = 0
    cpu_seconds: float = 0.0
    verifications: int = 0
    accepted: int = 0

    @property
    def accept_length(self) -> float:
        """1 + accepted / verifications."""
        return 1.0 + self.accepted / max(self.verifications, 1)

    @property
    def tokens_per_cpu_second(self) -> float:
        """Committed tokens per second of processor time."""
        return self.tokens / self.cpu_seconds


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
    them. Processor time is counted, not wall-clock time, and the prefill is part of it.

    Args:
        seconds (`float`):
            No batch is begun after this much time, but at least one is done.

    Returns:
        `dict`: the settings, the number of `prompts` used, and `arms`, one entry per way of rolling out.
    """
    policy.eval()
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
        if done and time.monotonic() - began > seconds:
            break
        batch = tokenizer.apply_chat_template(
            prompts[start : start + batch_size],
            add_generation_prompt=True,
            padding=True,
            padding_side="left",
            return_tensors="pt",
            return_dict=True,
        )
        for offset in range(len(arms)):
            torch.manual_seed(turn)
            roll_out(arms[(turn + offset) % len(arms)], policy, batch, num_draft_tokens, sampling)
        done += len(batch["input_ids"])
    result = {
        "prompts": done,
        "batch_size": batch_size,
        "num_draft_tokens": num_draft_tokens,
        "max_new_tokens": max_new_tokens,
        "threads": torch.get_num_threads(),
        "arms": [],
    }
    for arm in arms:
        measured = {key: value for key, value in asdict_without_draft(arm).items()}
        measured["accept_length"] = arm.accept_length if arm.draft is not None else None
        measured["tokens_per_cpu_second"] = arm.tokens_per_cpu_second
        measured["ratio"] = arm.tokens_per_cpu_second / arms[0].tokens_per_cpu_second
        result["arms"].append(measured)
    return result


def roll_out(arm: Arm, policy: PreTrainedModel, batch: dict, num_draft_tokens: int, sampling: dict) -> None:
    """Adds one batch to an arm: `generate` without a draft, the speculative loop with one."""
    width = batch["input_ids"].shape[1]
    start = time.process_time()
    if arm.draft is None:
        with torch.no_grad():
            completions = policy.generate(**batch, **sampling)[:, width:]
        arm.cpu_seconds += time.process_time() - start
        # One token per row up to and including its EOS; the rest are pads, and pads are EOS here.
        ended = (completions == policy.generation_config.eos_token_id).int().cumsum(1)
        arm.tokens += int((ended - (completions == policy.generation_config.eos_token_id).int() == 0).sum())
        return
    output = speculative_generate(
        policy, arm.draft, batch["input_ids"], batch["attention_mask"], num_draft_tokens=num_draft_tokens, **sampling
    )
    arm.cpu_seconds += time.process_time() - start
    arm.tokens += output.stats.committed
    arm.verifications += output.stats.verifications
    arm.accepted += output.stats.accepted


def asdict_without_draft(arm: Arm) -> dict:
    """The arm's counters as plain values."""
    return {name: value for name, value in asdict(Arm(**{**arm.__dict__, "draft": None})).items() if name != "draft"}


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
    return "\n".join(lines)
