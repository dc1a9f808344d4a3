"""
Taps of accelerators over gloo, through pinned host memory: for GPUs on any hosts.

A forward packs its taps into a buffer on its GPU and goes on. A thread sends the messages one after the other: when
gloo has room, a side stream copies the buffer there, and when the copy is done, gloo sends it. The draft's rank copies
what arrived to its GPU, on a side stream too, and waits for the copy alone, so that neither end waits for the stream
of its forwards.

On a CPU `torch.cpu` has streams and events that do nothing, so the order of all this is tested there.
"""

import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from queue import SimpleQueue

import torch

from .gloo import GlooTransport
from .message import TapChannelError, TapHeader, TapTimeout
from .plan import Lane


# Seconds between two looks at whether a copy is done.
LOOK = 0.0002


class PinnedTransport:
    """
    Carries taps between accelerators, through host memory. A forward waits only while as many messages as the lane has
    landing slots are on their way; the draft's rank waits in its forward of a microbatch until its taps have arrived.

    Args:
        inner ([`GlooTransport`]):
            Carries the messages, with `pin_memory=True`. On a source only the thread uses it within a step.
        device (`torch.device`):
            The accelerator of this rank, with its index.
    """

    def __init__(self, inner: GlooTransport, device: torch.device):
        self.inner = inner
        self.rank = inner.rank
        self.device = device
        self._module = torch.get_device_module(device)
        self._side = self._module.Stream(device)
        self._slots: dict[int, int] = {}
        self._under_way: dict[int, deque[Future]] = {}
        self._jobs: SimpleQueue[tuple[Future, TapHeader, torch.Tensor, torch.Event] | None] = SimpleQueue()
        self._message = torch.empty(0, dtype=torch.uint8)
        self._timeout = 0.0
        self._given_up = False

    def connect(self, lanes: Sequence[Lane], fingerprint: int, timeout: float) -> None:
        self.inner.connect(lanes, fingerprint, timeout)
        self._slots = {lane.stage: lane.slots for lane in lanes if lane.source == self.rank}
        self._under_way = {stage: deque() for stage in self._slots}
        if self._slots:
            # A daemon: a process that gives up does not wait for the thread.
            threading.Thread(target=self._send_all, daemon=True).start()

    def begin_step(self, sizes: Mapping[int, Sequence[int]], digest: int, timeout: float) -> None:
        # The thread has nothing to do between steps.
        self.inner.begin_step(sizes, digest, timeout)
        self._timeout = timeout

    def reserve(self, stage: int, num_bytes: int, timeout: float) -> torch.Tensor:
        if len(self._under_way[stage]) == self._slots[stage]:
            self._under_way[stage].popleft().result()  # it has a deadline of its own
        self._message = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        return self._message

    def publish(self, stage: int, header: TapHeader) -> None:
        packed, sent = self._module.Event(), Future()
        packed.record(self._module.current_stream(self.device))
        self._under_way[stage].append(sent)
        self._jobs.put((sent, header, self._message, packed))

    def _send_all(self) -> None:
        """The thread. After a failure nothing more is sent; the forward that waits for a message raises it."""
        self._module.set_device(self.device)
        while (job := self._jobs.get()) is not None:
            sent, header, message, packed = job
            try:
                if self._given_up:
                    raise TapChannelError("the channel was given up before this message was sent")
                self._copy(self._room(header), message, header, packed)
                self.inner.publish(header.stage, header)
                sent.set_result(None)
            except BaseException as error:
                self._given_up = True
                sent.set_exception(self._naming(error, header))

    def _naming(self, error: BaseException, header: TapHeader) -> BaseException:
        """Says in an error of the channel which taps were to be sent."""
        if not isinstance(error, TapChannelError):
            return error
        taps = f"stage {header.stage}, microbatch {header.microbatch}, step {header.epoch}"
        return type(error)(f"{error} (when rank {self.rank} was to send the taps of {taps})")

    def _room(self, header: TapHeader) -> torch.Tensor:
        """Waits for the memory that a message is copied to."""
        return self.inner.reserve(header.stage, header.num_bytes, self._timeout)

    def _content(self, header: TapHeader, payload: torch.Tensor) -> torch.Tensor:
        """Returns the memory that a message has arrived in."""
        return payload[: header.num_bytes]

    def _copy(
        self, target: torch.Tensor, source: torch.Tensor, header: TapHeader, after: torch.Event | None = None
    ) -> None:
        """Copies on the side stream, after an event, and returns when the copy is done."""
        deadline, done = time.monotonic() + self._timeout, self._module.Event()
        with self._module.stream(self._side):
            if after is not None:
                self._side.wait_event(after)
            target.copy_(source, non_blocking=True)
            done.record(self._side)
        while not done.query():
            if time.monotonic() > deadline:
                raise TapTimeout(
                    f"rank {self.rank} waited {self._timeout:g} s for {self.device} to copy the taps of stage "
                    f"{header.stage}, microbatch {header.microbatch}"
                )
            time.sleep(LOOK)

    def receive(self, stage: int, timeout: float) -> tuple[bytes, torch.Tensor]:
        return self.inner.receive(stage, timeout)

    def collect(self, header: TapHeader, payload: torch.Tensor) -> torch.Tensor:
        # Memory of the side stream, so that the copy waits for nothing that the forwards still use.
        with self._module.stream(self._side):
            message = torch.empty(header.num_bytes, dtype=torch.uint8, device=self.device)
        self._copy(message, self._content(header, payload), header)
        self.inner.release(header.stage)
        if self.device.type != "cpu":
            # The memory is not used again before the forwards' stream is done with it.
            message.record_stream(self._module.current_stream(self.device))
        return message

    def end_step(self, timeout: float) -> None:
        for under_way in self._under_way.values():
            while under_way:
                under_way.popleft().result()
        self.inner.end_step(timeout)

    def dead_ranks(self) -> list[int]:
        return self.inner.dead_ranks()

    def fail(self, text: str) -> None:
        self._given_up = True
        self._jobs.put(None)
        self.inner.fail(text)

    def close(self) -> None:
        self._given_up = True
        self._jobs.put(None)
        self.inner.close()
