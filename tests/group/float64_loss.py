"""
TRL's log-probs in float64 for policies in float64, so that runs can be compared beyond the rounding of float32.

TRL computes them, and the gradient of the head, in float32 whatever the policy's dtype. Nothing but the dtype is changed.
"""

import sys

import torch
from trl.kernels import chunked_logprob


class _Wide:
    """`torch`, in which float32 is float64."""

    def __getattr__(self, name):
        return torch.float64 if name == "float32" else getattr(torch, name)


_narrow = torch.Tensor.float


def _float(tensor, *args, **kwargs):
    inside_trl = sys._getframe(1).f_globals["__name__"].startswith("trl.")
    return tensor if inside_trl and tensor.dtype == torch.float64 else _narrow(tensor, *args, **kwargs)


def keep_float64_in_trl(policy_dtype):
    """What TRL computes from policies of this dtype, in this process from now on, is float64 where they are."""
    wide = policy_dtype == torch.float64
    chunked_logprob.torch = _Wide() if wide else torch
    torch.Tensor.float = _float if wide else _narrow
