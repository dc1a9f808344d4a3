"""Sharded policies: every rank runs the same number of forwards, whatever its own rows need."""

import os
import subprocess
import sys
from pathlib import Path


ROOT = Path(__file__).parents[2]


def test_sharded_ranks_finish_together_with_their_own_tokens(tmp_path):
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "tests"))),
        "OMP_NUM_THREADS": "1",
    }
    worker = ROOT / "tests" / "rollout" / "lockstep_worker.py"
    ranks = [
        subprocess.Popen(
            [sys.executable, str(worker), str(rank), str(tmp_path / "store")],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )  # fmt: skip
        for rank in range(2)
    ]
    try:
        outputs = [rank.communicate(timeout=150)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for number, output in enumerate(outputs):
        assert f"rank {number} ok" in output, output
