"""
Endurance of the tap channel: many steps with ranks that sleep at random, shapes and numbers of microbatches that
change, evaluations in between, over gloo and several schedules. Every tap of every microbatch is compared with its
known value; resident memory and open files must not grow. Ends with a non-zero code, or not at all, if something is
wrong.

    python benchmarks/tap_soak.py --steps 2000
"""

import argparse
import os
import platform
import random
import re
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from trl_codraft.pp import GlooTransport, Tap, TapChannel, TapPlan
from trl_codraft.pp.order import schedule_order


# Ranks, stages, schedule, microbatches.
PIPELINES = [(2, 2, "1F1B", 6), (3, 3, "GPipe", 4), (2, 4, "Interleaved1F1B", 4), (4, 4, "1F1B", 8)]
# Resident memory that a rank may grow by after the first tenth of the steps, and steps that this counts from on.
GROWTH_BYTES, SETTLED = 6 * 2**20, 0.1
WIDTH = 16


def pipeline_plan(num_ranks, num_stages, schedule, num_microbatches):
    """Two taps per stage, one in fp32 and one in bf16."""
    taps = tuple(
        Tap(layer, layer // 2, WIDTH, torch.bfloat16 if layer % 2 else torch.float32)
        for layer in range(2 * num_stages)
    )
    return TapPlan(taps, tuple(stage % num_ranks for stage in range(num_stages)), num_microbatches, schedule)


def tap_value(tap, step, microbatch, rows):
    """Different for every tap, step and microbatch; exact in every dtype."""
    count = rows[0] * rows[1] * tap.width
    return ((torch.arange(count) + 31 * tap.layer + 7 * microbatch + step) % 251).to(tap.dtype).view(tap.shape(rows))


def forwards(channel, order, rank, step, shapes, sleep):
    """Runs the order of a rank; what a forward does is to sleep and to have taps."""
    for action in order[rank]:
        time.sleep(sleep.random() ** 4 * 0.004)
        if action.backward:
            continue
        with channel.forward(action.stage, action.microbatch):
            for tap in channel.plan.taps_of(action.stage) if shapes else ():
                channel.capture(tap.layer, tap_value(tap, step, action.microbatch, shapes[action.microbatch]))


def soak(rank, pipeline, steps, folder):
    """What one rank does."""
    num_ranks, num_stages, schedule, num_microbatches = pipeline
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), num_ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks, timeout=timedelta(seconds=60))
    group = dist.new_group(list(range(num_ranks)), backend="gloo", timeout=timedelta(seconds=60))
    plan = pipeline_plan(*pipeline)
    stages = [stage for stage, owner in enumerate(plan.stage_ranks) if owner == rank]
    channel = TapChannel(plan, stages, GlooTransport(group), timeout=30.0)
    common, own = random.Random(0), random.Random(rank)
    settled = None
    for step in range(steps):
        if step == int(steps * SETTLED):
            settled = resident_bytes(), open_files()
        # Numbers of microbatches that every schedule can run: whole rounds.
        count = num_microbatches if step % 5 else num_ranks
        shapes = [(common.randint(1, 3), common.randint(1, 48)) for _ in range(count)]
        order = schedule_order(schedule, num_ranks, num_stages, count)
        if step % 3 == 0:
            forwards(channel, order, rank, step, None, own)  # an evaluation: the channel is not to notice
        channel.begin_step(shapes)
        forwards(channel, order, rank, step, shapes, own)
        channel.end_step()
        for microbatch in range(count) if channel.is_sink else ():
            for tap, value in zip(plan.taps, channel.take(microbatch), strict=True):
                expected = tap_value(tap, step, microbatch, shapes[microbatch])
                if value.dtype != tap.dtype or not torch.equal(value, expected):
                    raise AssertionError(f"step {step}, microbatch {microbatch}: tap {tap.layer} is wrong")
    grown, files = resident_bytes() - settled[0], open_files() - settled[1]
    if grown > GROWTH_BYTES or files > 0:
        raise AssertionError(f"rank {rank} grew by {grown / 2**20:.1f} MiB and {files} open files")
    torch.save((grown, channel.bytes_sent), folder / f"{rank}.pt")
    channel.close()
    dist.barrier()
    dist.destroy_process_group()


def resident_bytes():
    return 1024 * int(re.search(r"VmRSS:\s+(\d+) kB", Path("/proc/self/status").read_text())[1])


def open_files():
    return len(os.listdir("/proc/self/fd"))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200, help="steps of every pipeline")
    args = parser.parse_args()
    print(f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}, {args.steps} steps each")
    for pipeline in PIPELINES:
        with tempfile.TemporaryDirectory() as name:
            start, folder = time.perf_counter(), Path(name)
            mp.start_processes(soak, (pipeline, args.steps, folder), nprocs=pipeline[0], start_method="fork")
            results = [torch.load(folder / f"{rank}.pt") for rank in range(pipeline[0])]
            grown, sent = max(result[0] for result in results), sum(result[1] for result in results)
            print(
                f"{pipeline[0]} ranks, {pipeline[1]} stages, {pipeline[2]}: every tap right, "
                f"{sent / 2**20:.1f} MiB sent, resident memory {grown / 2**20:+.1f} MiB, {time.perf_counter() - start:.0f} s",
                flush=True,
            )


if __name__ == "__main__":
    sys.exit(main())
