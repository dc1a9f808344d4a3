"""
Holds an exception of one rank until all ranks hear of it.

Where ranks compute losses together, a rank that stops alone leaves the others waiting in a collective. So what a
user's code raises waits for the next header (`group/header.py`), which stops all ranks with its message; until then
stand-ins keep the collectives of TRL's rollout and rewards in step.
"""

from typing import Any

import torch
from accelerate.utils import gather
from trl import GRPOTrainer

from ..group.members import attributes_set
from .run import Run


class HeldFailures:
    """
    Runs TRL's rollouts and rewards, and holds what they raise.

    Args:
        run ([`~run.Run`]):
            The trainer.
        trl (`GRPOTrainer`):
            The same trainer without our overrides.
    """

    def __init__(self, run: Run, trl: GRPOTrainer):
        self.run, self.trl = run, trl
        self._held: Exception | None = None

    def take(self) -> Exception | None:
        """Returns what went wrong on this rank since the last call."""
        held, self._held = self._held, None
        return held

    def generate(self, prompts: list) -> tuple:
        """Generates as TRL does; after an exception, with rollouts that stand in."""
        try:
            return self.trl._generate(prompts)
        except Exception as error:  # the user's rollout function, tools or model may raise any
            self._held = error
        # A server that failed is not asked again: TRL pushes weights to it for a rollout function too.
        pushed = {"_last_loaded_step": self.run.state.global_step} if self.run.use_vllm else {}
        with attributes_set(self.run, rollout_func=_stand_in_rollouts, **pushed):
            return self.trl._generate(prompts)

    def calculate_rewards(self, *rows: Any) -> torch.Tensor:
        """Calculates rewards as TRL does; after an exception, rewards that are not numbers stand in."""
        try:
            return self.trl._calculate_rewards(*rows)
        except Exception as error:  # the user's reward functions or models may raise any
            self._held = self._held or error
        _inputs, prompts, *_ = rows
        missing = torch.full((len(prompts), len(self.run.reward_funcs)), torch.nan)
        return gather(missing.to(self.run.accelerator.device))


def _stand_in_rollouts(prompts: list, trainer: Run) -> dict[str, Any]:
    """Returns one end-of-sequence token per prompt."""
    token = [trainer.eos_token_ids[0]]
    return {
        "prompt_ids": [token for _ in prompts],
        "completion_ids": [token for _ in prompts],
        "logprobs": [[0.0] for _ in prompts] if trainer.use_vllm else None,
    }
