"""Two ranks with an engine each: one draft folder for both, the same draft in both, counters summed over them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny import tiny_policy, tiny_tokenizer

from trl_codraft.rollout.stats import SpeculativeStats


TESTS = Path(__file__).resolve().parents[1]


@pytest.mark.slow
def test_ranks_share_the_draft_and_sum_their_engines_counters(tmp_path):
    tiny_policy(scale=3.0).save_pretrained(tmp_path / "policy")
    tiny_tokenizer().save_pretrained(tmp_path / "policy")
    paths = [str(TESTS), str(TESTS / "trainer"), str(TESTS.parent)]
    environment = {
        **os.environ,
        "ACCELERATE_USE_CPU": "true",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(paths),
    }
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command = [*launch, str(TESTS / "distributed" / "vllm_worker.py"), str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    first, second = (torch.load(tmp_path / f"rank{rank}.pt", weights_only=False) for rank in range(2))
    assert first["folder"] == second["folder"]
    assert not first["folder_left"]
    for rank in (first, second):
        assert torch.equal(rank["draft"], first["own"])
    # The engines sampled differently, and each step's metric is over both.
    assert not torch.equal(first["counters"], second["counters"])
    whole = SpeculativeStats.from_tensor(first["counters"] + second["counters"])
    lengths = [entry["rollout/accept_length"] for entry in first["logs"]]
    assert len(lengths) == 2
    assert min(lengths) <= whole.accept_length <= max(lengths)
