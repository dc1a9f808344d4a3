"""The header in front of every message of a tap channel: 64 bytes, checked field by field by whoever receives it."""

import struct
import zlib
from dataclasses import asdict, dataclass
from enum import IntEnum


HEADER_BYTES = 64
MAGIC = b"TAPC"
VERSION = 1

# magic, version, kind | epoch | sequence | microbatch, stage | bytes | plan | slot, number of taps; then a CRC, 4 unused.
_FIELDS = struct.Struct("<4sHHQQIIQQII")
_CHECKSUM = struct.Struct("<I4x")
assert _FIELDS.size + _CHECKSUM.size == HEADER_BYTES


class TapChannelError(RuntimeError):
    """A tap channel broke. It cannot be used again."""


class TapTimeout(TapChannelError):
    """A rank did not do its part in time."""


class TapMismatch(TapChannelError):
    """Something arrived that is not what the plan says comes next."""


class Kind(IntEnum):
    """What a message is."""

    TAPS = 1  # a slot was filled
    CREDIT = 2  # a slot is free again
    RING = 3  # landing slots of this size; the memory comes with the message
    FAILURE = 4  # the sender gave up; a text follows
    GOODBYE = 5  # the sender is done and will close


@dataclass(frozen=True)
class Header:
    """
    Args:
        kind ([`Kind`]):
            What the message is.
        epoch (`int`):
            Step of the channel, counted from 1.
        sequence (`int`):
            Messages of this lane before this one.
        microbatch (`int`), stage (`int`):
            Whose taps.
        num_bytes (`int`):
            Length of the payload.
        plan (`int`):
            64 bits that stand for the plan and the shapes of this step.
        slot (`int`):
            Landing slot.
        num_taps (`int`):
            Number of taps.
    """

    kind: Kind
    epoch: int = 0
    sequence: int = 0
    microbatch: int = 0
    stage: int = 0
    num_bytes: int = 0
    plan: int = 0
    slot: int = 0
    num_taps: int = 0

    def pack(self) -> bytes:
        """The header as 64 bytes."""
        fields = _FIELDS.pack(
            MAGIC,
            VERSION,
            self.kind,
            self.epoch,
            self.sequence,
            self.microbatch,
            self.stage,
            self.num_bytes,
            self.plan,
            self.slot,
            self.num_taps,
        )
        return fields + _CHECKSUM.pack(zlib.crc32(fields))

    @classmethod
    def unpack(cls, content: bytes) -> "Header":
        """
        The inverse of [`Header.pack`].

        Raises:
            TapMismatch: if the content is not a header.
        """
        if len(content) != HEADER_BYTES:
            raise TapMismatch(f"a header of {len(content)} bytes arrived instead of {HEADER_BYTES}: it was cut short")
        fields = content[: _FIELDS.size]
        if _CHECKSUM.unpack(content[_FIELDS.size :])[0] != zlib.crc32(fields):
            raise TapMismatch("a header arrived whose checksum is wrong")
        magic, version, kind, *numbers = _FIELDS.unpack(fields)
        if magic != MAGIC or version != VERSION:
            raise TapMismatch(f"a message of another kind arrived: {magic!r}, version {version}")
        return cls(Kind(kind), *numbers)

    def require(self, expected: "Header") -> None:
        """
        Checks that this is the header that was expected.

        Raises:
            TapMismatch: naming every field that differs.
        """
        if self == expected:
            return
        ours, theirs = asdict(expected), asdict(self)
        wrong = [f"{name} {theirs[name]} instead of {ours[name]}" for name in ours if theirs[name] != ours[name]]
        raise TapMismatch(
            f"stage {expected.stage} was to send microbatch {expected.microbatch} of step {expected.epoch}, but a "
            f"message came with {', '.join(wrong)}: it was lost, repeated, reordered or cut short, or the ranks have "
            "other plans or shapes"
        )
