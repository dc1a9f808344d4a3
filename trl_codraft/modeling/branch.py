"""
Keys that a row shares with no other row, in closed form: the branch of a draft's row, and attention sinks.

With `L` the log-sum-exp over all keys and `delta = rowsum(dout * out)` of the final output, a branch key `b` has score
`l_b = scale * q . k_b`, weight `w_b = exp(l_b - L)` and `dl_b = w_b (dout . v_b - delta)`. A sink is a key with score
`sink_h` and value 0, so its gradient is `-sum_rows exp(sink_h - L) delta`. (Softmax over a union of key sets; EAGLE-3's
training-time test, arXiv 2503.01840, has the branch keys, gpt-oss the sinks.)

Shapes: `Ts` rows of the pass, `Hq` / `Hkv` query / key-value heads, `G = Hq / Hkv`, `D` / `Dv` head dims.
"""

from collections.abc import Sequence

import torch


def merge_branch(
    out: torch.Tensor,
    lse: torch.Tensor,
    q: torch.Tensor,
    branch_k: Sequence[torch.Tensor],
    branch_v: Sequence[torch.Tensor],
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Attention over trunk and branch from attention over the trunk.

    Args:
        out (`torch.Tensor` of shape `(Ts, Hq, Dv)`), lse (`torch.Tensor` of shape `(Ts, Hq)`):
            Output and log-sum-exp over the trunk, the latter in the accumulation dtype, `-inf` where nothing is seen.
        q (`torch.Tensor` of shape `(Ts, Hq, D)`):
            Queries.
        branch_k, branch_v (`Sequence[torch.Tensor]` of shape `(Ts, Hkv, D)`, `(Ts, Hkv, Dv)`):
            Each row's own keys and values, at least one.
        scale (`float`):
            Factor on the scores.

    Returns:
        `tuple`: output and log-sum-exp over both, in the accumulation dtype.
    """
    num_kv_heads = branch_k[0].shape[1]
    grouped_q, trunk_lse = _grouped(q.to(lse.dtype), num_kv_heads), _grouped(lse.unsqueeze(-1), num_kv_heads)
    scores = [(grouped_q * _key_row(key, lse.dtype)).sum(dim=-1, keepdim=True) * scale for key in branch_k]
    merged_lse = trunk_lse
    for score in scores:
        merged_lse = torch.logaddexp(merged_lse, score)
    merged = torch.exp(trunk_lse - merged_lse) * _grouped(out.to(lse.dtype), num_kv_heads)
    for score, value in zip(scores, branch_v, strict=True):
        merged = merged + torch.exp(score - merged_lse) * _key_row(value, lse.dtype)
    return merged.flatten(1, 2), merged_lse.flatten(1)


def branch_gradients(
    dout: torch.Tensor,
    q: torch.Tensor,
    branch_k: Sequence[torch.Tensor],
    branch_v: Sequence[torch.Tensor],
    lse: torch.Tensor,
    delta: torch.Tensor,
    scale: float,
    dq: torch.Tensor,
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """
    The branch's part of the backward.

    Args:
        dout (`torch.Tensor` of shape `(Ts, Hq, Dv)`):
            Gradient of the final output.
        q, branch_k, branch_v, scale:
            See [`merge_branch`].
        lse, delta (`torch.Tensor` of shape `(Ts, Hq)`):
            Log-sum-exp over all keys, and `rowsum(dout * out)`.
        dq (`torch.Tensor` of shape `(Ts, Hq, D)`):
            Gradient of the queries so far, in the accumulation dtype; the branch's part is added in place.

    Returns:
        `tuple`: the gradients of keys and values in their dtypes.
    """
    num_kv_heads = branch_k[0].shape[1]
    grouped_q, grouped_dout = (_grouped(tensor.to(lse.dtype), num_kv_heads) for tensor in (q, dout))
    delta, lse = (_grouped(tensor.unsqueeze(-1), num_kv_heads) for tensor in (delta, lse))
    grouped_dq = _grouped(dq, num_kv_heads)
    dbranch_k, dbranch_v = [], []
    for key, value in zip(branch_k, branch_v, strict=True):
        key_row, value_row = _key_row(key, lse.dtype), _key_row(value, lse.dtype)
        weight = torch.exp((grouped_q * key_row).sum(dim=-1, keepdim=True) * scale - lse)
        dscore = weight * ((grouped_dout * value_row).sum(dim=-1, keepdim=True) - delta) * scale
        grouped_dq += dscore * key_row
        dbranch_k.append((dscore * grouped_q).sum(dim=2).to(key.dtype))
        dbranch_v.append((weight * grouped_dout).sum(dim=2).to(value.dtype))
    return dbranch_k, dbranch_v


def merge_sinks(out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`out` and `lse` with a sink of score `sinks` `(Hq,)` among the keys of every row."""
    merged_lse = torch.logaddexp(lse, sinks.to(lse.dtype))
    return out * torch.exp(lse - merged_lse).unsqueeze(-1), merged_lse


def sink_gradients(sinks: torch.Tensor, lse: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
    """`(Hq,)` gradient of the sinks from this rank's rows."""
    return -(torch.exp(sinks.to(lse.dtype) - lse) * delta).sum(dim=0).to(sinks.dtype)


def _grouped(rows: torch.Tensor, num_kv_heads: int) -> torch.Tensor:
    """(Ts, Hq, X) -> (Ts, Hkv, G, X)."""
    return rows.unflatten(1, (num_kv_heads, rows.shape[1] // num_kv_heads))


def _key_row(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """(Ts, Hkv, X) -> (Ts, Hkv, 1, X)."""
    return rows.to(dtype).unsqueeze(2)
