"""Ranks for tests: what they run is imported once and forked, because importing TRL takes longer than several runs."""

import multiprocessing
import os
import socket
import subprocess
import sys
import traceback
from datetime import timedelta
from pathlib import Path

import pytest
import torch


TESTS = Path(__file__).resolve().parents[1]


def run_script(script, out, *arguments, timeout, folder="group"):
    """Runs a script of a folder of tests and returns what each of its ranks wrote to `OUT/rank{R}.pt`."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(str(path) for path in (TESTS / "group", TESTS, TESTS.parent)),
    }
    command = [sys.executable, str(TESTS / folder / script), str(out), *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout, check=False)
    if done.returncode:
        pytest.fail(f"{script} exits with {done.returncode}:\n{done.stderr[-4000:]}")
    return [torch.load(path, weights_only=False) for path in sorted(Path(out).glob("rank*.pt"))]


def fork_ranks(target, world_size, out, *arguments):
    """Runs `target(rank, world_size, *arguments)` on every rank and saves what it returns. Exits with 1 if one failed."""
    processes = start_ranks(target, world_size, out, *arguments)
    for process in processes:
        process.join()
    if any(process.exitcode for process in processes):
        sys.exit(1)


def start_ranks(target, world_size, out, *arguments, timeout=60):
    """The processes of [`fork_ranks`], running; a collective gives up after `timeout` seconds."""
    context = multiprocessing.get_context("fork")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes = [
        context.Process(target=_run_rank, args=(target, rank, world_size, port, timeout, out, *arguments))
        for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    return processes


def _run_rank(target, rank, world_size, port, timeout, out, *arguments):
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "ACCELERATE_USE_CPU": "true",
    }
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=timeout))
    try:
        torch.save(target(rank, world_size, *arguments), Path(out) / f"rank{rank}.pt")
    except Exception:
        # The ranks that wait for this one end when its connections close.
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    torch.distributed.destroy_process_group()
