"""
Attention over a pack that is split over ranks: trunk keys wherever they lie, branch keys and sinks in closed form, one
exact softmax over all of them.

The backward of every part takes the output and log-sum-exp over all keys; no part needs to know the others
(derivation: `docs/parallelism.md`, "One softmax over many places").

Shapes: `T` rows of this rank, `Ts` rows of the pass, `Hq` / `Hkv` query / key-value heads, `D` / `Dv` head dims of
keys and values.
"""

from collections.abc import Sequence

import torch

from ..modeling.attention import MergedAttention
from ..modeling.attention_kernels import AttentionKernel
from ..modeling.branch import require_branch_rows
from .gathered import GatheredKeys, GatheredTrunk
from .kernels import choose_shard_kernel
from .layout import ContextLayout
from .ring import RingTrunk
from .window import WindowTrunk


def ring_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layout: ContextLayout,
    *,
    branch: tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]] | None = None,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
    scale: float | None = None,
    trunk: GatheredKeys | None = None,
    kernel: AttentionKernel | None = None,
) -> torch.Tensor:
    """
    Causal attention over documents that are split over the ranks of a group, exact in output and gradients. A call is
    a collective: every rank of the group makes it with its own rows, also a rank without any, and every rank runs its
    backward. `q`, `k`, `v` and `branch` get the gradients of the sum of all ranks' losses; `sinks` get this rank's
    part.

    If there is a `branch`, the queries are the root rows of a draft's later pass: row `r` sees the trunk keys of rows
    up to `r` and of each branch tensor the key of its own row (EAGLE-3's training-time test,
    https://huggingface.co/papers/2503.01840). Kept for the backward are `q`, `k`, `v`, `branch` by reference, the
    output and the log-sum-exp: linear in passes. Trunk keys travel un-repeated; they are never all on one rank unless
    `trunk` is given.

    Args:
        q (`torch.Tensor` of shape `(Ts, Hq, D)`):
            Queries: all `T` rows of this rank without a branch, else the rows `layout.query_rows(1)`.
        k (`torch.Tensor` of shape `(T, Hkv, D)`), v (`torch.Tensor` of shape `(T, Hkv, Dv)`):
            Trunk keys and values of this rank, heads not repeated.
        layout ([`ContextLayout`]):
            Who has which rows.
        branch (`tuple`, *optional*):
            Keys and values of passes 1 to this one, `(s, Ts, Hkv, D)` and `(s, Ts, Hkv, Dv)` or sequences of `s`
            tensors.
        window (`int`, *optional*):
            A key is seen iff it lies fewer than `window` positions back, as in Transformers. Pass `s` queries stand
            `s` positions after their root row, branch key `b` `b` positions after it.
        sinks (`torch.Tensor` of shape `(Hq,)`, *optional*):
            Score of a further key with value 0.
        scale (`float`, *optional*, defaults to `D ** -0.5`):
            Factor on the scores.
        trunk ([`GatheredKeys`], *optional*):
            [`~gathered.gather_trunk`] of the same `k` and `v`; nothing travels then.
        kernel ([`AttentionKernel`], *optional*):
            Computes blocks; chosen by device, dtype and window if not given. With a window it must apply it.

    Returns:
        `torch.Tensor`: `(Ts, Hq, Dv)` in the dtype of `q`.

    Raises:
        ValueError: if rows, heads or settings do not fit each other.
        RuntimeError: if another rank does not answer within the group's timeout.
    """
    branch_k, branch_v = (list(half) for half in branch) if branch is not None else ([], [])
    num_pass = 0 if branch is None else 1
    _check_rows(q, k, v, layout, num_pass)
    require_branch_rows(branch_k, branch_v, q.shape[0])
    _check_settings(q.shape[1], window, sinks)
    if trunk is not None:
        _check_gathered(trunk, k, v, window)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if window is None:
        kernel = choose_shard_kernel(q, v) if kernel is None else kernel
        if trunk is not None:
            part = GatheredTrunk(layout, kernel, num_pass, scale, trunk.store)
            # The gathering takes the place of the keys in the graph, unless this pass takes them as constants.
            token = trunk.token if k.requires_grad or v.requires_grad else trunk.token.detach()
            return MergedAttention.apply(part, scale, q, k.detach(), v.detach(), sinks, token, *branch_k, *branch_v)
        part = RingTrunk(layout, kernel, num_pass, scale)
    else:
        # Keys at the same row are `s` positions back from the query of pass `s`, branch key `b` is `s - b` back.
        left = window - 1 - len(branch_k)
        kernel = choose_shard_kernel(q, v, max(left, 0)) if kernel is None else kernel
        part = WindowTrunk(layout, kernel, num_pass, scale, left)
        out_of_sight = max(0, len(branch_k) - window)
        branch_k, branch_v = branch_k[out_of_sight:], branch_v[out_of_sight:]
    return MergedAttention.apply(part, scale, q, k, v, sinks, None, *branch_k, *branch_v)


def _check_rows(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: ContextLayout, num_pass: int) -> None:
    """Checks that rows fit the layout and heads each other."""
    num_queries = layout.query_rows(num_pass).shape[0]
    if q.shape[0] != num_queries or k.shape[0] != layout.num_rows or v.shape[0] != layout.num_rows:
        raise ValueError(
            f"Rank {layout.rank} got {q.shape[0]} queries, {k.shape[0]} keys and {v.shape[0]} values for a layout of "
            f"{num_queries} query rows and {layout.num_rows} trunk rows of its own; passes with a branch attend from "
            "`layout.query_rows(1)` only."
        )
    if q.shape[1] % k.shape[1] or k.shape[1] != v.shape[1] or q.shape[2] != k.shape[2]:
        raise ValueError(
            f"Heads do not fit: q {tuple(q.shape[1:])}, k {tuple(k.shape[1:])}, v {tuple(v.shape[1:])}. Queries and "
            "keys share a head dim, keys and values their number of heads, which divides that of the queries."
        )


def _check_settings(num_heads: int, window: int | None, sinks: torch.Tensor | None) -> None:
    """Checks the window, and that there is a sink for each query head."""
    if window is not None and window < 1:
        raise ValueError(f"A window of {window} tokens shows nothing; pass None for full attention.")
    if sinks is not None and sinks.shape != (num_heads,):
        raise ValueError(f"Expected one sink per query head, {num_heads}, got {tuple(sinks.shape)}.")


def _check_gathered(trunk: GatheredKeys, k: torch.Tensor, v: torch.Tensor, window: int | None) -> None:
    """Checks that a gathered trunk is of these keys, and wanted."""
    if window is not None:
        raise ValueError("A window fetches the few rows it needs; do not gather its trunk.")
    if trunk.store.k.data_ptr() != k.data_ptr() or trunk.store.v.data_ptr() != v.data_ptr():
        raise ValueError("`trunk` was gathered from other keys and values than these.")
