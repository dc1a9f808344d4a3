"""
What transports of GPUs ask of CUDA, and nothing else: the calls of `torch.cuda` and of CUDA's runtime, one line each.

`tests/pp/emulated_device.py` has the same interface on a CPU, with streams that are late and memory that is poisoned.
"""

import ctypes
from functools import cached_property

import torch


# Allocations that are whole multiples of this share no page with what other processes are not to see.
PAGE = 2 * 2**20
HANDLE_BYTES = 64
# Some tens of milliseconds.
DELAY_CYCLES = 50_000_000


class CudaError(RuntimeError):
    """A call of CUDA's runtime failed."""


class CudaCalls:
    """
    One GPU as a process sees it. Streams and events are those of `torch.cuda`; a stream is either the current one or `side`.

    Args:
        device (`torch.device`):
            The GPU.
    """

    def __init__(self, device: torch.device):
        self.device = torch.device(device.type, torch.cuda.current_device() if device.index is None else device.index)
        self.side = torch.cuda.Stream(self.device)

    @cached_property
    def runtime(self):
        """
        CUDA's runtime in Python, which the CUDA builds of torch depend on. Imported where IPC is tried. It is a copy of its
        own: devices (by their primary contexts), streams and addresses are torch's, its last error is not.
        """
        from cuda.bindings import runtime

        return runtime

    def current(self) -> torch.cuda.Stream:
        """The stream that forwards run on."""
        return torch.cuda.current_stream(self.device)

    def enter_thread(self) -> None:
        """Makes this GPU the current one of a new thread, whose calls would make a context on the first GPU."""
        torch.cuda.set_device(self.device)

    # ------------------------------------------------------------------------------------------------- tensors

    def empty(self, num_bytes: int, stream: torch.cuda.Stream) -> torch.Tensor:
        """Memory of torch's allocator whose next use is on a stream."""
        with torch.cuda.stream(stream):
            return torch.empty(num_bytes, dtype=torch.uint8, device=self.device)

    def host(self, num_bytes: int) -> torch.Tensor:
        """Host memory that a copy need not wait for."""
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def hand_over(self, tensor: torch.Tensor, stream: torch.cuda.Stream) -> None:
        """Freed memory is not used again before what this stream does with it until then is done."""
        tensor.record_stream(stream)

    def copy(self, target: torch.Tensor, source: torch.Tensor, stream: torch.cuda.Stream) -> None:
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)

    def delay(self, stream: torch.cuda.Stream) -> None:
        """What comes next on a stream comes late."""
        with torch.cuda.stream(stream):
            torch.cuda._sleep(DELAY_CYCLES)

    # -------------------------------------------------------------------------------------------------- events

    def event(self) -> torch.cuda.Event:
        return torch.cuda.Event()

    def shared_event(self) -> tuple[torch.cuda.Event, bytes]:
        """An event and the handle by which another process opens it."""
        with torch.cuda.device(self.device):
            event = torch.cuda.Event(interprocess=True)
            return event, event.ipc_handle()

    def open_event(self, handle: bytes) -> torch.cuda.Event:
        # Of this device, whatever device recorded it: streams of any device may wait for it.
        return torch.cuda.Event.from_ipc_handle(self.device, handle)

    # ------------------------------------------------------------------------------------- memory of a neighbour

    def allocate(self, num_bytes: int) -> tuple[int, bytes]:
        """Address of memory on this GPU, and the handle by which another process opens it."""
        num_bytes = -(-num_bytes // PAGE) * PAGE
        try:
            address = self._call("cudaMalloc", num_bytes)
        except CudaError:
            torch.cuda.empty_cache()  # what torch keeps for later would do
            address = self._call("cudaMalloc", num_bytes)
        handle = self._call("cudaIpcGetMemHandle", address)
        return address, ctypes.string_at(int(handle.getPtr()), HANDLE_BYTES)

    def free(self, address: int) -> None:
        self._call("cudaFree", address)

    def open(self, handle: bytes, num_bytes: int) -> int:
        """Address here of what another process has allocated."""
        opened = self.runtime.cudaIpcMemHandle_t()
        ctypes.memmove(int(opened.getPtr()), handle, HANDLE_BYTES)
        return self._call("cudaIpcOpenMemHandle", opened, self.runtime.cudaIpcMemLazyEnablePeerAccess)

    def close(self, address: int) -> None:
        self._call("cudaIpcCloseMemHandle", address)

    def move(self, target: int, source: int, num_bytes: int, stream: torch.cuda.Stream) -> None:
        """Copies between addresses, of which one may be on another GPU."""
        kind = self.runtime.cudaMemcpyKind.cudaMemcpyDefault
        self._call("cudaMemcpyAsync", target, source, num_bytes, kind, stream.cuda_stream)

    def _call(self, name: str, *arguments):
        """Calls the runtime with this GPU as the current one."""
        with torch.cuda.device(self.device):
            self._require("cudaSetDevice", self.runtime.cudaSetDevice(self.device.index))
            return self._require(name, getattr(self.runtime, name)(*arguments))

    def _require(self, name: str, outcome: tuple):
        error, *results = outcome
        if error != self.runtime.cudaError_t.cudaSuccess:
            text = self.runtime.cudaGetErrorString(error)[1].decode()
            raise CudaError(f"{name} failed on {self.device}: {error.name}, {text}")
        return results[0] if results else None
