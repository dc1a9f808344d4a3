"""
The trunk of a sharded pack under a sliding window: each segment fetches the halo of rows before it.

Shapes: `T` rows of this rank, `Ts` rows of the pass, `Hq` / `Hkv` query / key-value heads, `D` / `Dv` head dims of
keys and values.
"""

import torch
from torch import Tensor

from ..modeling.attention_kernels import AttentionKernel, accumulation_dtype, nothing_seen
from ..modeling.kernel_call import Attended, Gradients, Mask
from .layout import ContextLayout
from .ring import TrunkShape


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

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Attended:
        """See [`RingTrunk`]."""
        wide = accumulation_dtype(q.dtype)
        if self.left < 0:
            return nothing_seen(q, v, wide)
        keys, values = self._with_halo(k, v)
        documents = self.block.documents
        out, lse = self.kernel.forward(q, keys, values, documents, Mask(causal=True, scale=self.scale))
        return Attended(out.to(wide), lse)

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, attended: Attended, need_trunk: bool
    ) -> Gradients:
        """See [`RingTrunk`]."""
        wide = attended.lse.dtype
        if self.left < 0:
            grads = tuple(torch.zeros_like(tensor, dtype=wide) for tensor in (q, k, v))
            return grads if need_trunk else (grads[0], None, None)
        keys, values = self._with_halo(k, v)
        documents = self.block.documents
        mask = Mask(causal=True, scale=self.scale)
        dq, *dtrunk = self.kernel.backward(dout, q, keys, values, attended, documents, mask)
        dq = dq.to(wide)
        if not need_trunk:
            return dq, None, None
        num_rows, num_halo = k.shape[0], self.exchange.num_wanted
        shape = TrunkShape.of(k, v)
        total = q.new_zeros(num_rows + num_halo, shape.row_size, dtype=wide)
        total[self.block.k_rows] = torch.cat([grad.flatten(1) for grad in dtrunk], dim=1).to(wide)
        local, halo = total.split([num_rows, num_halo])
        local = local + self.exchange.give_back(halo, num_rows)
        sizes = [shape.num_kv_heads * shape.key_dim, shape.num_kv_heads * shape.value_dim]
        dk, dv = local.split(sizes, dim=1)
        return dq, dk.reshape(k.shape), dv.reshape(v.shape)

    def _with_halo(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values in the kernel's order: each segment after its halo."""
        rows = torch.cat([k.flatten(1), v.flatten(1)], dim=1)
        rows = torch.cat([rows, self.exchange.fetch(rows)])[self.block.k_rows]
        shape = TrunkShape.of(k, v)
        keys, values = rows.split([shape.num_kv_heads * shape.key_dim, shape.num_kv_heads * shape.value_dim], dim=1)
        return (
            keys.unflatten(1, (shape.num_kv_heads, shape.key_dim)),
            values.unflatten(1, (shape.num_kv_heads, shape.value_dim)),
        )
