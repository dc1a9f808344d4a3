"""Ranks of `test_emulated_devices.py`: `python emulated_worker.py FOLDER [CASE ...]` runs `CASES` on transports of GPUs."""

import logging
import mmap
import os
import random
import sys
import threading
import time
from functools import partial
from itertools import product
from pathlib import Path

import tap_fault_worker
import torch
import torch.distributed as dist
from channel_cases import EMULATED, make_channel, mixed_plan, require_values, run_step, sleeping, tap_value
from channel_worker import changing_shapes, leftovers, recomputation
from emulated_device import (
    CPU,
    DeafToEvents,
    EmulatedCalls,
    Forgetful,
    OtherBindings,
    OutOfMemory,
    Overcautious,
    Unopenable,
    WrongBytes,
)
from forked import fork_ranks, side_by_side

from benchmarks.cuda_calls_check import CallsCheck
from benchmarks.tap_soak import open_files, resident_bytes
from trl_codraft.pp.taps.message import TapChannelError
from trl_codraft.pp.taps.opening import open_channel


SLOW_COPY = 0.6


class SlowCopies(EmulatedCalls):
    """Copies of the side stream take long, after those of the probe."""

    slow = False

    def _slowly(self, stream):
        if self.slow and stream is self.side:
            stream.enqueue(lambda: time.sleep(SLOW_COPY))

    def move(self, target, source, num_bytes, stream):
        self._slowly(stream)
        super().move(target, source, num_bytes, stream)

    def copy(self, target, source, stream):
        self._slowly(stream)
        super().copy(target, source, stream)


def mappings(channel):
    """Rings of landing slots that a rank has in its GPU's memory or mapped."""
    return sum(isinstance(holder, mmap.mmap) for holder, _ in channel.transport._calls._memory.values())


def taken_at_once(rank, group, transport, late_sink=False):
    """
    Taps are taken at the end of each forward of the last stage, while copies are late, and dropped at once. Returns how many
    rings are left when all have closed.
    """
    size = dist.get_world_size(group)
    plan = mixed_plan(size, num_microbatches=2 * size, schedule="GPipe", slots=1 if late_sink else None)
    calls = EmulatedCalls
    if late_sink:
        calls = partial(EmulatedCalls, side=0.1 if rank == size - 1 else 0.001, compute=0.001)
    channel = make_channel(rank, plan, transport, group, calls=calls)
    common = random.Random(2)
    for step in range(4):
        shapes = [(common.randint(1, 3), common.randint(1, 40 * (step + 1))) for _ in range(2 * size)]
        channel.begin_step(shapes)
        taken = []
        for microbatch, rows in enumerate(shapes):
            with channel.forward(rank, microbatch):
                for tap in plan.taps_of(rank):
                    channel.capture(tap.layer, tap_value(tap, step, microbatch, rows))
            if channel.is_sink:
                taken.append(channel.take(microbatch))
        channel.end_step()
        if channel.is_sink:
            require_values(plan, taken, step, shapes)
    channel.close()
    return mappings(channel)


def slow_copies(rank, group, transport):
    """Seconds that the forwards of a rank take when every copy takes long and the draft's GPU is busy, and then the step."""
    plan = mixed_plan(2, num_microbatches=3, schedule="GPipe", slots=3)
    channel = make_channel(rank, plan, transport, group, calls=SlowCopies)
    dist.barrier(group)
    channel.transport._calls.slow = True
    shapes = [(2, 300)] * 3  # more than in the probe, so that rings are replaced
    channel.begin_step(shapes)
    if channel.is_sink:
        channel.transport._calls.current().enqueue(lambda: time.sleep(2 * SLOW_COPY))
    start = time.monotonic()
    for microbatch in range(3):
        with channel.forward(rank, microbatch):
            for tap in plan.taps_of(rank):
                channel.capture(tap.layer, tap_value(tap, 0, microbatch, shapes[microbatch]))
    forwards = time.monotonic() - start
    channel.end_step()
    step = time.monotonic() - start
    if channel.is_sink:
        require_values(plan, [channel.take(k) for k in range(3)], 0, shapes)
    channel.close()
    return forwards, step


def soak(rank, group, transport, steps=300):
    """Many steps with ranks that sleep, shapes and numbers of microbatches that change; memory of the process at the end."""
    size = dist.get_world_size(group)
    plan = mixed_plan(size, 2 * size, 2 * size, "Interleaved1F1B")
    channel = make_channel(rank, plan, transport, group)
    common, own = random.Random(3), torch.Generator().manual_seed(rank)
    for step in range(steps):
        if step == steps // 4:
            settled = resident_bytes(), open_files()
        shapes = [(common.randint(1, 3), common.randint(1, 48)) for _ in range(size if step % 5 else 2 * size)]
        taken = run_step(channel, rank, step, shapes, sleeping(own, most=0.004))
        if channel.is_sink:
            require_values(plan, taken, step, shapes)
    channel.close()
    return resident_bytes() - settled[0], open_files() - settled[1]


def stalled(rank, group, transport, culprit):
    """A device stops in the middle of a step: seconds until each rank has given up, then until it has closed."""
    plan = mixed_plan(3, num_microbatches=4, slots=2)
    channel = make_channel(rank, plan, transport, group, timeout=2.0)

    def stall(action):
        if rank == culprit and action.microbatch == 1 and not action.backward:
            channel.transport._calls.side.enqueue(threading.Event().wait)

    start, message = time.monotonic(), ""
    try:
        run_step(channel, rank, 0, [(1, 4)] * 4, stall)
    except TapChannelError as error:
        message = f"{type(error).__name__}: {error}"
    gave_up = time.monotonic() - start
    channel.close()
    closed = time.monotonic() - start - gave_up
    dist.barrier()  # or those that have ended first would be gone
    return message, gave_up, closed, mappings(channel)


def closed_while_stuck(rank, group, transport, stuck):
    """
    First the source closes, then the draft's rank, while the source's copy or the draft's forward does not come to an end.
    Returns the seconds that each takes to close, and the rings that it leaves.
    """
    plan = mixed_plan(2, num_microbatches=1, schedule="GPipe")
    channel = make_channel(rank, plan, transport, group)
    calls = channel.transport._calls
    channel.begin_step([(1, 4)])
    if rank == 0:
        if stuck == 0:
            calls.side.enqueue(threading.Event().wait)
        with channel.forward(0, 0):
            for tap in plan.taps_of(0):
                channel.capture(tap.layer, tap_value(tap, 0, 0, (1, 4)))
    elif stuck == 1:
        calls.current().enqueue(threading.Event().wait)
    seconds = 0.0
    for turn in range(2):
        if rank == turn:
            start = time.monotonic()
            channel.close()
            seconds = time.monotonic() - start
        dist.barrier(group)
    return seconds, mappings(channel)


def failed_calls(rank, group, transport, kind):
    """Names of the checks of single calls that fail, on a GPU of some kind."""
    return CallsCheck(kind(CPU), group).run()


def fallback(rank, group, transport, calls, culprit):
    """What `open_channel` logs on each rank if the GPU of one of them is broken, and a step of the channel."""
    records = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append((record.levelname, record.getMessage()))
    logger = logging.getLogger("trl_codraft.pp.taps.opening")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    plan = mixed_plan(3, num_microbatches=3)
    mine = calls if rank == culprit else EmulatedCalls
    channel = open_channel(plan, [rank], group, timeout=20.0, device=CPU, calls=mine)
    for step in range(2):
        shapes = [(2, 3 + step), (1, 4), (2, 2)]
        taken = run_step(channel, rank, step, shapes)
        channel.transport._calls.current().synchronize()
        if channel.is_sink:
            require_values(plan, taken, step, shapes)
    channel.close()
    return type(channel.transport).__name__, records


CASES = {
    "changing shapes, 2 ranks": (2, changing_shapes),
    "changing shapes, 4 ranks": (4, changing_shapes),
    "interleaved": (2, partial(changing_shapes, schedule="Interleaved1F1B", num_stages=4)),
    "interleaved, fewest slots": (2, partial(changing_shapes, schedule="Interleaved1F1B", num_stages=4, slots=2)),
    "one slot, GPipe": (3, partial(changing_shapes, schedule="GPipe", slots=1)),
    "taken at once": (3, taken_at_once),
    "the draft's GPU is late": (2, partial(taken_at_once, late_sink=True)),
    "recomputation": (2, recomputation),
    "leftovers": (2, leftovers),
    "a source is killed": (3, tap_fault_worker.FAULTS["killed source"]),
    "the draft's rank is killed": (3, tap_fault_worker.FAULTS["killed sink (rank 2)"]),
    "slow copies": (2, slow_copies),
    "a source's GPU stops": (3, partial(stalled, culprit=0)),
    "the draft's GPU stops": (3, partial(stalled, culprit=2)),
    "the source closes over a copy": (2, partial(closed_while_stuck, stuck=0)),
    "the draft's rank closes over a forward": (2, partial(closed_while_stuck, stuck=1)),
}
# What does not depend on how taps travel.
OF_CUDA_ONLY = (
    "changing shapes, 4 ranks",
    "interleaved",
    "recomputation",
    "leftovers",
    "the source closes over a copy",
    "the draft's rank closes over a forward",
)
SOAK = {"soak": (2, soak)}
# Checks of single calls on GPUs that are broken, and on one that is not.
CALLS = {
    f"calls: {kind.__name__}": (2, partial(failed_calls, kind=kind))
    for kind in (EmulatedCalls, OutOfMemory, Unopenable, WrongBytes, DeafToEvents, Overcautious, Forgetful)
}
# Which rank's GPU cannot do what; ranks 0 and 1 send.
BROKEN = {
    "nothing": (EmulatedCalls, 0),
    "no memory (rank 2)": (OutOfMemory, 2),
    "no mapping (rank 1)": (Unopenable, 1),
    "other bindings (rank 1)": (OtherBindings, 1),
    "wrong bytes (rank 0)": (WrongBytes, 0),
    "no events (rank 0)": (DeafToEvents, 0),
    "no events (rank 2)": (DeafToEvents, 2),
}


def run_rank(rank, world_size, transport, case):
    group = dist.new_group(list(range(world_size)), backend="gloo")
    if case in BROKEN:
        return fallback(rank, group, transport, *BROKEN[case])
    return (CASES | CALLS | SOAK)[case][1](rank, group, transport)


def run_case(transport, case):
    place = folder / transport / case
    os.environ["CASE_FOLDER"] = str(place)
    size = 3 if case in BROKEN else (CASES | CALLS | SOAK)[case][0]
    return fork_ranks(run_rank, size, place, transport, case, timeout=150)


if __name__ == "__main__":
    folder, wanted = Path(sys.argv[1]), sys.argv[2:] or [*CASES, *CALLS, *BROKEN]
    runs = [
        run for run in product(EMULATED, wanted) if run[0] == "CUDA" or run[1] not in (*BROKEN, *CALLS, *OF_CUDA_ONLY)
    ]
    # What waits the longest first.
    runs.sort(key=lambda run: "stops" not in run[1])
    torch.save(side_by_side(run_case, runs), folder / "outcomes.pt")
