"""
Tap transport between GPUs of one host: payloads from device to device, headers over sockets.

The draft's rank has the ring of landing slots in its GPU's memory and the source maps it (CUDA IPC). A forward packs taps into
a staging buffer of its own GPU; a side stream copies that into the slot, and the header goes out at once. A header says that
a copy was enqueued, an event of the slot that it is done; a credit says that taking the content out was enqueued, another
event that it is done. Only streams wait for events in a step, hosts for headers and credits.

Why one event per slot and direction is enough: a stream that is told to wait for an event waits for its last `record` at that
moment. `filled` is recorded before its header is sent, and not again before the credit, which the draft's rank sends after
its stream was told to wait. `emptied` is recorded before its credit is sent, and not again before the slot's next header,
which the source sends after its stream was told to wait. (NVIDIA's sample simpleIPC orders the streams of processes like this,
with a barrier of the hosts for our headers.) And as every wait is for what was enqueued before it, on whatever device, streams
cannot wait for each other in a circle.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from .cuda_calls import CudaCalls
from .message import Header, Kind, TapChannelError, TapMismatch
from .plan import Lane
from .side_copies import SideCopies, Staging
from .sockets import SocketTransport
from .transport import TransportUnavailable


# Slots start at multiples of this.
ALIGNMENT = 512
# Length of a message of the probe, and seconds that each of its waits may take.
PROBE_BYTES, PROBE_SECONDS = 4096, 60.0
# What CUDA and torch raise; the others are the bindings', of a version that is not the one expected.
FAILURES = (RuntimeError, OSError, ImportError, AttributeError, TypeError, ValueError)
# Seconds that `close` waits for a device, or for another rank to have let go of its memory, before it leaves the memory to
# the end of the process.
CLOSING = 2.0


class CudaTransport(SocketTransport):
    """
    Between GPUs of one host (and one container), or processes on one GPU. Whether it works is found out in `connect`, by
    sending known bytes through every slot of every lane.

    Args:
        group (`ProcessGroup`):
            All ranks of the pipeline, of a backend that takes objects from the CPU, such as gloo. Used to connect and never
            again.
        device (`torch.device`):
            The GPU of this rank.
        calls (`Callable`, *optional*, defaults to `CudaCalls`):
            What makes of the device the object that calls CUDA.

    Raises:
        ValueError: in `connect`, if the processes cannot reach each other's sockets.
        TransportUnavailable: in `connect`, on all ranks alike, if the memory of one GPU cannot be written by another.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        calls: Callable[[torch.device], CudaCalls] = CudaCalls,
    ):
        super().__init__(group)
        self._calls = calls(device)
        self.device = self._calls.device
        self._copies = SideCopies(self._calls)
        self._staging: dict[int, Staging] = {}
        self._filled: dict[int, list] = {}
        self._emptied: dict[int, list] = {}
        self._outgrown: dict[int, deque[_DeviceRing | None]] = {}
        self._unmapped: list[_DeviceRing] = []

    # -------------------------------------------------------------------------------------------------- set-up

    def connect(self, lanes: Sequence[Lane], fingerprint: int, timeout: float) -> None:
        super().connect(lanes, fingerprint, timeout)
        handles = self._together(self._make_events)
        self._together(partial(self._open_events, handles))
        self._together(partial(self._probe, min(timeout, PROBE_SECONDS)))
        self._sized.clear()  # the probe's is no size to grow from

    def _together(self, act: Callable[[], Any]) -> list[Any]:
        """What an act returns on every rank; if it fails on one, all give up."""
        result, error, heard = None, None, False
        try:
            result = act()
        except FAILURES as failure:
            error = f"{type(failure).__name__}: {failure}"
            heard = type(failure) is TapChannelError  # only what another rank has said
            self.fail(error)
        everyone: list[Any] = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(everyone, (result, error, heard), group=self.group)
        errors = {rank: (error, heard) for rank, (_, error, heard) in enumerate(everyone) if error is not None}
        if errors:
            self.close()
            own = [f"rank {rank}: {error}" for rank, (error, heard) in errors.items() if not heard]
            raise TransportUnavailable(
                "; ".join(own or [f"rank {rank}: {error}" for rank, (error, _) in errors.items()])
            )
        return [result for result, _, _ in everyone]

    def _make_events(self) -> dict[int, list[bytes]]:
        """Makes the events that this rank records. Returns their handles, by lane and slot."""
        handles = {}
        for ends, events in ((self._sources, self._filled), (self._sinks, self._emptied)):
            for stage, end in ends.items():
                made = [self._calls.shared_event() for _ in range(end.slots)]
                events[stage], handles[stage] = [event for event, _ in made], [handle for _, handle in made]
        return handles

    def _open_events(self, handles: list[dict[int, list[bytes]]]) -> None:
        """Opens the events that the other ends record."""
        for ends, events in ((self._sources, self._emptied), (self._sinks, self._filled)):
            for stage in ends:
                theirs = handles[self._peer_of_stage[stage]][stage]
                events[stage] = [self._calls.open_event(handle) for handle in theirs]

    def _probe(self, timeout: float) -> None:
        """
        Sends known bytes through every slot three times. In the first round slots are filled late, in the second they are
        emptied late: bytes are wrong if either is not waited for.
        """
        rounds = {
            stage: [Header(Kind.TAPS, sequence=n, stage=stage, num_bytes=PROBE_BYTES) for n in range(3 * end.slots)]
            for stage, end in (*self._sources.items(), *self._sinks.items())
        }
        self.begin_step({stage: [PROBE_BYTES] for stage in rounds}, 0, timeout)
        for stage, end in self._sources.items():
            for header in rounds[stage]:
                room = self.reserve(stage, PROBE_BYTES, timeout)
                self.pack(room, _pattern(header).to(self.device))
                if header.sequence < end.slots:
                    self._calls.delay(self._calls.side)
                self.publish(stage, header)
        arrived = []
        for stage, end in self._sinks.items():
            for header in rounds[stage]:
                content, payload = self.receive(stage, timeout)
                Header.unpack(content).require(header)
                if end.slots <= header.sequence < 2 * end.slots:
                    self._calls.delay(self._calls.side)
                arrived.append((header, self.collect(header, payload)))
        self.end_step(timeout)
        for header, message in arrived:
            wrong = int((message.cpu() != _pattern(header)).sum())
            if wrong:
                source, slots = self._peer_of_stage[header.stage], self._sinks[header.stage].slots
                raise TapMismatch(
                    f"{wrong} of {PROBE_BYTES} bytes that rank {source} sent through slot {header.sequence % slots} of stage "
                    f"{header.stage} arrived wrong"
                )

    # --------------------------------------------------------------------------------------------------- steps

    def begin_step(self, sizes: Mapping[int, Sequence[int]], digest: int, timeout: float) -> None:
        self._free_unmapped()
        super().begin_step(sizes, digest, timeout)
        self._copies.begin_step()
        for stage in self._sources:
            ring = self._rings[stage]
            if stage not in self._staging or self._staging[stage].num_bytes < ring.slot_bytes:
                self._staging[stage] = Staging(self._calls, self._filled[stage], ring.slot_bytes)

    def _offer_ring(self, stage: int, slots: int, slot_bytes: int) -> None:
        slot_bytes = -(-slot_bytes // ALIGNMENT) * ALIGNMENT
        address, handle = self._calls.allocate(slots * slot_bytes)
        self._outgrown.setdefault(stage, deque()).append(self._rings.get(stage))
        self._rings[stage] = _DeviceRing(address, slots, slot_bytes)
        header = Header(Kind.RING, stage=stage, num_bytes=slot_bytes)
        self._send(self._peer_of_stage[stage], header, handle)

    def _take_ring(self, header: Header, content: bytes, ancillary: list) -> None:
        stage = header.stage
        if stage in self._sinks:
            # The source has closed the last ring: until then, freeing it would be undefined.
            outgrown = self._outgrown[stage].popleft()
            if outgrown is not None:
                self._unmapped.append(outgrown)
            return
        # Nothing is on its way into the last ring: the draft's rank had everything when it ended the last step.
        if stage in self._rings:
            self._calls.close(self._rings.pop(stage).address)
        slots = self._sources[stage].slots
        address = self._calls.open(content, slots * header.num_bytes)
        self._rings[stage] = _DeviceRing(address, slots, header.num_bytes)
        self._send(self._peer_of_stage[stage], Header(Kind.RING, stage=stage))

    def reserve(self, stage: int, num_bytes: int, timeout: float) -> torch.Tensor:
        return self._staging[stage].room(self._await_slot(stage, timeout))[:num_bytes]

    def pack(self, room: torch.Tensor, hidden: torch.Tensor) -> None:
        self._calls.copy(room, hidden, self._calls.current())

    def publish(self, stage: int, header: Header) -> None:
        calls, index = self._calls, self.slot(stage)
        staging = self._staging[stage]
        staging.leave(index)
        calls.side.wait_event(self._emptied[stage][index])
        calls.move(self._rings[stage].slot(index), staging.address(index), header.num_bytes, calls.side)
        self._filled[stage][index].record(calls.side)
        self._copies.started(header)
        super().publish(stage, header)

    def receive(self, stage: int, timeout: float) -> tuple[bytes, int]:
        return self._next_header(stage, timeout), self.slot(stage)

    def collect(self, header: Header, payload: int) -> torch.Tensor:
        calls, stage = self._calls, header.stage
        # Of the side stream, so that it waits for nothing that the compute stream does.
        message = calls.empty(header.num_bytes, calls.side)
        calls.side.wait_event(self._filled[stage][payload])
        calls.move(message.data_ptr(), self._rings[stage].slot(payload), header.num_bytes, calls.side)
        self._emptied[stage][payload].record(calls.side)
        self._copies.started(header)
        self.release(stage)
        return message

    def hand_over(self, stage: int, microbatch: int, message: torch.Tensor) -> None:
        self._copies.hand_over(stage, microbatch, message)

    def end_step(self, timeout: float) -> None:
        super().end_step(timeout)
        for header, event in self._copies.under_way():
            what = f"have the taps of microbatch {header.microbatch} copied by the GPUs of both"
            self._wait(event.query, header.stage, timeout, what, on_device=True)

    # ----------------------------------------------------------------------------------------------------- end

    def close(self) -> None:
        # What a copy may still touch, or another process has mapped, is left to the end of the process.
        if not self._copies.idle(CLOSING):
            # No goodbye, and sockets stay open: the other end would take either for leave to free its memory.
            self.fail(f"the GPU of rank {self.rank} was still at work when its channel was closed")
            return
        for stage, ring in self._rings.items():
            if stage in self._sources:
                self._calls.close(ring.address)
            elif self._has_left(self._peer_of_stage[stage], CLOSING):
                self._unmapped += [ring, *filter(None, self._outgrown[stage])]
        self._free_unmapped()
        super().close()

    def _free_unmapped(self) -> None:
        # Between steps only: CUDA may wait for the whole device first.
        while self._unmapped:
            self._calls.free(self._unmapped.pop().address)

    @property
    def memory_bytes(self) -> int:
        """Bytes of the landing slots that this rank has mapped, and of its staging buffers."""
        return super().memory_bytes + sum(staging.buffers.numel() for staging in self._staging.values())


class _DeviceRing(NamedTuple):
    """Landing slots of a lane in the memory of the draft's GPU, at their address in this process."""

    address: int
    slots: int
    slot_bytes: int

    def slot(self, index: int) -> int:
        return self.address + index * self.slot_bytes


def _pattern(header: Header) -> torch.Tensor:
    """Bytes that no other message of the probe has in their places."""
    return ((torch.arange(PROBE_BYTES) * 7 + 31 * header.sequence + 101 * header.stage) % 251).to(torch.uint8)
