"""Ranks for tests: what they run is imported once and forked, because importing TRL takes longer than several runs."""

import multiprocessing
import os
import socket
import sys
import time
import traceback
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from prepared import run_prepared


TESTS = Path(__file__).resolve().parent
SIDE_BY_SIDE = 8


@dataclass
class Outcome:
    """How a rank ended."""

    exitcode: int  # negative: the signal that killed it
    seconds: float  # from the start of all ranks
    errors: str
    result: object


def run_script(script, out, *arguments, timeout=240, folder="group"):
    """
    Runs a script of a folder of tests and returns what it wrote to `OUT/outcomes.pt`, or else what each of its ranks
    wrote to `OUT/rank{R}.pt`.
    """
    paths = (TESTS / "group", TESTS, TESTS.parent)
    done = run_prepared(TESTS / folder / script, out, *arguments, paths=paths, timeout=timeout)
    if done.returncode:
        pytest.fail(f"{script} exits with {done.returncode}:\n{done.stderr[-4000:]}")
    outcomes = Path(out) / "outcomes.pt"
    if outcomes.exists():
        return torch.load(outcomes, weights_only=False)
    return [torch.load(path, weights_only=False) for path in sorted(Path(out).glob("rank*.pt"))]


def fork_ranks(target, world_size, out, *arguments, timeout=60):
    """
    Runs `target(rank, world_size, *arguments)` on every rank and saves what it returns. Exits with 1 if one failed.
    """
    processes = start_ranks(target, world_size, out, *arguments, timeout=timeout)
    for process in processes:
        process.join()
    if any(process.exitcode for process in processes):
        sys.exit(1)


def watch_ranks(target, world_size, folder, *arguments, timeout=120, stalled=None):
    """
    `[Outcome, ...]` of `target(rank, world_size, *arguments)` on every rank. A rank that is stalled on purpose is
    killed when the others have ended, and all are after some seconds.
    """
    folder.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    ranks = start_ranks(target, world_size, folder, *arguments, apart=True)
    seconds = [None] * world_size
    while None in seconds:
        for number, rank in enumerate(ranks):
            late = time.monotonic() - start > timeout or (number == stalled and seconds.count(None) == 1)
            if seconds[number] is None and late:
                rank.kill()
            if seconds[number] is None and rank.exitcode is not None:
                seconds[number] = time.monotonic() - start
        time.sleep(0.01)
    return [
        Outcome(
            rank.exitcode,
            seconds[number],
            (folder / f"rank{number}.err").read_text(),
            torch.load(result, weights_only=False) if (result := folder / f"rank{number}.pt").exists() else None,
        )
        for number, rank in enumerate(ranks)
    ]


def side_by_side(run, runs):
    """`{arguments: run(*arguments)}` of runs that spend most of their time in waiting; the longest should be first."""
    with ProcessPoolExecutor(SIDE_BY_SIDE, multiprocessing.get_context("fork")) as pool:
        return dict(zip(runs, pool.map(run, *zip(*runs, strict=True)), strict=True))


def succeeded(outcomes):
    """The results of the ranks, all of which have to have ended well."""
    failed = [
        f"rank {rank} ends with {outcome.exitcode}:\n{outcome.errors[-3000:]}"
        for rank, outcome in enumerate(outcomes)
        if outcome.exitcode
    ]
    assert not failed, "\n".join(failed)
    return [outcome.result for outcome in outcomes]


def fork_broken_ranks(run_broken, mutations, world_size, folder):
    """
    Runs `run_broken(rank, world_size, folder, mutation)` for the plain run (`None`) and each mutation; every rank's
    file then holds what it saw by mutation. What a run raises is what it saw.
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
    A function from the name of a line `(world size, group sizes, cases, seconds)` of `lines` to what its ranks saw;
    the script starts when a line is first asked for.
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


def parameters_of(lines, slow_lines, seconds, impossible=()):
    """
    Parameters `(line, name, size)` of tests over lines as [`started_once`] takes them; those of slow lines are marked
    and may take `seconds`. `impossible` are pairs of name and size.
    """
    return [
        pytest.param(line, name, size, marks=marks, id=f"{line}-{name}-{size}")
        for marks, chosen in (((), lines), ((pytest.mark.slow, pytest.mark.timeout(seconds)), slow_lines))
        for line, (_, sizes, names, _) in chosen.items()
        for name in names
        for size in sizes
        if (name, size) not in impossible
    ]


def start_ranks(target, world_size, out, *arguments, timeout=60, apart=False):
    """
    The processes of [`fork_ranks`], running; a collective gives up after `timeout` seconds. With `None` a rank has the
    environment variables of torchrun alone, and what it runs makes the process group. Ranks that are `apart` write
    their errors to `OUT/rank{R}.err`, and end together if none of them fails.
    """
    context = multiprocessing.get_context("fork")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes = [
        context.Process(target=_run_rank, args=(target, rank, world_size, port, timeout, apart, Path(out), arguments))
        for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    return processes


def _run_rank(target, rank, world_size, port, timeout, apart, out, arguments):
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
    try:
        if apart:
            # Many of them start at once: a file as meeting place is never taken by others, as a port may be.
            sys.stderr = open(out / f"rank{rank}.err", "w", buffering=1)
            store = dist.FileStore(str(out / "store"), world_size)
            meeting = {"store": store, "rank": rank, "world_size": world_size}
        else:
            meeting = {}
        if timeout is not None:
            dist.init_process_group("gloo", timeout=timedelta(seconds=timeout), **meeting)
        torch.save(target(rank, world_size, *arguments), out / f"rank{rank}.pt")
        if apart:
            dist.barrier()
    except Exception:
        # The ranks that wait for this one end when its connections close.
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    dist.destroy_process_group()
