"""
Ranks of `test_group_faults.py`: `python fault_worker.py OUT` lets one of two ranks do something wrong, fault after
fault, and saves the exceptions that each rank saw.
"""

import sys
from pathlib import Path

from forked_ranks import fork_ranks
from replay import Rollouts, token_reward
from replay_worker import build, save_policies
from transformers import TrainerCallback


SMALL = {"max_steps": 3, "gradient_accumulation_steps": 2}


class FailingRollouts(Rollouts):
    """Raises on one rank in its second call."""

    def __init__(self, rank):
        super().__init__()
        self.rank = rank

    def __call__(self, prompts, trainer):
        if self.calls == 1 and trainer.accelerator.process_index == self.rank:
            raise ConnectionError("the sandbox is gone")
        return super().__call__(prompts, trainer)


def failing_reward(rank):
    def reward(completion_ids, trainer_state, **kwargs):
        if rank == 0 and trainer_state.global_step == 1:
            raise ZeroDivisionError("no tests were run")
        return token_reward(completion_ids)

    return reward


async def failing_async_reward(completion_ids, **kwargs):
    raise TimeoutError("the judge did not answer")


def train(case, out, **overrides):
    build({**SMALL, **case}, out, 2, 2, **overrides).train()


class ForgetRollouts(TrainerCallback):
    """Makes one rank generate where the others reuse what they have."""

    def __init__(self, rank):
        self.rank = rank

    def on_substep_end(self, args, state, control, **kwargs):
        if self.rank == 1:
            self.trainer._buffered_inputs = None


def one_rank_generates_alone(rank, out):
    callback = ForgetRollouts(rank)
    callback.trainer = build(SMALL, out, 2, 2, callbacks=[callback])
    callback.trainer.train()


FAULTS = {
    "rollout": lambda rank, out: train({}, out, rollout_func=FailingRollouts(1)),
    "rollout before log-probs": lambda rank, out: train({"beta": 0.1}, out, rollout_func=FailingRollouts(0)),
    "reward": lambda rank, out: train({}, out, reward_funcs=failing_reward(rank)),
    "reward of two": lambda rank, out: train(
        {}, out, reward_funcs=[token_reward, failing_async_reward if rank else token_reward]
    ),
    "evaluation": lambda rank, out: train(
        {"evaluate": True, "eval_on_start": True}, out, reward_funcs=failing_async_reward if rank else token_reward
    ),
    "other settings": lambda rank, out: train({"num_iterations": 1 + rank}, out),
    "schedule": one_rank_generates_alone,
}


def see_faults(rank, world_size, out):
    seen = {}
    for name, fault in FAULTS.items():
        seen[name] = None
        try:
            fault(rank, out)
        except (RuntimeError, ValueError) as error:
            seen[name] = (type(error).__name__, str(error), type(error.__cause__).__name__)
    return seen


if __name__ == "__main__":
    save_policies(Path(sys.argv[1]))
    fork_ranks(see_faults, 2, sys.argv[1], Path(sys.argv[1]))
