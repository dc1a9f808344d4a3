"""
Attention kernels: packed documents in, output and log-sum-exp out, and a backward that takes the *merged* output and
log-sum-exp, so that a caller may attend to further keys of its own (global log-sum-exp trick).

Shapes: `Tq` / `Tk` packed query / key rows, `Hq` / `Hkv` query / key-value heads, `G = Hq / Hkv`, `D` head dim.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from .flash_operators import AnyHeadDim, PackedFlash, installed_flash
from .kernel_call import Attended, Documents, Gradients, Mask, rows_of


class AttentionKernel(Protocol):
    """
    One way to compute softmax attention over packed documents. Stateless, no autograd inside.

    Document `i` has `q_lens[i]` query rows and `k_lens[i]` key rows, in pack order. A causal mask makes its queries
    the last `q_lens[i]` of its `k_lens[i]` positions, which see the keys up to their own; else they see all keys.
    Lengths of zero are allowed; a query without a key gets output 0 and log-sum-exp `-inf`.
    """

    def forward(self, q: Tensor, k: Tensor, v: Tensor, documents: Documents, mask: Mask) -> Attended:
        """
        Args:
            q (`torch.Tensor` of shape `(Tq, Hq, D)`), k, v (`torch.Tensor` of shape `(Tk, Hkv, D)`):
                Queries, and keys and values with heads not repeated.
            documents ([`~kernel_call.Documents`]):
                Query and key rows per document.
            mask ([`~kernel_call.Mask`]):
                See the class.

        Returns:
            [`~kernel_call.Attended`]: output in the dtype of `q`, log-sum-exp in float32 (float64 for float64).
        """
        ...

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, attended: Attended, documents: Documents, mask: Mask
    ) -> Gradients:
        """
        Gradients with respect to these keys when `attended` was taken over these and possibly further keys:
        `P = exp(S - lse)`, `dS = P * (dout v^T - rowsum(dout * out))`.

        Returns:
            `tuple`: `dq` `(Tq, Hq, D)`, `dk`, `dv` `(Tk, Hkv, D)` in the dtypes of `q`, `k`, `v`.
        """
        ...


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 for float64, else float32."""
    return torch.promote_types(dtype, torch.float32)


def merge_partials(first: Attended, second: Attended) -> Attended:
    """Attention over two disjoint sets of keys from the attention over each, in the dtype of the log-sum-exps."""
    lse = torch.logaddexp(first.lse, second.lse)
    # No key on either side: weights 0 instead of exp(-inf + inf).
    reference = lse.masked_fill(lse == -torch.inf, 0.0)
    weight, other = (torch.exp(part.lse - reference).unsqueeze(-1) for part in (first, second))
    return Attended(weight * first.out.to(lse.dtype) + other * second.out.to(lse.dtype), lse)


def nothing_seen(q: Tensor, v: Tensor, dtype: torch.dtype | None = None) -> Attended:
    """Attention of queries that see no key; the output has the dtype of `q` if none is given."""
    out = q.new_zeros(*q.shape[:2], v.shape[-1], dtype=dtype)
    return Attended(out, q.new_full(q.shape[:2], -torch.inf, dtype=accumulation_dtype(q.dtype)))


class ChunkedKernel:
    """
    Plain torch, any device and dtype, memory linear in the number of keys: queries are taken in chunks small enough
    that a chunk's scores hold at most `max_scores` numbers.
    """

    def __init__(self, max_scores: int = 2**24):
        self.max_scores = max_scores

    def forward(self, q: Tensor, k: Tensor, v: Tensor, documents: Documents, mask: Mask) -> Attended:
        """See [`AttentionKernel`]."""
        out, lse = nothing_seen(q, q)
        for rows, keys, scores in self._chunks(q, k, documents, mask):
            chunk_lse = scores.logsumexp(dim=-1)
            probs = torch.exp(scores - chunk_lse.unsqueeze(-1))
            values = v[keys].to(probs.dtype)
            out[rows] = ungroup_heads(torch.einsum("hgqk,khd->hgqd", probs, values)).to(q.dtype)
            lse[rows] = chunk_lse.flatten(0, 1).T
        return Attended(out, lse)

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, attended: Attended, documents: Documents, mask: Mask
    ) -> Gradients:
        """See [`AttentionKernel`]."""
        out, lse = attended
        wide = lse.dtype
        dq, dk, dv = (torch.zeros_like(tensor, dtype=wide) for tensor in (q, k, v))
        delta = (dout.to(wide) * out.to(wide)).sum(dim=-1)
        for rows, keys, scores in self._chunks(q, k, documents, mask):
            grouped_dout = group_heads(dout[rows].to(wide), k.shape[1])
            probs = torch.exp(scores - group_heads(lse[rows].unsqueeze(-1), k.shape[1]))
            dscores = torch.einsum("hgqd,khd->hgqk", grouped_dout, v[keys].to(wide))
            dscores = probs * (dscores - group_heads(delta[rows].unsqueeze(-1), k.shape[1])) * mask.scale
            dq[rows] = ungroup_heads(torch.einsum("hgqk,khd->hgqd", dscores, k[keys].to(wide)))
            dk[keys] += torch.einsum("hgqk,hgqd->khd", dscores, group_heads(q[rows].to(wide), k.shape[1]))
            dv[keys] += torch.einsum("hgqk,hgqd->khd", probs, grouped_dout)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)

    def _chunks(self, q: Tensor, k: Tensor, documents: Documents, mask: Mask) -> Iterator[tuple[slice, slice, Tensor]]:
        """Query rows, the key rows they can see, and their scaled, masked scores (Hkv, G, q, k)."""
        wide = accumulation_dtype(q.dtype)
        for queries, keys in documents.slices():
            size = max(1, self.max_scores // ((keys.stop - keys.start) * q.shape[1]))
            for start in range(queries.start, queries.stop, size):
                rows = slice(start, min(start + size, queries.stop))
                # Distance from the document's end, where its last query and its last key meet.
                seen = slice(keys.start, keys.stop - (queries.stop - rows.stop)) if mask.causal else keys
                scores = torch.einsum("hgqd,khd->hgqk", group_heads(q[rows].to(wide), k.shape[1]), k[seen].to(wide))
                scores = scores * mask.scale
                if mask.causal:
                    num_rows, num_keys = scores.shape[-2:]
                    visible = torch.ones(num_rows, num_keys, dtype=torch.bool, device=q.device)
                    scores.masked_fill_(~visible.tril(num_keys - num_rows), -torch.inf)
                yield rows, seen, scores


class SquareCausalKernel:
    """
    Base of the flash kernels, whose causal mask only means the same everywhere when there are as many queries as keys:
    queries that are a suffix of their document attend to the keys before it without a mask and to their own causally.
    Subclasses compute blocks: `_block_forward` and `_block_backward` take non-empty documents, square if causal.
    """

    def forward(self, q: Tensor, k: Tensor, v: Tensor, documents: Documents, mask: Mask) -> Attended:
        """See [`AttentionKernel`]."""
        whole = None
        for queries, keys, block_mask in self._blocks(documents, mask):
            rows, seen = rows_of(queries, q.device), rows_of(keys, k.device)
            block = Documents([len(piece) for piece in queries], [len(piece) for piece in keys])
            part = self._block_forward(q[rows], k[seen], v[seen], block, block_mask)
            if whole is None:
                whole = Attended(_among(part.out, rows, len(q)), _among(part.lse, rows, len(q), fill=-torch.inf))
            else:
                # A row is merged once, so the accumulation dtype is needed for no longer than that.
                merged = merge_partials(whole.at(rows), part)
                whole.out[rows], whole.lse[rows] = merged.out.to(q.dtype), merged.lse
        return nothing_seen(q, q) if whole is None else whole

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, attended: Attended, documents: Documents, mask: Mask
    ) -> Gradients:
        """See [`AttentionKernel`]."""
        grads = None
        for queries, keys, block_mask in self._blocks(documents, mask):
            rows, seen = rows_of(queries, q.device), rows_of(keys, k.device)
            block = Documents([len(piece) for piece in queries], [len(piece) for piece in keys])
            parts = self._block_backward(dout[rows], q[rows], k[seen], v[seen], attended.at(rows), block, block_mask)
            places = (rows, seen, seen)
            if grads is None:
                sizes = (len(q), len(k), len(v))
                grads = [_among(*argument) for argument in zip(parts, places, sizes, strict=True)]
            else:
                # The two blocks have no key in common, so no gradient is a sum of more than two parts.
                for total, index, part in zip(grads, places, parts, strict=True):
                    total[index] += part
        return (torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)) if grads is None else tuple(grads)

    def _blocks(self, documents: Documents, mask: Mask) -> Iterator[tuple[list[range], list[range], Mask]]:
        """At most two groups of documents: (query rows, key rows, mask)."""
        prefix, suffix = [], []
        for queries, keys in documents.slices():
            queries, keys = range(queries.start, queries.stop), range(keys.start, keys.stop)
            if not mask.causal:
                prefix.append((queries, keys))
                continue
            before = len(keys) - len(queries)
            suffix.append((queries, keys[before:]))
            if before:
                prefix.append((queries, keys[:before]))
        for pairs, causal in ((suffix, True), (prefix, False)):
            if pairs:
                yield [queries for queries, _ in pairs], [keys for _, keys in pairs], replace(mask, causal=causal)


class CpuFlashKernel(SquareCausalKernel):
    """
    The flash kernel behind scaled_dot_product_attention on the CPU: float32, float64 and bfloat16, one document a call
    (it has no packed form). It crashes the process on empty documents, which never get this far.
    """

    def _block_forward(self, q: Tensor, k: Tensor, v: Tensor, documents: Documents, mask: Mask) -> Attended:
        out = torch.empty_like(q)
        lse = q.new_empty(q.shape[:2], dtype=accumulation_dtype(q.dtype))
        for queries, keys in documents.slices():
            part, part_lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                _heads_first(q[queries]),
                _heads_first(k[keys]),
                _heads_first(v[keys]),
                0.0,
                mask.causal,
                scale=mask.scale,
            )
            out[queries] = part[0].transpose(0, 1)
            lse[queries] = part_lse[0].T
        return Attended(out, lse)

    def _block_backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, attended: Attended, documents: Documents, mask: Mask
    ) -> Gradients:
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        for queries, keys in documents.slices():
            parts = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                _heads_first(dout[queries]),
                _heads_first(q[queries]),
                _heads_first(k[keys]),
                _heads_first(v[keys]),
                _heads_first(attended.out[queries]),
                attended.lse[queries].T.unsqueeze(0),
                0.0,
                mask.causal,
                scale=mask.scale,
            )
            for total, index, part in zip((dq, dk, dv), (queries, keys, keys), parts, strict=True):
                total[index] = part[0].transpose(0, 1)
        return dq, dk, dv


class CudaFlashKernel(SquareCausalKernel):
    """
    Packed flash attention on a GPU: bfloat16 and float16, head dims up to 256.

    Args:
        operator ([`PackedFlash`], *optional*):
            Does the work; [`installed_flash`] by default.
    """

    def __init__(self, operator: PackedFlash | None = None):
        self.flash = AnyHeadDim(operator if operator is not None else installed_flash())

    def _block_forward(self, q: Tensor, k: Tensor, v: Tensor, documents: Documents, mask: Mask) -> Attended:
        return self.flash.forward(q, k, v, documents, mask)

    def _block_backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, attended: Attended, documents: Documents, mask: Mask
    ) -> Gradients:
        return self.flash.backward(dout, q, k, v, attended, documents, mask)


def choose_kernel(q: Tensor) -> AttentionKernel:
    """
    The kernel for a query tensor.

    Args:
        q (`torch.Tensor` of shape `(Tq, Hq, D)`):
            Queries; device, dtype and head dim decide.

    Returns:
        [`AttentionKernel`]: a flash kernel where one exists, else [`ChunkedKernel`].
    """
    if q.device.type == "cpu" and q.dtype in (torch.float32, torch.float64, torch.bfloat16):
        return CpuFlashKernel()
    # The oldest architecture with the kernel is Ampere (8.0).
    if q.device.type == "cuda" and q.dtype in (torch.bfloat16, torch.float16) and q.shape[-1] <= 256:
        if torch.version.cuda is not None and torch.cuda.get_device_capability(q.device) >= (8, 0):
            return CudaFlashKernel()
    return ChunkedKernel()


def _among(part: Tensor, rows: slice | Tensor, num_rows: int, fill: float = 0.0) -> Tensor:
    """The rows of a block among all rows; itself if it has them all."""
    if isinstance(rows, slice) and rows == slice(0, num_rows):
        return part
    whole = part.new_full((num_rows, *part.shape[1:]), fill)
    whole[rows] = part
    return whole


def group_heads(rows: Tensor, num_kv_heads: int) -> Tensor:
    """(q, Hq, X) -> (Hkv, G, q, X): query heads beside the key head they share."""
    return rows.view(rows.shape[0], num_kv_heads, rows.shape[1] // num_kv_heads, rows.shape[2]).permute(1, 2, 0, 3)


def ungroup_heads(rows: Tensor) -> Tensor:
    """(Hkv, G, q, X) -> (q, Hq, X)."""
    return rows.permute(2, 0, 1, 3).flatten(1, 2)


def _heads_first(rows: Tensor) -> Tensor:
    """(T, H, D) -> (1, H, T, D), a view."""
    return rows.transpose(0, 1).unsqueeze(0)
