"""
The trunk of a sharded pack: attention to keys that lie on other ranks. Forward and backward without autograd; the
backward takes the output and log-sum-exp over *all* keys, so every block's gradient is exact on its own
(`P = exp(S - L)`, `dS = P (dout v^T - rowsum(dout * out))`).

Three ways to reach the keys: [`RingTrunk`] passes them around in every pass, [`GatheredTrunk`] did so once,
[`WindowTrunk`] fetches only the rows before each segment.

Shapes: `T` rows of this rank, `Ts` rows of the pass, `Hq` / `Hkv` query / key-value heads, `D` / `Dv` head dims of keys
and values.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ..modeling.attention_kernels import AttentionKernel, accumulation_dtype, merge_partials
from ..modeling.documents import Documents, Mask
from .layout import ContextLayout
from .ring import Ring


@dataclass(frozen=True)
class TrunkShape:
    """Heads and head dims of keys and values, to cut a flat block into both."""

    num_kv_heads: int
    key_dim: int
    value_dim: int

    @classmethod
    def of(cls, k: torch.Tensor, v: torch.Tensor) -> "TrunkShape":
        """From `(T, Hkv, D)` keys and `(T, Hkv, Dv)` values."""
        return cls(k.shape[1], k.shape[2], v.shape[2])

    @property
    def row_size(self) -> int:
        return self.num_kv_heads * (self.key_dim + self.value_dim)

    def views(self, block: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a flat block, as views of it."""
        num_rows = block.numel() // self.row_size
        keys, values = block.split(
            [num_rows * self.num_kv_heads * self.key_dim, num_rows * self.num_kv_heads * self.value_dim]
        )
        return (
            keys.view(num_rows, self.num_kv_heads, self.key_dim),
            values.view(num_rows, self.num_kv_heads, self.value_dim),
        )


def travelling_block(layout: ContextLayout, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
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

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """`(Ts, Hq, Dv)` output and `(Ts, Hq)` log-sum-exp in the accumulation dtype."""
        wide = accumulation_dtype(q.dtype)
        documents, shape = Documents(*self.layout.local_lens(self.num_pass)), TrunkShape.of(k, v)
        visits = self._visits(k, v)
        out, lse = self.kernel.forward(q, k, v, documents, Mask(causal=True, scale=self.scale))
        out = out.to(wide)
        for source, visitor in visits:
            block = self.layout.remote_block(source, self.num_pass)
            if block is None:
                continue
            keys, values = (tensor[block.k_rows] for tensor in shape.views(visitor))
            part, part_lse = self.kernel.forward(
                q[block.q_rows], keys, values, block.documents, Mask(causal=False, scale=self.scale)
            )
            out[block.q_rows], lse[block.q_rows] = merge_partials(out[block.q_rows], lse[block.q_rows], part, part_lse)
        return out, lse

    def backward(self, dout, q, k, v, out, lse, need_trunk: bool):
        """
        Gradients of `q`, `k`, `v` in the accumulation dtype. With `need_trunk=False` those of `k` and `v` are `None`
        and nothing travels home; it must be the same on all ranks.
        """
        documents, shape = Documents(*self.layout.local_lens(self.num_pass)), TrunkShape.of(k, v)
        visits = self._visits(k, v)
        grads = self.kernel.backward(dout, q, k, v, out, lse, documents, Mask(causal=True, scale=self.scale))
        dq, dk, dv = (grad.to(lse.dtype) for grad in grads)
        parts = self._block_gradients(visits, shape, dout, q, out, lse, dq)
        if need_trunk:
            self._collect(parts, shape, dk, dv)
            return self._trunk_gradients(dq, dk, dv)
        for _ in parts:
            pass
        return dq, None, None

    def _visits(self, k, v) -> Iterator[tuple[int, torch.Tensor]]:
        """Blocks of the other ranks, the first of them under way."""
        return make_ring(self.layout, TrunkShape.of(k, v)).visits(travelling_block(self.layout, k, v))

    def _block_gradients(self, visits, shape: TrunkShape, dout, q, out, lse, dq) -> Iterator[torch.Tensor]:
        """For each visiting block its gradient, flat; adds to `dq` on the way."""
        for source, visitor in visits:
            grads = torch.zeros_like(visitor, dtype=lse.dtype)
            block = self.layout.remote_block(source, self.num_pass)
            if block is not None:
                rows = block.q_rows
                keys, values = (tensor[block.k_rows] for tensor in shape.views(visitor))
                part_q, *part_kv = self.kernel.backward(
                    dout[rows], q[rows], keys, values, out[rows], lse[rows],
                    block.documents, Mask(causal=False, scale=self.scale),
                )  # fmt: skip
                dq[rows] += part_q
                for total, part in zip(shape.views(grads), part_kv, strict=True):
                    _add_rows(total, block.k_rows, part)
            yield grads

    def _collect(self, parts: Iterator[torch.Tensor], shape: TrunkShape, dk: torch.Tensor, dv: torch.Tensor) -> None:
        """Sends the gradients of visiting blocks home and adds what comes home to `dk` and `dv`."""
        if self.layout.cp_size > 1:
            add_home(self.layout, make_ring(self.layout, shape).send_home(parts), shape, dk, dv)

    def _trunk_gradients(self, dq, dk, dv):
        return dq, dk, dv


def add_home(layout: ContextLayout, home: torch.Tensor, shape: TrunkShape, dk: torch.Tensor, dv: torch.Tensor) -> None:
    """Adds a flat block of gradients to those of this rank's rows."""
    num_rows = layout.split_rows[layout.rank]
    for total, part in zip((dk, dv), shape.views(home), strict=True):
        total[:num_rows] += part


@dataclass
class TrunkStore:
    """
    What [`GatheredTrunk`] keeps from pass to pass.

    Attributes:
        k, v (`torch.Tensor`): this rank's keys and values, detached.
        blocks (`list[tuple[int, torch.Tensor]]`): source rank and flat block, in the order in which a ring visits.
        grads (`list[torch.Tensor]`, *optional*): gradients of the blocks so far, then of `k` and `v`; accumulation
            dtype.
    """

    k: torch.Tensor
    v: torch.Tensor
    blocks: list[tuple[int, torch.Tensor]]
    grads: list[torch.Tensor] | None = None


class GatheredTrunk(RingTrunk):
    """
    [`RingTrunk`] over blocks that are already there. Gradients of the trunk add up in the store and go home once, when
    the backward reaches the gathering.

    Args:
        layout, kernel, num_pass, scale:
            See [`RingTrunk`].
        store ([`TrunkStore`]):
            The blocks.
    """

    def __init__(self, layout: ContextLayout, kernel: AttentionKernel, num_pass: int, scale: float, store: TrunkStore):
        super().__init__(layout, kernel, num_pass, scale)
        self.store = store

    def _visits(self, k, v):
        return iter(self.store.blocks)

    def _collect(self, parts, shape, dk, dv):
        grads = [*parts, dk, dv]
        if self.store.grads is None:
            self.store.grads = grads
        else:
            for total, grad in zip(self.store.grads, grads, strict=True):
                total += grad

    def _trunk_gradients(self, dq, dk, dv):
        return dq, None, None


class WindowTrunk:
    """
    A sliding window: a row sees its own key and the `left` keys before it, so each segment needs only the halo of rows
    before it, whatever the document's length.

    Args:
        layout, kernel, num_pass, scale:
            See [`RingTrunk`]; the kernel applies the window.
        left (`int`):
            Keys seen before a row's own; negative: the trunk is out of sight.
    """

    def __init__(self, layout: ContextLayout, kernel: AttentionKernel, num_pass: int, scale: float, left: int):
        self.kernel, self.scale, self.left = kernel, scale, left
        if left >= 0:
            self.exchange, self.block = layout.window_block(left, num_pass)

    def forward(self, q, k, v):
        """See [`RingTrunk`]."""
        wide = accumulation_dtype(q.dtype)
        if self.left < 0:
            out = q.new_zeros(*q.shape[:2], v.shape[-1], dtype=wide)
            return out, q.new_full(q.shape[:2], -torch.inf, dtype=wide)
        keys, values = self._with_halo(k, v)
        documents = self.block.documents
        out, lse = self.kernel.forward(q, keys, values, documents, Mask(causal=True, scale=self.scale))
        return out.to(wide), lse

    def backward(self, dout, q, k, v, out, lse, need_trunk: bool):
        """See [`RingTrunk`]."""
        if self.left < 0:
            grads = tuple(torch.zeros_like(tensor, dtype=lse.dtype) for tensor in (q, k, v))
            return grads if need_trunk else (grads[0], None, None)
        keys, values = self._with_halo(k, v)
        documents = self.block.documents
        dq, *dtrunk = self.kernel.backward(
            dout, q, keys, values, out, lse, documents, Mask(causal=True, scale=self.scale)
        )
        dq = dq.to(lse.dtype)
        if not need_trunk:
            return dq, None, None
        num_rows, num_halo = k.shape[0], self.exchange.num_wanted
        shape = TrunkShape.of(k, v)
        total = q.new_zeros(num_rows + num_halo, shape.row_size, dtype=lse.dtype)
        total[self.block.k_rows] = torch.cat([grad.flatten(1) for grad in dtrunk], dim=1).to(lse.dtype)
        local, halo = total.split([num_rows, num_halo])
        local = local + self.exchange.give_back(halo, num_rows)
        sizes = [shape.num_kv_heads * shape.key_dim, shape.num_kv_heads * shape.value_dim]
        dk, dv = local.split(sizes, dim=1)
        return dq, dk.reshape(k.shape), dv.reshape(v.shape)

    def _with_halo(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values in the kernel's order: each segment after its halo."""
        rows = torch.cat([k.flatten(1), v.flatten(1)], dim=1)
        rows = torch.cat([rows, self.exchange.fetch(rows)])[self.block.k_rows]
        shape = TrunkShape.of(k, v)
        keys, values = rows.split([shape.num_kv_heads * shape.key_dim, shape.num_kv_heads * shape.value_dim], dim=1)
        return (
            keys.unflatten(1, (shape.num_kv_heads, shape.key_dim)),
            values.unflatten(1, (shape.num_kv_heads, shape.value_dim)),
        )


def _add_rows(total: torch.Tensor, rows: slice | torch.Tensor, part: torch.Tensor) -> None:
    """`total[rows] += part`, also where an index occurs twice."""
    if isinstance(rows, slice):
        total[rows] += part
    else:
        total.index_add_(0, rows, part.to(total.dtype))
