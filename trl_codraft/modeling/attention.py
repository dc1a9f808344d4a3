"""
Branch attention: the attention of one TTT pass, trunk keys by a flash kernel and branch keys in closed form.

Shapes: `T` packed rows, `Ts` rows of the pass (a suffix of each document), `Hq` / `Hkv` query / key-value heads,
`G = Hq / Hkv`, `D` head dim.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from .attention_kernels import AttentionKernel, choose_kernel
from .branch import Branch, branch_gradients, merge_branch, merge_sinks, require_branch_rows, sink_gradients
from .kernel_call import Attended, Documents, Gradients, Mask
from .packing import PackedLayout


def branch_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: PackedLayout,
    *,
    branch: tuple[Sequence[Tensor], Sequence[Tensor]] | None = None,
    scale: float,
    kernel: AttentionKernel | None = None,
) -> Tensor:
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
    require_branch_rows(branch_k, branch_v, q.shape[0])
    kernel = kernel if kernel is not None else choose_kernel(q)
    trunk = LocalTrunk(kernel, Documents(q_lens, k_lens), Mask(causal=True, scale=scale))
    return MergedAttention.apply(trunk, scale, q, k, v, None, None, *branch_k, *branch_v)


class Trunk(Protocol):
    """Attention to the trunk's keys, wherever they lie. No autograd inside."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Attended:
        """Attention of `Ts` rows; the output has the dtype of `q` or a wider one."""
        ...

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, attended: Attended, need_trunk: bool
    ) -> Gradients:
        """
        Gradients for attention over all keys, these and others. With `need_trunk=False`, the gradients of `k` and `v`
        may be `None`.
        """
        ...


class LocalTrunk:
    """
    A trunk whose keys are all here.

    Args:
        kernel ([`AttentionKernel`]): computes it.
        documents ([`~kernel_call.Documents`]): query and key rows per document.
        mask ([`~kernel_call.Mask`]): the causal one.
    """

    def __init__(self, kernel: AttentionKernel, documents: Documents, mask: Mask):
        self.kernel, self.documents, self.mask = kernel, documents, mask

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Attended:
        """See [`Trunk`]."""
        return self.kernel.forward(q, k, v, self.documents, self.mask)

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, attended: Attended, need_trunk: bool
    ) -> Gradients:
        """See [`Trunk`]."""
        return self.kernel.backward(dout, q, k, v, attended, self.documents, self.mask)


class MergedAttention(torch.autograd.Function):
    """
    Trunk, branch and sinks, merged by their log-sum-exps:
    `apply(trunk, scale, q, k, v, sinks, token, *branch_k, *branch_v)`. `token` ties the call to the gathering of a
    trunk's keys ([`~cp.gathered.gather_trunk`]) in the graph.
    """

    @staticmethod
    def forward(
        ctx: Any,
        trunk: Trunk,
        scale: float,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        token: Tensor | None,
        *branch: Tensor,
    ) -> Tensor:
        attended = trunk.forward(q, k, v)
        if branch:
            attended = merge_branch(attended, q, Branch(*_halves(branch), scale))
        if sinks is not None:
            attended = merge_sinks(attended, sinks)
        out = attended.out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, attended.lse, sinks, *branch)
        ctx.trunk, ctx.scale = trunk, scale
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, sinks, *branch = ctx.saved_tensors
        need_k, need_v, need_sinks, need_token = (ctx.needs_input_grad[index] for index in (3, 4, 5, 6))
        dout = dout.contiguous()
        dq, dk, dv = ctx.trunk.backward(dout, q, k, v, Attended(out, lse), need_k or need_v or need_token)
        dbranch_k, dbranch_v, dsinks = [], [], None
        if branch or need_sinks:
            delta = (dout.to(lse.dtype) * out.to(lse.dtype)).sum(dim=-1)
        if branch:
            dq = dq.to(lse.dtype)
            branch = Branch(*_halves(branch), ctx.scale)
            dbranch_k, dbranch_v = branch_gradients(dout, q, branch, lse, delta, dq)
        if need_sinks:
            dsinks = sink_gradients(sinks, lse, delta)
        dtoken = dout.new_zeros(()) if need_token else None
        dk, dv = (None if grad is None else grad.to(like.dtype) for grad, like in ((dk, k), (dv, v)))
        return None, None, dq.to(q.dtype), dk, dv, dsinks, dtoken, *dbranch_k, *dbranch_v


def _halves(tensors: Sequence[Tensor]) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """The keys and the values of a flat list."""
    middle = len(tensors) // 2
    return tensors[:middle], tensors[middle:]
