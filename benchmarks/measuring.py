"""What the benchmarks read of the machine and of their own process; Linux keeps the numbers in `/proc`."""

import os
import platform
import shutil
import subprocess
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile


def machine(name: str = platform.machine()) -> str:
    """First words of a benchmark's output: the commit, the machine and torch."""
    return f"commit {commit()}; {name}, {os.cpu_count()} cores, torch {torch.__version__}"


def commit() -> str:
    """The commit of this checkout, with `-dirty` if the tree has changes on top of it."""
    if shutil.which("git") is None:
        return "unknown"
    command = ["git", "describe", "--always", "--dirty", "--exclude=*", "--abbrev=7"]
    found = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True)
    return found.stdout.strip() or "unknown"


def resident_bytes(field: str = "VmRSS") -> int:
    """Resident memory of this process: `VmRSS` now, `VmHWM` the most since [`reset_peak`]."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def reset_peak() -> None:
    """Sets the largest resident size back to the present one: a process starts with that of its parent."""
    Path("/proc/self/clear_refs").write_text("5")


def open_files() -> int:
    """File descriptors that this process holds."""
    return len(os.listdir("/proc/self/fd"))


def saved_and_peak_bytes(run) -> tuple[int, int]:
    """Bytes that autograd keeps, and the highest sum of live allocations above those before the run."""
    storages = {}

    def keep(tensor):
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            run()
    live = peak = 0
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return sum(storages.values()), peak
