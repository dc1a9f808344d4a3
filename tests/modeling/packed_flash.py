"""
Stand-ins for the packed flash operators of CUDA: torch's and flash-attn 2.8's documented arguments, dense arithmetic
inside, any dtype on the CPU. They check the demands of the real ones: head dims of multiples of 8, int32 offsets, no
empty document, a contiguous log-sum-exp `(Hq, Tq)`. Masks and windows are aligned at the end of each document.
"""

import importlib.metadata
import sys
import types

import torch
from modeling.reference import dense_attention

from trl_codraft.modeling import flash_operators


def visible(cu_q, cu_k, causal, left, right):
    """`(Tq, Tk)`: which keys a query sees; a negative `left` is no window."""
    assert cu_q.dtype == cu_k.dtype == torch.int32
    mask = torch.zeros(int(cu_q[-1]), int(cu_k[-1]), dtype=torch.bool)
    for index in range(len(cu_q) - 1):
        queries, keys = slice(cu_q[index], cu_q[index + 1]), slice(cu_k[index], cu_k[index + 1])
        num_queries, num_keys = queries.stop - queries.start, keys.stop - keys.start
        assert min(num_queries, num_keys) > 0
        block = torch.ones(int(num_queries), int(num_keys), dtype=torch.bool)
        if causal or left >= 0:
            shift = int(num_keys - num_queries)
            block = block.tril(shift + max(right, 0))
            block = block.triu(shift - left) if left >= 0 else block
        mask[queries, keys] = block
    return mask


def scores_of(q, k, mask, scale):
    scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(q.shape[1] // k.shape[1], 1)) * scale
    return scores.masked_fill(~mask, -torch.inf)


def forward(q, k, v, mask, scale):
    assert q.shape[-1] % 8 == 0
    return dense_attention(q, k, v, mask, scale), scores_of(q, k, mask, scale).logsumexp(-1)


def backward(dout, q, k, v, out, lse, mask, scale):
    assert lse.shape == (q.shape[1], q.shape[0])
    assert lse.is_contiguous()
    group = q.shape[1] // k.shape[1]
    wide_k, wide_v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    probs = (scores_of(q, k, mask, scale) - lse.unsqueeze(-1)).exp()
    delta = (dout * out).sum(-1).T.unsqueeze(-1)
    dscores = probs * (torch.einsum("qhd,khd->hqk", dout, wide_v) - delta) * scale
    dq = torch.einsum("hqk,khd->qhd", dscores, wide_k)
    dk, dv = torch.einsum("hqk,qhd->khd", dscores, q), torch.einsum("hqk,qhd->khd", probs, dout)
    return dq, *(grad.unflatten(1, (k.shape[1], group)).sum(2) for grad in (dk, dv))


def emulate_torch(monkeypatch, calls: list):
    """Replaces torch's operators; `calls` collects the `causal` of each forward."""

    def window(settings):
        return settings.get("window_size_left", -1), settings.get("window_size_right", -1)

    def flash_forward(
        q, k, v, cu_q, cu_k, max_q, max_k, dropout, causal, return_debug_mask, *, scale=None, **settings
    ):
        assert (max_q, max_k, dropout) == (int(cu_q.diff().max()), int(cu_k.diff().max()), 0.0)
        calls.append(causal)
        return *forward(q, k, v, visible(cu_q, cu_k, causal, *window(settings)), scale), None, None, None

    def flash_backward(
        dout, q, k, v, out, lse, cu_q, cu_k, max_q, max_k, dropout, causal, rng, unused, *, scale=None, **settings
    ):
        return backward(dout, q, k, v, out, lse, visible(cu_q, cu_k, causal, *window(settings)), scale)

    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", flash_forward)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_backward", flash_backward)
    return flash_operators.TorchFlash()


def install_flash_attn(monkeypatch, calls: list, version: str = "2.8.3"):
    """Installs a package flash-attn with the signatures of 2.8.3 (`flash_attn/flash_attn_interface.py`)."""

    def _flash_attn_varlen_forward(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        dropout_p,
        softmax_scale,
        causal,
        window_size_left=-1,
        window_size_right=-1,
        softcap=0.0,
        alibi_slopes=None,
        return_softmax=False,
        block_table=None,
        leftpad_k=None,
        seqused_k=None,
        zero_tensors=False,
    ):
        longest = int(cu_seqlens_q.diff().max()), int(cu_seqlens_k.diff().max())
        assert (max_seqlen_q, max_seqlen_k, dropout_p, softcap) == (*longest, 0.0, 0.0)
        calls.append(causal)
        mask = visible(cu_seqlens_q, cu_seqlens_k, causal, window_size_left, window_size_right)
        return *forward(q, k, v, mask, softmax_scale), torch.empty(0), torch.empty(2)

    def _flash_attn_varlen_backward(
        dout,
        q,
        k,
        v,
        out,
        softmax_lse,
        dq,
        dk,
        dv,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        dropout_p,
        softmax_scale,
        causal,
        window_size_left,
        window_size_right,
        softcap,
        alibi_slopes,
        deterministic,
        rng_state=None,
        zero_tensors=False,
    ):
        mask = visible(cu_seqlens_q, cu_seqlens_k, causal, window_size_left, window_size_right)
        for place, grad in zip(
            (dq, dk, dv), backward(dout, q, k, v, out, softmax_lse, mask, softmax_scale), strict=True
        ):
            place.copy_(grad)
        return torch.empty(0)

    interface = types.ModuleType("flash_attn.flash_attn_interface")
    interface._flash_attn_varlen_forward = _flash_attn_varlen_forward
    interface._flash_attn_varlen_backward = _flash_attn_varlen_backward
    package = types.ModuleType("flash_attn")
    package.flash_attn_interface = interface
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    monkeypatch.setitem(sys.modules, "flash_attn.flash_attn_interface", interface)
    known = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version if name == "flash-attn" else known(name))
    monkeypatch.setattr(flash_operators, "installed_flash", flash_operators.installed_flash.__wrapped__)


def emulate_flash_attn(monkeypatch, calls: list):
    """What a machine with flash-attn 2.8.3 chooses."""
    install_flash_attn(monkeypatch, calls)
    return flash_operators.installed_flash()


OPERATORS = {"torch": emulate_torch, "flash-attn": emulate_flash_attn}
