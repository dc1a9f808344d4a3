"""The demo's rewards against completions written by hand, and its held-out problems."""

import sys
from pathlib import Path

import pytest


sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

from demo.task import correct_reward, ending_reward, format_reward, word_problems


def scores(reward, *texts, **columns):
    return reward([[{"role": "assistant", "content": text}] for text in texts], **columns)


@pytest.mark.parametrize(
    ("text", "form", "correct"),
    [
        ("Ana has 3 and gets 14. 3 + 14 = 17. Answer: 17", 0.4, 0.4),
        ("14 + 3 = 17. Answer: 17\n", 0.4, 0.4),
        ("3 + 14 = 16. Answer: 16", 0.4, 0.0),
        ("3 + 14 = 17. Answer: 18", 0.4, 0.0),
        ("4 + 13 = 17. Answer: 17", 0.4, 0.0),
        ("3 + 14 = 17. Answer: 17 coins", 0.2, 0.0),
        ("3 + 14 = 17", 0.2, 0.0),
        ("Answer: 17", 0.0, 0.0),
        ("", 0.0, 0.0),
    ],
)
def test_form_and_correctness_are_rewarded_apart(text, form, correct):
    assert scores(format_reward, text) == [form]
    assert scores(correct_reward, text, first=[3], second=[14]) == [correct]


def test_only_a_completion_that_ends_its_turn_gets_the_ending_reward():
    reward = ending_reward(eos_token_id=2)
    assert reward(["a", "b", "c"], completion_ids=[[5, 2], [2, 5], []]) == [0.2, 0.0, 0.0]


def test_problems_are_reproducible_and_held_out_ones_are_new():
    train, test = word_problems(200, 50)
    again, _ = word_problems(200, 50)
    assert train["prompt"] == again["prompt"]
    asked = [row[-1]["content"] for row in [*train["prompt"], *test["prompt"]]]
    assert len(set(asked)) == 250
    for row in test:
        assert f" {row['first']} " in row["prompt"][-1]["content"]
        assert f" {row['second']} " in row["prompt"][-1]["content"]
