"""The processes of a group: which of them run on one host, and which have ended."""

import os
import select
import sys
from collections.abc import Iterable
from pathlib import Path

import torch.distributed as dist


# Seconds that a process may take to end after its connections broke.
DYING = 0.5


def place() -> str | None:
    """
    Names where this process runs: two processes with one name see each other's ids and files. `None` if not on Linux.
    """
    if sys.platform != "linux":
        return None
    namespaces = [os.readlink(f"/proc/self/ns/{kind}") for kind in ("net", "pid", "mnt")]
    return " ".join([Path("/proc/sys/kernel/random/boot_id").read_text().strip(), *namespaces])


def on_one_host(group: dist.ProcessGroup) -> bool:
    """Says whether all ranks of a group run in one container of one Linux host. Collective."""
    places = [None] * dist.get_world_size(group)
    dist.all_gather_object(places, place(), group)
    return places[0] is not None and len(set(places)) == 1


class Neighbours:
    """
    The ranks on this host, by descriptors that tell when a process ends. (A closed socket is no proof of life or
    death: forked workers of a dead process keep its sockets open.)

    Args:
        rank (`int`):
            This rank.
        processes (`Iterable[tuple[str | None, int]]`):
            By rank, where it runs ([`place`]) and its process id.
    """

    def __init__(self, rank: int, processes: Iterable[tuple[str | None, int]]):
        here = place()
        self._descriptors = {
            os.pidfd_open(pid): number
            for number, (where, pid) in enumerate(processes)
            if number != rank and where is not None and where == here
        }

    def ended(self) -> list[int]:
        """Returns the ranks whose process has ended, or ends within a moment."""
        poll = select.poll()
        for descriptor in self._descriptors:
            poll.register(descriptor, select.POLLIN)
        return sorted(self._descriptors[descriptor] for descriptor, _ in poll.poll(1000 * DYING))

    def close(self) -> None:
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors = {}
