"""
FSDP2 by Accelerate on CPUs. Accelerate shards on accelerators only: with CPUs it leaves `ACCELERATE_USE_FSDP` unread
when it decides what kind of run this is. Everything after that decision (wrapping, loading, clipping, saving) is its
own code, and torch shards over gloo as over NCCL.
"""

import os
from contextlib import contextmanager
from unittest import mock

from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from torch.distributed.tensor import DTensor


# What the example configs of `examples/accelerate_configs` set.
ENVIRONMENT = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "true",
    "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT",
}


@contextmanager
def fsdp2_on_cpu():
    """Trainers that are built within it shard their policy over all processes with FSDP2."""
    original = AcceleratorState.__init__

    def initialize(self, *args, fsdp_plugin=None, **kwargs):
        original(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is not None and self.distributed_type == DistributedType.MULTI_CPU:
            self.fsdp_plugin = fsdp_plugin
            self.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP

    AcceleratorState._reset_state()
    try:
        with mock.patch.dict(os.environ, ENVIRONMENT), mock.patch.object(AcceleratorState, "__init__", initialize):
            yield
    finally:
        AcceleratorState._reset_state()
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_CPU


def whole(tensor):
    """A detached copy of all of a tensor, gathered if it is sharded: collective."""
    tensor = tensor.detach()
    return tensor.full_tensor().clone() if isinstance(tensor, DTensor) else tensor.clone()
