"""
The two ends of a lane as counters, without any transport: which slot is next, and whether it is free.

`tests/pp/test_protocol_model.py` explores these classes together with whole schedules exhaustively.
"""

from .message import TapMismatch


class SourceEnd:
    """
    The end that fills slots.

    Args:
        slots (`int`):
            Landing slots of the lane.
    """

    def __init__(self, slots: int):
        self.slots = slots
        self.sent = 0
        self.released = 0

    @property
    def has_free_slot(self) -> bool:
        return self.sent - self.released < self.slots

    @property
    def slot(self) -> int:
        """The slot of the next message."""
        return self.sent % self.slots

    def publish(self) -> None:
        """The next slot was filled and announced."""
        self.sent += 1

    def credit(self, sequence: int) -> None:
        """
        The other end has emptied the slot of a message.

        Raises:
            TapMismatch: if it is not the oldest message that is still there.
        """
        if sequence != self.released or self.released == self.sent:
            raise TapMismatch(
                f"slot of message {sequence} was given back when {self.released} of {self.sent} were due"
            )
        self.released += 1


class SinkEnd:
    """
    The end that empties slots.

    Args:
        slots (`int`):
            Landing slots of the lane.
    """

    def __init__(self, slots: int):
        self.slots = slots
        self.released = 0

    @property
    def slot(self) -> int:
        """The slot of the next message."""
        return self.released % self.slots

    def release(self) -> int:
        """The content of the next slot was copied out. Returns the sequence number to give back."""
        self.released += 1
        return self.released - 1
