"""Copies beside the forwards of a GPU: on a side stream, from buffers that the compute stream fills, with hosts that only look."""

import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from .cuda_calls import CudaCalls
from .message import Header


class Staging:
    """
    Where the forwards of a lane pack their messages, one buffer for each that may be under way.

    Args:
        calls ([`CudaCalls`]):
            The GPU.
        copied (`Sequence`):
            By buffer, the event that is recorded on the side stream when it was copied from.
        num_bytes (`int`):
            Size of a buffer.
    """

    def __init__(self, calls: CudaCalls, copied: Sequence[Any], num_bytes: int):
        self.calls = calls
        self.copied = copied
        self.num_bytes = num_bytes
        self.packed = [calls.event() for _ in copied]
        self.buffers = calls.empty(len(copied) * num_bytes, calls.current())
        calls.hand_over(self.buffers, calls.side)

    def room(self, index: int) -> torch.Tensor:
        """A buffer to pack into. The stream, not the host, waits until the buffer's last message was copied from it."""
        self.calls.current().wait_event(self.copied[index])
        return self.content(index)

    def content(self, index: int) -> torch.Tensor:
        return self.buffers[index * self.num_bytes : (index + 1) * self.num_bytes]

    def leave(self, index: int) -> None:
        """A buffer is packed: what comes next on the side stream comes after that."""
        self.packed[index].record(self.calls.current())
        self.calls.side.wait_event(self.packed[index])

    def address(self, index: int) -> int:
        return self.buffers.data_ptr() + index * self.num_bytes


class SideCopies:
    """
    The copies of a step on the side stream of a GPU, in their order.

    Args:
        calls ([`CudaCalls`]):
            The GPU.
    """

    def __init__(self, calls: CudaCalls):
        self.calls = calls
        self._pending: deque[tuple[Header, Any, Any]] = deque()
        self._arrived: dict[tuple[int, int], Any] = {}

    def begin_step(self) -> None:
        self._arrived = {}

    def started(self, header: Header, source: Any = None) -> None:
        """The copy of a message was enqueued. Its source is kept until it is done."""
        event = self.calls.event()
        event.record(self.calls.side)
        self._pending.append((header, event, source))
        self._arrived[header.stage, header.microbatch] = event

    def hand_over(self, stage: int, microbatch: int, message: torch.Tensor) -> None:
        """What the current stream does next comes after the copy, and the memory is kept for it."""
        current = self.calls.current()
        current.wait_event(self._arrived.pop((stage, microbatch)))
        self.calls.hand_over(message, current)

    def under_way(self) -> Iterator[tuple[Header, Any]]:
        """The oldest copy that may not be done, and its event, again and again until there is none."""
        while self._pending:
            header, event, _ = self._pending[0]
            yield header, event
            self._pending.popleft()

    def forget_done(self) -> None:
        """Lets go of the sources of copies that are done."""
        while self._pending and self._pending[0][1].query():
            self._pending.popleft()

    def idle(self, seconds: float) -> bool:
        """Whether everything on the side stream and the current one is done, within some seconds."""
        deadline = time.monotonic() + seconds
        for stream in (self.calls.side, self.calls.current()):
            last = self.calls.event()
            last.record(stream)
            while not last.query():
                if time.monotonic() > deadline:
                    return False
                time.sleep(0.001)
        return True
