"""The rooms of the package: which may import which, no circles, one trainer. Read from the code's own imports."""

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from trl import GRPOTrainer

import trl_codraft
from trl_codraft import CoDraftGRPOTrainer


PACKAGE = Path(trl_codraft.__file__).parent
NAME = PACKAGE.name
# From the top floor down. A room imports from lower floors and from itself, never from a neighbour on its floor.
FLOORS = (
    ("cli",),
    ("scripts",),
    ("trainer",),
    ("grpo",),
    ("config",),
    ("serving", "vllm"),
    ("rollout",),
    ("training", "cp", "pp"),
    ("modeling", "group"),
)
FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
# Beside the floors: the package's door, and differences between releases of other packages.
DOOR, VERSIONS = NAME, f"{NAME}.versions"


def modules():
    """Dotted name -> file of every module."""
    found = {}
    for file in sorted(PACKAGE.rglob("*.py")):
        parts = [NAME, *file.relative_to(PACKAGE).with_suffix("").parts]
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


MODULES = modules()


def imports_of(module, source, is_package):
    """Modules of the package that a module imports anywhere in its source, `TYPE_CHECKING` and functions included."""
    package = module if is_package else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")
            home = ".".join(parts[: len(parts) - node.level + 1]) if node.level else ""
            home = ".".join(filter(None, (home, node.module)))
            targets = [home, *(f"{home}.{alias.name}" for alias in node.names)]
        else:
            continue
        yield from (target for target in targets if target in MODULES and target not in (module, NAME))


def edges():
    return {
        module: set(imports_of(module, file.read_text(), file.name == "__init__.py"))
        for module, file in MODULES.items()
    }


EDGES = edges()


def room_of(module):
    return module.split(".")[1] if "." in module else module


def complaint(module, target):
    """Why a module must not import another, `None` if it may."""
    here, there = room_of(module), room_of(target)
    if module == DOOR or target == VERSIONS or here == there:
        return None
    if module == VERSIONS:
        return "differences between releases know nothing of the rooms"
    if FLOOR_OF[there] <= FLOOR_OF[here]:
        return "imports run down, and not to a neighbour"
    return None


def test_every_module_is_in_a_room():
    assert {room_of(module) for module in MODULES} - {DOOR, "versions"} == set(FLOOR_OF)


def test_imports_run_one_way():
    wrong = [
        f"{module} -> {target}: {complaint(module, target)}"
        for module, targets in EDGES.items()
        for target in sorted(targets)
        if complaint(module, target)
    ]
    assert not wrong, "\n".join(wrong)


def test_no_modules_import_each_other_in_a_circle():
    try:
        list(TopologicalSorter(EDGES).static_order())
    except CycleError as circle:
        pytest.fail(" -> ".join(circle.args[1]))


@pytest.mark.parametrize(
    ("module", "source", "is_package"),
    [
        ("trl_codraft.rollout.loop", "from ..grpo.support import refuse_policy", False),
        ("trl_codraft.pp.rows", "from ..cp import layout", False),
        ("trl_codraft.grpo.run", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from ..trainer import x", False),
        ("trl_codraft.group.header", "def late():\n    import trl_codraft.rollout.loop", False),
        ("trl_codraft.pp", "from ..cp.layout import ContextLayout", True),
        ("trl_codraft.training.draft_trainer", "from ..config import CoDraftGRPOConfig", False),
    ],
)  # fmt: skip
def test_an_import_that_runs_up_or_sideways_is_seen(module, source, is_package):
    assert any(complaint(module, target) for target in imports_of(module, source, is_package))


def test_the_root_is_a_hallway_and_not_a_store_room():
    assert len(list(PACKAGE.glob("*.py"))) <= 8


def test_nothing_of_ours_stands_between_the_trainer_and_trl():
    assert CoDraftGRPOTrainer.__mro__[1] is GRPOTrainer
