"""
Kernels that only shards need: sliding windows, and value heads of another size.

Shapes: `Tq` / `Tk` packed query / key rows, `Hq` / `Hkv` query / key-value heads, `D` / `Dv` head dims of keys and
values.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from ..modeling.attention_kernels import (
    AttentionKernel,
    ChunkedKernel,
    CudaFlashKernel,
    accumulation_dtype,
    choose_kernel,
    group_heads,
    nothing_seen,
)
from ..modeling.flash_operators import PackedFlash
from ..modeling.kernel_call import Attended, Documents, Gradients, Mask


class ChunkedWindowKernel(ChunkedKernel):
    """
    [`ChunkedKernel`] for causal attention in which a query sees its own key and the `left` keys before it. Work and
    memory grow with the window, not with the document.

    Args:
        left (`int`):
            Keys seen before a query's own.
        max_scores (`int`, *optional*, defaults to `2**24`):
            Most scores held at a time, unless one query alone sees more.
    """

    def __init__(self, left: int, max_scores: int = 2**24):
        super().__init__(max_scores)
        self.left = left

    def _chunks(self, q: Tensor, k: Tensor, documents: Documents, mask: Mask) -> Iterator[tuple[slice, slice, Tensor]]:
        wide = accumulation_dtype(q.dtype)
        for queries, keys in documents.slices():
            num_keys = keys.stop - keys.start
            # Chunks no longer than the window: at most half of their scores are masked.
            size = min(self.left + 1, self.max_scores // (q.shape[1] * min(num_keys, 2 * self.left + 1)))
            size = max(1, size)
            # Distance from a query's row to the row of its key.
            shift = keys.stop - queries.stop
            for start in range(queries.start, queries.stop, size):
                rows = slice(start, min(start + size, queries.stop))
                seen = slice(max(keys.start, start + shift - self.left), rows.stop + shift)
                grouped_q = group_heads(q[rows].to(wide), k.shape[1])
                scores = torch.einsum("hgqd,khd->hgqk", grouped_q, k[seen].to(wide)) * mask.scale
                own = torch.arange(start + shift, rows.stop + shift, device=q.device).unsqueeze(1)
                distance = own - torch.arange(seen.start, seen.stop, device=q.device)
                yield rows, seen, scores.masked_fill_((distance < 0) | (distance > self.left), -torch.inf)


class CudaWindowKernel(CudaFlashKernel):
    """
    [`CudaFlashKernel`] with a window: causal, aligned at the end of each document, one call. Documents without a query
    or a key are refused by the operator and must not be passed.

    Args:
        left (`int`):
            Keys seen before a query's own.
        operator ([`PackedFlash`], *optional*):
            See [`CudaFlashKernel`].
    """

    def __init__(self, left: int, operator: PackedFlash | None = None):
        super().__init__(operator)
        self.left = left

    def forward(self, q: Tensor, k: Tensor, v: Tensor, documents: Documents, mask: Mask) -> Attended:
        """See [`AttentionKernel`]."""
        if not documents.q_lens:
            return nothing_seen(q, v)
        return super()._block_forward(q, k, v, documents, replace(mask, window=self.left))

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, attended: Attended, documents: Documents, mask: Mask
    ) -> Gradients:
        """See [`AttentionKernel`]."""
        if not documents.q_lens:
            return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        return super()._block_backward(dout, q, k, v, attended, documents, replace(mask, window=self.left))


class PaddedKernel:
    """
    Lets a kernel that wants one head dim serve keys and values of different ones: zeros are appended to the smaller,
    which changes no score and no output, and cut off again. Only the kernel sees them; the wire does not.

    Args:
        kernel ([`AttentionKernel`]):
            Does the work.
    """

    def __init__(self, kernel: AttentionKernel):
        self.kernel = kernel

    def forward(self, q: Tensor, k: Tensor, v: Tensor, documents: Documents, mask: Mask) -> Attended:
        """See [`AttentionKernel`]."""
        width = max(q.shape[-1], v.shape[-1])
        padded = (_widen(tensor, width) for tensor in (q, k, v))
        out, lse = self.kernel.forward(*padded, documents, mask)
        return Attended(out[..., : v.shape[-1]], lse)

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, attended: Attended, documents: Documents, mask: Mask
    ) -> Gradients:
        """See [`AttentionKernel`]."""
        width = max(q.shape[-1], v.shape[-1])
        padded = (_widen(tensor, width) for tensor in (dout, q, k, v))
        attended = Attended(_widen(attended.out, width), attended.lse)
        grads = self.kernel.backward(*padded, attended, documents, mask)
        return tuple(grad[..., : like.shape[-1]] for grad, like in zip(grads, (q, k, v), strict=True))


def choose_shard_kernel(q: Tensor, v: Tensor, window_left: int | None = None) -> AttentionKernel:
    """
    The kernel for a shard's trunk.

    Args:
        q (`torch.Tensor` of shape `(Tq, Hq, D)`), v (`torch.Tensor` of shape `(Tk, Hkv, Dv)`):
            Queries and values; device, dtype and head dims decide.
        window_left (`int`, *optional*):
            Keys a query sees before its own; `None` for all.

    Returns:
        [`AttentionKernel`]: a flash kernel where one exists, else the chunked one.
    """
    kernel = choose_kernel(q if q.shape[-1] >= v.shape[-1] else v)
    if window_left is not None:
        on_cuda = isinstance(kernel, CudaFlashKernel)
        kernel = CudaWindowKernel(window_left) if on_cuda else ChunkedWindowKernel(window_left)
    return kernel if q.shape[-1] == v.shape[-1] else PaddedKernel(kernel)


def _widen(tensor: Tensor, width: int) -> Tensor:
    """Zeros up to a head dim of `width`."""
    return tensor if tensor.shape[-1] == width else F.pad(tensor, (0, width - tensor.shape[-1]))
