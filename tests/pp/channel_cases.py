"""Taps with known values through a channel, in the order of a schedule, without any model."""

import os
import time
from pathlib import Path

import torch

from trl_codraft.pp import GlooTransport, Tap, TapChannel, TapPlan
from trl_codraft.pp.order import schedule_order
from trl_codraft.pp.taps.pinned import PinnedTransport
from trl_codraft.pp.taps.symmetric import SymmetricTransport


CPU = torch.device("cpu")


class FileMappedTransport(SymmetricTransport):
    """Between processes on a CPU: the memory of a rank is a file that all map, as symmetric memory is for GPUs."""

    def _require_reach(self, indices):
        pass

    def _map(self, num_bytes):
        name = f"{self.inner.group.group_name} {num_bytes}"
        paths = [Path(os.environ["CASE_FOLDER"]) / f"{name} {rank}" for rank in range(self.inner.group.size())]
        return [torch.from_file(str(path), shared=True, size=num_bytes, dtype=torch.uint8) for path in paths]


TRANSPORTS = {
    "gloo": GlooTransport,
    # Both ways of GPUs, on a CPU.
    "pinned": lambda group: PinnedTransport(GlooTransport(group), CPU),
    "symmetric": lambda group: FileMappedTransport(GlooTransport(group), CPU),
}
# Taps of several dtypes and odd widths on each stage.
DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.float16, torch.int16)


def mixed_plan(num_ranks, num_stages=None, num_microbatches=6, schedule="1F1B", slots=None, taps_per_stage=2):
    """A plan in which every stage, the last too, has taps."""
    num_stages = num_stages or num_ranks
    taps = tuple(
        Tap(layer, stage=layer // taps_per_stage, width=3 + layer, dtype=DTYPES[layer % len(DTYPES)])
        for layer in range(num_stages * taps_per_stage)
    )
    ranks = tuple(stage % num_ranks for stage in range(num_stages))
    return TapPlan(taps, ranks, num_microbatches, schedule, slots)


def tap_value(tap, step, microbatch, rows):
    """What a tap holds: different for every tap, step, microbatch and element."""
    count = torch.Size(tap.shape(rows)).numel()
    values = (torch.arange(count) * 7 + 131 * tap.layer + 17 * microbatch + 1009 * step) % 2039
    return values.to(tap.dtype).view(tap.shape(rows))


def run_step(channel, rank, step, shapes, on_action=None):
    """One step in the order of the plan's schedule; returns the taps of every microbatch on the draft's rank."""
    plan = channel.plan
    order = schedule_order(plan.schedule, len(set(plan.stage_ranks)), plan.num_stages, len(shapes))
    channel.begin_step(shapes)
    for action in order[rank]:
        if on_action is not None:
            on_action(action)
        if not action.backward:
            with channel.forward(action.stage, action.microbatch):
                for tap in plan.taps_of(action.stage):
                    channel.capture(tap.layer, tap_value(tap, step, action.microbatch, shapes[action.microbatch]))
    channel.end_step()
    return [channel.take(microbatch) for microbatch in range(len(shapes))] if channel.is_sink else []


def require_values(plan, taken, step, shapes):
    """Every tap arrived, in order and to the bit."""
    assert len(taken) == len(shapes)
    for microbatch, (taps, rows) in enumerate(zip(taken, shapes, strict=True)):
        assert len(taps) == len(plan.taps)
        for tap, value in zip(plan.taps, taps, strict=True):
            expected = tap_value(tap, step, microbatch, rows)
            assert value.dtype == tap.dtype
            assert torch.equal(value, expected), (step, microbatch, tap)


def require_one_crossing(results):
    """
    Of every tap, by what `(bytes sent, bytes by the formula, bytes left)` the ranks return of a case; some did cross.
    """
    for sent, formula, queued in results:
        assert sent == formula
        assert queued == 0
    assert sum(sent for sent, _, _ in results) > 0


def sleeping(generator, most=0.002):
    """Waits a random while before every action, so that ranks run ahead of each other."""

    def sleep(action):
        time.sleep(float(torch.rand((), generator=generator)) * most)

    return sleep


def make_channel(rank, plan, transport, group, timeout=20.0):
    stages = [stage for stage, owner in enumerate(plan.stage_ranks) if owner == rank]
    return TapChannel(plan, stages, TRANSPORTS[transport](group), timeout=timeout)
