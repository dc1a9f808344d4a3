"""
Policies and their losses in float64 throughout where the weights are, so that runs can be compared beyond the rounding
of float32.

Transformers computes norms, and TRL log-probs and the gradient of the head, in float32 whatever the policy's dtype.
Nothing but the dtype is changed.
"""

import re
import sys

import torch
from trl.kernels import chunked_logprob


POLICIES = r"transformers\.models\.\w+\.modeling_"


class _Wide:
    """`torch`, in which float32 is float64."""

    def __getattr__(self, name):
        return torch.float64 if name in ("float", "float32") else getattr(torch, name)


_narrow = torch.Tensor.float


def _float(tensor, *args, **kwargs):
    inside = sys._getframe(1).f_globals["__name__"].startswith(("trl.", "transformers.models."))
    return tensor if inside and tensor.dtype == torch.float64 else _narrow(tensor, *args, **kwargs)


def keep_float64(policy_dtype):
    """What policies of this dtype and TRL compute, in this process from now on, is float64 where the weights are."""
    wide = policy_dtype == torch.float64
    of_policies = [module for name, module in sys.modules.items() if re.match(POLICIES, name)]
    for module in (chunked_logprob, *of_policies):
        module.torch = _Wide() if wide else torch
    torch.Tensor.float = _float if wide else _narrow
