"""How the messages of a tap channel get from the rank of a source stage to the rank of the draft's stage."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from .message import Header
from .plan import Lane


class Transport(Protocol):
    """
    What [`TapChannel`] needs. One object per process; a lane is named by its source stage. Messages of a lane arrive in
    the order in which they were published.

    Every method that waits takes the seconds after which it gives up, and raises [`TapTimeout`] then, or
    [`TapChannelError`] as soon as a rank that it waits for is gone. Both name the rank and the stage.
    """

    rank: int
    device: torch.device  # of the tensors that are packed and handed out

    def connect(self, lanes: Sequence[Lane], fingerprint: int, timeout: float) -> None:
        """
        Called once, by all ranks of the group. Raises `ValueError` on all alike if their plans differ, and
        [`TransportUnavailable`] on all alike if taps cannot travel this way.
        """

    def begin_step(self, sizes: Mapping[int, Sequence[int]], digest: int, timeout: float) -> None:
        """
        Bytes of every message of the step, by source stage, and 64 bits that stand for plan and shapes. Called by all
        ranks, with the same.
        """

    def reserve(self, stage: int, num_bytes: int, timeout: float) -> torch.Tensor:
        """
        The next landing slot (or a staging buffer for it) of an own source stage, once it is free: `(num_bytes,)`. Nothing
        is written to it but by `pack`.
        """

    def pack(self, room: torch.Tensor, hidden: torch.Tensor) -> None:
        """Copies a hidden state, which may change afterwards, to where its message is made up."""

    def slot(self, stage: int) -> int:
        """Index of the slot that the next message of a lane goes to, or comes from."""

    def publish(self, stage: int, header: Header) -> None:
        """Announces what was packed into the reserved slot."""

    def receive(self, stage: int, timeout: float) -> tuple[bytes, Any]:
        """Header of the next message of a lane, and where its payload is."""

    def collect(self, header: Header, payload: Any) -> torch.Tensor:
        """Takes the payload of the last message that was received out of its slot, and gives the slot back."""

    def hand_over(self, stage: int, microbatch: int, message: torch.Tensor) -> None:
        """What was collected, or a view of it, is about to be used by what the caller does next."""

    def end_step(self, timeout: float) -> None:
        """Waits until everything this rank published has been taken, and what it collected is there."""

    def dead_ranks(self) -> list[int]:
        """Ranks of the group whose process has ended, as far as the transport can know."""

    def fail(self, text: str) -> None:
        """Tells the others why this rank gives up. Never raises, never waits long."""

    def close(self) -> None:
        """Frees everything. The others are told that no more will come."""


class TransportUnavailable(RuntimeError):
    """The ranks of a group cannot reach each other by this transport. The message says which rank found what."""


class HostCopies:
    """For transports of host memory: what was copied is there."""

    device = torch.device("cpu")

    def pack(self, room: torch.Tensor, hidden: torch.Tensor) -> None:
        room.copy_(hidden)

    def collect(self, header: Header, payload: torch.Tensor) -> torch.Tensor:
        # One copy of the whole message; the taps look into it.
        message = payload[: header.num_bytes].clone()
        self.release(header.stage)
        return message

    def hand_over(self, stage: int, microbatch: int, message: torch.Tensor) -> None:
        pass


def gather_from_all(group: dist.ProcessGroup, mine: dict[str, object], fingerprint: int) -> list[dict[str, object]]:
    """
    What every rank says about itself, by rank.

    Raises:
        ValueError: on all ranks alike, if their plans differ.
    """
    everyone: list[dict[str, object]] = [{} for _ in range(dist.get_world_size(group))]
    dist.all_gather_object(everyone, {**mine, "plan": fingerprint}, group=group)
    plans = [theirs["plan"] for theirs in everyone]
    if len(set(plans)) > 1:
        common = max(set(plans), key=plans.count)
        others = [rank for rank, plan in enumerate(plans) if plan != common]
        raise ValueError(
            f"The tap plan of rank(s) {others} differs from that of the others (fingerprints by rank: "
            f"{[f'{plan:016x}' for plan in plans]}). Taps, stages, schedule, number of microbatches and slots must be the "
            "same everywhere: build the plan from the same settings on all ranks."
        )
    return everyone
