"""What an attention kernel is told besides its tensors: where documents lie, and who sees whom."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Documents:
    """
    Documents of a pack, one after the other.

    Attributes:
        q_lens, k_lens (`Sequence[int]`): query and key rows of each document; zero is allowed.
    """

    q_lens: Sequence[int]
    k_lens: Sequence[int]

    def slices(self) -> Iterator[tuple[slice, slice]]:
        """Query and key rows of each document that has both."""
        q_start = k_start = 0
        for q_len, k_len in zip(self.q_lens, self.k_lens, strict=True):
            if q_len and k_len:
                yield slice(q_start, q_start + q_len), slice(k_start, k_start + k_len)
            q_start, k_start = q_start + q_len, k_start + k_len


@dataclass(frozen=True)
class Mask:
    """
    Which keys of its document a query sees, and the factor on scores.

    Attributes:
        causal (`bool`): whether queries are the last rows of their document and see the keys up to their own, or all.
        scale (`float`): factor on the scores.
        window (`int`, *optional*): keys that a query sees before its own; `None` for all of them.
    """

    causal: bool
    scale: float
    window: int | None = None
