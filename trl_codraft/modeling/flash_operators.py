"""
Packed flash attention on CUDA: the operator that ships with torch and the one of the package flash-attn (the `[flash]`
extra), with the same calls. Documents lie one after the other, none may be empty, causal masks and windows are aligned
at the end of each document, and the backward may be given the output and log-sum-exp over further keys.

Shapes: `Tq` / `Tk` packed query / key rows, `Hq` / `Hkv` query / key-value heads, `D` head dim.
"""

import importlib.metadata
import logging
from functools import cache
from itertools import accumulate
from typing import Any, Protocol

import torch
from packaging.version import Version
from torch import Tensor

from .kernel_call import Attended, Documents, Gradients, Mask


logger = logging.getLogger(__name__)


class PackedFlash(Protocol):
    """One packed flash operator: bfloat16 and float16, head dims that are multiples of 8 up to 256."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, documents: Documents, mask: Mask) -> Attended:
        """The log-sum-exp is float32 of shape `(Hq, Tq)` here."""
        ...

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, attended: Attended, documents: Documents, mask: Mask
    ) -> Gradients:
        """Gradients in the dtypes of `q`, `k` and `v`; the log-sum-exp is `(Hq, Tq)` and contiguous."""
        ...


class TorchFlash:
    """The operator behind `torch.nn.attention.varlen`; needs no further package."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, documents: Documents, mask: Mask) -> Attended:
        """See [`PackedFlash`]."""
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            q,
            k,
            v,
            *_offsets_and_lengths(documents, q.device),
            0.0,
            mask.causal,
            return_debug_mask=False,
            scale=mask.scale,
            **self._window(mask.window),
        )
        return Attended(out, lse)

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, attended: Attended, documents: Documents, mask: Mask
    ) -> Gradients:
        """See [`PackedFlash`]."""
        return torch.ops.aten._flash_attention_backward(
            dout,
            q,
            k,
            v,
            *attended,
            *_offsets_and_lengths(documents, q.device),
            0.0,
            mask.causal,
            # The kernel reads no random state without dropout; these are the placeholders torch itself passes.
            torch.zeros(2, dtype=torch.uint64, device=q.device),
            torch.empty(0, device=q.device),
            scale=mask.scale,
            **self._window(mask.window),
        )

    @staticmethod
    def _window(left: int | None) -> dict[str, int]:
        return {} if left is None else {"window_size_left": left, "window_size_right": 0}


class FlashAttention2:
    """The operators of flash-attn 2.8, whose public function differentiates with a log-sum-exp of its own only."""

    def __init__(self):
        from flash_attn import flash_attn_interface

        self._forward = flash_attn_interface._flash_attn_varlen_forward
        self._backward = flash_attn_interface._flash_attn_varlen_backward

    def forward(self, q: Tensor, k: Tensor, v: Tensor, documents: Documents, mask: Mask) -> Attended:
        """See [`PackedFlash`]."""
        out, lse, *_ = self._forward(q, k, v, **self._settings(documents, mask, q.device))
        return Attended(out, lse)

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, attended: Attended, documents: Documents, mask: Mask
    ) -> Gradients:
        """See [`PackedFlash`]."""
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        self._backward(
            dout,
            q,
            k,
            v,
            *attended,
            dq,
            dk,
            dv,
            deterministic=torch.are_deterministic_algorithms_enabled(),
            **self._settings(documents, mask, q.device),
        )
        return dq, dk, dv

    @staticmethod
    def _settings(documents: Documents, mask: Mask, device: torch.device) -> dict[str, Any]:
        q_offsets, k_offsets, longest_q, longest_k = _offsets_and_lengths(documents, device)
        return {
            "cu_seqlens_q": q_offsets,
            "cu_seqlens_k": k_offsets,
            "max_seqlen_q": longest_q,
            "max_seqlen_k": longest_k,
            "dropout_p": 0.0,
            "softmax_scale": mask.scale,
            "causal": mask.causal,
            # A negative number on the left means no window.
            "window_size_left": -1 if mask.window is None else mask.window,
            "window_size_right": -1 if mask.window is None else 0,
            "softcap": 0.0,
            "alibi_slopes": None,
        }


@cache
def installed_flash() -> PackedFlash:
    """flash-attn where a release that we know is installed and can be imported, else torch's own operator."""
    try:
        version = Version(importlib.metadata.version("flash-attn"))
    except importlib.metadata.PackageNotFoundError:
        return TorchFlash()
    if not Version("2.8") <= version < Version("3"):
        logger.warning("flash-attn %s is not 2.8: torch's own flash attention is used in its place.", version)
        return TorchFlash()
    try:
        return FlashAttention2()
    except (ImportError, AttributeError) as error:
        logger.warning("flash-attn %s cannot be used (%s): torch's own flash attention is.", version, error)
        return TorchFlash()


class AnyHeadDim:
    """
    An operator for any head dim up to 256, and log-sum-exps of shape `(Tq, Hq)` as kernels have them.

    Args:
        operator ([`PackedFlash`]): computes documents, none of which may be empty.
    """

    def __init__(self, operator: PackedFlash):
        self.operator = operator

    def forward(self, q: Tensor, k: Tensor, v: Tensor, documents: Documents, mask: Mask) -> Attended:
        """See [`~attention_kernels.AttentionKernel`]."""
        out, lse = self.operator.forward(*map(_pad_head_dim, (q, k, v)), documents, mask)
        return Attended(out[..., : q.shape[-1]], lse.T)

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, attended: Attended, documents: Documents, mask: Mask
    ) -> Gradients:
        """See [`~attention_kernels.AttentionKernel`]."""
        padded = map(_pad_head_dim, (dout, q, k, v))
        attended = Attended(_pad_head_dim(attended.out), attended.lse.T.contiguous())
        grads = self.operator.backward(*padded, attended, documents, mask)
        return tuple(grad[..., : q.shape[-1]] for grad in grads)


def _pad_head_dim(rows: Tensor) -> Tensor:
    """Zeros up to the next multiple of 8; they change no score and are cut off again."""
    return torch.nn.functional.pad(rows, (0, -rows.shape[-1] % 8)).contiguous()


def _offsets_and_lengths(documents: Documents, device: torch.device) -> tuple[Tensor, Tensor, int, int]:
    """Where documents begin, int32 `[0, l0, l0+l1, ...]`, for queries and keys, and the longest of each."""
    lengths = documents.q_lens, documents.k_lens
    offsets = (torch.tensor([0, *accumulate(lens)], dtype=torch.int32, device=device) for lens in lengths)
    return *offsets, *map(max, lengths)
