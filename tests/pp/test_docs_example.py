"""The example of the tap channel in `docs/parallelism.md`, run as it stands."""

import re

import torch
from group.forked_ranks import TESTS, run_script


def test_example_of_the_tap_channel_runs(tmp_path):
    section = (TESTS.parent / "docs" / "parallelism.md").read_text().split("## TapChannel")[1]
    (tmp_path / "example.py").write_text(re.search(r"```python\n(.*?)```", section, re.DOTALL)[1])
    first, last = run_script("example_worker.py", tmp_path, tmp_path / "example.py", timeout=200, folder="pp")
    assert first["taps"] is None
    assert len(last["taps"]) == last["n"] == 4
    assert [tuple(tap.shape) for tap in last["taps"][0]] == [(2, 8, 16)] * 3
    assert torch.equal(last["taps"][3][2], last["hidden"])
