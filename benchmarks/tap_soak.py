"""
Endurance of the tap channel: many steps with ranks that sleep at random, shapes and numbers of microbatches that
change, evaluations in between, over gloo or a way of GPUs (on a CPU) and several schedules. Every tap of every
microbatch is compared with its known value; resident memory and open files must not grow. Ends with a non-zero code,
or not at all, if something is wrong.

    python benchmarks/tap_soak.py --steps 2000
"""

import argparse
import os
import random
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from measuring import machine, open_files, resident_bytes


ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "pp"), str(ROOT / "tests")]

from channel_cases import TRANSPORTS, make_channel, mixed_plan, require_values, run_step  # noqa: E402

from trl_codraft.pp.order import schedule_order  # noqa: E402


# Ranks, stages, schedule, microbatches.
PIPELINES = [(2, 2, "1F1B", 6), (3, 3, "GPipe", 4), (2, 4, "Interleaved1F1B", 4), (4, 4, "1F1B", 8)]
# Resident memory that a rank may grow by after the first part of the steps, and the part.
GROWTH_BYTES, SETTLED = 6 * 2**20, 0.25


def evaluate(channel, rank, count):
    """Forwards outside a step, which the channel must not notice."""
    plan = channel.plan
    for action in schedule_order(plan.schedule, len(set(plan.stage_ranks)), plan.num_stages, count)[rank]:
        if not action.backward:
            with channel.forward(action.stage, action.microbatch):
                pass


def soak(rank, pipeline, transport, steps, folder):
    """What one rank does."""
    num_ranks, num_stages, schedule, num_microbatches = pipeline
    torch.set_num_threads(1)
    os.environ["CASE_FOLDER"] = str(folder)
    store = dist.FileStore(str(folder / "store"), num_ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks, timeout=timedelta(seconds=60))
    group = dist.new_group(list(range(num_ranks)), backend="gloo", timeout=timedelta(seconds=60))
    plan = mixed_plan(num_ranks, num_stages, num_microbatches, schedule)
    channel = make_channel(rank, plan, transport, group, timeout=30.0)
    common, own = random.Random(0), random.Random(rank)
    for step in range(steps):
        if step == int(steps * SETTLED):
            settled = resident_bytes(), open_files()
        # Numbers of microbatches that every schedule can run: whole rounds.
        count = num_microbatches if step % 5 else num_ranks
        shapes = [(common.randint(1, 3), common.randint(1, 48)) for _ in range(count)]
        if step % 3 == 0:
            evaluate(channel, rank, count)
        taken = run_step(channel, rank, step, shapes, lambda action: time.sleep(own.random() ** 4 * 0.004))
        if channel.is_sink:
            require_values(plan, taken, step, shapes)
    grown, files = resident_bytes() - settled[0], open_files() - settled[1]
    if grown > GROWTH_BYTES or files > 0:
        raise AssertionError(f"rank {rank} grew by {grown / 2**20:.1f} MiB and {files} open files")
    torch.save((grown, channel.bytes_sent), folder / f"{rank}.pt")
    channel.close()
    dist.barrier()
    dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200, help="steps of every pipeline")
    parser.add_argument("--transports", nargs="+", choices=list(TRANSPORTS), default=["gloo"])
    args = parser.parse_args()
    print(f"{machine()}, {args.steps} steps each")
    for pipeline, transport in [(pipeline, transport) for transport in args.transports for pipeline in PIPELINES]:
        with tempfile.TemporaryDirectory() as name:
            start, folder = time.perf_counter(), Path(name)
            arguments = (pipeline, transport, args.steps, folder)
            mp.start_processes(soak, arguments, nprocs=pipeline[0], start_method="fork")
            results = [torch.load(folder / f"{rank}.pt") for rank in range(pipeline[0])]
            grown, sent = max(result[0] for result in results), sum(result[1] for result in results)
            print(
                f"{transport:10} {pipeline[0]} ranks, {pipeline[1]} stages, {pipeline[2]}: every tap right, "
                f"{sent / 2**20:.1f} MiB sent, resident memory {grown / 2**20:+.1f} MiB, "
                f"{time.perf_counter() - start:.0f} s",
                flush=True,
            )


if __name__ == "__main__":
    sys.exit(main())
