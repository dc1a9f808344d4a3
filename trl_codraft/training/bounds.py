"""Bounds the values of settings; an error names the setting and its value."""

import math
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..modeling.naming import shown


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """
    The values that one setting may have.

    Args:
        optional (`bool`, *optional*, defaults to `False`):
            Whether the setting may be `None`.
        advice (`str`, *optional*, defaults to `""`):
            A sentence that ends the error: what to set instead.
    """

    optional: bool = False
    advice: str = ""

    @property
    def description(self) -> str:
        """Describes the allowed values, as they follow "must be"."""
        raise NotImplementedError

    def allows(self, value: Any) -> bool:
        """Whether a value that is not `None` is one of them."""
        raise NotImplementedError

    def check(self, name: str, value: Any) -> None:
        """
        Refuses every other value.

        Args:
            name (`str`):
                The setting, as its user writes it.
            value (`Any`):
                Its value.

        Raises:
            ValueError: naming both.
        """
        if self.optional if value is None else self.allows(value):
            return
        wanted = f"{self.description} or None" if self.optional else self.description
        raise ValueError(f"`{name}` must be {wanted}, got {shown(value)}.{self.advice and ' ' + self.advice}")


@dataclass(frozen=True, kw_only=True)
class Flag(Bounds):
    """`True` or `False`; the word "false" would count as true."""

    description = "True or False"

    def allows(self, value: Any) -> bool:
        return isinstance(value, bool)


@dataclass(frozen=True, kw_only=True)
class Text(Bounds):
    """A path or a name, which is not empty."""

    description = "a name or a path that is not empty"

    def allows(self, value: Any) -> bool:
        return isinstance(value, (str, os.PathLike)) and bool(os.fspath(value))


@dataclass(frozen=True, kw_only=True)
class Choice(Bounds):
    """One of a few words."""

    choices: tuple[str, ...]

    @property
    def description(self) -> str:
        return f"one of {self.choices}"

    def allows(self, value: Any) -> bool:
        return isinstance(value, str) and value in self.choices


@dataclass(frozen=True, kw_only=True)
class Whole(Bounds):
    """An integer of at least `least`; `True` and `False` are none."""

    least: int

    @property
    def description(self) -> str:
        return f"an integer of at least {self.least}"

    def allows(self, value: Any) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and value >= self.least


@dataclass(frozen=True, kw_only=True)
class WholeNumbers(Bounds):
    """A list of at least one integer, each at least `least`."""

    least: int
    ascending: bool = False

    @property
    def description(self) -> str:
        order = ", strictly ascending" if self.ascending else ""
        return f"a list of at least one integer, each at least {self.least}{order}"

    def allows(self, value: Any) -> bool:
        one = Whole(least=self.least)
        if not isinstance(value, (list, tuple)) or not value or not all(map(one.allows, value)):
            return False
        return not self.ascending or list(value) == sorted(set(value))


@dataclass(frozen=True, kw_only=True)
class Number(Bounds):
    """A finite number: more than `above`, or at least `least`, and at most `most`."""

    above: float | None = None
    least: float | None = None
    most: float = math.inf

    @property
    def description(self) -> str:
        smallest = f"above {self.above}" if self.above is not None else f"of at least {self.least}"
        largest = f" and at most {self.most}" if self.most < math.inf else ""
        return f"a finite number {smallest}{largest}"

    def allows(self, value: Any) -> bool:
        # A comparison, which NaN fails and integers of any size stand.
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not abs(value) <= sys.float_info.max:
            return False
        return (value > self.above if self.above is not None else value >= self.least) and value <= self.most


def check_all(settings: Any, bounds: Mapping[str, Bounds]) -> None:
    """
    Checks attributes of an object, each by its own name.

    Args:
        settings (`Any`):
            The object that has the settings.
        bounds (`Mapping[str, Bounds]`):
            The allowed values of each.

    Raises:
        ValueError: at the first that is something else.
    """
    for name, allowed in bounds.items():
        allowed.check(name, getattr(settings, name))
