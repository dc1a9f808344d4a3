"""Ranks of `test_tap_channel.py`: `python channel_worker.py FOLDER [CASE]` runs `CASES` over the transports."""

import logging
import os
import random
import resource
import signal
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from channel_cases import (
    CPU,
    TRANSPORTS,
    FileMappedTransport,
    make_channel,
    mixed_plan,
    require_values,
    run_step,
    sleeping,
    tap_value,
)
from forked_ranks import side_by_side, watch_ranks
from torch import nn
from torch.utils.checkpoint import checkpoint

from trl_codraft.pp import GlooTransport, Tap, TapChannelError, TapPlan, open_channel
from trl_codraft.pp.taps import opening, processes
from trl_codraft.pp.taps.pinned import PinnedTransport


def changing_shapes(rank, group, transport, schedule="1F1B", num_stages=None, slots=None):
    """Every tap to the bit, while shapes and numbers of microbatches change and ranks sleep."""
    size = dist.get_world_size(group)
    plan = mixed_plan(size, num_stages, 2 * size, schedule, slots)
    channel = make_channel(rank, plan, transport, group)
    common, own = random.Random(1), torch.Generator().manual_seed(rank)
    payload = 0
    for step in range(6):
        count = 2 * size if step % 2 else size
        shapes = [(common.randint(1, 3), common.randint(1, 20 * (step + 1))) for _ in range(count)]
        taken = run_step(channel, rank, step, shapes, sleeping(own))
        if channel.is_sink:
            require_values(plan, taken, step, shapes)
        lanes = [lane.stage for lane in plan.lanes if lane.source == rank]
        payload += sum(tap.num_bytes(rows) for rows in shapes for stage in lanes for tap in plan.taps_of(stage))
    result = channel.bytes_sent, payload, channel.queued_bytes
    channel.close()
    return result


def many_open_files(rank, group, transport):
    """As in a long run with data loaders and many connections: file descriptors beyond what `select` can take."""
    _, limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(limit, 4096), limit))
    held = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    assert max(held) > 1024
    return changing_shapes(rank, group, transport)


def many_slots(rank, group, transport):
    """The draft's rank reads nothing before the source has filled every one of many slots."""
    count = 300
    plan = mixed_plan(2, num_microbatches=count, schedule="GPipe", slots=count)
    channel = make_channel(rank, plan, transport, group)
    filled = Path(os.environ["CASE_FOLDER"]) / "filled"

    def in_turn(action):
        if rank == 0 and action.backward:
            filled.touch()
        while rank == 1 and not filled.exists():
            time.sleep(0.01)

    shapes = [(1, 1)] * count
    taken = run_step(channel, rank, 0, shapes, in_turn)
    if channel.is_sink:
        require_values(plan, taken, 0, shapes)
    channel.close()
    return len(taken)


def one_host(rank, group, transport):
    """Whether ranks find that they run on one host: as they do, and if they saw that they do not."""
    together = processes.on_one_host(group)
    processes.place = lambda: f"host {rank}"
    return together, processes.on_one_host(group)


def late_receive(rank, group, transport, seconds=0.5):
    """Seconds after which a send of gloo is complete whose receive is posted late."""
    content = torch.zeros(64, dtype=torch.uint8)
    if rank == 0:
        start = time.monotonic()
        dist.isend(content, group=group, group_dst=1).wait()
        return time.monotonic() - start
    time.sleep(seconds)
    dist.irecv(content, group=group, group_src=0).wait()
    return seconds


def slow_copies(rank, group, transport):
    """Seconds that the forwards of a rank take when every copy of a source takes long, and then the step."""
    plan = mixed_plan(2, num_microbatches=3, schedule="GPipe", slots=6)
    channel = make_channel(rank, plan, transport, group)
    copy = channel.transport._copy

    def slowly(*arguments):
        if rank == 0:
            time.sleep(SLOW_COPY)
        copy(*arguments)

    channel.transport._copy = slowly
    dist.barrier(group)
    shapes = [(2, 300)] * 3
    channel.begin_step(shapes)
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


class NeverDone(torch.cpu.Event):
    """An event that a device which has stopped does not come to."""

    def query(self):
        return False


def stopped(rank, group, transport, culprit):
    """A device stops in the middle of a step: what each rank says, and seconds until then and until it has closed."""
    channel = make_channel(rank, mixed_plan(3, num_microbatches=4, slots=2), transport, group, timeout=2.0)
    copy = channel.transport._copy

    def copy_or_stop(target, source, header, *after):
        if rank == culprit and header.microbatch == 1:
            channel.transport._module = SimpleNamespace(**{**vars(torch.cpu), "Event": NeverDone})
        copy(target, source, header, *after)

    channel.transport._copy = copy_or_stop
    start, message = time.monotonic(), ""
    try:
        run_step(channel, rank, 0, [(1, 4)] * 4)
    except TapChannelError as error:
        message = f"{type(error).__name__}: {error}"
    gave_up = time.monotonic() - start
    channel.close()
    return message, gave_up, time.monotonic() - start - gave_up


class Unmapped(FileMappedTransport):
    """The memory of other ranks cannot be mapped."""

    def _map(self, num_bytes):
        raise RuntimeError("CUDA error: invalid device pointer")


class Unreached(FileMappedTransport):
    """The GPUs do not reach each other's memory."""

    def _require_reach(self, indices):
        raise RuntimeError("this GPU does not reach the memory of another")


class OtherMemory(FileMappedTransport):
    """A write to the memory of another rank goes elsewhere."""

    def _map(self, num_bytes):
        mine = super()._map(num_bytes)[self.rank]
        return [torch.zeros_like(mine)] * self.rank + [mine] + [torch.zeros_like(mine)] * 2


def fallback(rank, group, transport, kind, culprit):
    """
    What `open_channel` logs on each rank if the first way does not work on one of them, and steps of the channel.
    """
    records, logger, handler = [], logging.getLogger(opening.__name__), logging.Handler()
    handler.emit = lambda record: records.append((record.levelname, record.getMessage()))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)

    def ways(group, device):
        first = (kind if rank == culprit else FileMappedTransport)(GlooTransport(group), CPU)
        return [("from GPU to GPU", first), ("through pinned memory", PinnedTransport(GlooTransport(group), CPU))]

    opening._ways = ways
    plan = mixed_plan(3, num_microbatches=3)
    channel = open_channel(plan, [rank], group, timeout=20.0)
    for step in range(2):
        shapes = [(2, 3 + step), (1, 4), (2, 2)]
        taken = run_step(channel, rank, step, shapes)
        if channel.is_sink:
            require_values(plan, taken, step, shapes)
    channel.close()
    return type(channel.transport).__name__, records


def layer_stack(seed, count=4, width=8):
    torch.manual_seed(seed)
    return nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(count))


def run_layers(layers, hidden, how):
    for layer in layers:
        hidden = layer(hidden) if how == "plain" else checkpoint(layer, hidden, use_reentrant=how == "reentrant")
    return hidden


def recomputation(rank, group, transport):
    """Hooks on checkpointed layers of stage 0: what a backward recomputes is not sent, nor what runs between steps."""
    taps = (Tap(0, 0, 8, torch.float32), Tap(2, 0, 8, torch.float32), Tap(4, 0, 8, torch.float32))
    channel = make_channel(rank, TapPlan(taps, (0, 1), 2, "GPipe"), transport, group)
    layers = layer_stack(seed=5)
    if rank == 0:
        channel.hook_layers(0, layers)
    taken = []
    for how in ("plain", "non-reentrant", "reentrant"):
        inputs = [torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(k)) for k in range(2)]
        with torch.no_grad():
            run_layers(layers, inputs[0], "plain")  # an evaluation
        channel.begin_step([(2, 3)] * 2)
        for microbatch, hidden in enumerate(inputs):
            with channel.forward(rank, microbatch):
                if rank == 0:
                    out = run_layers(layers, hidden.clone().requires_grad_(), how)
            if rank == 0:
                out.sum().backward()
                out.detach().zero_()  # what was captured is a copy
        channel.end_step()
        if rank == 1:
            for microbatch in (1, 0):  # in any order
                got = channel.take(microbatch)
                with torch.no_grad():
                    middle = run_layers(layers[:2], inputs[microbatch], "plain")
                    expected = [inputs[microbatch], middle, run_layers(layers[2:], middle, "plain")]
                taken.append(all(torch.equal(a, b) for a, b in zip(got, expected, strict=True)))
    channel.close()
    return channel.epoch, taken


def forward_of(channel, width=0, layers=(0, 1)):
    """The first forward of rank 0, with taps of some layers."""
    with channel.forward(0, 0):
        for tap in channel.plan.taps_of(0):
            if tap.layer in layers:
                channel.capture(tap.layer, torch.zeros(1, 1, tap.width + width, dtype=tap.dtype))


def captures_of(channel, *hidden):
    """The first forward of rank 0, with these for its first tap."""
    with channel.forward(0, 0):
        for tensor in hidden:
            channel.capture(0, tensor)


# What a caller does wrong on rank 0, in a step that has begun or, by `(act,)`, outside of one.
MISUSES = {
    "other device": lambda channel: captures_of(channel, torch.zeros(1, 1, 3, device="meta")),
    "no tap": lambda channel: forward_of(channel, layers=()),
    "other width": lambda channel: forward_of(channel, width=1),
    "one tap of two": lambda channel: forward_of(channel, layers=(0,)),
    "forward twice": lambda channel: [forward_of(channel), forward_of(channel)],
    "captured twice": lambda channel: captures_of(channel, *torch.zeros(2, 1, 1, 3)),
    "taken elsewhere": lambda channel: channel.take(0),
    "no forward": lambda channel: channel.end_step(),
    "no step": (lambda channel: channel.end_step(),),
    "no microbatch": (lambda channel: channel.begin_step([]),),
}


def refusal(rank, group, transport, misuse):
    """What this rank is told of a misuse, and when it begins a step after it."""
    channel, act = (
        make_channel(rank, mixed_plan(2, num_microbatches=2), transport, group, timeout=2.0),
        MISUSES[misuse],
    )
    messages = []

    def told(act):
        try:
            act()
        except (RuntimeError, ValueError) as error:
            messages.append(str(error))

    def misused():
        if rank == 1 or not isinstance(act, tuple):
            channel.begin_step([(1, 1)] * 2)
        if rank == 1:
            channel.take(1)
        else:
            (act[0] if isinstance(act, tuple) else act)(channel)

    told(misused)
    told(lambda: channel.begin_step([(1, 1)] * 2))
    dist.barrier()
    channel.close()
    return messages


def leftovers(rank, group, transport):
    """The next step does not begin over taps that nobody took; `discard` allows it."""
    plan = mixed_plan(2, num_microbatches=2)
    channel = make_channel(rank, plan, transport, group, timeout=5.0)
    shapes = [(1, 2)] * 2
    for step in range(2):
        channel.begin_step(shapes)
        for microbatch in range(2):
            with channel.forward(rank, microbatch):
                for tap in plan.taps_of(rank):
                    channel.capture(tap.layer, torch.full((1, 2, tap.width), step, dtype=tap.dtype))
        channel.end_step()
        queued = channel.queued_bytes
        if step == 0:
            channel.discard()
    message = ""
    dist.barrier()  # the source has ended its step before the other rank ends the channel for both
    if rank == 1:
        try:
            channel.begin_step(shapes)
        except RuntimeError as error:
            message = str(error)
    channel.close()
    return queued, channel.queued_bytes, message


def killed_in_step(rank, group, transport):
    """All ranks end by SIGKILL with messages in the slots; before that, what files they hold."""
    plan = mixed_plan(2, num_microbatches=4)
    channel = make_channel(rank, plan, transport, group)
    channel.begin_step([(2, 64)] * 4)
    with channel.forward(rank, 0):
        for tap in plan.taps_of(rank):
            channel.capture(tap.layer, torch.zeros(2, 64, tap.width, dtype=tap.dtype))
    descriptors = [os.readlink(link) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    mappings = Path("/proc/self/maps").read_text().split("\n")
    files = [*descriptors, *(line.split(maxsplit=5)[5] for line in mappings if line.count("/"))]
    torch.save(files, Path(os.environ["CASE_FOLDER"]) / f"files{rank}.pt")
    dist.barrier(group)
    os.kill(os.getpid(), signal.SIGKILL)


SLOW_COPY = 0.6
DEVICES = ("pinned", "symmetric")
# By name: ranks, what they do, over which transports.
CASES = {
    "changing shapes, 2 ranks": (2, changing_shapes, TRANSPORTS),
    "changing shapes, 4 ranks": (4, changing_shapes, ["gloo", "symmetric"]),
    "many open files": (2, many_open_files, ["gloo"]),
    "interleaved": (2, partial(changing_shapes, schedule="Interleaved1F1B", num_stages=4), ["gloo", "symmetric"]),
    "interleaved, fewest slots": (
        2,
        partial(changing_shapes, schedule="Interleaved1F1B", num_stages=4, slots=2),
        TRANSPORTS,
    ),
    "one slot, GPipe": (3, partial(changing_shapes, schedule="GPipe", slots=1), TRANSPORTS),
    "many slots": (2, many_slots, TRANSPORTS),
    "recomputation": (2, recomputation, ["gloo", "symmetric"]),
    **{misuse: (2, partial(refusal, misuse=misuse), ["gloo"]) for misuse in MISUSES},
    "leftovers": (2, leftovers, ["gloo", "symmetric"]),
    "one host": (2, one_host, ["gloo"]),
    "late receive": (2, late_receive, ["gloo"]),
    "slow copies": (2, slow_copies, DEVICES),
    "a source's device stops": (3, partial(stopped, culprit=0), DEVICES),
    "the draft's device stops": (3, partial(stopped, culprit=2), DEVICES),
    "killed": (2, killed_in_step, ["gloo"]),
}
# Which rank finds that the first way does not work; ranks 0 and 1 send.
BROKEN = {
    "nothing": (FileMappedTransport, 0),
    "no mapping (rank 1)": (Unmapped, 1),
    "no mapping (rank 2)": (Unmapped, 2),
    "no reach (rank 0)": (Unreached, 0),
    "other memory (rank 0)": (OtherMemory, 0),
}
CASES |= {
    case: (3, partial(fallback, kind=kind, culprit=rank), ["symmetric"]) for case, (kind, rank) in BROKEN.items()
}


def run_rank(rank, world_size, transport, case):
    group = dist.new_group(list(range(world_size)), backend="gloo")
    return CASES[case][1](rank, group, transport)


def run_case(transport, case):
    place = folder / transport / case
    os.environ["CASE_FOLDER"] = str(place)
    return watch_ranks(run_rank, CASES[case][0], place, transport, case, timeout=150)


if __name__ == "__main__":
    folder, cases = Path(sys.argv[1]), {case: CASES[case] for case in sys.argv[2:] or CASES}
    # Open files are looked at, and what runs side by side has some that are not the channel's.
    outcomes = {("gloo", "killed"): run_case("gloo", "killed")} if "killed" in cases else {}
    runs = [(transport, case) for case, (_, _, over) in cases.items() for transport in over if case != "killed"]
    # What waits for ranks that do not come is the longest.
    runs.sort(key=lambda run: "stops" not in run[1])
    torch.save(outcomes | side_by_side(run_case, runs), folder / "outcomes.pt")
