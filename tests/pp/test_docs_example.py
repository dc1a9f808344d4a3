"""The example of the tap channel in `docs/parallelism.md`, run as it stands."""

import os
import re
import socket
import subprocess
import sys

from forked import TESTS


CHECKS = """
if rank == 1:
    assert [tuple(tap.shape) for tap in taps[0]] == [(2, 8, 16)] * 3
    assert torch.equal(taps[n - 1][2], hidden.detach())
    print("taps of", len(taps), "microbatches")
dist.destroy_process_group()
"""


def test_example_of_the_tap_channel_runs(tmp_path):
    section = (TESTS.parent / "docs" / "parallelism.md").read_text().split("## TapChannel")[1]
    example = re.search(r"```python\n(.*?)```", section, re.DOTALL)[1]
    (tmp_path / "example.py").write_text(example + CHECKS)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(tmp_path / "example.py")],
            env={**os.environ, **common, "RANK": str(rank), "PYTHONPATH": str(TESTS.parent)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [rank.communicate(timeout=200) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], outputs
    assert outputs[1][0] == "taps of 4 microbatches\n"
