"""
The tap channel on GPUs: first that every tap arrives to the bit, then what a step costs. With one GPU its ranks share it: CUDA
IPC works between processes on one device too. Without a GPU, or with `--emulate`, the same on the emulated GPUs of the tests,
small: its times say nothing of GPUs.

1. Every call of CUDA that a channel makes, a line each (`cuda_calls_check.py`).
2. Which way a channel finds by its probe, and why not a shorter one.
3. Cases of `tests/pp` over each transport of GPUs: several dtypes and schedules, shapes that change, rings that grow, taps that
   are computed late, overwritten after their capture, taken before the step ends and dropped before they are read.
4. A pipeline step whose forwards keep the compute stream busy, without a channel and with each in turn: over CUDA IPC, through
   pinned memory, and with copies that the forward waits for. Host time in the forwards against the last of these, and time of
   the compute stream for them against no channel. The draft's rank runs one forward for two of the source, and waits for it.

Ends with 1 if a call does not do what it is for, a tap is wrong or a rank fails. Nothing is judged by time.

    python benchmarks/gpu_tap_check.py
"""

import argparse
import os
import platform
import statistics
import sys
import tempfile
import time
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from trl_codraft.pp import TapChannel
from trl_codraft.pp.taps.cuda import CudaTransport
from trl_codraft.pp.taps.cuda_calls import CudaCalls
from trl_codraft.pp.taps.opening import open_channel
from trl_codraft.pp.taps.pinned import PinnedTransport
from trl_codraft.pp.taps.plan import Tap, TapPlan
from trl_codraft.pp.taps.shared_memory import SharedMemoryTransport


ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "pp"), str(ROOT / "tests")]

import channel_worker  # noqa: E402
import emulated_worker  # noqa: E402
from channel_cases import mixed_plan  # noqa: E402
from emulated_device import CPU, EmulatedCalls, LateChannel  # noqa: E402

from benchmarks.cuda_calls_check import CallsCheck  # noqa: E402


CASES = ("changing shapes, 2 ranks", "interleaved, fewest slots", "one slot, GPipe", "taken at once")
ARMS = ("none", "CUDA", "pinned", "blocking")
TIMEOUT = 60.0


class LateOnGpu(TapChannel):
    """What [`LateChannel`] is on emulated GPUs."""

    def capture(self, layer, hidden):
        late = torch.empty_like(hidden, device=self.device)
        torch.cuda._sleep(2_000_000)
        late.copy_(hidden, non_blocking=True)
        super().capture(layer, late)
        late.fill_(77)

    def take(self, microbatch):
        taps = super().take(microbatch)
        torch.cuda._sleep(2_000_000)
        read = [tap.clone() for tap in taps]
        del taps
        return [tap.cpu() for tap in read]


class RealGpu:
    """A GPU, and work for it."""

    channel, calls = LateOnGpu, CudaCalls

    def __init__(self, rank, busy):
        self.device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(self.device)
        self.left = torch.randn(4096, 4096, device=self.device, dtype=torch.bfloat16)
        self.busy = busy

    def compute(self, hidden):
        """A forward: `busy` products, and a hidden state that depends on time."""
        for _ in range(self.busy):
            self.left @ self.left
        return hidden + 1

    def timed(self, forwards, finish):
        """Seconds of the compute stream for what the forwards enqueue."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        forwards()
        end.record()
        finish()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / 1000

    def blocking(self, group):
        return SharedMemoryTransport(group)


class WaitingTransport(SharedMemoryTransport):
    """On an emulated GPU, what a copy to memory that is not pinned does: it waits for the stream."""

    calls = None

    def pack(self, room, hidden):
        self.calls.current().synchronize()
        super().pack(room, hidden)


class EmulatedGpu:
    channel = LateChannel

    def __init__(self, rank, busy):
        self.device, self.busy = CPU, busy
        made = EmulatedCalls(CPU, side=0.0005, compute=0.0001)
        self.stream, self.calls = made.current(), lambda device: made

    def compute(self, hidden):
        self.stream.enqueue(partial(time.sleep, 0.001 * self.busy))
        return hidden

    def timed(self, forwards, finish):
        self.stream.synchronize()
        start = time.perf_counter()
        forwards()
        self.stream.synchronize()
        seconds = time.perf_counter() - start
        finish()
        return seconds

    def blocking(self, group):
        transport = WaitingTransport(group)
        transport.calls = self.calls(CPU)
        return transport


TRANSPORTS = {
    "CUDA": lambda gpu, group: CudaTransport(group, gpu.device, gpu.calls),
    "pinned": lambda gpu, group: PinnedTransport(SharedMemoryTransport(group), gpu.device, gpu.calls),
    "blocking": lambda gpu, group: gpu.blocking(group),
}


def check(rank, gpu, transport, case):
    """A case of `tests/pp` on this GPU: its ranks compare every tap with its known value."""
    size = dist.get_world_size()
    count, act = (channel_worker.CASES | emulated_worker.CASES)[case]
    group = dist.new_group(list(range(count)), backend="gloo", timeout=timedelta(seconds=TIMEOUT))
    if rank >= min(count, size):
        return

    def make_channel(rank, plan, transport, group, timeout=TIMEOUT, calls=None):
        stages = [stage for stage, owner in enumerate(plan.stage_ranks) if owner == rank]
        return gpu.channel(plan, stages, TRANSPORTS[transport](gpu, group), timeout=timeout, device=gpu.device)

    emulated_worker.mappings = lambda channel: 0  # which only an emulated GPU can tell
    channel_worker.make_channel = emulated_worker.make_channel = make_channel
    act(rank, group, transport)


def step_plan(args):
    """Two stages, two taps on the first, one on the draft's."""
    taps = tuple(Tap(layer, layer // 2, args.hidden, torch.bfloat16) for layer in range(3))
    return TapPlan(taps, (0, 1), args.microbatches, "GPipe")


def measure(rank, gpu, args, arms, group):
    """By arm, host seconds in the forwards of a step and seconds of the compute stream, on this rank."""
    plan, rows = step_plan(args), (1, args.tokens)
    hidden = torch.zeros(*rows, args.hidden, dtype=torch.bfloat16, device=gpu.device)
    channels = {
        arm: TapChannel(plan, rank, TRANSPORTS[arm](gpu, group), timeout=TIMEOUT, device=gpu.device)
        for arm in arms[1:]
    }
    records = {arm: [] for arm in arms}

    def forwards(channel):
        start = time.perf_counter()
        for microbatch in range(args.microbatches):
            with nullcontext() if channel is None else channel.forward(rank, microbatch):
                for tap in plan.taps_of(rank):
                    computed = gpu.compute(hidden)
                    if channel is not None:
                        channel.capture(tap.layer, computed)
        spent.append(time.perf_counter() - start)

    def finish(channel):
        if channel is not None:
            channel.end_step()
            channel.discard()

    for repeat in range(args.repeats + 1):
        for arm in arms:
            spent, channel = [], channels.get(arm)
            dist.barrier(group)
            if channel is not None:
                channel.begin_step([rows] * args.microbatches)
            seconds = gpu.timed(partial(forwards, channel), partial(finish, channel))
            if repeat:  # the first one makes rings
                records[arm].append((spent[0], seconds))
    for channel in channels.values():
        channel.close()
    return records


def run_rank(rank, args, folder):
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), args.ranks)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=args.ranks, timeout=timedelta(seconds=2 * TIMEOUT)
    )
    gpu = (EmulatedGpu if args.emulate else RealGpu)(rank, args.busy)
    world = dist.new_group(list(range(args.ranks)), backend="gloo")
    pair = dist.new_group([0, 1], backend="gloo")
    failed = CallsCheck(gpu.calls(gpu.device), pair).run() if rank < 2 else []
    dist.barrier()
    plan = mixed_plan(args.ranks)
    channel = open_channel(plan, [rank], world, timeout=TIMEOUT, device=gpu.device, calls=gpu.calls)
    found = type(channel.transport).__name__
    channel.close()
    arms = [arm for arm in ARMS if arm != "CUDA" or found == "CudaTransport"]
    for transport in arms[1:-1]:
        for case in CASES:
            start = time.perf_counter()
            check(rank, gpu, transport, case)
            dist.barrier()
            if rank == 0:
                print(f"{transport:7} {case:28} every tap right, {time.perf_counter() - start:.1f} s", flush=True)
    if rank < 2:
        torch.save(measure(rank, gpu, args, arms, pair), folder / f"{rank}.pt")
    dist.barrier()
    if rank == 0:
        torch.save((found, failed), folder / "found.pt")
    dist.destroy_process_group()


def report(args, folder):
    source, sink = (torch.load(folder / f"{rank}.pt") for rank in range(2))
    size = args.tokens * args.hidden * 2
    print(
        f"{args.microbatches} microbatches, 2 taps of {size / 1e6:.2f} MB each from the first of two stages, medians of "
        f"{args.repeats} steps; forwards: host time, stream: time of the compute stream"
    )
    for name, records in (("source", source), ("draft", sink)):
        medians = {
            arm: [statistics.median(values) for values in zip(*steps, strict=True)] for arm, steps in records.items()
        }
        for arm, (forwards, stream) in medians.items():
            print(
                f"{name:6} {arm:9} forwards {1e3 * forwards:9.2f} ms ({forwards / medians['blocking'][0]:.3f} of blocking), "
                f"stream {1e3 * stream:9.2f} ms ({stream / medians['none'][1]:.3f} of none)"
            )


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--emulate", action="store_true", help="on emulated GPUs, small")
    parser.add_argument("--ranks", type=int, default=3, help="processes, at least 3")
    parser.add_argument("--tokens", type=int)
    parser.add_argument("--hidden", type=int)
    parser.add_argument("--microbatches", type=int, default=6)
    parser.add_argument(
        "--busy", type=int, default=10, help="products of 4096 x 4096, or milliseconds, before each tap"
    )
    parser.add_argument("--repeats", type=int)
    args = parser.parse_args()
    small = args.emulate = args.emulate or not torch.cuda.is_available()
    args.tokens, args.hidden = args.tokens or (64 if small else 8192), args.hidden or (32 if small else 4096)
    args.repeats = args.repeats or (2 if small else 7)
    return args


def main():
    args = parse_arguments()
    count = 0 if args.emulate else torch.cuda.device_count()
    where = "emulated GPUs" if args.emulate else f"{count} x {torch.cuda.get_device_name()}"
    print(f"{where}, {platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}, {args.ranks} processes")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        mp.start_processes(
            run_rank, (args, folder), nprocs=args.ranks, start_method="fork" if args.emulate else "spawn"
        )
        found, failed = torch.load(folder / "found.pt")
        print(f"a channel opens with {found}")
        report(args, folder)
        if failed:
            sys.exit(f"Calls of CUDA that did not do what they are for: {failed}")
        if found != "CudaTransport":
            sys.exit("GPUs do not reach each other's memory: the warning above says why.")


if __name__ == "__main__":
    main()
