"""
The call of an attention kernel: where documents lie and who sees whom, and the output with its log-sum-exp.

Shapes: `Tq` packed query rows, `Hq` query heads, `Dv` head dim of values.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor


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


class Attended(NamedTuple):
    """
    Attention over some keys, in the form in which it can be merged with attention over others and differentiated.

    Attributes:
        out (`torch.Tensor` of shape `(Tq, Hq, Dv)`): weighted mean of the values; 0 for a query without a key.
        lse (`torch.Tensor` of shape `(Tq, Hq)`):
            Natural log-sum-exp of the scores in the accumulation dtype; `-inf` for a query without a key.
    """

    out: Tensor
    lse: Tensor

    def at(self, rows: slice | Tensor) -> "Attended":
        """Some of the rows."""
        return Attended(self.out[rows], self.lse[rows])


# Gradients of queries, keys and values; `None` for one that is not asked for.
Gradients = tuple[Tensor, Tensor | None, Tensor | None]


def rows_of(ranges: Sequence[range], device: torch.device) -> slice | Tensor:
    """Rows of ranges: a slice (no copy) where each begins at the end of the last, else their indices."""
    if not ranges:
        return slice(0, 0)
    if all(left.stop == right.start for left, right in pairwise(ranges)):
        return slice(ranges[0].start, ranges[-1].stop)
    # Built on the CPU: one copy instead of one kernel launch per range.
    return torch.cat([torch.arange(piece.start, piece.stop) for piece in ranges]).to(device)
