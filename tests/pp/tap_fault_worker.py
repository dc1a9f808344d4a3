"""
Ranks of `test_tap_faults.py`: `python tap_fault_worker.py FOLDER` lets one of three ranks do something wrong, fault
after fault, over the transports. Stages 0 and 1 are sources, stage 2 is the draft's; the culprit is rank 0 unless the
fault's name says so.
"""

import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from channel_cases import make_channel, mixed_plan, require_values, run_step
from forked_ranks import side_by_side, watch_ranks

from trl_codraft.pp import Tap
from trl_codraft.pp.taps.message import HEADER_BYTES


TIMEOUT = 3.0
NUM_RANKS, NUM_MICROBATCHES = 3, 5
SHAPES = [(2, 3), (2, 5), (1, 4), (2, 7), (3, 3)]
FAULTY_MICROBATCH = 2


def plan_of(**overrides):
    return mixed_plan(NUM_RANKS, num_microbatches=NUM_MICROBATCHES, slots=overrides.pop("slots", 2), **overrides)


class Sender:
    """Sends over gloo what a transport would, but as a fault wants it."""

    def __init__(self, transport):
        self.gloo = getattr(transport, "inner", transport)
        self.original = self.gloo.publish

    def raw(self, stage, content):
        """Any bytes instead of a message."""
        end = self.gloo._sources[stage]
        end.pending.append(end.send(torch.frombuffer(bytearray(content), dtype=torch.uint8), end.tag))

    def dropped(self, stage, header):
        pass

    def duplicated(self, stage, header):
        end, slot = self.gloo._sources[stage], self.gloo._sources[stage].counter.slot
        self.original(stage, header)
        end.pending.append(end.send(end.buffers[slot, : HEADER_BYTES + end.reserved].clone(), end.tag))

    def reordered(self, stage, header):
        self.original(stage, replace(header, sequence=header.sequence + 1, microbatch=header.microbatch + 1))

    def cut_header(self, stage, header):
        self.raw(stage, header.pack()[:40])

    def cut_payload(self, stage, header):
        self.original(stage, replace(header, num_bytes=header.num_bytes - 64))

    def other_bytes(self, stage, header):
        self.raw(stage, bytes(HEADER_BYTES))


def faulty_channel(rank, group, transport, fault, culprit=0):
    channel = make_channel(rank, plan_of(), transport, group, timeout=TIMEOUT)
    if rank == culprit:
        sender = Sender(channel.transport)

        def publish(stage, header):
            if header.microbatch == FAULTY_MICROBATCH and header.epoch == 2:
                getattr(sender, fault)(stage, header)
            else:
                sender.original(stage, header)

        sender.gloo.publish = publish
    return channel


def two_steps(channel, rank, on_action=None):
    """The first step is as it should be; the fault is in the second."""
    for step in range(2):
        taken = run_step(channel, rank, step, SHAPES, on_action if step else None)
        if channel.is_sink:
            require_values(channel.plan, taken, step, SHAPES)


def message_fault(fault):
    def work(rank, group, transport):
        two_steps(faulty_channel(rank, group, transport, fault), rank)

    return work


def at_microbatch(culprit, act):
    def work(rank, group, transport):
        channel = make_channel(rank, plan_of(), transport, group, timeout=TIMEOUT)

        def on_action(action):
            if rank == culprit and action.microbatch == FAULTY_MICROBATCH and not action.backward:
                act()

        two_steps(channel, rank, on_action)

    return work


def kill():
    os.kill(os.getpid(), signal.SIGKILL)


def stall():
    time.sleep(60)


def broken_model(rank, group, transport):
    channel = make_channel(rank, plan_of(), transport, group, timeout=TIMEOUT)
    if rank == 0:
        channel.begin_step(SHAPES)
        with channel.forward(0, 0):
            raise ZeroDivisionError("the model is broken")
    run_step(channel, rank, 0, SHAPES)


def other_plan(rank, group, transport):
    plan = plan_of()
    if rank == 1:
        plan = replace(plan, taps=tuple(Tap(*tap[:3], torch.float32) for tap in plan.taps))
    make_channel(rank, plan, transport, group, timeout=TIMEOUT)


def other_shapes(rank, group, transport):
    channel = make_channel(rank, plan_of(), transport, group, timeout=TIMEOUT)
    run_step(channel, rank, 0, SHAPES if rank else [*SHAPES[:3], (1, 7), (3, 3)])


def never_joins(rank, group, transport):
    channel = make_channel(rank, plan_of(), transport, group, timeout=TIMEOUT)
    if rank == 0:
        stall()
    run_step(channel, rank, 0, SHAPES)


FAULTS = {
    "dropped": message_fault("dropped"),
    "duplicated": message_fault("duplicated"),
    "reordered": message_fault("reordered"),
    "cut header": message_fault("cut_header"),
    "cut payload": message_fault("cut_payload"),
    "other bytes": message_fault("other_bytes"),
    "killed source": at_microbatch(0, kill),
    "killed sink (rank 2)": at_microbatch(2, kill),
    "stalled source": at_microbatch(0, stall),
    "stalled sink (rank 2)": at_microbatch(2, stall),
    "broken model": broken_model,
    "other plan (rank 1)": other_plan,
    "other shapes": other_shapes,
    "never joins": never_joins,
}

# Faults over each transport. Through pinned memory the messages are gloo's own.
OVER = {"gloo": FAULTS, "symmetric": FAULTS, "pinned": ("killed source", "killed sink (rank 2)")}
# Ranks that sleep for longer than the test may take.
STALLED = {"stalled source": 0, "stalled sink (rank 2)": 2, "never joins": 0}


def run_rank(rank, world_size, transport, fault):
    group = dist.new_group(list(range(world_size)), backend="gloo")
    FAULTS[fault](rank, group, transport)


def run_fault(transport, fault):
    place, stalled = folder / transport / fault, STALLED.get(fault)
    os.environ["CASE_FOLDER"] = str(place)
    return watch_ranks(run_rank, NUM_RANKS, place, transport, fault, timeout=60, stalled=stalled)


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    runs = [(transport, fault) for transport, faults in OVER.items() for fault in faults]
    runs.sort(key=lambda run: run[1] not in STALLED)
    torch.save(side_by_side(run_fault, runs), folder / "outcomes.pt")
