"""
Taps of GPUs over a transport of host memory, for GPUs that cannot reach each other's memory: on several hosts, say.

A forward packs taps into a staging buffer of its GPU, a side stream copies that into pinned host memory, and a thread
publishes the message, in order, when its copy is done. The draft's rank copies what arrives into pinned memory and from there
to its GPU, on a side stream too.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any

import torch

from .cuda_calls import CudaCalls
from .message import Header, TapChannelError, TapTimeout
from .plan import Lane
from .side_copies import SideCopies, Staging
from .transport import Transport


# Seconds between two looks at whether a device is done.
LOOK = 0.001
# Seconds that `close` gives copies to end.
CLOSING = 2.0


class PinnedTransport:
    """
    Between GPUs, through host memory. A forward does not wait for its copy unless as many messages as the lane has landing
    slots are on their way; the draft's rank waits in its forward of a microbatch until the taps of it have arrived.

    Args:
        inner ([`SharedMemoryTransport`] or [`GlooTransport`]):
            What carries the messages. On a source only the thread uses it within a step.
        device (`torch.device`):
            The GPU of this rank.
        calls (`Callable`, *optional*, defaults to `CudaCalls`):
            What makes of the device the object that calls CUDA.
    """

    def __init__(self, inner: Transport, device: torch.device, calls: Callable[[torch.device], CudaCalls] = CudaCalls):
        self.inner = inner
        self.rank = inner.rank
        self._calls = calls(device)
        self.device = self._calls.device
        self._copies = SideCopies(self._calls)
        self._lanes: dict[int, _Outgoing] = {}
        self._publisher = _Publisher(self._calls)
        self._timeout = 0.0

    def connect(self, lanes: Sequence[Lane], fingerprint: int, timeout: float) -> None:
        self.inner.connect(lanes, fingerprint, timeout)
        self._lanes = {lane.stage: _Outgoing(self._calls, lane.slots) for lane in lanes if lane.source == self.rank}
        if self._lanes:
            self._publisher.start()

    def begin_step(self, sizes: Mapping[int, Sequence[int]], digest: int, timeout: float) -> None:
        # The thread has nothing to do between steps.
        self.inner.begin_step(sizes, digest, timeout)
        self._copies.begin_step()
        self._timeout = timeout
        for stage, lane in self._lanes.items():
            lane.fit(max(sizes[stage]))

    def reserve(self, stage: int, num_bytes: int, timeout: float) -> torch.Tensor:
        lane = self._lanes[stage]
        if len(lane.pending) == lane.slots:
            lane.pending.popleft().result()  # has a deadline of its own
        return lane.staging.room(lane.slot)[:num_bytes]

    def pack(self, room: torch.Tensor, hidden: torch.Tensor) -> None:
        self._calls.copy(room, hidden, self._calls.current())

    def slot(self, stage: int) -> int:
        # Ahead of the inner transport's by what the thread has not published yet.
        return self._lanes[stage].slot if stage in self._lanes else self.inner.slot(stage)

    def publish(self, stage: int, header: Header) -> None:
        calls, lane, index = self._calls, self._lanes[stage], self._lanes[stage].slot
        target = lane.host[index][: header.num_bytes]
        lane.staging.leave(index)
        calls.copy(target, lane.staging.content(index)[: header.num_bytes], calls.side)
        lane.copied[index].record(calls.side)
        lane.pending.append(self._publisher.submit(self._publish, header, target, lane.copied[index], self._timeout))
        lane.sent += 1

    def _publish(self, header: Header, content: torch.Tensor, copied: Any, timeout: float) -> None:
        """In the thread: when a message is in host memory, it goes its way."""
        self._await_copy(copied, header, time.monotonic() + timeout, "to")
        try:
            room = self.inner.reserve(header.stage, header.num_bytes, timeout)
            room.copy_(content)
            self.inner.publish(header.stage, header)
        except TapChannelError as error:
            taps = f"stage {header.stage}, microbatch {header.microbatch}, step {header.epoch}"
            raise type(error)(f"{error} (when rank {self.rank} was to send the taps of {taps})") from error

    def receive(self, stage: int, timeout: float) -> tuple[bytes, Any]:
        return self.inner.receive(stage, timeout)

    def collect(self, header: Header, payload: torch.Tensor) -> torch.Tensor:
        calls = self._calls
        content = calls.host(header.num_bytes)
        content.copy_(payload[: header.num_bytes])
        self.inner.release(header.stage)
        # Of the side stream, so that it waits for nothing that the compute stream does.
        message = calls.empty(header.num_bytes, calls.side)
        calls.copy(message, content, calls.side)
        self._copies.forget_done()
        self._copies.started(header, content)
        return message

    def hand_over(self, stage: int, microbatch: int, message: torch.Tensor) -> None:
        self._copies.hand_over(stage, microbatch, message)

    def end_step(self, timeout: float) -> None:
        for lane in self._lanes.values():
            while lane.pending:
                lane.pending.popleft().result()
        self.inner.end_step(timeout)
        deadline = time.monotonic() + timeout
        for header, event in self._copies.under_way():
            self._await_copy(event, header, deadline, "from")

    def _await_copy(self, event: Any, header: Header, deadline: float, way: str) -> None:
        """Until the event of a copy is done, or the clock says that the step's timeout has passed."""
        while not event.query():
            if time.monotonic() > deadline:
                raise TapTimeout(
                    f"rank {self.rank} waited {self._timeout:g} s for its GPU to copy the taps of stage {header.stage}, "
                    f"microbatch {header.microbatch}, {way} host memory"
                )
            time.sleep(LOOK)

    def dead_ranks(self) -> list[int]:
        return self.inner.dead_ranks()

    def fail(self, text: str) -> None:
        self._publisher.stop()
        self.inner.fail(text)

    def close(self) -> None:
        self._publisher.stop()
        self._copies.idle(CLOSING)
        self.inner.close()

    @property
    def memory_bytes(self) -> int:
        """Bytes of the inner transport's slots, and of the staging buffers on the GPU and the host."""
        staged = sum(2 * lane.slots * lane.num_bytes for lane in self._lanes.values())
        return self.inner.memory_bytes + staged


class _Outgoing:
    """The messages of a lane between a forward and the inner transport."""

    def __init__(self, calls: CudaCalls, slots: int):
        self.calls = calls
        self.slots = slots
        self.num_bytes = -1
        self.sent = 0
        self.pending: deque[Future] = deque()
        self.copied = [calls.event() for _ in range(slots)]

    @property
    def slot(self) -> int:
        return self.sent % self.slots

    def fit(self, num_bytes: int) -> None:
        if self.num_bytes < num_bytes:
            self.num_bytes = num_bytes
            self.staging = Staging(self.calls, self.copied, num_bytes)
            self.host = [self.calls.host(num_bytes) for _ in range(self.slots)]


class _Publisher(threading.Thread):
    """Does one thing after the other. A daemon: a process that gives up does not wait for what it still waits for."""

    def __init__(self, calls: CudaCalls):
        super().__init__(daemon=True)
        self._calls = calls
        self._jobs: SimpleQueue[tuple[Future, Callable, tuple] | None] = SimpleQueue()
        self._stopped = False

    def submit(self, job: Callable, *arguments) -> Future:
        future: Future = Future()
        self._jobs.put((future, job, arguments))
        return future

    def run(self) -> None:
        self._calls.enter_thread()
        while (entry := self._jobs.get()) is not None:
            future, job, arguments = entry
            try:
                if self._stopped:
                    raise TapChannelError("the channel was given up before this message was sent")
                future.set_result(job(*arguments))
            except BaseException as error:
                # Raised by whoever waits for the message; what comes after it is not sent.
                self._stopped = True
                future.set_exception(error)

    def stop(self) -> None:
        self._stopped = True
        self._jobs.put(None)
