"""Ranks for tests: what they run is imported once and forked, because importing TRL takes longer than several runs."""

import multiprocessing
import os
import socket
import sys
import traceback
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from prepared import run_prepared


TESTS = Path(__file__).resolve().parents[1]


def run_script(script, out, *arguments, timeout, folder="group"):
    """Runs a script of a folder of tests and returns what each of its ranks wrote to `OUT/rank{R}.pt`."""
    paths = (TESTS / "group", TESTS, TESTS.parent)
    done = run_prepared(TESTS / folder / script, out, *arguments, paths=paths, timeout=timeout)
    if done.returncode:
        pytest.fail(f"{script} exits with {done.returncode}:\n{done.stderr[-4000:]}")
    return [torch.load(path, weights_only=False) for path in sorted(Path(out).glob("rank*.pt"))]


def fork_ranks(target, world_size, out, *arguments, timeout=60):
    """Runs `target(rank, world_size, *arguments)` on every rank and saves what it returns. Exits with 1 if one failed."""
    processes = start_ranks(target, world_size, out, *arguments, timeout=timeout)
    for process in processes:
        process.join()
    if any(process.exitcode for process in processes):
        sys.exit(1)


def fork_broken_ranks(run_broken, mutations, world_size, folder):
    """
    Runs `run_broken(rank, world_size, folder, mutation)` for the plain run (`None`) and each mutation; every rank's file
    then holds what it saw by mutation. What a run raises is what it saw.
    """
    seen = {}
    for mutation in [None, *mutations]:
        fork_ranks(_keep_error, world_size, folder, run_broken, folder, mutation)
        seen[mutation] = [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in range(world_size)]
    for rank in range(world_size):
        torch.save({mutation: results[rank] for mutation, results in seen.items()}, folder / f"rank{rank}.pt")


def _keep_error(rank, world_size, run_broken, folder, mutation):
    try:
        return run_broken(rank, world_size, folder, mutation)
    except Exception as error:
        if mutation is None:
            raise
        return error


def started_once(tmp_path_factory, lines, script, folder="group"):
    """
    A function from the name of a line `(world size, group sizes, cases, seconds)` of `lines` to what its ranks saw; the
    script starts when a line is first asked for.
    """
    seen = {}

    def ranks_of(line):
        if line not in seen:
            world_size, sizes, names, timeout = lines[line]
            out = tmp_path_factory.mktemp("ranks")
            sizes = ",".join(map(str, sizes))
            try:
                seen[line] = run_script(script, out, world_size, sizes, *names, timeout=timeout, folder=folder)
            except pytest.fail.Exception as failure:
                seen[line] = failure
        if isinstance(seen[line], pytest.fail.Exception):
            raise seen[line]  # not started again for each test that asks
        return seen[line]

    return ranks_of


def start_ranks(target, world_size, out, *arguments, timeout=60):
    """
    The processes of [`fork_ranks`], running; a collective gives up after `timeout` seconds. With `None` a rank has the
    environment variables of torchrun alone, and what it runs makes the process group.
    """
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
    if timeout is not None:
        torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=timeout))
    try:
        torch.save(target(rank, world_size, *arguments), Path(out) / f"rank{rank}.pt")
    except Exception:
        # The ranks that wait for this one end when its connections close.
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    torch.distributed.destroy_process_group()
