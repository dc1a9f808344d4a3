"""
CUDA graphs on a CPU, as strict as on a GPU: what runs in a capture is put down operator by operator with the very
tensors it read and wrote, and a replay runs these operators on these tensors and nothing else. Python code does not
run again, so whatever it would have decided stays as it was at the capture. Values read on the host are refused, as a
capture does.

Graphs share a memory pool: a replay overwrites everything that other graphs computed.
"""

from contextlib import contextmanager

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from trl_codraft.rollout import speculative, static_shapes
from trl_codraft.rollout.static_shapes import CudaGraphs, LiveSteps, StaticSteps


aten = torch.ops.aten
# What waits for the device, or copies from pageable memory to it.
HOST_READS = {aten._local_scalar_dense.default, aten.nonzero.default, aten.masked_select.default, aten.equal.default}
HOST_WRITES = {aten.lift_fresh.default}
POISON = -77


class Tape(TorchDispatchMode):
    """Puts operators down while they run."""

    def __init__(self):
        super().__init__()
        self.calls, self.computed = [], []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function in HOST_READS | HOST_WRITES or _indexes_by_mask(function, args):
            raise RuntimeError(f"operation not permitted when stream is capturing: {function}")
        before = {_memory(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
        out = function(*args, **(kwargs or {}))
        self.calls.append((function, args, kwargs or {}, out))
        self.computed += [leaf for leaf in _tensors(out) if _memory(leaf) not in before]
        return out


class FakeCUDAGraph:
    """Stands in for `torch.cuda.CUDAGraph`."""

    all: list["FakeCUDAGraph"] = []

    def __init__(self, keep_graph=False):
        self.tape, self.replays = Tape(), 0
        FakeCUDAGraph.all.append(self)

    def replay(self):
        self.replays += 1
        for other in FakeCUDAGraph.all:
            if other is not self:
                for tensor in other.tape.computed:
                    tensor.fill_(POISON if tensor.dtype != torch.bool else True)
        for function, args, kwargs, out in self.tape.calls:
            for held, new in zip(_tensors(out), _tensors(function(*args, **kwargs)), strict=True):
                if _memory(held) != _memory(new):
                    held.copy_(new)


class FakeDevice:
    """Stands in for `torch.cuda.device`. Kernels are recorded if they run on the device of the capturing stream."""

    current = None

    def __init__(self, device):
        self.device = device

    def __enter__(self):
        self.before, FakeDevice.current = FakeDevice.current, self.device

    def __exit__(self, *error):
        FakeDevice.current = self.before


@contextmanager
def fake_capture(cuda_graph, pool=None, stream=None, capture_error_mode="global"):
    """Stands in for `torch.cuda.graph`."""
    assert pool == "pool"
    assert stream == ("stream", FakeDevice.current)
    with cuda_graph.tape:
        yield


@pytest.fixture
def cuda_graphs(monkeypatch):
    """The list of graphs made; decoders that are asked for CUDA graphs record them on the CPU."""
    FakeCUDAGraph.all = []
    monkeypatch.setattr(torch.cuda, "CUDAGraph", FakeCUDAGraph)
    monkeypatch.setattr(torch.cuda, "graph", fake_capture)
    monkeypatch.setattr(torch.cuda, "device", FakeDevice)
    monkeypatch.setattr(static_shapes, "capture_stream", lambda device: ("stream", device))
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "pool")
    monkeypatch.setattr(
        speculative, "steps_for", lambda device, wanted: StaticSteps(CudaGraphs()) if wanted else LiveSteps()
    )
    yield FakeCUDAGraph.all
    FakeCUDAGraph.all = []


def _tensors(out):
    return [leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]


def _memory(tensor):
    return tensor.untyped_storage().data_ptr()


def _indexes_by_mask(function, args):
    if function not in (aten.index.Tensor, aten.index_put_.default, aten._index_put_impl_.default):
        return False
    return any(index is not None and index.dtype == torch.bool for index in args[1])
