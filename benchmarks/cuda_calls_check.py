"""
Every call of `CudaCalls` on real GPUs, a line each: what a tap channel takes for granted about CUDA holds, or the line says what
does not. The first thing to run on new hardware, by itself or as the beginning of `gpu_tap_check.py`. Two processes, on two GPUs or
one. Without a GPU, or with `--emulate`, on the emulated ones of the tests.

Ends with 1 if a call fails or does something else. After a stream that does not come to an end nothing more is tried.

    python benchmarks/cuda_calls_check.py
"""

import argparse
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from trl_codraft.pp.taps.cuda_calls import CudaCalls, CudaError


ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "pp"), str(ROOT / "tests")]

from emulated_device import CPU, EmulatedCalls  # noqa: E402


BYTES = 2**19
# How often a stream is delayed so that another rank's next act comes first, and so that it comes much later.
LATE, MUCH_LATER = 4, 12
# Seconds within which a stream has to come to an end.
PATIENCE = 10.0


class CallsCheck:
    """
    The checks, on one of two ranks. Both do the same, each to the other.

    Args:
        calls ([`CudaCalls`]):
            The GPU of this rank.
        group (`ProcessGroup`):
            Two ranks, of the gloo backend.
    """

    def __init__(self, calls: CudaCalls, group: dist.ProcessGroup):
        self.calls, self.group = calls, group
        self.rank = dist.get_rank(group)
        self.failed: list[str] = []
        self._stuck = False

    def run(self) -> list[str]:
        """Prints, on the first rank, a line for each check. Returns the names of those that failed."""
        self._check("current, side: two streams", self._streams)
        self._check("event, delay: a stream that is late is not done, then done", self._late)
        self._check("empty, copy: a stream waits for the other's event", self._copies)
        self._check("host: pinned memory, to the GPU and back", self._host)
        self._check("hand_over: memory is not used again under a late stream", self._handed_over)
        self._check("enter_thread: a thread's calls are of this GPU", self._thread)
        self._check("allocate: memory with a handle (cudaMalloc, cudaIpcGetMemHandle)", self._allocate)
        self._check("move: into that memory and back (cudaMemcpyAsync)", self._move)
        self._check("open: the other rank's memory (cudaIpcOpenMemHandle)", self._hand_handle, self._open)
        self._check("shared_event: a handle before any record (cudaIpcGetEventHandle)", self._share_event)
        self._check("open_event: the other rank's event (cudaIpcOpenEventHandle)", self._hand_event, self._open_event)
        self._check("open_event: a stream waits for what the other rank recorded", self._fill_late, self._read_filled)
        self._check(
            "open_event: a wait is for the record before it, not for later ones",
            self._record_again,
            self._wait_behind_delay,
            self._record_much_later,
            self._was_not_held_up,
        )
        self._check("move: into the other rank's memory", self._fill_other, self._read_own)
        self._check("close, open: unmapped, then mapped anew", self._close, self._open_again)
        self._check("free: after the other rank's close (cudaFree)", self._free)
        self._check("allocate: too much is a CudaError, and torch goes on", self._allocate_too_much)
        self._check("open: no handle is a CudaError, and torch goes on", self._open_nothing)
        self._check("open_event: no handle is a RuntimeError, and torch goes on", self._open_no_event)
        return self.failed

    def _check(self, name: str, *acts: Callable[[Any], Any]) -> None:
        """Acts of both ranks, one after the other. Each is given what the other rank's last one returned."""
        if self._stuck:
            return
        start, theirs, errors = time.monotonic(), None, []
        for act in acts:
            mine, error = None, None
            try:
                mine = act(theirs)
            except Exception as failure:  # whatever it is, the line says it
                error = f"rank {self.rank}: {type(failure).__name__}: {failure}"
                self._stuck = isinstance(failure, TimeoutError)
            both: list[Any] = [None, None]
            dist.all_gather_object(both, (mine, error, self._stuck), group=self.group)
            self._stuck = any(stuck for _, _, stuck in both)
            errors = [error for _, error, _ in both if error is not None]
            if errors:
                self.failed.append(name)
                break
            theirs = both[1 - self.rank][0]
        if self.rank == 0:
            took = f"{1e3 * (time.monotonic() - start):.0f} ms"
            print(f"FAILED {name}: {'; '.join(errors)}" if errors else f"ok     {name}, {took}", flush=True)

    # -------------------------------------------------------------------------------------------- what acts use

    def _pattern(self, rank: int, number: int) -> torch.Tensor:
        """Bytes that differ by rank and use, in every place."""
        return ((torch.arange(BYTES) * 7 + 101 * rank + 31 * number) % 251).to(torch.uint8)

    def _on_gpu(self, content: torch.Tensor) -> torch.Tensor:
        """The content in memory of the side stream, there for what comes next on it."""
        tensor = self.calls.empty(BYTES, self.calls.side)
        self.calls.copy(tensor, content, self.calls.side)
        return tensor

    def _late_by(self, times: int) -> None:
        for _ in range(times):
            self.calls.delay(self.calls.side)

    def _finish(self) -> None:
        """Waits until both streams have come to an end."""
        deadline = time.monotonic() + PATIENCE
        for name, stream in (("side", self.calls.side), ("current", self.calls.current())):
            last = self.calls.event()
            last.record(stream)
            while not last.query():
                if time.monotonic() > deadline:
                    raise TimeoutError(f"the {name} stream is not done after {PATIENCE:g} s")
                time.sleep(0.001)

    def _require(self, content: torch.Tensor, rank: int, number: int) -> None:
        self._finish()
        wrong = int((content.cpu() != self._pattern(rank, number)).sum())
        if wrong:
            raise ValueError(f"{wrong} of {BYTES} bytes are wrong")

    def _require_torch_goes_on(self) -> None:
        self._require(self._on_gpu(self._pattern(self.rank, 0)), self.rank, 0)

    # ------------------------------------------------------------------------------------------- within a process

    def _streams(self, theirs):
        if self.calls.current() == self.calls.side:
            raise ValueError("the side stream is the current one")

    def _late(self, theirs):
        event = self.calls.event()
        if not event.query():
            raise ValueError("an event that was never recorded is not done")
        self._late_by(LATE)
        event.record(self.calls.side)
        if event.query():
            raise ValueError("an event behind a delay is done at once")
        self._finish()
        if not event.query():
            raise ValueError("the stream is done, its event is not")

    def _copies(self, theirs):
        calls, event = self.calls, self.calls.event()
        source, target = calls.empty(BYTES, calls.current()), calls.empty(BYTES, calls.side)
        for _ in range(LATE):
            calls.delay(calls.current())
        calls.copy(source, self._pattern(self.rank, 1), calls.current())
        event.record(calls.current())
        calls.side.wait_event(event)
        calls.copy(target, source, calls.side)
        self._require(target, self.rank, 1)

    def _host(self, theirs):
        sent, came = self.calls.host(BYTES), self.calls.host(BYTES)
        if self.calls.device.type == "cuda" and not sent.is_pinned():
            raise ValueError("the memory is not pinned")
        sent.copy_(self._pattern(self.rank, 2))
        self.calls.copy(came, self._on_gpu(sent), self.calls.side)
        self._require(came, self.rank, 2)

    def _handed_over(self, theirs):
        calls, event = self.calls, self.calls.event()
        source, target = calls.empty(BYTES, calls.current()), calls.empty(BYTES, calls.side)
        calls.copy(source, self._pattern(self.rank, 3), calls.current())
        event.record(calls.current())
        calls.side.wait_event(event)
        self._late_by(LATE)
        calls.copy(target, source, calls.side)
        calls.hand_over(source, calls.side)
        del source
        again = calls.empty(BYTES, calls.current())
        calls.copy(again, self._pattern(self.rank, 4), calls.current())
        self._require(target, self.rank, 3)

    def _thread(self, theirs):
        done = []

        def look():
            self.calls.enter_thread()
            done.append(event.query())
            if self.calls.device.type == "cuda":
                done.append(torch.cuda.current_device() == self.calls.device.index)

        event = self.calls.event()
        event.record(self.calls.side)
        self._finish()
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
        if not done or not all(done):
            raise ValueError(f"in the thread: {done}")

    # --------------------------------------------------------------------------------------- between processes

    def _allocate(self, theirs):
        self._address, self._handle = self.calls.allocate(BYTES)
        if len(self._handle) != 64 or self._address % 512:
            raise ValueError(f"a handle of {len(self._handle)} bytes for memory at {self._address:#x}")

    def _move(self, theirs):
        source, target = self._on_gpu(self._pattern(self.rank, 5)), self.calls.empty(BYTES, self.calls.side)
        self.calls.move(self._address, source.data_ptr(), BYTES, self.calls.side)
        self.calls.move(target.data_ptr(), self._address, BYTES, self.calls.side)
        self._require(target, self.rank, 5)

    def _hand_handle(self, theirs):
        return self._handle

    def _open(self, handle):
        self._mapped, self._their_handle = self.calls.open(handle, BYTES), handle
        self._require_mapped(1 - self.rank, 5)

    def _require_mapped(self, rank: int, number: int) -> None:
        """What the other rank's memory holds."""
        self._require(self._read(self._mapped), rank, number)

    def _read(self, address: int) -> torch.Tensor:
        # On the current stream, since this rank's own late acts hold up the side stream.
        target = self.calls.empty(BYTES, self.calls.current())
        self.calls.move(target.data_ptr(), address, BYTES, self.calls.current())
        return target

    def _share_event(self, theirs):
        self._event, self._event_handle = self.calls.shared_event()
        if len(self._event_handle) != 64:
            raise ValueError(f"a handle of {len(self._event_handle)} bytes")

    def _hand_event(self, theirs):
        return self._event_handle

    def _open_event(self, handle):
        self._opened = self.calls.open_event(handle)
        self.calls.side.wait_event(self._opened)  # never recorded: no reason to wait
        self._finish()

    def _fill_late(self, theirs):
        source = self._on_gpu(self._pattern(self.rank, 6))
        self._late_by(LATE)
        self.calls.move(self._address, source.data_ptr(), BYTES, self.calls.side)
        self._event.record(self.calls.side)

    def _read_filled(self, theirs):
        self.calls.current().wait_event(self._opened)
        self._require_mapped(1 - self.rank, 6)

    def _record_again(self, theirs):
        self._event.record(self.calls.side)
        self._finish()

    def _wait_behind_delay(self, theirs):
        self._late_by(LATE)
        self.calls.side.wait_event(self._opened)
        self._behind = self.calls.event()
        self._behind.record(self.calls.side)

    def _record_much_later(self, theirs):
        self._late_by(MUCH_LATER)
        self._event.record(self.calls.side)

    def _was_not_held_up(self, theirs):
        deadline = time.monotonic() + PATIENCE
        while not self._behind.query() and time.monotonic() < deadline:
            time.sleep(0.001)
        later_is_done = self._opened.query()
        self._finish()
        if later_is_done:
            raise ValueError("a stream waited for an event's next record, which came after the wait")

    def _fill_other(self, theirs):
        source = self._on_gpu(self._pattern(self.rank, 7))
        self._late_by(LATE)
        self.calls.move(self._mapped, source.data_ptr(), BYTES, self.calls.side)
        self._event.record(self.calls.side)

    def _read_own(self, theirs):
        self.calls.current().wait_event(self._opened)
        self._require(self._read(self._address), 1 - self.rank, 7)

    def _close(self, theirs):
        self._finish()
        self.calls.close(self._mapped)

    def _open_again(self, theirs):
        self._mapped = self.calls.open(self._their_handle, BYTES)
        self._require_mapped(self.rank, 7)
        self.calls.close(self._mapped)

    def _free(self, theirs):
        self.calls.free(self._address)

    # -------------------------------------------------------------------------------------------------- errors

    def _allocate_too_much(self, theirs):
        self._require_error(CudaError, lambda: self.calls.allocate(2**60))

    def _open_nothing(self, theirs):
        self._require_error(CudaError, lambda: self.calls.open(bytes(64), BYTES))

    def _open_no_event(self, theirs):
        self._require_error(RuntimeError, lambda: self.calls.open_event(bytes(64)))

    def _require_error(self, kind, call):
        try:
            call()
        except kind:
            self._require_torch_goes_on()
        else:
            raise ValueError("it was no error")


def run_rank(rank, folder, emulate):
    store = dist.FileStore(str(folder / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=120))
    if emulate:
        calls = EmulatedCalls(CPU)
    else:
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
        calls = CudaCalls(device)
    failed = CallsCheck(calls, dist.group.WORLD).run()
    dist.destroy_process_group()
    sys.exit(bool(failed))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--emulate", action="store_true", help="on emulated GPUs")
    emulate = parser.parse_args().emulate or not torch.cuda.is_available()
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(run_rank, (Path(folder), emulate), nprocs=2, start_method="fork" if emulate else "spawn")


if __name__ == "__main__":
    main()
