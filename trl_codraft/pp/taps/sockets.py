"""
The control plane of tap transports within one host: headers over sockets, whatever memory the payloads lie in.

The draft's rank makes one ring of landing slots per lane and hands it to the source over a socket. A source fills a slot and
then sends a header; emptied slots come back as headers too, and `poll` gives a wait its deadline. Sockets have kernel-made
abstract addresses and processes are watched through `pidfd`s, so nothing is left behind when all of them are killed.
"""

import array
import os
import select
import socket
import struct
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol

import torch.distributed as dist

from .lane import SinkEnd, SourceEnd
from .message import HEADER_BYTES, Header, Kind, TapChannelError, TapMismatch, TapTimeout
from .plan import Lane
from .transport import gather_from_all


# Longest text of a failure that travels, in bytes.
MAX_TEXT = 2000
# Seconds that a process may take to end after its connections broke.
DYING = 0.5
# Seconds between two looks at whether a device is done.
LOOK = 0.002
# A ring that was too small is replaced by one with this much to spare.
GROWTH = 1.25
PEER_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
# What the kernel counts, at most, for a header that waits to be read; messages besides those of slots.
QUEUED_BYTES, OTHER_MESSAGES = 1024, 16


class Ring(Protocol):
    """Landing slots of a lane, mapped."""

    slots: int
    slot_bytes: int


class SocketTransport(ABC):
    """
    Between processes of one host (and one container). Subclasses say what a ring is: [`~SocketTransport._offer_ring`] and
    [`~SocketTransport._take_ring`].

    Args:
        group (`ProcessGroup`):
            All ranks of the pipeline, used to connect and never again.

    Raises:
        ValueError: in `connect`, if the processes cannot share memory, or a socket cannot hold as many headers as slots.
    """

    def __init__(self, group: dist.ProcessGroup):
        self.group = group
        self.rank = dist.get_rank(group)
        self._poll = select.poll()
        self._sockets: dict[int, socket.socket] = {}
        self._pidfds: dict[int, int] = {}
        self._rank_of_fd: dict[int, int] = {}
        self._departed: set[int] = set()
        self._sources: dict[int, SourceEnd] = {}
        self._sinks: dict[int, SinkEnd] = {}
        self._rings: dict[int, Ring] = {}
        self._sized: set[int] = set()  # lanes whose ring had the size of a step
        self._inbox: dict[int, deque[bytes]] = {}
        self._peer_of_stage: dict[int, int] = {}

    # -------------------------------------------------------------------------------------------------- set-up

    def connect(self, lanes: Sequence[Lane], fingerprint: int, timeout: float) -> None:
        listener = None
        if any(lane.sink == self.rank for lane in lanes):
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            listener.bind("")  # the kernel picks an abstract address that no file system knows
            listener.listen(len(lanes))
        mine = {"host": place(), "pid": os.getpid(), "address": listener and listener.getsockname()}
        everyone = gather_from_all(self.group, mine, fingerprint)
        hosts = [theirs["host"] for theirs in everyone]
        if len(set(hosts)) > 1:
            raise ValueError(
                f"Shared memory reaches the processes of one host and container, but the ranks run on {hosts}. Use "
                "`GlooTransport`."
            )
        self._pids = [theirs["pid"] for theirs in everyone]
        # A source may fill all its slots, and the draft's rank give all back, before the other end reads a header.
        by_source = {lane.source: [other.slots for other in lanes if other.source == lane.source] for lane in lanes}
        self._most_slots = max(map(sum, by_source.values()), default=0)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
            held = _hold_headers(probe, self._most_slots)
        if held < self._most_slots:
            raise ValueError(
                f"The lanes of a rank have {self._most_slots} landing slots together, but a socket holds the headers of {held} "
                "(`net.core.wmem_max`). Set fewer `slots` (in the trainer: `tap_channel_slots`), or use `GlooTransport`."
            )
        for lane in lanes:
            if self.rank == lane.sink:
                self._sinks[lane.stage] = SinkEnd(lane.slots)
                self._inbox[lane.stage] = deque()
                self._peer_of_stage[lane.stage] = lane.source
            elif self.rank == lane.source:
                self._sources[lane.stage] = SourceEnd(lane.slots)
                self._peer_of_stage[lane.stage] = lane.sink
        if listener is not None:
            for _ in {lane.source for lane in lanes}:
                self._accept(listener, timeout)
            listener.close()
        for sink in {self._peer_of_stage[stage] for stage in self._sources}:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            connection.settimeout(timeout)
            connection.connect(everyone[sink]["address"])
            self._watch(sink, connection)
        for rank, pid in enumerate(self._pids):
            if rank != self.rank and rank not in self._pidfds:
                self._pidfds[rank] = os.pidfd_open(pid)  # of no lane, but it may be why another rank fails

    def _accept(self, listener: socket.socket, timeout: float) -> None:
        """Takes the connection of one source; who it is, the kernel says."""
        listener.settimeout(timeout)
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            missing = sorted(set(self._peer_of_stage.values()) - set(self._sockets))
            raise TapTimeout(f"rank(s) {missing} did not connect to rank {self.rank} within {timeout:g} s") from None
        pid, uid, _ = PEER_CREDENTIALS.unpack(
            connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, PEER_CREDENTIALS.size)
        )
        if uid != os.getuid() or pid not in self._pids:
            raise TapChannelError(f"a process that is no rank (pid {pid}, user {uid}) connected to rank {self.rank}")
        self._watch(self._pids.index(pid), connection)

    def _watch(self, rank: int, connection: socket.socket) -> None:
        connection.setblocking(False)
        _hold_headers(connection, self._most_slots)
        self._sockets[rank] = connection
        # A closed socket is no proof of life or death: forked workers of a dead process keep its sockets open.
        self._pidfds[rank] = os.pidfd_open(self._pids[rank])
        for fd in (connection.fileno(), self._pidfds[rank]):
            self._rank_of_fd[fd] = rank
            self._poll.register(fd, select.POLLIN)

    # --------------------------------------------------------------------------------------------------- steps

    def begin_step(self, sizes: Mapping[int, Sequence[int]], digest: int, timeout: float) -> None:
        for stage, end in self._sinks.items():
            needed = max(sizes[stage])
            if not self._has_ring(stage, needed):
                self._offer_ring(stage, end.slots, int(needed * GROWTH) if stage in self._sized else needed)
                self._sized.add(stage)
        for stage in self._sources:
            is_large_enough = partial(self._has_ring, stage, max(sizes[stage]))
            self._wait(is_large_enough, stage, timeout, "make landing slots")

    def _has_ring(self, stage: int, slot_bytes: int) -> bool:
        return stage in self._rings and self._rings[stage].slot_bytes >= slot_bytes

    @abstractmethod
    def _offer_ring(self, stage: int, slots: int, slot_bytes: int) -> None:
        """The draft's rank makes a ring with slots of at least this size, in place of the lane's last, and sends it."""

    @abstractmethod
    def _take_ring(self, header: Header, content: bytes, ancillary: list) -> None:
        """A message about a ring has come, with what was sent beside its header."""

    def _await_slot(self, stage: int, timeout: float) -> int:
        """The slot of the next message of an own source stage, once it is free."""
        end = self._sources[stage]
        self._wait(lambda: end.has_free_slot, stage, timeout, "empty a landing slot")
        return end.slot

    def slot(self, stage: int) -> int:
        return (self._sources.get(stage) or self._sinks[stage]).slot

    def publish(self, stage: int, header: Header) -> None:
        self._sources[stage].publish()
        self._send(self._peer_of_stage[stage], header)

    def _next_header(self, stage: int, timeout: float) -> bytes:
        """What announces the next message of a lane."""
        inbox = self._inbox[stage]
        self._wait(lambda: inbox, stage, timeout, "send taps")
        return inbox.popleft()

    def release(self, stage: int) -> None:
        sequence = self._sinks[stage].release()
        self._send(self._peer_of_stage[stage], Header(Kind.CREDIT, sequence=sequence, stage=stage))

    def end_step(self, timeout: float) -> None:
        for stage, end in self._sources.items():
            self._wait(lambda end=end: end.idle, stage, timeout, "take the last taps")

    # -------------------------------------------------------------------------------------------------- events

    def _send(self, rank: int, header: Header, content: bytes = b"", fd: int | None = None) -> None:
        """One datagram. There are never more under way than slots, which the socket was made to hold."""
        ancillary = [] if fd is None else [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))]
        try:
            self._sockets[rank].sendmsg([header.pack() + content], ancillary)
        except (BrokenPipeError, ConnectionResetError):
            # What it said before it went is still there to be read.
            self._read(rank)
            self._raise_gone(rank)

    def _wait(
        self, ready: Callable[[], object], stage: int, timeout: float, what: str, *, on_device: bool = False
    ) -> None:
        """Handles what arrives, on any lane, until something is ready: said by a peer, or else done by a device."""
        peer = self._peer_of_stage[stage]
        deadline = time.monotonic() + timeout
        while not ready():
            if peer in self._departed and not on_device:
                raise TapChannelError(f"rank {peer} closed the channel when rank {self.rank} waited for it to {what}")
            remaining = deadline - time.monotonic()
            events = self._poll.poll(1000 * max(0.0, min(remaining, LOOK) if on_device else remaining))
            if not events and remaining <= 0:
                raise TapTimeout(
                    f"rank {self.rank} waited {timeout:g} s for rank {peer} to {what} (lane of stage {stage})"
                )
            for rank in {self._rank_of_fd[fd] for fd, _ in events}:
                self._read(rank)

    def _read(self, rank: int) -> None:
        """Everything that a rank has sent; then, whether it still lives."""
        while True:
            try:
                content, ancillary, _, _ = self._sockets[rank].recvmsg(
                    HEADER_BYTES + MAX_TEXT, socket.CMSG_SPACE(array.array("i").itemsize)
                )
            except BlockingIOError:
                break
            except ConnectionResetError:
                continue  # said once, before what is still there to be read
            if not content:
                if rank not in self._departed:
                    self._raise_gone(rank)
                break
            try:
                self._handle(rank, content, ancillary)
            except TapMismatch as error:
                raise TapMismatch(f"from rank {rank}: {error}") from error
            if rank in self._departed:
                return
        if _readable([self._pidfds[rank]], 0.0):
            self._raise_gone(rank)

    def _handle(self, rank: int, content: bytes, ancillary: list) -> None:
        header = Header.unpack(content[:HEADER_BYTES])
        if header.kind == Kind.TAPS:
            self._require_lane(self._sinks, rank, header)
            self._inbox[header.stage].append(content)
        elif header.kind == Kind.CREDIT:
            self._require_lane(self._sources, rank, header)
            self._sources[header.stage].credit(header.sequence)
        elif header.kind == Kind.RING:
            self._require_lane(self._sinks | self._sources, rank, header)
            self._take_ring(header, content[HEADER_BYTES:], ancillary)
        elif header.kind == Kind.FAILURE:
            raise TapChannelError(f"rank {rank} gave up: {content[HEADER_BYTES:].decode(errors='replace')}")
        else:
            self._departed.add(rank)
            for fd in (self._sockets[rank].fileno(), self._pidfds[rank]):
                self._poll.unregister(fd)

    def _require_lane(self, ends: Mapping[int, object], rank: int, header: Header) -> None:
        if header.stage not in ends or self._peer_of_stage[header.stage] != rank:
            raise TapMismatch(
                f"rank {rank} sent {header.kind.name} for stage {header.stage}, which is no lane of it here"
            )

    def _raise_gone(self, rank: int) -> None:
        stages = [stage for stage, peer in self._peer_of_stage.items() if peer == rank]
        raise TapChannelError(
            f"rank {rank} is gone: its process ended or closed its socket (lanes of stages {stages})"
        )

    # ----------------------------------------------------------------------------------------------------- end

    def dead_ranks(self) -> list[int]:
        # A process that ends closes its connections a little before it counts as ended.
        dead = _readable(self._pidfds.values(), DYING)
        return [rank for rank, fd in self._pidfds.items() if fd in dead]

    def fail(self, text: str) -> None:
        content = Header(Kind.FAILURE).pack() + text.encode()[:MAX_TEXT]
        for connection in self._sockets.values():
            try:
                connection.send(content)
            except OSError:
                continue  # it is gone, or full of messages that it does not read

    def _has_left(self, rank: int, seconds: float) -> bool:
        """Whether a rank says goodbye, or ends, within some seconds. What else it says is not heard any more."""
        connection, deadline = self._sockets[rank], time.monotonic() + seconds
        while rank not in self._departed and time.monotonic() < deadline:
            ready = _readable([connection.fileno(), self._pidfds[rank]], deadline - time.monotonic())
            if connection.fileno() in ready:
                try:
                    content = connection.recv(HEADER_BYTES + MAX_TEXT)
                except ConnectionResetError:
                    continue  # said once, as in `_read`
                if not content or Header.unpack(content[:HEADER_BYTES]).kind == Kind.GOODBYE:
                    return True
            elif ready:
                return True
        return rank in self._departed

    def close(self) -> None:
        for connection in self._sockets.values():
            try:
                connection.send(Header(Kind.GOODBYE).pack())
            except OSError:
                pass  # it went first
            connection.close()
        for fd in self._pidfds.values():
            os.close(fd)
        self._sockets, self._pidfds, self._rings = {}, {}, {}

    @property
    def memory_bytes(self) -> int:
        """Bytes of the landing slots that this rank has mapped."""
        return sum(ring.slots * ring.slot_bytes for ring in self._rings.values())


def _hold_headers(connection: socket.socket, count: int) -> int:
    """Lets a socket hold as many headers that were not read yet, as far as the kernel allows. Returns how many it holds."""
    needed = QUEUED_BYTES * (OTHER_MESSAGES + count)
    if connection.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) < needed:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, needed)
    return connection.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) // QUEUED_BYTES - OTHER_MESSAGES


def _readable(fds: Iterable[int], seconds: float) -> set[int]:
    """Those of some file descriptors, of any number, that can be read, or a first one within some seconds."""
    poll = select.poll()
    for fd in fds:
        poll.register(fd, select.POLLIN)
    return {fd for fd, _ in poll.poll(1000 * seconds)}


def place() -> str:
    """Same on two processes iff they can reach each other's sockets and see each other's process ids."""
    namespaces = [os.readlink(f"/proc/self/ns/{kind}") for kind in ("net", "pid")]
    return " ".join([Path("/proc/sys/kernel/random/boot_id").read_text().strip(), *namespaces])
