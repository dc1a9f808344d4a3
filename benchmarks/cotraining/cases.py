"""The two policies and tasks that `cotraining_value.py` looks at."""

import random
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase


sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
from demo.model import smollm2_path
from demo.run import TRAINED_LAYERS, freeze_lower_layers
from demo.task import correct_reward, ending_reward, format_reward, word_problems
from tiny import tiny_policy, tiny_tokenizer


SWITCH_LENGTH = 32
LETTERS = "abcdefghijklmnopqrstuvwxyz"


@dataclass
class Case:
    """
    One policy, its task, and how long things take.

    Args:
        name (`str`):
            Names the files of the case.
        policy (`Callable`):
            Given a seed, the policy before GRPO.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]):
            Pads on the left.
        train_set, test_prompts:
            Prompts of GRPO, and held-out ones.
        reward_funcs (`Callable`):
            Makes the reward functions of a run; they may have an `on_step(step)` that is called before each step.
        grpo (`dict`):
            Arguments of `GRPOConfig`.
        draft (`dict`):
            Arguments of `Eagle3DraftConfig.from_policy`.
        one_policy (`bool`):
            Whether all seeds begin with the same policy, and so with the same draft.
        num_passes (`int`), num_draft_tokens (`int`):
            TTT passes of training, and draft tokens of real rollouts.
        plateau_updates, plateau_patience (`int`):
            Most updates at one learning rate before the trajectory, and evaluations without a gain that end them.
        learning_rate (`float`):
            The draft's, along the trajectory.
    """

    name: str
    policy: Callable[[int], PreTrainedModel]
    tokenizer: PreTrainedTokenizerBase
    train_set: Dataset
    test_prompts: list
    reward_funcs: Callable[[], list]
    grpo: dict[str, Any]
    draft: dict[str, Any]
    one_policy: bool = False
    num_passes: int = 4
    num_draft_tokens: int = 2
    plateau_updates: int = 400
    plateau_patience: int = 3
    pretrain_learning_rate: float = 1e-3
    learning_rate: float = 2e-4
    comparison: dict[str, Any] = field(default_factory=lambda: {"batch_size": 4})

    @property
    def rows(self) -> int:
        """Rollouts per GRPO step, and per draft update."""
        return self.grpo["per_device_train_batch_size"] * self.grpo["gradient_accumulation_steps"]


# The demo's task on SmolLM2-135M.


def demo_case(steps: int) -> Case:
    path = smollm2_path()
    tokenizer = AutoTokenizer.from_pretrained(path, padding_side="left")
    train_set, test_set = word_problems(512, 32)

    def policy(seed):
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        freeze_lower_layers(model, TRAINED_LAYERS)
        return model

    return Case(
        name="demo",
        policy=policy,
        tokenizer=tokenizer,
        train_set=train_set,
        test_prompts=list(test_set["prompt"]),
        reward_funcs=lambda: [format_reward, correct_reward, ending_reward(tokenizer.eos_token_id)],
        grpo={
            "learning_rate": 1e-4,
            "lr_scheduler_type": "constant",
            "num_generations": 4,
            "per_device_train_batch_size": 4,
            "gradient_accumulation_steps": 4,
            "max_completion_length": 48,
            "max_steps": steps,
        },
        draft={"draft_vocab_size": 4096},
        one_policy=True,
    )


# A tiny policy that knows two alphabets and is taught one, then the other.


class NextLetter:
    """Reward: neighbours that follow the alphabet in force at this step, as a share of those a full text has."""

    def __init__(self, alphabets: list[dict[str, str]], switch_at: int, length: int):
        self.alphabets, self.switch_at, self.length, self.step = alphabets, switch_at, length, 0
        self.__name__ = "next_letter"

    def on_step(self, step: int) -> None:
        self.step = step

    def __call__(self, completions, **kwargs) -> list[float]:
        follows = self.alphabets[int(self.step >= self.switch_at)]
        texts = [completion[0]["content"] for completion in completions]
        pairs = [list(zip(text, text[1:], strict=False)) for text in texts]
        return [sum(follows.get(a) == b for a, b in neighbours) / (self.length - 1) for neighbours in pairs]


def two_alphabets() -> list[dict[str, str]]:
    """Two cyclic orders of the letters in which no letter has the same successor."""
    rng = random.Random(0)
    orders = []
    while len(orders) < 2:
        order = rng.sample(LETTERS, len(LETTERS))
        follows = dict(zip(order, order[1:] + order[:1], strict=True))
        if all(follows[a] != other[a] for other in orders for a in LETTERS):
            orders.append(follows)
    return orders


def train_on_mixture(model, tokenizer, alphabets, seed: int, updates: int = 300) -> None:
    """Teaches a policy text in which a letter is followed by either alphabet's next one, or by any letter."""
    rng = random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model.train()
    for _ in range(updates):
        texts = []
        for _ in range(32):
            text = rng.choice(LETTERS)
            while len(text) < SWITCH_LENGTH:
                choice = rng.random()
                text += rng.choice(LETTERS) if choice < 0.5 else alphabets[choice < 0.75][text[-1]]
            texts.append(f"<|user|>{random_letters(rng)}<eos><|assistant|>{text}")
        ids = torch.tensor(tokenizer(texts)["input_ids"])
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()


def random_letters(rng: random.Random) -> str:
    return "".join(rng.choices(LETTERS, k=6))


def switch_case(steps: int) -> Case:
    tokenizer, alphabets = tiny_tokenizer(), two_alphabets()
    rng = random.Random(1)
    prompts = [[{"role": "user", "content": random_letters(rng)}] for _ in range(288)]

    def policy(seed):
        model = tiny_policy(hidden_size=64, intermediate_size=128, num_hidden_layers=4, head_dim=16, seed=seed)
        train_on_mixture(model, tokenizer, alphabets, seed)
        return model

    return Case(
        name="switch",
        policy=policy,
        tokenizer=tokenizer,
        train_set=Dataset.from_dict({"prompt": prompts[:256]}),
        test_prompts=prompts[256:],
        reward_funcs=lambda: [NextLetter(alphabets, steps // 2, SWITCH_LENGTH)],
        grpo={
            "learning_rate": 1e-3,
            "lr_scheduler_type": "constant",
            "num_generations": 8,
            "per_device_train_batch_size": 32,
            "gradient_accumulation_steps": 1,
            "max_completion_length": SWITCH_LENGTH,
            "max_steps": steps,
        },
        draft={"tap_layers": [1, 2, 3]},
        learning_rate=4e-3,  # the best of 5e-4 to 4e-3 on another seed
    )


CASES = {"demo": demo_case, "switch": switch_case}
