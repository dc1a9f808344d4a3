"""
The ring step: attention of this rank's queries to keys and values that visit one rank after the other, merged by
their log-sum-exps, and the way home of the gradients. Forward and backward without autograd; the backward takes the
output and log-sum-exp over *all* keys, so every block's gradient is exact on its own (`P = exp(S - L)`,
`dS = P (dout v^T - rowsum(dout * out))`).

Two other ways to reach the keys are [`~gathered.GatheredTrunk`], whose blocks were gathered once for all passes, and
[`~window.WindowTrunk`], which fetches only the rows before each segment.

Shapes: `T` rows of this rank, `Ts` rows of the pass, `Hq` / `Hkv` query / key-value heads, `D` / `Dv` head dims of
keys and values.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..modeling.attention_kernels import AttentionKernel, accumulation_dtype, merge_partials
from ..modeling.kernel_call import Attended, Documents, Gradients, Mask
from .layout import ContextLayout
from .messages import Ring


# Source rank and its flat block, in the order in which a ring visits.
Visits = Iterator[tuple[int, Tensor]]


@dataclass(frozen=True)
class TrunkShape:
    """Heads and head dims of keys and values, to cut a flat block into both."""

    num_kv_heads: int
    key_dim: int
    value_dim: int

    @classmethod
    def of(cls, k: Tensor, v: Tensor) -> "TrunkShape":
        """Reads the shape off `(T, Hkv, D)` keys and `(T, Hkv, Dv)` values."""
        return cls(k.shape[1], k.shape[2], v.shape[2])

    @property
    def row_size(self) -> int:
        return self.num_kv_heads * (self.key_dim + self.value_dim)

    def views(self, block: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of a flat block, as views of it."""
        num_rows = block.numel() // self.row_size
        keys, values = block.split(
            [num_rows * self.num_kv_heads * self.key_dim, num_rows * self.num_kv_heads * self.value_dim]
        )
        return (
            keys.view(num_rows, self.num_kv_heads, self.key_dim),
            values.view(num_rows, self.num_kv_heads, self.value_dim),
        )


def travelling_block(layout: ContextLayout, k: Tensor, v: Tensor) -> Tensor:
    """The rows of this rank that others may need, keys then values, flat."""
    num_rows = layout.split_rows[layout.rank]
    return torch.cat([k[:num_rows].flatten(), v[:num_rows].flatten()])


def make_ring(layout: ContextLayout, shape: TrunkShape) -> Ring:
    """The ring of a layout for keys and values of this shape."""
    return Ring(layout.group, layout.rank, [rows * shape.row_size for rows in layout.split_rows])


class RingTrunk:
    """
    Keys and values travel in every call, their gradients travel home in the accumulation dtype. Of the other ranks'
    rows no more than two blocks are held at a time.

    Args:
        layout ([`ContextLayout`]):
            Who has which rows.
        kernel ([`AttentionKernel`]):
            Computes blocks.
        num_pass (`int`):
            0, or 1 for the rows of later passes.
        scale (`float`):
            Factor on the scores.
    """

    def __init__(self, layout: ContextLayout, kernel: AttentionKernel, num_pass: int, scale: float):
        self.layout, self.kernel, self.num_pass, self.scale = layout, kernel, num_pass, scale

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Attended:
        """Attention of the rows of the pass, in the accumulation dtype."""
        wide = accumulation_dtype(q.dtype)
        documents, shape = Documents(*self.layout.local_lens(self.num_pass)), TrunkShape.of(k, v)
        visits = self._visits(k, v)
        out, lse = self.kernel.forward(q, k, v, documents, Mask(causal=True, scale=self.scale))
        attended = Attended(out.to(wide), lse)
        for source, visitor in visits:
            block = self.layout.remote_block(source, self.num_pass)
            if block is None:
                continue
            keys, values = (tensor[block.k_rows] for tensor in shape.views(visitor))
            rows, mask = block.q_rows, Mask(causal=False, scale=self.scale)
            part = self.kernel.forward(q[rows], keys, values, block.documents, mask)
            attended.out[rows], attended.lse[rows] = merge_partials(attended.at(rows), part)
        return attended

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, attended: Attended, need_trunk: bool
    ) -> Gradients:
        """
        Returns the gradients of `q`, `k`, `v` in the accumulation dtype. With `need_trunk=False`, which must be the
        same on all ranks, the gradients of `k` and `v` are `None` and nothing travels home.
        """
        documents, shape = Documents(*self.layout.local_lens(self.num_pass)), TrunkShape.of(k, v)
        visits = self._visits(k, v)
        grads = self.kernel.backward(dout, q, k, v, attended, documents, Mask(causal=True, scale=self.scale))
        dq, dk, dv = (grad.to(attended.lse.dtype) for grad in grads)
        parts = self._block_gradients(visits, shape, dout, q, attended, dq)
        if need_trunk:
            self._collect(parts, shape, dk, dv)
            return self._trunk_gradients(dq, dk, dv)
        for _ in parts:
            pass
        return dq, None, None

    def _visits(self, k: Tensor, v: Tensor) -> Visits:
        """Blocks of the other ranks, the first of them under way."""
        return make_ring(self.layout, TrunkShape.of(k, v)).visits(travelling_block(self.layout, k, v))

    def _block_gradients(
        self, visits: Visits, shape: TrunkShape, dout: Tensor, q: Tensor, attended: Attended, dq: Tensor
    ) -> Iterator[Tensor]:
        """Yields the gradient of each visiting block, flat, and adds to `dq` on the way."""
        for source, visitor in visits:
            grads = torch.zeros_like(visitor, dtype=dq.dtype)
            block = self.layout.remote_block(source, self.num_pass)
            if block is not None:
                rows = block.q_rows
                keys, values = (tensor[block.k_rows] for tensor in shape.views(visitor))
                mask = Mask(causal=False, scale=self.scale)
                part_q, *part_kv = self.kernel.backward(
                    dout[rows], q[rows], keys, values, attended.at(rows), block.documents, mask
                )
                dq[rows] += part_q
                for total, part in zip(shape.views(grads), part_kv, strict=True):
                    _add_rows(total, block.k_rows, part)
            yield grads

    def _collect(self, parts: Iterator[Tensor], shape: TrunkShape, dk: Tensor, dv: Tensor) -> None:
        """Sends the gradients of visiting blocks home and adds the arriving ones to `dk` and `dv`."""
        if self.layout.cp_size > 1:
            add_home(self.layout, make_ring(self.layout, shape).send_home(parts), shape, dk, dv)

    def _trunk_gradients(self, dq: Tensor, dk: Tensor, dv: Tensor) -> Gradients:
        """Returns the gradients that this pass hands to autograd."""
        return dq, dk, dv


def add_home(layout: ContextLayout, home: Tensor, shape: TrunkShape, dk: Tensor, dv: Tensor) -> None:
    """Adds a flat block of gradients to `dk` and `dv` of this rank's rows."""
    num_rows = layout.split_rows[layout.rank]
    for total, part in zip((dk, dv), shape.views(home), strict=True):
        total[:num_rows] += part


def _add_rows(total: Tensor, rows: slice | Tensor, part: Tensor) -> None:
    """`total[rows] += part`, also where an index occurs twice."""
    if isinstance(rows, slice):
        total[rows] += part
    else:
        total.index_add_(0, rows, part.to(total.dtype))
