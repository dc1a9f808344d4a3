"""The class under the transports of GPUs, as far as it can be looked at without one: names, signatures, handles, errors."""

import ctypes
import inspect
from contextlib import nullcontext
from enum import IntEnum
from types import SimpleNamespace

import pytest
import torch

from trl_codraft.pp.taps.cuda_calls import PAGE, CudaCalls, CudaError


class Errors(IntEnum):
    cudaSuccess = 0
    cudaErrorMemoryAllocation = 2
    cudaErrorInsufficientDriver = 35


TEXTS = {
    Errors.cudaErrorMemoryAllocation: b"out of memory",
    Errors.cudaErrorInsufficientDriver: b"CUDA driver version is insufficient for CUDA runtime version",
}


class Handle:
    """As `cudaIpcMemHandle_t` of `cuda.bindings.runtime`: 64 bytes, of which Python knows the address."""

    def __init__(self):
        self.content = (ctypes.c_char * 64)()

    def getPtr(self):
        return ctypes.addressof(self.content)


class Runtime:
    """The functions of `cuda.bindings.runtime` (12.9 and 13.5) that are used: integers go in, tuples come back, errors first."""

    cudaError_t, cudaIpcMemHandle_t = Errors, Handle
    cudaIpcMemLazyEnablePeerAccess = 1
    cudaMemcpyKind = SimpleNamespace(cudaMemcpyDefault=4)

    def __init__(self, failures=0, driver=Errors.cudaSuccess):
        self.failures, self.driver, self.seen = failures, driver, []

    def cudaSetDevice(self, device):
        self.seen.append(("cudaSetDevice", device))
        return (self.driver,)

    def cudaMalloc(self, size):
        self.seen.append(("cudaMalloc", size))
        if self.failures:
            self.failures -= 1
            return Errors.cudaErrorMemoryAllocation, None
        return Errors.cudaSuccess, 4096

    def cudaIpcGetMemHandle(self, devPtr):
        handle = Handle()
        handle.content.raw = bytes(range(63)) + bytes([devPtr % 251])
        return Errors.cudaSuccess, handle

    def cudaIpcOpenMemHandle(self, handle, flags):
        self.seen.append(("cudaIpcOpenMemHandle", handle.content.raw, flags))
        return Errors.cudaSuccess, 8192

    def cudaMemcpyAsync(self, dst, src, count, kind, stream):
        self.seen.append(("cudaMemcpyAsync", dst, src, count, kind, stream))
        return (Errors.cudaSuccess,)

    def cudaGetErrorString(self, error):
        return Errors.cudaSuccess, TEXTS[error]


@pytest.fixture
def make(monkeypatch):
    """`make(runtime)`: the calls of GPU 3, and how often torch was told to free what it keeps."""
    emptied = []
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(1))
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: SimpleNamespace(cuda_stream=77))

    def build(runtime):
        calls = CudaCalls(torch.device("cuda", 3))
        calls.runtime = runtime
        return calls, emptied

    return build


def test_memory_is_whole_pages_and_its_handle_reaches_the_other_process_as_bytes(make):
    runtime = Runtime()
    calls, _ = make(runtime)
    address, handle = calls.allocate(PAGE + 1)
    assert ("cudaMalloc", 2 * PAGE) in runtime.seen
    assert len(handle) == 64
    assert calls.open(handle, PAGE + 1) == 8192
    assert runtime.seen[-1] == ("cudaIpcOpenMemHandle", bytes(range(63)) + bytes([address % 251]), 1)
    assert runtime.seen[-2] == ("cudaSetDevice", 3)


def test_copy_goes_to_the_side_stream(make):
    runtime = Runtime()
    calls, _ = make(runtime)
    calls.move(16, 32, 5, calls.side)
    assert runtime.seen[-1] == ("cudaMemcpyAsync", 16, 32, 5, 4, 77)


def test_new_thread_makes_its_calls_on_this_gpu(make, monkeypatch):
    calls, _ = make(Runtime())
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: current.append(device))
    current = []
    calls.enter_thread()
    assert current == [torch.device("cuda", 3)]


def test_memory_that_torch_keeps_is_freed_before_an_allocation_fails(make):
    calls, emptied = make(Runtime(failures=1))
    assert calls.allocate(1)[0] == 4096
    assert emptied == [1]


@pytest.mark.parametrize(
    ("runtime", "message"),
    [
        (Runtime(failures=2), "cudaMalloc failed on cuda:3: cudaErrorMemoryAllocation, out of memory"),
        (
            Runtime(driver=Errors.cudaErrorInsufficientDriver),
            "cudaSetDevice failed on cuda:3: cudaErrorInsufficientDriver, CUDA driver version is insufficient",
        ),
    ],
)
def test_error_names_the_call_the_device_and_what_cuda_says(make, runtime, message):
    calls, _ = make(runtime)
    with pytest.raises(CudaError, match=message):
        calls.allocate(1)


def test_torch_has_what_is_called():
    def takes(function, *arguments, **named):
        inspect.signature(function).bind(*arguments, **named)

    takes(torch.cuda.Stream.__new__, torch.cuda.Stream, torch.device("cuda", 0))
    takes(torch.cuda.Stream.wait_event, None, None)
    takes(torch.cuda.Event.__new__, torch.cuda.Event, interprocess=True)
    takes(torch.cuda.Event.from_ipc_handle, torch.device("cuda", 0), b"")
    takes(torch.cuda.Event.ipc_handle, None)
    takes(torch.cuda.Event.record, None, None)
    takes(torch.cuda.Event.query, None)
    takes(torch.cuda.current_stream, torch.device("cuda", 0))
    takes(torch.cuda._sleep, 1)
    assert callable(torch.Tensor.record_stream)
