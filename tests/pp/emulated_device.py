"""
A GPU for tests of transports, emulated by threads: the interface of `trl_codraft.pp.taps.cuda_calls.CudaCalls`.

Streams run what they are given late, by random times of their own. Events are counters, those of other processes in shared
memory; an event that was not recorded is not waited for. Memory is poisoned when it is allocated and when it is freed, as soon
as the stream that it belongs to comes there: whoever still reads it then, reads poison. What is enqueued holds no memory.
"""

import bisect
import ctypes
import mmap
import os
import queue
import random
import threading
import time
import weakref

import torch

from trl_codraft.pp import TapChannel
from trl_codraft.pp.taps.cuda_calls import CudaError


POISON = 0xA5
DELAY = 0.05
CPU = torch.device("cpu")
HANDLE_BYTES = 64
MEMORY = 2**34
of_gpu = threading.local()  # whether a thread has said which GPU its calls are of


class EmulatedStream:
    """A thread that does one thing after the other."""

    def __init__(self, seed, latest):
        self._random, self._latest = random.Random(seed), latest
        self._acts = queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self):
        while True:
            act = self._acts.get()
            time.sleep(self._random.random() ** 4 * self._latest)
            act()

    def enqueue(self, act):
        self._acts.put(act)

    def wait_event(self, event):
        target = event.recorded
        self.enqueue(lambda: event.wait_until(target))

    def synchronize(self):
        done = threading.Event()
        self.enqueue(done.set)
        done.wait()


class EmulatedEvent:
    """How often it was recorded, and how many of these records a stream has come to."""

    def __init__(self, memory=None):
        self._counters = memoryview(memory or bytearray(16)).cast("Q")

    @property
    def recorded(self):
        return self._counters[0]

    def record(self, stream):
        number = self._counters[0] = self._counters[0] + 1
        stream.enqueue(lambda: self._counters.__setitem__(1, number))

    def query(self):
        known = threading.current_thread() is threading.main_thread() or getattr(of_gpu, "known", False)
        assert known, ("on a GPU this makes a context on the first one",)
        return self._counters[1] >= self._counters[0]

    def wait_until(self, number):
        pause = 0.0002
        while self._counters[1] < number:
            time.sleep(pause)
            pause = min(2 * pause, 0.005)


class _Block:
    """Memory of the allocator, and who else uses it."""

    def __init__(self, num_bytes, stream):
        self.content = bytearray([POISON]) * (-(-max(num_bytes, 1) // 64) * 64)
        self.stream = stream
        self.users = []
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.content))

    def freed(self, device):
        for user in self.users:
            event = EmulatedEvent()
            event.record(user)
            self.stream.wait_event(event)
        self.stream.enqueue(lambda: device.forget(self))


class EmulatedCalls:
    """One GPU. `side` and `compute` are the seconds by which anything on these streams may be late."""

    def __init__(self, device, side=0.003, compute=0.003):
        self.device = device
        self.side = EmulatedStream(f"{os.getpid()} side", side)
        self._compute = EmulatedStream(f"{os.getpid()} compute", compute)
        self._lock = threading.RLock()
        self._memory = {}  # by address: what holds it, and its length
        self._addresses = []

    def current(self):
        return self._compute

    def enter_thread(self):
        of_gpu.known = True

    # ------------------------------------------------------------------------------------------------- tensors

    def empty(self, num_bytes, stream):
        block = _Block(num_bytes, stream)
        self._add(block.address, block, len(block.content))
        view = memoryview(block.content)
        weakref.finalize(view, block.freed, self)  # the storage holds it
        return torch.frombuffer(view, dtype=torch.uint8)[:num_bytes]

    def host(self, num_bytes):
        return torch.full((num_bytes,), POISON, dtype=torch.uint8)

    def hand_over(self, tensor, stream):
        self._find(tensor.data_ptr()).users.append(stream)

    def copy(self, target, source, stream):
        to, what = self._untracked(target), self._untracked(source)
        stream.enqueue(lambda: to.copy_(what))

    def delay(self, stream):
        stream.enqueue(lambda: time.sleep(DELAY))

    def _untracked(self, tensor):
        """The same view, without a claim on the memory that would keep it from being freed."""
        block = self._find(tensor.data_ptr())
        if block is None:
            return tensor
        whole = torch.frombuffer(block.content, dtype=tensor.dtype)
        return whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    # -------------------------------------------------------------------------------------------------- events

    def event(self):
        return EmulatedEvent()

    def shared_event(self):
        memory, handle = self._shared(16)
        return EmulatedEvent(memory), handle

    def open_event(self, handle):
        return EmulatedEvent(self._opened(handle, 16))

    # ------------------------------------------------------------------------------------- memory of a neighbour

    def allocate(self, num_bytes):
        if num_bytes > MEMORY:
            raise CudaError("cudaMalloc failed on emulated: cudaErrorMemoryAllocation, out of memory")
        memory, handle = self._shared(num_bytes)
        memory[:] = bytes([POISON]) * num_bytes
        return self._map(memory, num_bytes), handle

    def free(self, address):
        for stream in (self.side, self._compute):
            stream.synchronize()  # as CUDA may
        memory, num_bytes = self._remove(address)
        memory[:] = bytes([POISON]) * num_bytes

    def open(self, handle, num_bytes):
        return self._map(self._opened(handle, num_bytes), num_bytes)

    def close(self, address):
        self._remove(address)

    def move(self, target, source, num_bytes, stream):
        held = self._find(target), self._find(source)
        assert None not in held, "neither memory of this device nor opened"

        def act():
            assert held  # so that a late copy hits poison, not what is no memory
            ctypes.memmove(target, source, num_bytes)

        stream.enqueue(act)

    # ------------------------------------------------------------------------------------------------ internal

    def _shared(self, num_bytes):
        fd = os.memfd_create("emulated")
        os.ftruncate(fd, num_bytes)
        return mmap.mmap(fd, num_bytes), f"{os.getpid()}:{fd}".encode().ljust(HANDLE_BYTES)

    def _opened(self, handle, num_bytes):
        assert len(handle) == HANDLE_BYTES
        if not any(handle):
            raise CudaError("opening failed on emulated: cudaErrorInvalidValue, invalid argument")
        pid, fd = handle.decode().split(":")
        opened = os.open(f"/proc/{pid}/fd/{fd.strip()}", os.O_RDWR)
        memory = mmap.mmap(opened, num_bytes)
        os.close(opened)
        return memory

    def _map(self, memory, num_bytes):
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self._add(address, memory, num_bytes)
        return address

    def _add(self, address, holder, num_bytes):
        with self._lock:
            self._memory[address] = holder, num_bytes
            bisect.insort(self._addresses, address)

    def _remove(self, address):
        with self._lock:
            self._addresses.remove(address)
            return self._memory.pop(address)

    def _find(self, address):
        """What holds an address, if it is of this device."""
        with self._lock:
            index = bisect.bisect(self._addresses, address) - 1
            if index < 0:
                return None
            holder, num_bytes = self._memory[self._addresses[index]]
            return holder if address < self._addresses[index] + num_bytes else None

    def forget(self, block):
        """In the stream that a freed block belongs to: it is used for something else from now on."""
        self._remove(block.address)
        block.content[:] = bytes([POISON]) * len(block.content)


class LateChannel(TapChannel):
    """
    A channel as programs of a GPU use one: what it captures is computed late, by its stream, and overwritten afterwards; what
    is taken is read late, and dropped before it was read.
    """

    @property
    def _calls(self):
        return self.transport._calls

    def capture(self, layer, hidden):
        calls = self._calls
        if hidden.device.type != "cpu":
            return super().capture(layer, hidden)
        late = calls.empty(hidden.nbytes, calls.current()).view(hidden.dtype).view(hidden.shape)
        calls.copy(late, hidden.detach().clone(), calls.current())
        super().capture(layer, late)
        calls.copy(late, torch.full_like(hidden, 77), calls.current())

    def take(self, microbatch):
        taps, calls = super().take(microbatch), self._calls
        read = [torch.empty_like(tap) for tap in taps]
        while taps:
            calls.copy(read[len(taps) - 1], taps.pop(), calls.current())
        calls.current().synchronize()
        return read


class OutOfMemory(EmulatedCalls):
    def allocate(self, num_bytes):
        raise CudaError("cudaMalloc failed on emulated: cudaErrorMemoryAllocation, out of memory")


class WrongBytes(EmulatedCalls):
    """Every copy to or from another process's memory gets one byte wrong."""

    def move(self, target, source, num_bytes, stream):
        super().move(target, source, num_bytes, stream)
        stream.enqueue(lambda: ctypes.memset(target + num_bytes // 2, 0xEE, 1))


class DeafToEvents(EmulatedCalls):
    """Events of other processes can be opened, but waiting for one does nothing."""

    def open_event(self, handle):
        super().open_event(handle)
        return EmulatedEvent()


class Overcautious(EmulatedCalls):
    """A stream that waits for another process's event waits for its last record at the time that the stream comes there."""

    def open_event(self, handle):
        event = super().open_event(handle)
        event.wait_until = lambda number: EmulatedEvent.wait_until(event, max(number, event.recorded))
        return event


class Forgetful(EmulatedCalls):
    """Freed memory is used again at once, whoever else was to use it."""

    def hand_over(self, tensor, stream):
        pass


class OtherBindings(EmulatedCalls):
    def open(self, handle, num_bytes):
        raise TypeError("cudaIpcOpenMemHandle() takes exactly 1 positional argument (2 given)")


class Unopenable(EmulatedCalls):
    def open(self, handle, num_bytes):
        raise CudaError("cudaIpcOpenMemHandle failed on emulated: cudaErrorInvalidValue, invalid argument")
