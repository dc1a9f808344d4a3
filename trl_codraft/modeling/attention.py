"""
Branch attention: the attention of one TTT pass, trunk keys by a flash kernel and branch keys in closed form.

Shapes: `T` packed rows, `Ts` rows of the pass (a suffix of each document), `Hq` / `Hkv` query / key-value heads,
`G = Hq / Hkv`, `D` head dim.
"""

from collections.abc import Sequence

import torch

from .attention_kernels import AttentionKernel, accumulation_dtype, choose_kernel
from .packing import PackedLayout


def branch_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layout: PackedLayout,
    *,
    branch: tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]] | None = None,
    scale: float,
    kernel: AttentionKernel | None = None,
) -> torch.Tensor:
    """
    Softmax attention of root rows to their trunk and their own branch. Root row `r` sees the trunk keys of rows up to
    `r` of its document, and of each branch tensor only the key of its own row (EAGLE-3's training-time test mask,
    https://huggingface.co/papers/2503.01840). Rows are indexed by root, so in every pass the trunk mask is the plain
    causal one.

    Memory is linear in rows and passes: kept for the backward are `q`, the output, the log-sum-exp, and the keys and
    values by reference. Trunk gradients come from the kernel's backward called with the merged output and log-sum-exp,
    branch gradients from `w_b = exp(l_b - L)`, `ds_b = w_b (dout . v_b - dout . out)`.

    Args:
        q (`torch.Tensor` of shape `(Ts, Hq, D)`):
            Queries: all `T` rows without a branch, else the rows of `layout.query_rows(1)`.
        k, v (`torch.Tensor` of shape `(T, Hkv, D)`):
            Trunk keys and values of every row, heads not repeated.
        layout ([`PackedLayout`]):
            Documents of the pack.
        branch (`tuple`, *optional*):
            Keys and values of passes 1 to this one, two lists of `(Ts, Hkv, D)` tensors.
        scale (`float`):
            Factor on the scores.
        kernel ([`AttentionKernel`], *optional*):
            Computes the trunk part; [`choose_kernel`] by default.

    Returns:
        `torch.Tensor`: `(Ts, Hq, D)` in the dtype of `q`.

    Raises:
        ValueError: if the rows do not fit the layout or the heads do not divide.
    """
    branch_k, branch_v = branch if branch is not None else ((), ())
    q_lens = layout.query_lens(0 if branch is None else 1)
    k_lens = layout.doc_lens
    if q.shape[0] != sum(q_lens) or k.shape[0] != sum(k_lens) or v.shape[0] != sum(k_lens):
        raise ValueError(
            f"Got {q.shape[0]} queries, {k.shape[0]} keys and {v.shape[0]} values for a layout of {sum(q_lens)} query "
            f"rows and {sum(k_lens)} trunk rows; later passes attend from `layout.query_rows(1)` only."
        )
    if q.shape[1] % k.shape[1]:
        raise ValueError(f"{q.shape[1]} query heads cannot share {k.shape[1]} key/value heads evenly.")
    if len(branch_k) != len(branch_v) or any(part.shape[0] != q.shape[0] for part in (*branch_k, *branch_v)):
        raise ValueError(f"Each branch needs a key and a value for each of the {q.shape[0]} query rows.")
    kernel = kernel if kernel is not None else choose_kernel(q)
    return _BranchAttention.apply(q, k, v, kernel, q_lens, k_lens, scale, *branch_k, *branch_v)


class _BranchAttention(torch.autograd.Function):
    """Trunk by the kernel, branch in closed form, merged by their log-sum-exps."""

    @staticmethod
    def forward(ctx, q, k, v, kernel, q_lens, k_lens, scale, *branch):
        branch_k, branch_v = _halves(branch)
        out, lse = kernel.forward(q, k, v, q_lens, k_lens, causal=True, scale=scale)
        if branch_k:
            out, lse = _merge_branch(out, lse, q, branch_k, branch_v, scale)
        ctx.save_for_backward(q, k, v, out, lse, *branch)
        ctx.settings = (kernel, q_lens, k_lens, scale)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dout):
        q, k, v, out, lse, *branch = ctx.saved_tensors
        kernel, q_lens, k_lens, scale = ctx.settings
        branch_k, branch_v = _halves(branch)
        dq, dk, dv = kernel.backward(dout, q, k, v, out, lse, q_lens, k_lens, causal=True, scale=scale)
        dbranch_k, dbranch_v = [], []
        if branch_k:
            wide = accumulation_dtype(q.dtype)
            grouped_q, grouped_dout = (_grouped(tensor.to(wide), k.shape[1]) for tensor in (q, dout))
            grouped_dq = _grouped(dq.to(wide), k.shape[1])
            delta = (dout.to(wide) * out.to(wide)).sum(dim=-1)
            delta, grouped_lse = (_grouped(tensor.unsqueeze(-1), k.shape[1]) for tensor in (delta, lse))
            for key, value in zip(branch_k, branch_v, strict=True):
                key_row, value_row = key.to(wide).unsqueeze(2), value.to(wide).unsqueeze(2)
                weight = torch.exp((grouped_q * key_row).sum(dim=-1, keepdim=True) * scale - grouped_lse)
                dscore = weight * ((grouped_dout * value_row).sum(dim=-1, keepdim=True) - delta) * scale
                grouped_dq = grouped_dq + dscore * key_row
                dbranch_k.append((dscore * grouped_q).sum(dim=2).to(key.dtype))
                dbranch_v.append((weight * grouped_dout).sum(dim=2).to(value.dtype))
            dq = grouped_dq.flatten(1, 2).to(q.dtype)
        return dq, dk, dv, None, None, None, None, *dbranch_k, *dbranch_v


def _merge_branch(
    out: torch.Tensor,
    lse: torch.Tensor,
    q: torch.Tensor,
    branch_k: Sequence[torch.Tensor],
    branch_v: Sequence[torch.Tensor],
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and log-sum-exp over trunk and branch, from those over the trunk."""
    wide, num_kv_heads = lse.dtype, branch_k[0].shape[1]
    grouped_q = _grouped(q.to(wide), num_kv_heads)
    scores = [(grouped_q * key.to(wide).unsqueeze(2)).sum(dim=-1, keepdim=True) * scale for key in branch_k]
    trunk_lse = _grouped(lse.unsqueeze(-1), num_kv_heads)
    merged_lse = trunk_lse
    for score in scores:
        merged_lse = torch.logaddexp(merged_lse, score)
    merged = torch.exp(trunk_lse - merged_lse) * _grouped(out.to(wide), num_kv_heads)
    for score, value in zip(scores, branch_v, strict=True):
        merged = merged + torch.exp(score - merged_lse) * value.to(wide).unsqueeze(2)
    return merged.flatten(1, 2).to(out.dtype), merged_lse.flatten(1).contiguous()


def _grouped(rows: torch.Tensor, num_kv_heads: int) -> torch.Tensor:
    """(Ts, Hq, X) -> (Ts, Hkv, G, X)."""
    return rows.unflatten(1, (num_kv_heads, rows.shape[1] // num_kv_heads))


def _halves(tensors: Sequence[torch.Tensor]) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
    """The keys and the values of a flat list."""
    middle = len(tensors) // 2
    return tensors[:middle], tensors[middle:]
