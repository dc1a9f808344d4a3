"""The demo's task: one-shot word problems whose answers must end in a required form.

It is verifiable, and the form has to be learned: an answer is right when it ends in `a + b = c. Answer: c` with the
problem's numbers and the turn ends there. Everything is generated from a fixed seed.
"""

import random
import re

from datasets import Dataset


NAMES = ["Ana", "Ben", "Carla", "David", "Emma", "Farid", "Grace", "Hugo", "Iris", "Jonas", "Kim", "Lena"]
THINGS = ["apples", "books", "coins", "stamps", "shells", "cards", "pencils", "marbles", "cookies", "flowers"]
STORIES = [
    "{name} has {a} {thing} and gets {b} more. How many {thing} does {name} have now?",
    "{name} found {a} {thing} in the morning and {b} in the evening. How many {thing} did {name} find?",
    "There are {a} {thing} on the table. {name} puts {b} more on it. How many {thing} are on the table?",
    "{name} bought {a} {thing} on Monday and {b} on Tuesday. How many {thing} did {name} buy?",
]
SYSTEM = "Solve."
EXAMPLE_PROBLEM = "Mia has 3 pears and gets 4 more. How many pears does Mia have now?"
EXAMPLE_ANSWER = "Mia has 3 pears and gets 4 more. 3 + 4 = 7. Answer: 7"

EQUATION = re.compile(r"\d+ \+ \d+ = \d+")
ANSWER = re.compile(r"(\d+) \+ (\d+) = (\d+)\. Answer: (\d+)$")


def messages(problem: str) -> list[dict]:
    """A problem as a chat with one worked example before it."""
    return [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": EXAMPLE_PROBLEM},
        {"role": "assistant", "content": EXAMPLE_ANSWER},
        {"role": "user", "content": problem},
    ]


def word_problems(num_train: int, num_test: int, seed: int = 0) -> tuple[Dataset, Dataset]:
    """
    Generate training and held-out problems; no problem is in both.

    Returns:
        `tuple[Dataset, Dataset]`: columns `prompt` (chat messages), `first`, `second` (`int`, the two numbers).
    """
    rng = random.Random(seed)
    rows = {}
    while len(rows) < num_train + num_test:
        first, second = rng.randint(2, 20), rng.randint(2, 20)
        story = rng.choice(STORIES)
        problem = story.format(name=rng.choice(NAMES), thing=rng.choice(THINGS), a=first, b=second)
        rows[problem] = {"prompt": messages(problem), "first": first, "second": second}
    rows = list(rows.values())
    return Dataset.from_list(rows[:num_train]), Dataset.from_list(rows[num_train:])


def answer_of(completion: list[dict]) -> re.Match | None:
    """The required ending of a completion (a list with the assistant's one message), or None."""
    return ANSWER.search(completion[0]["content"].strip())


def format_reward(completions, **kwargs) -> list[float]:
    """0.4 when the completion ends in the required form, 0.2 when it only has an addition somewhere."""
    rewards = []
    for completion in completions:
        partial = 0.2 if EQUATION.search(completion[0]["content"]) else 0.0
        rewards.append(0.4 if answer_of(completion) else partial)
    return rewards


def correct_reward(completions, first, second, **kwargs) -> list[float]:
    """0.4 when the required form adds the problem's two numbers and states their sum twice."""
    rewards = []
    for completion, a, b in zip(completions, first, second, strict=True):
        answer = answer_of(completion)
        right = answer and {int(answer[1]), int(answer[2])} == {a, b} and int(answer[3]) == int(answer[4]) == a + b
        rewards.append(0.4 if right else 0.0)
    return rewards


def ending_reward(eos_token_id: int):
    """A reward function: 0.2 when the completion ended its turn by itself."""

    def ending(completions, completion_ids, **kwargs) -> list[float]:
        return [0.2 if ids and ids[-1] == eos_token_id else 0.0 for ids in completion_ids]

    return ending
