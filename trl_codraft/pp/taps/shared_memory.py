"""
Tap transport between processes of one host: payloads in shared memory.

A ring of landing slots is a `memfd`, which has no name, handed over a socket. A source copies taps into a slot and then sends
the header: the two system calls order the memory.
"""

import array
import mmap
import os

import torch

from .message import Header, Kind, TapMismatch
from .sockets import SocketTransport
from .transport import HostCopies


class SharedMemoryTransport(HostCopies, SocketTransport):
    """
    Between processes of one host (and one container), for taps in host memory.

    Args:
        group (`ProcessGroup`):
            All ranks of the pipeline, used to connect and never again.

    Raises:
        ValueError: in `connect`, if the processes cannot share memory.
    """

    def reserve(self, stage: int, num_bytes: int, timeout: float) -> torch.Tensor:
        return self._rings[stage].slot(self._await_slot(stage, timeout))[:num_bytes]

    def receive(self, stage: int, timeout: float) -> tuple[bytes, torch.Tensor]:
        return self._next_header(stage, timeout), self._rings[stage].slot(self._sinks[stage].slot)

    def _offer_ring(self, stage: int, slots: int, slot_bytes: int) -> None:
        ring, fd = _SharedRing.create(slots, slot_bytes)
        self._rings[stage] = ring
        header = Header(Kind.RING, stage=stage, num_bytes=ring.slot_bytes)
        self._send(self._peer_of_stage[stage], header, fd=fd)
        os.close(fd)

    def _take_ring(self, header: Header, content: bytes, ancillary: list) -> None:
        if header.stage not in self._sources:
            raise TapMismatch(f"a ring came for stage {header.stage}, which does not send from here")
        fd = array.array("i", ancillary[0][2])[0]
        self._rings[header.stage] = _SharedRing(fd, self._sources[header.stage].slots, header.num_bytes)
        os.close(fd)


class _SharedRing:
    """Landing slots of a lane in shared memory."""

    def __init__(self, fd: int, slots: int, slot_bytes: int):
        self.slots = slots
        self.slot_bytes = slot_bytes
        # The mapping lives as long as tensors that look into it.
        self._memory = torch.frombuffer(mmap.mmap(fd, slots * slot_bytes), dtype=torch.uint8)

    @classmethod
    def create(cls, slots: int, slot_bytes: int) -> tuple["_SharedRing", int]:
        """A new ring and its file descriptor."""
        slot_bytes = max(1, -(-slot_bytes // mmap.PAGESIZE)) * mmap.PAGESIZE
        fd = os.memfd_create("taps")
        # Too little memory is an error here, not a signal when a slot is written.
        os.posix_fallocate(fd, 0, slots * slot_bytes)
        return cls(fd, slots, slot_bytes), fd

    def slot(self, index: int) -> torch.Tensor:
        return self._memory[index * self.slot_bytes : (index + 1) * self.slot_bytes]
