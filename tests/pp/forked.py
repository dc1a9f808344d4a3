"""
Ranks for the tests of pipelines: plain processes, forked from a script that has imported everything, each with its own
exit code, error output and time. `python SCRIPT FOLDER` runs a script's `CASES` and leaves `outcomes.pt` there.
"""

import multiprocessing
import os
import signal
import sys
import time
import traceback
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from prepared import run_prepared


TESTS = Path(__file__).resolve().parents[1]
GROUP_TIMEOUT = timedelta(seconds=60)
SIDE_BY_SIDE = 4


@dataclass
class Outcome:
    """How a rank ended."""

    exitcode: int  # negative: the signal that killed it
    seconds: float  # from the start of all ranks
    errors: str
    result: object


def fork_ranks(target, world_size, folder, *arguments, timeout=120, stalled=None):
    """
    `[Outcome, ...]` of `target(rank, world_size, *arguments)` on every rank. A rank that is stalled on purpose is killed
    when the others have ended.
    """
    folder.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    pids = []
    for rank in range(world_size):
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            _run_rank(target, rank, world_size, folder, arguments)
        pids.append(pid)
    outcomes = [None] * world_size
    while any(outcome is None for outcome in outcomes):
        for rank, pid in enumerate(pids):
            if outcomes[rank] is None:
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    outcomes[rank] = (os.waitstatus_to_exitcode(status), time.monotonic() - start)
                elif time.monotonic() - start > timeout or (rank == stalled and outcomes.count(None) == 1):
                    os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
    results = []
    for rank, (exitcode, seconds) in enumerate(outcomes):
        result = folder / f"rank{rank}.pt"
        content = torch.load(result, weights_only=False) if result.exists() else None
        results.append(Outcome(exitcode, seconds, (folder / f"rank{rank}.err").read_text(), content))
    return results


def _run_rank(target, rank, world_size, folder, arguments):
    """In the child: never returns."""
    code = 1
    try:
        sys.stderr = open(folder / f"rank{rank}.err", "w", buffering=1)
        torch.set_num_threads(1)
        store = dist.FileStore(str(folder / "store"), world_size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=GROUP_TIMEOUT)
        torch.save(target(rank, world_size, *arguments), folder / f"rank{rank}.pt")
        dist.barrier()
        dist.destroy_process_group()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def side_by_side(run, runs):
    """`{arguments: run(*arguments)}` of runs that spend most of their time in waiting; the longest should be first."""
    with multiprocessing.get_context("fork").Pool(SIDE_BY_SIDE) as pool:
        return dict(zip(runs, pool.starmap(run, runs, chunksize=1), strict=True))


def run_script(script, folder, *arguments, timeout=240):
    """`{case: [Outcome, ...]}` of a script of this folder."""
    paths = (TESTS / "pp", TESTS, TESTS.parent)
    done = run_prepared(TESTS / "pp" / script, folder, *arguments, paths=paths, timeout=timeout)
    if done.returncode:
        pytest.fail(f"{script} exits with {done.returncode}:\n{done.stderr[-4000:]}")
    return torch.load(Path(folder) / "outcomes.pt", weights_only=False)


def succeeded(outcomes):
    """The results of the ranks, all of which have to have ended well."""
    for rank, outcome in enumerate(outcomes):
        assert outcome.exitcode == 0, f"rank {rank} ends with {outcome.exitcode}:\n{outcome.errors[-3000:]}"
    return [outcome.result for outcome in outcomes]
