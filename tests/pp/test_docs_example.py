"""
The example of the tap channel in `docs/parallelism.md`, run as it stands, and with the transport left to the ranks.
"""

import re

import pytest
import torch
from forked_ranks import TESTS, run_script


GIVEN = 'TapChannel(plan, rank, GlooTransport(dist.new_group(backend="gloo")), timeout=60.0)'
FOUND = 'open_channel(plan, rank, dist.new_group(backend="gloo"), timeout=60.0, device="cpu")'


@pytest.mark.parametrize("channel", [GIVEN, FOUND, FOUND.replace(', device="cpu"', "")])
def test_example_of_the_tap_channel_runs(channel, tmp_path):
    section = (TESTS.parent / "docs" / "parallelism.md").read_text().split("## TapChannel")[1]
    example = re.search(r"```python\n(.*?)```", section, re.DOTALL)[1]
    assert GIVEN in example
    example = example.replace(GIVEN, channel).replace("pp import", "pp import open_channel,")
    (tmp_path / "example.py").write_text(example)
    first, last = run_script("example_worker.py", tmp_path, tmp_path / "example.py", timeout=200, folder="pp")
    assert first["taps"] is None
    assert len(last["taps"]) == last["n"] == 4
    assert [tuple(tap.shape) for tap in last["taps"][0]] == [(2, 8, 16)] * 3
    assert torch.equal(last["taps"][3][2], last["hidden"])
