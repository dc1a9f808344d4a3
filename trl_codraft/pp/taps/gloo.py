"""
Tap transport over a process group of the gloo backend, for CPU tensors on any number of hosts.

Two-sided: the draft's rank posts a receive for each landing slot that the step still needs, never one beyond the step,
so that nothing is outstanding between steps; a source sends from staging buffers of its own, as many as there are
slots. A send completes only when its receive was posted. A header travels in front of the payload, in the same
message. The draft's rank sends every source two notes per step: at its beginning, with the shapes it expects (gloo
aborts a process that receives more than it posted, so a source compares them before it sends), and at its end, or as
soon as something fails.

Completion is learned by waiting only: gloo's point-to-point work reports `is_completed() == False` until it is waited
for.
"""

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta

import torch
import torch.distributed as dist

from .lane import SinkEnd, SourceEnd
from .message import HEADER_BYTES, Kind, TapChannelError, TapHeader, TapMismatch, TapTimeout
from .plan import Lane
from .processes import Neighbours, place


# Size of a note of the draft's rank: a header, and room for the reason of a failure.
NOTE_BYTES = 1024
# Seconds that a rank which gives up leaves for its reasons to be sent.
LAST_WORDS = 0.25
# Seconds between two looks of the draft's rank at how long it has waited.
LOOK = 0.25


class GlooTransport:
    """
    Carries taps between processes on any hosts.

    Args:
        group (`ProcessGroup`):
            All ranks of the pipeline, of the gloo backend. Used by nothing else: not the group of the pipeline, whose
            messages have no tags and would be taken for the channel's.
        pin_memory (`bool`, *optional*, defaults to `False`):
            Whether messages lie in host memory that an accelerator copies to and from without a wait.

    Raises:
        ValueError: if the group is not of the gloo backend.
    """

    device = torch.device("cpu")

    def __init__(self, group: dist.ProcessGroup, *, pin_memory: bool = False):
        if dist.get_backend(group) != "gloo":
            raise ValueError(
                f"Taps travel over gloo, but the group is of the {dist.get_backend(group)} backend. Make one with "
                "`torch.distributed.new_group(ranks, backend='gloo')`, for taps of a GPU too: they travel through "
                "host memory."
            )
        self.group = group
        self.rank = dist.get_rank(group)
        self.pin_memory = pin_memory
        self._neighbours: Neighbours | None = None
        self._sources: dict[int, _Source] = {}
        self._sinks: dict[int, _Sink] = {}
        self._waiting: tuple[int, float, float] | None = None
        self._last_words: str | None = None
        self._closed = threading.Event()

    def connect(self, lanes: Sequence[Lane], fingerprint: int, timeout: float) -> None:
        everyone: list[tuple] = [()] * dist.get_world_size(self.group)
        dist.all_gather_object(everyone, (place(), os.getpid(), fingerprint), group=self.group)
        _require_one_plan([theirs for _, _, theirs in everyone])
        self._neighbours = Neighbours(self.rank, [(where, pid) for where, pid, _ in everyone])
        for lane in lanes:
            if self.rank == lane.sink:
                self._sinks[lane.stage] = _Sink(self.group, lane, self.pin_memory)
            elif self.rank == lane.source:
                self._sources[lane.stage] = _Source(self.group, lane, self.pin_memory)
        if self._sinks:
            threading.Thread(target=self._watch, daemon=True).start()

    def begin_step(self, sizes: Mapping[int, Sequence[int]], digest: int, timeout: float) -> None:
        for stage, end in (*self._sources.items(), *self._sinks.items()):
            end.begin_step(sizes[stage], digest)

    def reserve(self, stage: int, num_bytes: int, timeout: float) -> torch.Tensor:
        return self._sources[stage].reserve(num_bytes, timeout)

    def publish(self, stage: int, header: TapHeader) -> None:
        self._sources[stage].publish(header)

    def receive(self, stage: int, timeout: float) -> tuple[bytes, torch.Tensor]:
        self._waiting = stage, time.monotonic() + timeout, timeout
        try:
            received = self._sinks[stage].receive(timeout + LOOK + 2 * LAST_WORDS)
        except TapTimeout as error:
            raise TapTimeout(self._last_words) from error
        finally:
            self._waiting = None
        if self._last_words is not None:
            raise TapTimeout(self._last_words)
        return received

    def _watch(self) -> None:
        """
        Runs in a thread of the draft's rank. A wait of gloo that times out breaks all connections of the process, so
        the other sources are told a little before.
        """
        while not self._closed.wait(LOOK):
            waiting = self._waiting
            if waiting is None or time.monotonic() < waiting[1]:
                continue
            end = self._sinks[waiting[0]]
            self._last_words = (
                f"rank {self.rank} waited {waiting[2]:g} s for rank {end.peer} to send the taps of stage "
                f"{end.lane.stage}, microbatch {end.posted - len(end.works)}"
            )
            self.fail(self._last_words)
            return

    def collect(self, header: TapHeader, payload: torch.Tensor) -> torch.Tensor:
        # One copy of the whole message; the taps look into it.
        message = payload[: header.num_bytes].clone()
        self.release(header.stage)
        return message

    def release(self, stage: int) -> None:
        """Gives back the slot of the message that was received last, after its content was taken."""
        self._sinks[stage].release()

    def end_step(self, timeout: float) -> None:
        for sink in self._sinks.values():
            sink.note(TapHeader(Kind.END, stage=sink.lane.stage))
        for end in (*self._sources.values(), *self._sinks.values()):
            end.end_step(timeout)

    def dead_ranks(self) -> list[int]:
        # Gloo does not say which processes live, the kernel does.
        return [] if self._neighbours is None else self._neighbours.ended()

    def fail(self, text: str) -> None:
        for end in (*self._sources.values(), *self._sinks.values()):
            try:
                end.fail(text)
            except RuntimeError:
                continue  # the connection is broken, so the other side knows that much
        # Not waited for: a peer that does not answer would break the connections to all others.
        time.sleep(LAST_WORDS)

    def close(self) -> None:
        # Nothing is outstanding between steps, and the group belongs to the caller.
        self._closed.set()
        self._sources, self._sinks = {}, {}
        if self._neighbours is not None:
            self._neighbours.close()


class _End:
    """The common part of both ends of a lane: buffers, tags, and how to wait."""

    def __init__(self, group: dist.ProcessGroup, lane: Lane, peer: int, pin_memory: bool):
        self.group = group
        self.lane = lane
        self.peer = peer
        self.pin_memory = pin_memory
        self.buffers = torch.empty(0, 0, dtype=torch.uint8)
        self.sizes: Sequence[int] = ()
        self.tag = 2 * lane.stage
        self.note_tag = self.tag + 1

    def begin_step(self, sizes: Sequence[int], digest: int) -> None:
        self.sizes = sizes
        if self.buffers.shape[1] < HEADER_BYTES + max(sizes):
            shape = self.lane.slots, HEADER_BYTES + max(sizes)
            self.buffers = torch.empty(shape, dtype=torch.uint8, pin_memory=self.pin_memory)

    def send(self, content: torch.Tensor, tag: int) -> dist.Work:
        return self.start(dist.isend, content, group_dst=self.peer, tag=tag)

    def expect(self, content: torch.Tensor, tag: int) -> dist.Work:
        return self.start(dist.irecv, content, group_src=self.peer, tag=tag)

    def start(self, operation: Callable[..., dist.Work], content: torch.Tensor, **named: int) -> dist.Work:
        try:
            return operation(content, group=self.group, **named)
        except RuntimeError as error:
            raise TapChannelError(
                f"the connection to rank {self.peer} is broken (lane of stage {self.lane.stage}): {error}"
            ) from error

    def wait(self, work: dist.Work, timeout: float, what: str) -> None:
        start = time.monotonic()
        try:
            work.wait(timedelta(seconds=timeout))
        except RuntimeError as error:
            if time.monotonic() - start >= timeout:
                raise TapTimeout(
                    f"rank {dist.get_rank(self.group)} waited {timeout:g} s for rank {self.peer} to {what} (lane of "
                    f"stage {self.lane.stage})"
                ) from error
            raise TapChannelError(
                f"the connection to rank {self.peer} broke when it was to {what} (lane of stage {self.lane.stage}): "
                f"{error}"
            ) from error


class _Source(_End):
    def __init__(self, group: dist.ProcessGroup, lane: Lane, pin_memory: bool):
        super().__init__(group, lane, lane.sink, pin_memory)
        self.counter = SourceEnd(lane.slots)
        self.pending: deque[dist.Work] = deque()
        self.notes: deque[tuple[dist.Work, torch.Tensor]] = deque()
        self.sent_in_step = self.reserved = 0

    def begin_step(self, sizes: Sequence[int], digest: int) -> None:
        super().begin_step(sizes, digest)
        self.sent_in_step, self.digest = 0, digest
        for _ in range(2):
            note = torch.zeros(NOTE_BYTES, dtype=torch.uint8)
            self.notes.append((self.expect(note, self.note_tag), note))

    def reserve(self, num_bytes: int, timeout: float) -> torch.Tensor:
        if self.sent_in_step == 0:
            begun = self.read_note(timeout, "begin the step")
            if begun.plan != self.digest:
                raise TapMismatch(f"rank {self.peer} has begun a step with another plan or other shapes")
        if not self.counter.has_free_slot:
            self.wait_oldest(timeout, "empty a landing slot")
        self.reserved = num_bytes
        return self.buffers[self.counter.slot, HEADER_BYTES : HEADER_BYTES + num_bytes]

    def publish(self, header: TapHeader) -> None:
        message = self.buffers[self.counter.slot, : HEADER_BYTES + self.reserved]
        message[:HEADER_BYTES] = _as_tensor(header.pack())
        self.pending.append(self.send(message, self.tag))
        self.counter.publish()
        self.sent_in_step += 1

    def end_step(self, timeout: float) -> None:
        while self.pending:
            self.wait_oldest(timeout, "take the last taps")
        self.read_note(timeout, "take the last taps")

    def wait_oldest(self, timeout: float, what: str) -> None:
        try:
            self.wait(self.pending.popleft(), timeout, what)
        except TapChannelError:
            self.read_last_note()
            raise
        self.counter.credit(self.counter.released)

    def read_note(self, timeout: float, what: str) -> TapHeader:
        work, note = self.notes.popleft()
        self.wait(work, timeout, what)
        header, text = _content(note)
        if header.kind == Kind.FAILURE:
            raise TapChannelError(f"rank {self.peer} gave up: {text}")
        return header

    def read_last_note(self) -> None:
        """Raises the reason that the draft's rank gave before the connection broke, if it gave one."""
        work, note = self.notes[0]
        try:
            work.wait(timedelta(seconds=LAST_WORDS))
        except RuntimeError:
            return
        header, text = _content(note)
        if header.kind == Kind.FAILURE:
            raise TapChannelError(f"rank {self.peer} gave up: {text}")

    def fail(self, text: str) -> None:
        if self.sent_in_step < len(self.sizes):
            # As long as the receive that is posted for it, so that even a short message's place holds the reason.
            self.last_message = torch.zeros(HEADER_BYTES + max(self.sizes), dtype=torch.uint8)
            _write(self.last_message, TapHeader(Kind.FAILURE, stage=self.lane.stage), text)
            self.pending.append(self.send(self.last_message, self.tag))


class _Sink(_End):
    def __init__(self, group: dist.ProcessGroup, lane: Lane, pin_memory: bool):
        super().__init__(group, lane, lane.source, pin_memory)
        self.counter = SinkEnd(lane.slots)
        self.works: deque[tuple[dist.Work, torch.Tensor]] = deque()
        self.posted = 0
        self.notes: list[tuple[dist.Work, torch.Tensor]] = []

    def begin_step(self, sizes: Sequence[int], digest: int) -> None:
        super().begin_step(sizes, digest)
        self.posted, self.notes = 0, []
        for _ in range(min(self.lane.slots, len(sizes))):
            self.post()
        self.note(TapHeader(Kind.BEGIN, stage=self.lane.stage, plan=digest))

    def post(self) -> None:
        """Posts a receive for the next message, of its whole slot: less may come, not more."""
        slot = (self.counter.released + len(self.works)) % self.lane.slots
        message = self.buffers[slot]
        self.works.append((self.expect(message, self.tag), message))
        self.posted += 1

    def receive(self, timeout: float) -> tuple[bytes, torch.Tensor]:
        work, message = self.works[0]
        self.wait(work, timeout, "send taps")
        header, text = _content(message)
        if header.kind == Kind.FAILURE:
            raise TapChannelError(f"rank {self.peer} gave up: {text}")
        return header.pack(), message[HEADER_BYTES:]

    def release(self) -> None:
        self.works.popleft()
        self.counter.release()
        if self.posted < len(self.sizes):
            self.post()

    def note(self, header: TapHeader, text: str = "") -> None:
        note = torch.zeros(NOTE_BYTES, dtype=torch.uint8)
        _write(note, header, text)
        self.notes.append((self.send(note, self.note_tag), note))

    def end_step(self, timeout: float) -> None:
        for work, _ in self.notes:
            self.wait(work, timeout, "end the step")

    def fail(self, text: str) -> None:
        # The note takes the place of the one that the source waits for next: the step's end, or the next one's
        # beginning.
        self.note(TapHeader(Kind.FAILURE, stage=self.lane.stage), text)


def _require_one_plan(fingerprints: list[int]) -> None:
    """Raises on all ranks alike if the plan of one differs."""
    if len(set(fingerprints)) == 1:
        return
    common = max(set(fingerprints), key=fingerprints.count)
    others = [rank for rank, theirs in enumerate(fingerprints) if theirs != common]
    raise ValueError(
        f"The tap plan of rank(s) {others} differs from that of the others (fingerprints by rank: "
        f"{[f'{theirs:016x}' for theirs in fingerprints]}). Taps, stages, schedule, number of microbatches and slots "
        "must be the same everywhere: build the plan from the same settings on all ranks."
    )


def _as_tensor(content: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def _write(message: torch.Tensor, header: TapHeader, text: str) -> None:
    """Writes a header and as much of a text as fits."""
    content = text.encode()[: message.numel() - HEADER_BYTES]
    content = replace(header, num_bytes=len(content)).pack() + content
    message[: len(content)] = _as_tensor(content)


def _content(message: torch.Tensor) -> tuple[TapHeader, str]:
    """Returns the header of a message and, if it reports a failure, the reason."""
    header = TapHeader.unpack(message[:HEADER_BYTES].numpy().tobytes())
    if header.kind != Kind.FAILURE:
        return header, ""
    # Nothing was received beyond the text: the rest of a slot is old.
    text = message[HEADER_BYTES : HEADER_BYTES + header.num_bytes].numpy().tobytes()
    return header, text.decode(errors="replace")
