"""The notebook's small form, cell by cell."""

import json
from pathlib import Path


NOTEBOOK = Path(__file__).parents[2] / "examples" / "notebooks" / "train_and_serve.ipynb"


def run_cells(monkeypatch, folder):
    """Executes the code cells in one namespace; returns it and the printed serve commands' names."""
    monkeypatch.setenv("CI", "1")  # no telemetry
    monkeypatch.chdir(folder)
    namespace = {}
    for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), f"<{cell['id']}>", "exec"), namespace)
    return namespace


def test_notebook_trains_scores_and_exports_a_draft_that_servers_load(tmp_path, monkeypatch, capsys):
    state = run_cells(monkeypatch, tmp_path)
    assert state["found"] == []
    assert state["scores"]["accept_length"] > 1.2
    assert state["scores"]["accepted"] == sum(state["scores"]["accepted_per_position"])
    printed = capsys.readouterr().out
    assert "accept length simulated" in printed
    assert 'vllm serve train_and_serve --speculative-config \'{"method": "eagle3"' in printed
    exported = tmp_path / "train_and_serve" / "exported"
    assert sorted(file.name for file in exported.iterdir()) == ["README.md", "config.json", "model.safetensors"]
    assert f"{state['scores']['accept_length']:.3f}" in (exported / "README.md").read_text()


def test_notebook_is_committed_without_outputs():
    for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] == "code":
            assert not cell["outputs"], cell["id"]
            assert cell["execution_count"] is None
