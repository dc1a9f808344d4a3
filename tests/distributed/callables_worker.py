"""
Ranks of `test_user_callables.py`: `python callables_worker.py OUT` trains on two of them with everything that users
may pass to be called, by TRL's trainer and by ours, and saves what each saw.
"""

import functools
import sys
from pathlib import Path

import torch
from forked_ranks import fork_ranks
from grpo_runs import codraft_trainer, letter_reward, plain_trainer, policy_logs, prompt_dataset, weights
from tiny import SIZES, tiny_tokenizer
from transformers import LlamaConfig, LlamaForSequenceClassification


TOOL_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}"
    "{% for call in message['tool_calls'] or [] %}{{ call['function']['name'] }}"
    "{{ call['function']['arguments'] | tojson }}"
    "{% endfor %}<eos>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


class Judge:
    """Rewards as an object with `__call__`, without a name of its own."""

    def __call__(self, completions, **kwargs):
        return letter_reward(completions)

    def grade(self, completions, **kwargs):
        return letter_reward(completions)

    async def grade_later(self, completions, **kwargs):
        return letter_reward(completions)


class AsyncJudge:
    async def __call__(self, completions, **kwargs):
        return letter_reward(completions)


async def async_reward(completions, weight=1.0, **kwargs):
    return [weight * reward for reward in letter_reward(completions)]


def reward_model():
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return LlamaForSequenceClassification(LlamaConfig(**{**SIZES, "num_hidden_layers": 1}, num_labels=1)).eval()


def rollout(prompts, trainer):
    ids = trainer.processing_class(text=prompts)["input_ids"]
    completions = [[8 + (len(row) + step) % 90 for step in range(6)] + [2] for row in ids]
    return {"prompt_ids": ids, "completion_ids": completions, "logprobs": None}


async def search(query: str) -> str:
    """
    Looks something up.

    Args:
        query: What to look for.
    """
    return query


class Game:
    """An environment whose reward takes its time."""

    def reset(self, **kwargs):
        self.turns = 0

    async def get_reward(self):
        return 0.5

    async def move(self, direction: str) -> str:
        """
        Goes somewhere.

        Args:
            direction: Where to.
        """
        return direction


def rewards(*functions):
    processing = [tiny_tokenizer() if isinstance(f, torch.nn.Module) else None for f in functions]
    return {"reward_funcs": list(functions), "reward_processing_classes": processing}


def with_tools(**arguments):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TOOL_TEMPLATE
    # Nothing that the tiny policy says parses: TRL then takes completions for text.
    tokenizer.response_template = {}
    return {"processing_class": tokenizer, "train_dataset": prompt_dataset(conversational=True), **arguments}


CASES = {
    "async object": lambda: rewards(AsyncJudge()),
    "object": lambda: rewards(async_reward, Judge()),
    "partial of async": lambda: rewards(letter_reward, functools.partial(async_reward, weight=2.0)),
    "partial of async object": lambda: rewards(functools.partial(AsyncJudge(), weight=2.0)),
    "method": lambda: rewards(AsyncJudge(), Judge().grade),
    "async method": lambda: rewards(letter_reward, Judge().grade_later),
    "model": lambda: rewards(AsyncJudge(), reward_model()),
    "rollouts": lambda: {"rollout_func": rollout},
    "rollouts as an object": lambda: {"rollout_func": functools.partial(rollout)},
    "async tool": lambda: with_tools(tools=[search]),
    "async environment": lambda: with_tools(environment_factory=Game, reward_funcs=[AsyncJudge()]),
}


def passed(arguments):
    """What a case passes to be called."""
    return [*arguments.get("reward_funcs", []), arguments.get("rollout_func"), *arguments.get("tools", [])]


class Witness:
    """A reward function that keeps what the trainer holds while TRL calls what users passed."""

    def __init__(self):
        self.seen, self.trainer = [], None

    def __call__(self, completions, **kwargs):
        self.seen += passed(vars(self.trainer))
        return [0.0] * len(completions)


def see_run(name, build, out, **config):
    arguments, witness = {"reward_funcs": [letter_reward], **CASES[name]()}, Witness()
    given = passed(arguments)
    # Not the last: functions are called in order, and the last one is as good as any to be tampered with.
    arguments["reward_funcs"].insert(0, witness)
    if "reward_processing_classes" in arguments:
        arguments["reward_processing_classes"].insert(0, None)
    trainer = witness.trainer = build(out / "run", trainer=arguments, max_steps=2, ddp_timeout=60, **config)
    trainer.train()
    unchanged = all(any(held is own for held in witness.seen) for own in given)
    return {"weights": weights(trainer), "logs": policy_logs(trainer), "unchanged": unchanged}


def see_case(name, out):
    ours = see_run(name, codraft_trainer, out, use_draft=False)
    return {"plain": see_run(name, plain_trainer, out), "ours": ours}


def see(rank, world_size, out):
    return {name: see_case(name, out) for name in CASES}


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    fork_ranks(see, 2, folder, folder, timeout=None)
