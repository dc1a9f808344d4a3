"""Ranks of `test_tap_channel.py`: `python channel_worker.py FOLDER` runs `CASES`, each on both transports."""

import os
import random
import resource
import signal
import sys
import time
from functools import partial
from itertools import product
from pathlib import Path

import torch
import torch.distributed as dist
from channel_cases import TRANSPORTS, make_channel, mixed_plan, require_values, run_step, sleeping
from forked import fork_ranks, side_by_side
from torch import nn
from torch.utils.checkpoint import checkpoint

from trl_codraft.pp.taps import opening, sockets
from trl_codraft.pp.taps.opening import open_channel
from trl_codraft.pp.taps.plan import Tap, TapPlan


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


def too_many_slots(rank, group, transport):
    """More than a socket can hold the headers of."""
    try:
        make_channel(rank, mixed_plan(2, schedule="GPipe", slots=10**6), transport, group).close()
    except ValueError as error:
        return str(error)
    return ""


def two_hosts(rank, group, transport):
    """Ranks that see that they do not run on one host: what shared memory says to it, and how taps travel instead."""
    sockets.place = opening.place = lambda: f"host {rank}"
    message = ""
    plan, shapes = mixed_plan(2), [(2, 3)] * 6
    try:
        make_channel(rank, plan, "shared memory", group)
    except ValueError as error:
        message = str(error)
    channel = open_channel(plan, rank, dist.new_group([0, 1], backend="gloo"), timeout=20.0)
    taken = run_step(channel, rank, 0, shapes)
    if channel.is_sink:
        require_values(plan, taken, 0, shapes)
    channel.close()
    return message, type(channel.transport).__name__


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


def refusals(rank, group, transport):
    """What a caller does wrong on one rank is said there, and ends the channel for all."""
    messages = []

    def attempt(act):
        # What is outstanding in a group when a channel fails stays there, so every attempt has its own.
        fresh = dist.new_group([0, 1], backend="gloo")
        channel = make_channel(rank, mixed_plan(2, num_microbatches=2), transport, fresh, timeout=5.0)
        try:
            act(channel)
        except (RuntimeError, ValueError) as error:
            messages.append(str(error))
        try:
            channel.begin_step([(1, 1)] * 2)
            messages.append("still usable")
        except RuntimeError as error:
            messages.append(str(error))
        dist.barrier(group)
        channel.close()

    def forward(channel, microbatch=0, capture=True, width=0, layers=None, rows=(1, 1)):
        with channel.forward(rank, microbatch):
            for tap in channel.plan.taps_of(rank) if capture else ():
                if layers is None or tap.layer in layers:
                    channel.capture(tap.layer, torch.zeros(*rows, tap.width + width, dtype=tap.dtype))

    def begun(act):
        def run(channel):
            channel.begin_step([(1, 1)] * 2)
            act(channel)

        return run

    def twice(channel):
        forward(channel)
        forward(channel)

    def captured_twice(channel):
        with channel.forward(rank, 0):
            for _ in range(2):
                tap = channel.plan.taps_of(rank)[0]
                channel.capture(tap.layer, torch.zeros(1, 1, tap.width, dtype=tap.dtype))

    def on_another_device(channel):
        with channel.forward(rank, 0):
            channel.capture(0, torch.zeros(1, 1, 3, device="meta"))

    if rank == 0:
        attempt(begun(on_another_device))
        attempt(begun(lambda channel: forward(channel, capture=False)))
        attempt(begun(lambda channel: forward(channel, width=1)))
        attempt(begun(lambda channel: forward(channel, layers=[0])))
        attempt(begun(twice))
        attempt(begun(captured_twice))
        attempt(begun(lambda channel: channel.take(0)))
        attempt(begun(lambda channel: channel.end_step()))
        attempt(lambda channel: channel.end_step())
        attempt(lambda channel: channel.begin_step([]))
    else:
        for _ in range(10):
            attempt(begun(lambda channel: channel.take(1)))
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
    if rank == 0:
        with channel.forward(0, 0):
            for tap in plan.taps_of(0):
                channel.capture(tap.layer, torch.zeros(2, 64, tap.width, dtype=tap.dtype))
    else:
        channel._drain(0)
    descriptors = [os.readlink(link) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    mappings = Path("/proc/self/maps").read_text().split("\n")
    files = [*descriptors, *(line.split(maxsplit=5)[5] for line in mappings if line.count("/"))]
    # Of sockets with a name: number, and path or "@" and an address.
    sockets = [line.split()[6:] for line in Path("/proc/net/unix").read_text().split("\n")[1:]]
    files += [
        name for number, *names in filter(None, sockets) for name in names if f"socket:[{number}]" in descriptors
    ]
    torch.save(files, Path(os.environ["CASE_FOLDER"]) / f"files{rank}.pt")
    dist.barrier(group)
    os.kill(os.getpid(), signal.SIGKILL)


CASES = {
    "changing shapes, 2 ranks": (2, changing_shapes),
    "changing shapes, 4 ranks": (4, changing_shapes),
    "many open files": (2, many_open_files),
    "interleaved": (2, partial(changing_shapes, schedule="Interleaved1F1B", num_stages=4)),
    "interleaved, fewest slots": (2, partial(changing_shapes, schedule="Interleaved1F1B", num_stages=4, slots=2)),
    "one slot, GPipe": (3, partial(changing_shapes, schedule="GPipe", slots=1)),
    "many slots": (2, many_slots),
    "too many slots": (2, too_many_slots),
    "two hosts": (2, two_hosts),
    "recomputation": (2, recomputation),
    "refusals": (2, refusals),
    "leftovers": (2, leftovers),
    "killed": (2, killed_in_step),
}


def run_rank(rank, world_size, transport, case):
    group = dist.new_group(list(range(world_size)), backend="gloo")
    return CASES[case][1](rank, group, transport)


def run_case(transport, case):
    place = folder / transport / case
    os.environ["CASE_FOLDER"] = str(place)
    return fork_ranks(run_rank, CASES[case][0], place, transport, case, timeout=60)


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    # Open files are looked at, and what runs side by side has some that are not the channel's.
    outcomes = {(transport, "killed"): run_case(transport, "killed") for transport in TRANSPORTS}
    # What waits for ranks that do not come is the longest.
    runs = sorted(product(TRANSPORTS, CASES.keys() - {"killed"}), key=lambda run: run[1] != "refusals")
    torch.save(outcomes | side_by_side(run_case, runs), folder / "outcomes.pt")
