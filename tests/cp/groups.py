"""Gloo processes for the tests: one spawn serves groups of several sizes, as starting it costs more than the cases."""

import os
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


# Groups other than the world: ranks of a group and of the world differ, and not all start at 0.
RANKS = {2: [1, 3], 3: [0, 2, 3], 4: [0, 1, 2, 3]}


def run_in_groups(work, ranks=RANKS, timeout=120):
    """`{size: [result of rank 0 of the group, ...]}` of `work(group) -> result` in groups of ranks, by size."""
    world_size, sizes = 1 + max(map(max, ranks.values())), list(ranks)
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_run_rank, args=(world_size, ranks, folder, timeout, work), nprocs=world_size)
        return {
            size: [torch.load(os.path.join(folder, f"{size}-{rank}.pt"), weights_only=False) for rank in range(size)]
            for size in sizes
        }


def _run_rank(rank, world_size, ranks, folder, timeout, work):
    torch.set_num_threads(1)
    store = dist.FileStore(os.path.join(folder, "store"), world_size)
    timeout = timedelta(seconds=timeout)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)
    try:
        groups = {size: dist.new_group(members, timeout=timeout) for size, members in ranks.items()}
        for size, group in groups.items():
            if rank in ranks[size]:
                torch.save(work(group), os.path.join(folder, f"{size}-{dist.get_rank(group)}.pt"))
    finally:
        dist.destroy_process_group()


class WireBytes:
    """Counts the bytes this process sends through `batch_isend_irecv` while entered."""

    def __enter__(self):
        self.sent, self.original = 0, dist.batch_isend_irecv

        def counting(operations):
            for operation in operations:
                if operation.op is dist.isend:
                    self.sent += operation.tensor.numel() * operation.tensor.element_size()
            return self.original(operations)

        dist.batch_isend_irecv = counting
        return self

    def __exit__(self, *_):
        dist.batch_isend_irecv = self.original
