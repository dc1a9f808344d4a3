"""
Taps between GPUs of one host: from the memory of one to that of the other, headers over gloo.

Torch's symmetric memory maps the memory of every rank into all others (`torch.distributed._symmetric_memory`). That is
all it is used for. A message is a copy into the memory of the draft's GPU, and its header goes out over gloo when the
host has seen that the copy is done, so whoever has the header may read the message. Its signals (`put_signal`,
`wait_signal`) are not used: a GPU that waits for one in vain spins for ever or loses its context, and neither a
fall-back nor an error that names a rank comes out of that.

When may a source write into a slot again? A lane has twice as many landing slots as receives for headers are posted at
a time, say `2 h`. Gloo has room for the header of message `n` when the header of message `n - h` was received for,
which the draft's rank does when it has copied message `n - 2 h` out of its slot: the slot of message `n`.
(`tests/pp/test_protocol_model.py` explores this.) `h` is half of the plan's slots, rounded up, so a source may run
ahead at least as far as planned.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory

from .message import Kind, TapHeader, TapMismatch
from .pinned import PinnedTransport
from .plan import Lane
from .transport import TransportUnavailable


# Slots start at multiples of this.
ALIGNMENT = 512
# Landing slots that were too small are replaced by ones with this much to spare.
GROWTH = 1.25
# Length of a message of the probe, and seconds that each of its copies may take.
PROBE_BYTES, PROBE_SECONDS = 4096, 60.0
# Room for a text behind a header.
REASON_BYTES = 960
# Errors of CUDA and torch, and of another version of torch's private module.
FAILURES = (RuntimeError, AttributeError, TypeError, ValueError)


class SymmetricTransport(PinnedTransport):
    """
    Carries taps between GPUs of one host, one rank on each. `connect` finds out whether it works, by writing known
    bytes into every slot of every lane and reading them on the other side.

    The landing slots are torch's workspace of the group, equally large on every rank, and stay allocated until the
    process ends. A step with larger microbatches than ever enlarges them, which all ranks do together.

    Args:
        inner ([`GlooTransport`]):
            Carries the headers.
        device (`torch.device`):
            The GPU of this rank, with its index.

    Raises:
        TransportUnavailable: in `connect`, on all ranks alike, if the memory of one GPU cannot be written by another.
    """

    def connect(self, lanes: Sequence[Lane], fingerprint: int, timeout: float) -> None:
        lanes = [lane._replace(slots=(lane.slots + 1) // 2) for lane in lanes]
        super().connect(lanes, fingerprint, timeout)
        self._lanes = {lane.stage: lane for lane in lanes}
        self._slot_bytes: dict[int, int] = {}
        self._memory: list[torch.Tensor] = []
        self._timeout = min(timeout, PROBE_SECONDS)
        indices = self._together(lambda: self.device.index)
        self._together(lambda: self._require_reach(indices))
        self._together(lambda: self._make_slots(dict.fromkeys(self._lanes, PROBE_BYTES)))
        self._together(self._write_known_bytes)
        self._together(self._require_known_bytes)
        self._slot_bytes = {}  # the probe's sizes are none to grow from

    def begin_step(self, sizes: Mapping[int, Sequence[int]], digest: int, timeout: float) -> None:
        self._make_slots({stage: max(sizes[stage]) for stage in self._lanes})
        # Headers travel alone. The room behind one is for the reason of a failure.
        super().begin_step({stage: [REASON_BYTES] * len(sizes[stage]) for stage in self._lanes}, digest, timeout)

    def _make_slots(self, sizes: Mapping[int, int]) -> None:
        """Makes larger slots if those of a lane are too small. Collective."""
        needed = {stage: -(-size // ALIGNMENT) * ALIGNMENT for stage, size in sizes.items()}
        if all(size <= self._slot_bytes.get(stage, 0) for stage, size in needed.items()):
            return
        spare = GROWTH if self._slot_bytes else 1
        for stage, size in needed.items():
            enlarged = int(size * spare) // ALIGNMENT * ALIGNMENT
            self._slot_bytes[stage] = max(enlarged, self._slot_bytes.get(stage, 0))
        self._memory = self._map(sum(2 * self._lanes[stage].slots * n for stage, n in self._slot_bytes.items()))

    def _slot(self, rank: int, header: TapHeader) -> torch.Tensor:
        """Returns the landing slot of a message, in the memory of a rank."""
        start = 0
        for stage, lane in self._lanes.items():
            if stage == header.stage:
                start += header.sequence % (2 * lane.slots) * self._slot_bytes[stage]
                break
            start += 2 * lane.slots * self._slot_bytes[stage]
        return self._memory[rank][start : start + header.num_bytes]

    def _room(self, header: TapHeader) -> torch.Tensor:
        self.inner.reserve(header.stage, 0, self._timeout)
        return self._slot(self._lanes[header.stage].sink, header)

    def _content(self, header: TapHeader, payload: torch.Tensor) -> torch.Tensor:
        return self._slot(self.rank, header)

    # ------------------------------------------------------------------------------- calls of torch's private module

    def _map(self, num_bytes: int) -> list[torch.Tensor]:
        """Returns, by rank, that many bytes of its memory. Collective."""
        with torch.cuda.device(self.device):
            handle = symmetric_memory.get_symm_mem_workspace(self.inner.group.group_name, num_bytes)
        return [handle.get_buffer(rank, (num_bytes,), torch.uint8) for rank in range(handle.world_size)]

    def _require_reach(self, indices: Sequence[int]) -> None:
        """Raises where it is known beforehand that `_map` would fail, on one rank perhaps while others wait for it."""
        backend = symmetric_memory.get_backend(self.device)
        if backend != "CUDA":
            raise RuntimeError(f"symmetric memory is of the backend {backend} (TORCH_SYMMMEM), not CUDA")
        if len(set(indices)) < len(indices):
            raise RuntimeError(f"the ranks have GPUs of the numbers {indices}: symmetric memory wants one for each")
        for index in indices:
            if index != self.device.index and not torch.cuda.can_device_access_peer(self.device.index, index):
                raise RuntimeError(f"{self.device} does not reach the memory of cuda:{index}")

    # -------------------------------------------------------------------------------------------------- the probe

    def _together(self, act: Callable[[], Any]) -> list[Any]:
        """Returns the result of an act on every rank; if it fails on one, all give up."""
        result, error = None, None
        try:
            result = act()
        except FAILURES as failure:
            error = f"rank {self.rank}: {type(failure).__name__}: {failure}"
        everyone: list[Any] = [None] * dist.get_world_size(self.inner.group)
        dist.all_gather_object(everyone, (result, error), group=self.inner.group)
        errors = [error for _, error in everyone if error is not None]
        if errors:
            self.close()
            raise TransportUnavailable("; ".join(errors))
        return [result for result, _ in everyone]

    def _probe_headers(self, lane: Lane) -> list[TapHeader]:
        """Returns the header of a message for each landing slot of a lane."""
        slots = range(2 * lane.slots)
        return [TapHeader(Kind.TAPS, sequence=n, stage=lane.stage, num_bytes=PROBE_BYTES) for n in slots]

    def _write_known_bytes(self) -> None:
        """Fills the landing slots of the lanes that begin here."""
        for stage in self._slots:
            for header in self._probe_headers(self._lanes[stage]):
                known = _pattern(header).to(self.device)
                packed = self._module.Event()
                packed.record(self._module.current_stream(self.device))
                self._copy(self._slot(self._lanes[stage].sink, header), known, header, packed)

    def _require_known_bytes(self) -> None:
        """Checks the landing slots on the draft's rank."""
        for lane in self._lanes.values():
            for header in self._probe_headers(lane) if lane.sink == self.rank else ():
                wrong = int((self._slot(self.rank, header).cpu() != _pattern(header)).sum())
                if wrong:
                    raise TapMismatch(
                        f"{wrong} of {PROBE_BYTES} bytes that rank {lane.source} wrote into slot {header.sequence} of "
                        f"stage {lane.stage} are wrong"
                    )


def _pattern(header: TapHeader) -> torch.Tensor:
    """Returns bytes that no other message of the probe has in their places."""
    return ((torch.arange(PROBE_BYTES) * 7 + 31 * header.sequence + 101 * header.stage) % 251).to(torch.uint8)
