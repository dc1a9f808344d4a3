"""
The header in front of every message of a tap channel: 64 bytes, checked field by field by the rank that receives it.
"""

import struct
import zlib
from dataclasses import asdict, astuple, dataclass
from enum import IntEnum


HEADER_BYTES = 64
MAGIC = b"TAPC"
VERSION = 2

# magic, version, kind | epoch | sequence | microbatch, stage | bytes | plan | number of taps; then a CRC, 8 unused.
_FIELDS = struct.Struct("<4sHHQQIIQQI")
_CHECKSUM = struct.Struct("<I8x")
assert _FIELDS.size + _CHECKSUM.size == HEADER_BYTES


class TapChannelError(RuntimeError):
    """A tap channel broke. It cannot be used again."""


class TapTimeout(TapChannelError):
    """A rank did not do its part in time."""


class TapMismatch(TapChannelError):
    """A message arrived that is not the one the plan says comes next."""


class Kind(IntEnum):
    """The kinds of messages."""

    TAPS = 1  # the taps of a microbatch, from a source
    BEGIN = 2  # the draft's rank has begun a step
    END = 3  # the draft's rank has taken all taps of the step
    FAILURE = 4  # the sender gave up; a text follows


@dataclass(frozen=True)
class TapHeader:
    """
    Args:
        kind ([`Kind`]):
            Kind of the message.
        epoch (`int`):
            Step of the channel, counted from 1.
        sequence (`int`):
            Messages of this lane before this one.
        microbatch (`int`), stage (`int`):
            The microbatch and the stage that the taps belong to.
        num_bytes (`int`):
            Length of the payload.
        plan (`int`):
            64 bits that stand for the plan and the shapes of this step.
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
    num_taps: int = 0

    def pack(self) -> bytes:
        """Returns the header as 64 bytes."""
        fields = _FIELDS.pack(MAGIC, VERSION, *astuple(self))
        return fields + _CHECKSUM.pack(zlib.crc32(fields))

    @classmethod
    def unpack(cls, content: bytes) -> "TapHeader":
        """
        Reads a header from its 64 bytes.

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

    def require(self, expected: "TapHeader") -> None:
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
