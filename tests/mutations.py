"""
Breaks one piece of the library at a time: evidence that a check can fail. A table of [`Mutation`]s names what breaks,
and the case that has to notice.
"""

import inspect
import textwrap
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock


@dataclass(frozen=True)
class Mutation:
    """
    Args:
        case (`str`): the case of a test that has to notice.
        owner (`Any`), name (`str`): class or module, and its attribute that breaks.
        broken (`Any`): stands in its place.
        also (`tuple`): further modules that have imported the attribute.
    """

    case: str
    owner: Any
    name: str
    broken: Any
    also: tuple = ()

    @contextmanager
    def applied(self) -> Iterator[None]:
        with ExitStack() as patches:
            for holder in (self.owner, *self.also):
                patches.enter_context(mock.patch.object(holder, self.name, self.broken))
            yield


def in_source(case: str, owner: Any, name: str, *changes: str, also: tuple = ()) -> Mutation:
    """The mutation of a function in whose source pieces are replaced: see [`rewritten`]."""
    return Mutation(case, owner, name, rewritten(owner, name, *changes), also)


def rewritten(owner: Any, name: str, *changes: str) -> Any:
    """
    A function, method or property with pieces of its source replaced: `changes` are old and new text in turn. Old text
    has to occur exactly once, so that a mutation that no longer applies fails too.
    """
    attribute = inspect.getattr_static(owner, name)
    function = inspect.unwrap(getattr(attribute, "__func__", getattr(attribute, "fget", attribute)))
    source = textwrap.dedent(inspect.getsource(function))
    for old, new in zip(changes[::2], changes[1::2], strict=True):
        assert source.count(old) == 1, f"{old!r} occurs {source.count(old)} times in {name}"
        source = source.replace(old, new)
    # A method that calls `super()` without arguments needs the class cell that only a class body provides.
    source = source.replace("super()", f"super({owner.__name__}, self)")
    found: dict[str, Any] = {}
    exec(compile(source, f"<mutated {name}>", "exec"), function.__globals__, found)
    return found[name]


def runs_of(mutations: dict[str, Mutation], run: Callable) -> Callable:
    """
    What `fork_broken_ranks` runs: `run(case, folder, world_size, name)` with the mutation of that name in place, or,
    with `None`, of each case as the library is.
    """

    def run_broken(rank, world_size, folder, name):
        if name is None:
            cases = dict.fromkeys(mutation.case for mutation in mutations.values())
            return {case: run(case, folder, world_size, None) for case in cases}
        with mutations[name].applied():
            return run(mutations[name].case, folder, world_size, name)

    return run_broken
