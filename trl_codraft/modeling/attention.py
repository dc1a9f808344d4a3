"""
Branch attention: the attention of one TTT pass, trunk keys by a flash kernel and branch keys in closed form.

Shapes: `T` packed rows, `Ts` rows of the pass (a suffix of each document), `Hq` / `Hkv` query / key-value heads,
`G = Hq / Hkv`, `D` head dim.
"""

from collections.abc import Sequence

import torch

from .attention_kernels import AttentionKernel, choose_kernel
from .branch import branch_gradients, merge_branch
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
            out, lse = merge_branch(out, lse, q, branch_k, branch_v, scale)
            out = out.to(q.dtype)
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
            delta = (dout.to(lse.dtype) * out.to(lse.dtype)).sum(dim=-1)
            wide_dq = dq.to(lse.dtype)
            dbranch_k, dbranch_v = branch_gradients(dout, q, branch_k, branch_v, lse, delta, scale, wide_dq)
            dq = wide_dq.to(q.dtype)
        return dq, dk, dv, None, None, None, None, *dbranch_k, *dbranch_v


def _halves(tensors: Sequence[torch.Tensor]) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
    """The keys and the values of a flat list."""
    middle = len(tensors) // 2
    return tensors[:middle], tensors[middle:]
