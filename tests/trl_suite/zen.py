"""
Local data with the columns of TRL's test data sets (`trl-internal-testing/zen`, `-image`, `-multi-image`): prompts
from the Zen of Python. A test pins the first twelve training prompts; five more of the original would only cost time.
"""

import datasets
from datasets import Dataset, DatasetDict, Features, Image, Sequence, Value
from PIL import Image as PILImage


TRAIN = [
    "Beautiful is better than",
    "Explicit is",
    "Simple is better",
    "Complex",
    "Flat is better than",
    "Sparse is better",
    "Readability",
    "Special cases aren't special",
    "Although practicality beats",
    "Errors should never",
    "Unless explicitly",
    "In the face of ambiguity, refuse",
]
TEST = ["If the implementation is easy", "Namespaces are one"]
SPLITS = {"train": TRAIN, "test": TEST}
MESSAGES = [{"role": Value("string"), "content": Value("string")}]


def messages_of(line: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"How does this go on: {line}?"}]


def picture(index: int) -> PILImage.Image:
    return PILImage.new("RGB", (56, 56), color=(15 * index % 256, 40 * index % 256, 200))


def text_rows(config: str, lines: list[str]) -> Dataset:
    if config == "standard_prompt_only":
        return Dataset.from_dict({"prompt": lines})
    if config == "conversational_prompt_only":
        return Dataset.from_dict({"prompt": [messages_of(line) for line in lines]})
    raise ValueError(f"No local stand-in for the configuration {config!r} of the data set.")


def image_rows(lines: list[str]) -> Dataset:
    columns = {
        "prompt": [messages_of(line) for line in lines],
        "image": [picture(index) for index, _ in enumerate(lines)],
    }
    return Dataset.from_dict(columns, features=Features({"prompt": MESSAGES, "image": Image()}))


def multi_image_rows(lines: list[str]) -> Dataset:
    """One or two images a row, in turn."""
    columns = {
        "prompt": [messages_of(line) for line in lines],
        "images": [[picture(index + k) for k in range(1 + index % 2)] for index, _ in enumerate(lines)],
    }
    return Dataset.from_dict(columns, features=Features({"prompt": MESSAGES, "images": Sequence(Image())}))


def rows_of(name: str, config: str, lines: list[str]) -> Dataset:
    if name == "trl-internal-testing/zen":
        return text_rows(config, lines)
    return image_rows(lines) if name == "trl-internal-testing/zen-image" else multi_image_rows(lines)


def load_dataset(
    path: str,
    name: str | None = None,
    split: str | None = None,
    streaming: bool = False,
    *,
    num_train_rows: int | None = None,
    **kwargs,
):
    """
    Takes the place of [`datasets.load_dataset`] in the test module; other data sets go to the real function.

    Args:
        path, name, split, streaming: as there.
        num_train_rows (`int`, *optional*): training rows to keep, all if `None`.
    """
    known = ("trl-internal-testing/zen", "trl-internal-testing/zen-image", "trl-internal-testing/zen-multi-image")
    if path not in known:
        return datasets.load.load_dataset(path, name, split=split, streaming=streaming, **kwargs)
    rows = {
        part: rows_of(path, name, lines[:num_train_rows] if part == "train" else lines)
        for part, lines in SPLITS.items()
    }
    if streaming:
        rows = {part: dataset.to_iterable_dataset() for part, dataset in rows.items()}
        return rows[split] if split else datasets.IterableDatasetDict(rows)
    return rows[split] if split else DatasetDict(rows)
