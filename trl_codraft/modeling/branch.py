"""
Keys that a row shares with no other row, in closed form: the branch of a draft's row, and attention sinks.

A branch key `b` has score `l_b = scale * q . k_b`, weight `w_b = exp(l_b - L)` and `dl_b = w_b (dout . v_b - delta)`,
where `L` is the log-sum-exp over all keys and `delta = rowsum(dout * out)` of the final output. A sink is a key with
score `sink_h` and value 0, so its gradient is `-sum_rows exp(sink_h - L) delta`. (Softmax over a union of key sets;
EAGLE-3's training-time test, arXiv 2503.01840, has the branch keys, gpt-oss the sinks.)

Shapes: `Ts` rows of the pass, `Hq` / `Hkv` query / key-value heads, `G = Hq / Hkv`, `D` / `Dv` head dims.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .kernel_call import Attended


@dataclass(frozen=True)
class Branch:
    """
    Keys and values that each row has for itself.

    Attributes:
        keys, values (`Sequence[torch.Tensor]` of shape `(Ts, Hkv, D)`, `(Ts, Hkv, Dv)`): of each earlier pass.
        scale (`float`): factor on the scores.
    """

    keys: Sequence[Tensor]
    values: Sequence[Tensor]
    scale: float


def require_branch_rows(keys: Sequence[Tensor], values: Sequence[Tensor], num_queries: int) -> None:
    """Raises ValueError unless each branch has a key and a value for each query."""
    if len(keys) != len(values) or any(part.shape[0] != num_queries for part in (*keys, *values)):
        raise ValueError(f"Each branch needs a key and a value for each of the {num_queries} query rows.")


def merge_branch(trunk: Attended, q: Tensor, branch: Branch) -> Attended:
    """
    Attention over trunk and branch from attention over the trunk.

    Args:
        trunk ([`~kernel_call.Attended`] with `Ts` rows):
            Attention over the trunk.
        q (`torch.Tensor` of shape `(Ts, Hq, D)`):
            Queries.
        branch ([`Branch`]):
            At least one key of each row's own.

    Returns:
        [`~kernel_call.Attended`]: over both, in the accumulation dtype.
    """
    dtype, num_kv_heads = trunk.lse.dtype, branch.keys[0].shape[1]
    grouped_q, trunk_lse = _grouped(q.to(dtype), num_kv_heads), _grouped(trunk.lse.unsqueeze(-1), num_kv_heads)
    scores = [(grouped_q * _key_row(key, dtype)).sum(dim=-1, keepdim=True) * branch.scale for key in branch.keys]
    merged_lse = trunk_lse
    for score in scores:
        merged_lse = torch.logaddexp(merged_lse, score)
    merged = torch.exp(trunk_lse - merged_lse) * _grouped(trunk.out.to(dtype), num_kv_heads)
    for score, value in zip(scores, branch.values, strict=True):
        merged = merged + torch.exp(score - merged_lse) * _key_row(value, dtype)
    return Attended(merged.flatten(1, 2), merged_lse.flatten(1))


def branch_gradients(
    dout: Tensor, q: Tensor, branch: Branch, lse: Tensor, delta: Tensor, dq: Tensor
) -> tuple[list[Tensor], list[Tensor]]:
    """
    The branch's part of the backward.

    Args:
        dout (`torch.Tensor` of shape `(Ts, Hq, Dv)`):
            Gradient of the final output.
        q, branch:
            See [`merge_branch`].
        lse, delta (`torch.Tensor` of shape `(Ts, Hq)`):
            Log-sum-exp over all keys, and `rowsum(dout * out)`.
        dq (`torch.Tensor` of shape `(Ts, Hq, D)`):
            Gradient of the queries so far, in the accumulation dtype; the branch's part is added in place.

    Returns:
        `tuple`: the gradients of keys and values in their dtypes.
    """
    num_kv_heads = branch.keys[0].shape[1]
    grouped_q, grouped_dout = (_grouped(tensor.to(lse.dtype), num_kv_heads) for tensor in (q, dout))
    delta, lse = (_grouped(tensor.unsqueeze(-1), num_kv_heads) for tensor in (delta, lse))
    grouped_dq = _grouped(dq, num_kv_heads)
    dkeys, dvalues = [], []
    for key, value in zip(branch.keys, branch.values, strict=True):
        key_row, value_row = _key_row(key, lse.dtype), _key_row(value, lse.dtype)
        weight = torch.exp((grouped_q * key_row).sum(dim=-1, keepdim=True) * branch.scale - lse)
        dscore = weight * ((grouped_dout * value_row).sum(dim=-1, keepdim=True) - delta) * branch.scale
        grouped_dq += dscore * key_row
        dkeys.append((dscore * grouped_q).sum(dim=2).to(key.dtype))
        dvalues.append((weight * grouped_dout).sum(dim=2).to(value.dtype))
    return dkeys, dvalues


def merge_sinks(attended: Attended, sinks: Tensor) -> Attended:
    """Attention with a sink of score `sinks` `(Hq,)` among the keys of every row."""
    lse = torch.logaddexp(attended.lse, sinks.to(attended.lse.dtype))
    return Attended(attended.out * torch.exp(attended.lse - lse).unsqueeze(-1), lse)


def sink_gradients(sinks: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
    """`(Hq,)` gradient of the sinks from this rank's rows."""
    return -(torch.exp(sinks.to(lse.dtype) - lse) * delta).sum(dim=0).to(sinks.dtype)


def _grouped(rows: Tensor, num_kv_heads: int) -> Tensor:
    """(Ts, Hq, X) -> (Ts, Hkv, G, X)."""
    return rows.unflatten(1, (num_kv_heads, rows.shape[1] // num_kv_heads))


def _key_row(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """(Ts, Hkv, X) -> (Ts, Hkv, 1, X)."""
    return rows.to(dtype).unsqueeze(2)
