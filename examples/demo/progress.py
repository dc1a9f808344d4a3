"""What the demo shows while it trains, and when it stops: as many GRPO steps as its time allows."""

import copy
import time

from tqdm.auto import tqdm
from transformers import TrainerCallback

from trl_codraft import CoDraftGRPOTrainer


class StepBudget(TrainerCallback):
    """
    Ends training after a number of steps that follows from the measured first step, prints a line per step, and keeps
    every step's metrics. Add it to a trainer that exists already, so that it begins after the draft's pretraining.

    Args:
        trainer ([`CoDraftGRPOTrainer`]):
            The trainer.
        seconds (`float`):
            Wall-clock time for the GRPO steps.
        min_steps (`int`):
            Steps to take even if they need more time.
        steps (`int` or `None`):
            A fixed number of steps; the time plays no role then.

    Attributes:
        history (`list[dict]`):
            Logged metrics of each step.
        pretrained_draft ([`Eagle3DraftModel`] or `None`):
            A copy of the draft, made when its pretraining ended.
    """

    def __init__(self, trainer: CoDraftGRPOTrainer, seconds: float, min_steps: int, steps: int | None):
        self.trainer, self.seconds, self.min_steps, self.steps = trainer, seconds, min_steps, steps
        self.history: list[dict] = []
        self.pretrained_draft = None
        self.began = 0.0
        self.bar = None

    def say(self, line: str) -> None:
        """Prints a line above the progress bar, on the main process."""
        if self.trainer.is_world_process_zero():
            tqdm.write(line)

    def on_train_begin(self, args, state, control, **kwargs):
        self.pretrained_draft = copy.deepcopy(self.trainer.draft_model)
        log = self.trainer.draft_pretraining_log
        if log:
            first, last = log[0], log[-1]
            self.say(
                f"[draft] pretrained for {len(log)} updates: "
                f"loss {first['draft/loss']:.2f} -> {last['draft/loss']:.2f}, "
                f"simulated accept length {first['draft/accept_length_sim']:.2f} -> "
                f"{last['draft/accept_length_sim']:.2f}"
            )
        if self.steps is None:
            self.say(
                f"[grpo] the first step decides how many fit into {self.seconds:.0f} s, at least {self.min_steps}"
            )
        self.bar = tqdm(
            total=self.steps or self.min_steps, desc="GRPO", unit="step", disable=not state.is_world_process_zero
        )
        self.began = time.monotonic()

    def on_step_end(self, args, state, control, **kwargs):
        elapsed = time.monotonic() - self.began
        if self.steps is None:
            self.steps = max(self.min_steps, int(self.seconds / elapsed))
            self.say(f"[grpo] the first step took {elapsed:.0f} s: {self.steps} steps")
            self.bar.total = self.steps
        self.bar.update()
        if state.global_step >= self.steps:
            control.should_training_stop = True

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "reward" not in logs:
            return
        self.history.append({"step": state.global_step, "seconds": time.monotonic() - self.began, **logs})
        values = {name: float(logs[name]) for name in ("reward", "draft/loss", "rollout/accept_length")}
        self.say(
            f"[grpo] step {state.global_step}/{self.steps}: reward {values['reward']:.3f}, "
            f"completion length {float(logs['completions/mean_length']):.0f}, draft loss {values['draft/loss']:.3f}, "
            f"accept length {values['rollout/accept_length']:.2f}, "
            f"{float(logs['rollout/tokens_per_second']):.0f} tokens/s"
        )

    def on_train_end(self, args, state, control, **kwargs):
        self.bar.close()
