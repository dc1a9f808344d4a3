"""Ranks as threads of one process, messages through queues: to break the code on purpose and see a check notice."""

import queue
import threading
from itertools import product

from trl_codraft.cp import messages


class _Arrivals:
    def __init__(self, receives):
        self.receives = receives

    def wait(self):
        for buffer, channel in self.receives:
            buffer.copy_(channel.get(timeout=20))


def run_in_threads(monkeypatch, work, size):
    """`[work((rank, size)) for each rank]`, all at once."""
    channels = {key: queue.Queue() for key in product(range(size), range(size), range(3))}
    local, results, errors = threading.local(), [None] * size, []

    def post(group, sends, receives, what, tag=0):
        for peer, buffer in sends:
            if buffer.numel():
                channels[local.rank, peer, tag].put(buffer.clone())
        return _Arrivals([(buffer, channels[peer, local.rank, tag]) for peer, buffer in receives if buffer.numel()])

    def run(rank):
        local.rank = rank
        try:
            results[rank] = work((rank, size))
        except Exception as error:
            errors.append(error)

    monkeypatch.setattr(messages, "post", post)
    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results
