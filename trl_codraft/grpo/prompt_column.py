"""The prompts of a run's datasets: whether they are there, before training needs them."""

from collections.abc import Iterator, Mapping, Sequence, Sized
from itertools import chain, islice
from typing import Any

from datasets import Dataset, IterableDataset

from ..modeling.naming import shown
from .run import Run


COLUMN = "prompt"


def require_prompts(run: Run) -> None:
    """
    Raises if the training set or an evaluation set has no `prompt` column, or the training set no rows. Environments
    write prompts themselves.

    Args:
        run ([`~run.Run`]):
            The trainer, after `GRPOTrainer.__init__`.

    Raises:
        ValueError: naming the dataset and the columns that it has.
    """
    train = run.train_dataset
    if isinstance(train, Sized) and not len(train):
        raise ValueError(
            "`train_dataset` has no rows. Pass one that holds prompts (a filter may have dropped all of them)."
        )
    if run.environment_factories is not None:
        return
    for name, dataset in [("train_dataset", train), *evaluation_sets(run.eval_dataset)]:
        columns = _other_columns(dataset)
        if columns:
            raise ValueError(
                f"`{name}` has no column `{COLUMN}`, which rollouts begin with: its rows have {shown(columns)}. "
                f"Rename the column that holds prompts: `dataset.rename_column({columns[0]!r}, {COLUMN!r})`."
            )


def evaluation_sets(given: Any) -> Iterator[tuple[str, Any]]:
    """Name and dataset of each evaluation set, however many a trainer was given."""
    if isinstance(given, Mapping):
        yield from ((f"eval_dataset[{key!r}]", dataset) for key, dataset in given.items())
    elif given is not None:
        yield "eval_dataset", given


def _other_columns(dataset: Any) -> list[str]:
    """
    The columns of the first row, if `prompt` is not among them; none of a set without rows, or of one that could only
    be asked by using it up. A transform may make the column, so that the row decides where the names of columns do not
    say that it is there. Of a stream the row is read apart from the training, which still begins with it.
    """
    row = None
    if isinstance(dataset, (Dataset, IterableDataset)):
        if COLUMN in (dataset.column_names or ()):
            return []
        row = next(iter(dataset.take(1)), None)
    elif isinstance(dataset, Sequence) and dataset:
        row = dataset[0]
    return list(row) if isinstance(row, Mapping) and COLUMN not in row else []


def held_out_prompts(eval_dataset: Any, count: int) -> list:
    """
    The first prompts of the evaluation sets, one set after the other: there may be several, and some small or empty.
    All are text or all are messages, as the first is; what only a `rollout_func` understands is left out.

    Args:
        eval_dataset (`Any`):
            The argument of a trainer: a dataset, several by name, or `None`.
        count (`int`):
            How many at most.

    Returns:
        `list`: none where there is no such prompt.
    """
    rows = chain.from_iterable(dataset for _, dataset in evaluation_sets(eval_dataset))
    prompts = (row.get(COLUMN) for row in rows)
    prompts = (prompt for prompt in prompts if isinstance(prompt, (str, list)) and prompt)
    first = next(prompts, None)
    return (
        list(islice(chain([first], (prompt for prompt in prompts if type(prompt) is type(first))), count))
        if first
        else []
    )
