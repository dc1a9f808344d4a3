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
        ("trl_codraft.grpo.run", "if TYPE_CHECKING:\n    from ..trainer import CoDraftGRPOTrainer", False),
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


# The seam: `grpo/run.py` lists everything of a trainer that its parts touch.

PROTOCOLS = {
    node.name: {
        member.target.id if isinstance(member, ast.AnnAssign) else member.name
        for member in node.body
        if isinstance(member, (ast.AnnAssign, ast.FunctionDef))
    }
    for node in ast.parse(MODULES[f"{NAME}.grpo.run"].read_text()).body
    if isinstance(node, ast.ClassDef)
}
# The parts that a trainer holds for its parts, by attribute.
PARTS = {"losses": "Losses", "learner": "Learner", "rollouts": "Rollouts", "reports": "Reports"}


def protocols_of_arguments(function):
    """Argument -> protocol, for those that are annotated with one (or `None`)."""
    arguments = {argument.arg: argument.annotation for argument in function.args.args}
    kinds = {name: ast.unparse(kind).removesuffix(" | None") for name, kind in arguments.items() if kind is not None}
    return {name: kind for name, kind in kinds.items() if kind in PROTOCOLS}


def protocol_of(node, names):
    """The protocol of the value of an expression, `None` if it has none."""
    if isinstance(node, ast.Name):
        return names.get(node.id)
    if not isinstance(node, ast.Attribute):
        return None
    if isinstance(node.value, ast.Name) and node.value.id == "self":
        return names.get(f"self.{node.attr}")
    return PARTS.get(node.attr) if protocol_of(node.value, names) == "Run" else None


def touched(source):
    """Pairs (protocol, attribute) that a module reads, sets, or replaces for a while with `attributes_set`."""
    tree = ast.parse(source)
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    names = {"run": "Run"}
    for function in functions:
        found = protocols_of_arguments(function)
        names |= found
        if function.name == "__init__":
            names |= {f"self.{name}": kind for name, kind in found.items()}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and (kind := protocol_of(node.value, names)):
            yield kind, node.attr
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "attributes_set":
            if kind := protocol_of(node.args[0], names):
                yield from ((kind, name) for name in replaced_by(node, tree))


def replaced_by(call, tree):
    """Attributes that a call of `attributes_set` replaces: its keywords, and the names that `**` may bring along."""
    yield from (keyword.arg for keyword in call.keywords if keyword.arg)
    if all(keyword.arg for keyword in call.keywords):
        return
    pieces = {piece for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for piece in node.values}
    constants = {node for node in ast.walk(tree) if isinstance(node, ast.Constant)} - pieces
    texts = {node.value for node in constants if isinstance(node.value, str)}
    yield from (text for text in texts if text in PROTOCOLS["Run"] or (text.isidentifier() and text.startswith("_")))


SEAM = {file.name: file.read_text() for file in sorted((PACKAGE / "grpo").glob("*.py"))}


def test_all_that_parts_touch_of_a_trainer_is_declared():
    undeclared = {
        f"{name}: {protocol}.{attribute}"
        for name, source in SEAM.items()
        for protocol, attribute in touched(source)
        if attribute not in PROTOCOLS[protocol]
    }
    assert not undeclared, "\n".join(sorted(undeclared))


def test_nothing_is_declared_of_a_trainer_that_no_part_touches():
    used = {attribute for source in SEAM.values() for protocol, attribute in touched(source) if protocol == "Run"}
    assert PROTOCOLS["Run"] - used == set()


@pytest.mark.parametrize(
    ("source", "attribute"),
    [
        ("def f(run): run.secret", ("Run", "secret")),
        ("class A:\n    def __init__(self, run: Run): ...\n    def f(self): self.run.secret = 1", ("Run", "secret")),
        ("def f(prompts, trainer: Run): return trainer.secret", ("Run", "secret")),
        ("def f(learner: Learner | None): learner.secret()", ("Learner", "secret")),
        ("def f(run): run.losses.secret()", ("Losses", "secret")),
        ("def f(run):\n    with attributes_set(run, secret=1): ...", ("Run", "secret")),
        ("def f(run):\n    with attributes_set(run, **{'_secret': 1}): ...", ("Run", "_secret")),
    ],
)
def test_what_a_part_touches_is_seen(source, attribute):
    assert attribute in set(touched(source))
