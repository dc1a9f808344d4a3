"""
The tap channel on GPUs: first that every tap arrives to the bit, then what a step costs. One rank per GPU. Without
GPUs the same runs small on a CPU, where a file stands for symmetric memory: its times say nothing.

1. Which way a channel finds by its probe; a warning says why not a shorter one.
2. Cases of `tests/pp` over each way of GPUs: several dtypes and schedules, shapes that change, slots that grow, taps
   that are computed late, overwritten after their capture, and dropped before they are read.
3. A pipeline step whose forwards keep the GPU busy, without a channel and with each in turn: from GPU to GPU, through
   pinned memory, and with copies that the forward waits for. Host time in the forwards, and time until their stream is
   done. The draft's rank waits in its forwards for the source's.

Ends with 1 if a tap is wrong, a rank fails, or GPUs do not reach each other's memory. Nothing is judged by time.

    python benchmarks/gpu_tap_check.py
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from measuring import machine


ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "pp"), str(ROOT / "tests")]

import channel_worker  # noqa: E402
from channel_cases import FileMappedTransport, mixed_plan  # noqa: E402

from trl_codraft.pp import GlooTransport, Tap, TapChannel, TapPlan, open_channel  # noqa: E402
from trl_codraft.pp.taps.pinned import PinnedTransport  # noqa: E402
from trl_codraft.pp.taps.symmetric import SymmetricTransport  # noqa: E402


CASES = ("changing shapes, 2 ranks", "interleaved, fewest slots", "one slot, GPipe")
TIMEOUT = 60.0


class LateChannel(TapChannel):
    """Taps come late, change after their capture, and are dropped before they are read."""

    def capture(self, layer, hidden):
        late = torch.empty_like(hidden, device=self.device)
        self.delay()
        late.copy_(hidden, non_blocking=True)
        super().capture(layer, late)
        late.fill_(77)

    def take(self, microbatch):
        taps = super().take(microbatch)
        self.delay()
        read = [tap.clone() for tap in taps]
        del taps
        return [tap.cpu() for tap in read]

    def delay(self):
        if self.device.type == "cuda":
            torch.cuda._sleep(2_000_000)


def transport_of(arm, group, device):
    if arm == "pinned":
        return PinnedTransport(GlooTransport(group, pin_memory=device.type != "cpu"), device)
    if arm == "symmetric":
        return (FileMappedTransport if device.type == "cpu" else SymmetricTransport)(GlooTransport(group), device)
    return GlooTransport(group)  # copies in the forward, which waits


def check(rank, arm, case, device):
    """A case of `tests/pp` on this GPU: its ranks compare every tap with its known value."""
    count, act, _ = channel_worker.CASES[case]
    group = dist.new_group(list(range(count)), backend="gloo", timeout=timedelta(seconds=TIMEOUT))
    if rank >= count:
        return

    def make_channel(rank, plan, transport, group, timeout=TIMEOUT):
        stages = [stage for stage, owner in enumerate(plan.stage_ranks) if owner == rank]
        return LateChannel(plan, stages, transport_of(arm, group, device), timeout=timeout, device=device)

    channel_worker.make_channel = make_channel
    act(rank, group, arm)


def measure(rank, args, arms, device, group):
    """By arm, host seconds in the forwards of a step and seconds until their stream is done, on this rank."""
    taps = tuple(Tap(layer, layer // 2, args.hidden, torch.bfloat16) for layer in range(3))
    plan, rows = TapPlan(taps, (0, 1), args.microbatches, "GPipe"), (1, args.tokens)
    hidden = torch.zeros(*rows, args.hidden, dtype=torch.bfloat16, device=device)
    left = torch.randn(args.work, args.work, dtype=torch.bfloat16, device=device)
    channels = {
        arm: TapChannel(plan, rank, transport_of(arm, group, device), timeout=TIMEOUT, device=device)
        for arm in arms[1:]
    }
    stream, records = torch.get_device_module(device).current_stream(device), {arm: [] for arm in arms}
    for repeat in range(args.repeats + 1):
        for arm in arms:
            channel = channels.get(arm)
            dist.barrier(group)
            if channel is not None:
                channel.begin_step([rows] * args.microbatches)
            start = time.perf_counter()
            for microbatch in range(args.microbatches):
                with nullcontext() if channel is None else channel.forward(rank, microbatch):
                    for tap in plan.taps_of(rank):
                        for _ in range(args.busy):
                            left @ left
                        if channel is not None:
                            channel.capture(tap.layer, hidden + 1)
            forwards = time.perf_counter() - start
            if device.type != "cpu":
                stream.synchronize()
            done = time.perf_counter() - start
            if channel is not None:
                channel.end_step()
                channel.discard()
            if repeat:  # the first one makes slots
                records[arm].append((forwards, done))
    for channel in channels.values():
        channel.close()
    return records


def run_rank(rank, args, folder):
    torch.set_num_threads(1)
    os.environ["CASE_FOLDER"] = str(folder)
    store = dist.FileStore(str(folder / "store"), args.ranks)
    limit = timedelta(seconds=2 * TIMEOUT)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=args.ranks, timeout=limit)
    device = torch.device("cuda", rank % torch.cuda.device_count()) if args.gpu else torch.device("cpu")
    torch.get_device_module(device).set_device(device)
    world = dist.new_group(list(range(args.ranks)), backend="gloo")
    pair = dist.new_group([0, 1], backend="gloo")
    channel = open_channel(mixed_plan(args.ranks), [rank], world, timeout=TIMEOUT, device=device)
    found = type(channel.transport).__name__
    channel.close()
    ways = ["pinned"] if found == "PinnedTransport" else ["symmetric", "pinned"]
    for arm in ways:
        for case in CASES:
            start = time.perf_counter()
            check(rank, arm, case, device)
            dist.barrier()
            if rank == 0:
                print(f"{arm:9} {case:28} every tap right, {time.perf_counter() - start:.1f} s", flush=True)
    if rank < 2:
        torch.save(measure(rank, args, ["none", *ways, "blocking"], device, pair), folder / f"{rank}.pt")
    dist.barrier()
    if rank == 0:
        torch.save(found, folder / "found.pt")
    dist.destroy_process_group()


def report(args, folder):
    size = args.tokens * args.hidden * 2
    print(
        f"{args.microbatches} microbatches, 2 taps of {size / 1e6:.2f} MB each from the first of two stages, medians "
        f"of {args.repeats} steps; forwards: host time, stream: until the forwards' stream is done"
    )
    for rank, name in enumerate(("source", "draft")):
        for arm, steps in torch.load(folder / f"{rank}.pt").items():
            forwards, done = (1e3 * statistics.median(values) for values in zip(*steps, strict=True))
            print(f"{name:6} {arm:9} forwards {forwards:9.2f} ms, stream {done:9.2f} ms")


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    gpu = torch.cuda.is_available()
    parser.add_argument("--ranks", type=int, default=3, help="processes, at least 3")
    parser.add_argument("--tokens", type=int, default=8192 if gpu else 64)
    parser.add_argument("--hidden", type=int, default=4096 if gpu else 32)
    parser.add_argument("--work", type=int, default=4096 if gpu else 64, help="width of the products before each tap")
    parser.add_argument("--busy", type=int, default=10, help="products before each tap")
    parser.add_argument("--microbatches", type=int, default=6)
    parser.add_argument("--repeats", type=int, default=7 if gpu else 2)
    args = parser.parse_args()
    args.gpu = gpu
    return args


def main():
    args = parse_arguments()
    where = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}" if args.gpu else "no GPU"
    print(f"{machine(where)}, {args.ranks} processes")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        mp.start_processes(run_rank, (args, folder), nprocs=args.ranks, start_method="spawn" if args.gpu else "fork")
        found = torch.load(folder / "found.pt")
        print(f"a channel opens with {found}")
        report(args, folder)
        if args.gpu and found != "SymmetricTransport":
            sys.exit("GPUs do not reach each other's memory: the warning above says why.")


if __name__ == "__main__":
    main()
