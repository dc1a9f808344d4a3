"""How the messages of a tap channel get from the rank of a source stage to the rank of the draft's stage."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from .message import TapHeader
from .plan import Lane


class Transport(Protocol):
    """
    The operations that [`TapChannel`] needs of a transport. One object per process; a lane is named by its source
    stage. Messages of a lane arrive in the order in which they were published.

    Every method that waits takes the seconds after which it gives up, and raises [`TapTimeout`] then, or
    [`TapChannelError`] as soon as a rank that it waits for is gone. Both name the rank and the stage.
    """

    rank: int
    device: torch.device  # of the tensors that `reserve` and `collect` return

    def connect(self, lanes: Sequence[Lane], fingerprint: int, timeout: float) -> None:
        """
        Called once, by all ranks of the group. Raises `ValueError` on all alike if their plans differ, and
        [`TransportUnavailable`] on all alike if taps cannot travel this way.
        """

    def begin_step(self, sizes: Mapping[int, Sequence[int]], digest: int, timeout: float) -> None:
        """
        Takes the bytes of every message of the step, by source stage, and 64 bits that stand for plan and shapes.
        Called by all ranks, with the same.
        """

    def reserve(self, stage: int, num_bytes: int, timeout: float) -> torch.Tensor:
        """
        Returns `(num_bytes,)` bytes to put the next message of an own source stage into, once there is room for it.
        """

    def publish(self, stage: int, header: TapHeader) -> None:
        """Sends the message that was put into the reserved bytes."""

    def receive(self, stage: int, timeout: float) -> tuple[bytes, Any]:
        """Returns the header of the next message of a lane, and where its payload is."""

    def collect(self, header: TapHeader, payload: Any) -> torch.Tensor:
        """
        Takes the payload of the message that was received last out of its slot, and gives the slot back. The current
        stream may use the result at once.
        """

    def end_step(self, timeout: float) -> None:
        """Waits until everything that this rank published has been taken."""

    def dead_ranks(self) -> list[int]:
        """Returns the ranks of the group whose process has ended, as far as the transport can know."""

    def fail(self, text: str) -> None:
        """Tells the others why this rank gives up. Never raises, never waits long."""

    def close(self) -> None:
        """Frees everything. Nothing may be under way."""


class TransportUnavailable(RuntimeError):
    """
    The ranks of a group cannot reach each other by this transport. The message names the rank that found out, and why.
    """
