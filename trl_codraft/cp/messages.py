"""
Messages between the ranks of a context-parallel group: hops around a ring, and rows from wherever they lie.

Every call is posted by all ranks of the group in the same order, as one batch, and sizes follow from the layout alone,
so nothing about them is sent and empty messages are left out on both sides. Tags keep apart messages that gloo would
match by order; NCCL goes by the order. A rank that does not answer within the group's timeout is an error that names
it.

Shapes: `T` rows of this rank.
"""

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist


class Pending:
    """Messages under way. Holds their buffers until [`wait`]."""

    def __init__(self, operations: list[dist.P2POp], peers: list[int], what: str):
        self.what, self.peers, self.operations = what, peers, operations
        try:
            self.works = dist.batch_isend_irecv(operations) if operations else []
        except RuntimeError as error:
            raise self._unanswered(peers, error) from error

    def wait(self) -> None:
        """
        Waits until all have arrived (on CUDA: until the current stream may use them).

        Raises:
            RuntimeError: if a rank does not answer in time; names the awaited message and its sender.
        """
        for index, work in enumerate(self.works):
            try:
                work.wait()
            except RuntimeError as error:
                # gloo gives one work per message, NCCL one for the batch.
                waiting_for = [self.peers[index]] if len(self.works) == len(self.peers) else self.peers
                raise self._unanswered(waiting_for, error) from error
        self.operations = []

    def _unanswered(self, ranks: list[int], error: RuntimeError) -> RuntimeError:
        names = ", ".join(map(str, sorted(set(ranks))))
        return RuntimeError(
            f"Context parallelism: no answer from rank {names} while exchanging {self.what}. Look at the log of that "
            f"rank first; how long others wait is the timeout of the process group. ({error})"
        )


def post(
    group: dist.ProcessGroup,
    sends: Sequence[tuple[int, torch.Tensor]],
    receives: Sequence[tuple[int, torch.Tensor]],
    what: str,
    tag: int = 0,
) -> Pending:
    """
    Starts one batch of messages.

    Args:
        group (`dist.ProcessGroup`):
            The context-parallel group.
        sends, receives (`Sequence[tuple[int, torch.Tensor]]`):
            Rank in the group and contiguous buffer. Buffers must stay as they are until `wait`; empty ones are
            skipped.
        what (`str`):
            Named in errors.
        tag (`int`, *optional*, defaults to `0`):
            Keeps streams of messages between two ranks apart.

    Returns:
        [`Pending`]
    """
    operations, peers = [], []
    for function, messages in ((dist.isend, sends), (dist.irecv, receives)):
        for rank, buffer in messages:
            if buffer.numel():
                peer = dist.get_global_rank(group, rank)
                operations.append(dist.P2POp(function, buffer, peer, group, tag))
                peers.append(peer)
    return Pending(operations, peers, what)


class Ring:
    """
    The trunk's way around the group: keys and values visit every rank, their gradients come home.

    Only rows of documents that lie on several ranks travel. A block is a flat buffer: keys, then values, of one rank's
    travelling rows.

    Args:
        group (`dist.ProcessGroup` or `None`):
            The group; `None` for a single process.
        rank (`int`):
            This rank in the group.
        block_sizes (`list[int]`):
            Numbers in the block of each rank.
    """

    def __init__(self, group: dist.ProcessGroup | None, rank: int, block_sizes: list[int]):
        self.group, self.rank, self.block_sizes = group, rank, block_sizes
        self.size = len(block_sizes)

    def visits(self, block: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
        """
        Sends this rank's block around and yields the others as they pass. The first hop starts at once, each further
        one before its predecessor's block is yielded: messages are under way while the caller computes.

        Args:
            block (`torch.Tensor`):
                This rank's block, flat; unchanged until the iteration ends. The iteration must be finished.

        Returns:
            `Iterator[tuple[int, torch.Tensor]]`: source rank and its block, for sources `rank - 1`, `rank - 2`, ...
        """
        return self._pass_on(*self._forward(block, 1)) if self.size > 1 else iter(())

    def _pass_on(self, pending: Pending, arriving: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
        for step in range(1, self.size):
            pending.wait()
            block = arriving
            if step + 1 < self.size:
                pending, arriving = self._forward(block, step + 1)
            yield (self.rank - step) % self.size, block

    def _forward(self, block: torch.Tensor, step: int) -> tuple[Pending, torch.Tensor]:
        """Hands a block on and lets the one of source `rank - step` come."""
        arriving = block.new_empty(self.block_sizes[(self.rank - step) % self.size])
        return self._hop(block, arriving, "trunk keys and values", tag=0), arriving

    def send_home(self, parts: Iterator[torch.Tensor]) -> torch.Tensor:
        """
        Adds up the gradients that the other ranks found for this rank's block, and theirs likewise.

        Args:
            parts (`Iterator[torch.Tensor]`):
                This rank's gradients of the blocks of `rank - 1`, `rank - 2`, ..., flat; consumed one per hop and
                changed in place.

        Returns:
            `torch.Tensor`: sum over the other ranks of the gradients of this rank's block, flat.
        """
        pending, arriving = None, None
        for step, part in enumerate(parts, start=1):
            if pending is not None:
                pending.wait()
                part.add_(arriving)
            # What arrives was found for the source this rank turns to next; in the last hop that is itself.
            arriving = part.new_empty(self.block_sizes[(self.rank - step - 1) % self.size])
            pending = self._hop(part, arriving, "gradients of trunk keys and values", tag=1)
        pending.wait()
        return arriving

    def _hop(self, sent: torch.Tensor, received: torch.Tensor, what: str, tag: int) -> Pending:
        sends = [((self.rank + 1) % self.size, sent)]
        receives = [((self.rank - 1) % self.size, received)]
        return post(self.group, sends, receives, what, tag)


class RowExchange:
    """
    Rows that each rank wants, wherever they lie, and the way back for their gradients.

    Args:
        group (`dist.ProcessGroup` or `None`):
            The group; `None` for a single process.
        rank (`int`):
            This rank in the group.
        wanted (`list[list[tuple[int, int, int]]]`):
            The rows that each rank wants, in order: runs of (owner, first, last + 1) in the owner's storage.
        device (`torch.device`):
            Where index tensors live.
        what (`str`):
            Named in errors.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        rank: int,
        wanted: list[list[tuple[int, int, int]]],
        device: torch.device,
        what: str,
    ):
        self.group, self.rank, self.what = group, rank, what
        ranks = range(len(wanted))
        self.num_wanted = sum(end - start for _, start, end in wanted[rank])
        self._sent = [_rows(wanted[peer], rank).to(device) for peer in ranks]
        self._num_received = [
            sum(end - start for owner, start, end in wanted[rank] if owner == peer) for peer in ranks
        ]
        # Rows arrive by owner; `_order` puts them as they were wanted.
        first = [sum(self._num_received[:peer]) for peer in ranks]
        order = []
        for owner, start, end in wanted[rank]:
            order.append(torch.arange(first[owner], first[owner] + end - start))
            first[owner] += end - start
        self._order = torch.cat([torch.empty(0, dtype=torch.int64), *order]).to(device)
        self._others = [(rank + step) % len(wanted) for step in range(1, len(wanted))]

    def fetch(self, values: torch.Tensor) -> torch.Tensor:
        """`(T, ...)` rows of this rank to the `(num_wanted, ...)` rows it wants. Not differentiable."""
        sent = {peer: values[self._sent[peer]].contiguous() for peer in self._others}
        received = {
            peer: values.new_empty(self._num_received[peer], *values.shape[1:])
            for peer in range(len(self._num_received))
        }
        received[self.rank] = values[self._sent[self.rank]]
        self._exchange(sent, received)
        return torch.cat([received[peer] for peer in sorted(received)])[self._order]

    def give_back(self, grads: torch.Tensor, num_rows: int) -> torch.Tensor:
        """`(num_wanted, ...)` gradients to their owners; the sum over ranks for this rank's `num_rows` rows."""
        by_owner = torch.empty_like(grads)
        by_owner[self._order] = grads
        sent = dict(enumerate(by_owner.split(self._num_received)))
        received = {peer: grads.new_empty(len(self._sent[peer]), *grads.shape[1:]) for peer in self._others}
        received[self.rank] = sent.pop(self.rank)
        self._exchange(sent, received)
        total = grads.new_zeros(num_rows, *grads.shape[1:])
        for peer in sorted(received):
            total.index_add_(0, self._sent[peer], received[peer])
        return total

    def _exchange(self, sent: dict[int, torch.Tensor], received: dict[int, torch.Tensor]) -> None:
        """Fills `received` from the other ranks."""
        sends = [(peer, sent[peer]) for peer in self._others]
        receives = [(peer, received[peer]) for peer in reversed(self._others)]
        post(self.group, sends, receives, self.what, tag=2).wait()


def _rows(runs: list[tuple[int, int, int]], owner: int) -> torch.Tensor:
    """Storage rows of one owner in a list of runs."""
    pieces = [torch.arange(start, end) for run_owner, start, end in runs if run_owner == owner]
    return torch.cat([torch.empty(0, dtype=torch.int64), *pieces])


def gather_rows(group: dist.ProcessGroup | None, values: torch.Tensor, rows_of: list[int]) -> list[torch.Tensor]:
    """
    Every rank's rows on every rank.

    Args:
        group (`dist.ProcessGroup` or `None`):
            The group; `None` for a single process.
        values (`torch.Tensor` of shape `(T, ...)`):
            Rows of this rank.
        rows_of (`list[int]`):
            Rows of each rank.

    Returns:
        `list[torch.Tensor]`: rows of each rank.
    """
    if len(rows_of) == 1:
        return [values]
    # Collectives want equal sizes.
    padded = values.new_zeros(max(rows_of), *values.shape[1:])
    padded[: values.shape[0]] = values
    gathered = [torch.empty_like(padded) for _ in rows_of]
    dist.all_gather(gathered, padded, group=group)
    return [rows[:count] for rows, count in zip(gathered, rows_of, strict=True)]
