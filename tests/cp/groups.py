"""
Gloo processes for the tests: one start serves groups of several sizes, as starting them costs more than the cases.
`python groups.py FOLDER` is what starts them, forked from a process that has imported everything.
"""

import multiprocessing
import pickle
import sys
import tempfile
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from prepared import run_prepared


# Groups other than the world: ranks of a group and of the world differ, and not all start at 0.
RANKS = {2: [1, 3], 3: [0, 2, 3], 4: [0, 1, 2, 3]}


def run_in_groups(work, ranks=RANKS, timeout=120):
    """
    `{size: [result of rank 0 of the group, ...]}` of `work(group) -> result` in groups of ranks, by size. `work` is a
    function of a module, or a `partial` of one.
    """
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        (folder / "work").write_bytes(pickle.dumps((work, ranks, timeout)))
        done = run_prepared(__file__, folder, paths=sys.path, timeout=2 * timeout)
        assert done.returncode == 0, done.stderr[-4000:]
        return {
            size: [torch.load(folder / f"{size}-{rank}.pt", weights_only=False) for rank in range(size)]
            for size in ranks
        }


def _fork_ranks(folder):
    work, ranks, timeout = pickle.loads((folder / "work").read_bytes())
    world_size = 1 + max(map(max, ranks.values()))
    context = multiprocessing.get_context("fork")
    processes = [
        context.Process(target=_run_rank, args=(rank, world_size, ranks, folder, timeout, work))
        for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    return max(abs(process.exitcode) for process in processes)


def _run_rank(rank, world_size, ranks, folder, timeout, work):
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), world_size)
    timeout = timedelta(seconds=timeout)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)
    groups = {size: dist.new_group(members, timeout=timeout) for size, members in ranks.items()}
    for size, group in groups.items():
        if rank in ranks[size]:
            torch.save(work(group), folder / f"{size}-{dist.get_rank(group)}.pt")
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


if __name__ == "__main__":
    sys.exit(_fork_ranks(Path(sys.argv[1])))
