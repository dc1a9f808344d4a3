"""Naming things in messages: a few by name, the rest counted, long values cut, so that a message stays readable."""

from collections.abc import Iterable, Sequence
from typing import Any


NAMED = 4
LONGEST_VALUE = 80


def few(items: Iterable[Any], separator: str = ", ", limit: int = NAMED) -> str:
    """
    Names a few things and counts the rest.

    Args:
        items (`Iterable`):
            What to name, in this order.
        separator (`str`, *optional*, defaults to `", "`):
            Between two of them.
        limit (`int`, *optional*, defaults to 4):
            The most that are named.

    Returns:
        `str`: for example `"a, b, c, d and 36 more"`.
    """
    texts = [str(item) for item in items]
    rest = len(texts) - limit
    return separator.join(texts[:limit]) + (f" and {rest} more" if rest > 0 else "")


def sentences(items: Sequence[str], one: str, many: str) -> list[str]:
    """
    One sentence for each of a few things, or one for them all.

    Args:
        items (`Sequence[str]`):
            What the sentences are about.
        one (`str`):
            A sentence about one of them, with `{}` in the place of its name.
        many (`str`):
            What comes before a list of them.

    Returns:
        `list[str]`
    """
    if len(items) <= NAMED:
        return [one.format(item) for item in items]
    return [f"{many} ({len(items)}): {few(items)}"]


def shown(value: Any) -> str:
    """A value as it stands in a file, cut where it is long."""
    text = repr(value)
    return text if len(text) <= LONGEST_VALUE else f"{text[:LONGEST_VALUE]}..."
