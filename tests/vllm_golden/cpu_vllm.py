"""
What has to be replaced in vLLM 0.29 so that a run with a draft works on a CPU: two functions of its CPU backend, and
the NCCL group that a server's weights come through. Everything else is vLLM's own.
"""

import os
from types import SimpleNamespace


ENVIRONMENT = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "CI": "1",
}
# Before the import of vLLM, which reads them.
os.environ.update(ENVIRONMENT)

import torch  # noqa: E402
import vllm.distributed.device_communicators.pynccl as pynccl  # noqa: E402
import vllm.distributed.weight_transfer.packed_tensor as packed_tensor  # noqa: E402
import vllm.model_executor.layers.utils as cpu_layers  # noqa: E402
import vllm.v1.sample.rejection_sampler as rejection_sampler  # noqa: E402


def keep_weights_loadable() -> None:
    """The CPU backend packs weights into a form that cannot be loaded into again."""

    def unpacked(layer, remove_weight):
        layer.cpu_linear = torch.nn.functional.linear

    cpu_layers.dispatch_cpu_unquantized_gemm = unpacked


def expand_properly() -> None:
    """The CPU kernel of `expand_batch_to_tokens` leaves the temperatures of sampled drafts uninitialised."""

    def expand(x, cu_num_tokens, num_tokens, replace_from=0, replace_to=0):
        counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1)).long()
        return x.masked_fill(x == replace_from, replace_to).repeat_interleave(counts)

    rejection_sampler.expand_batch_to_tokens = expand


class StoreCommunicator:
    """Broadcasts over the TCP store of the group, in the place of NCCL, which wants a GPU."""

    def __init__(self, group, device):
        self.group = group

    def broadcast(self, tensor: torch.Tensor, src: int, stream=None) -> None:
        tensor.copy_(self.group.broadcast(tensor, src))


def transfer_without_gpu() -> None:
    """Trainer and server: the group of weight transfers, and the CUDA streams it is used from."""
    pynccl.PyNcclCommunicator = StoreCommunicator
    packed_tensor._get_streams = lambda device, count: [SimpleNamespace(synchronize=lambda: None)] * count
    torch.accelerator.current_device_index = lambda: 0
    torch.cuda.stream = lambda stream: torch.cuda.StreamContext(None)
