"""
The layout of a pack over a context-parallel group: which rows a rank stores, in which order, and the blocks and
messages that follow.

Every rank builds the layout of all ranks from the same document lengths, so both ends of a message know its size and
nothing is ever asked of the data.

Shapes: `S` rows of the whole pack, `T` rows of this rank, `Ts` rows of this rank that pass `s` computes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.distributed as dist

from ..modeling.kernel_call import Documents, rows_of
from ..modeling.packing import require_roots
from .messages import RowExchange, gather_rows
from .planner import BALANCE_LENGTH, Segment, Shards, plan_document, plan_hybrid


@dataclass(frozen=True)
class Block:
    """
    Arguments of one kernel call: the rows of queries and keys, and how many of each document. `None` for all rows.
    """

    q_rows: slice | torch.Tensor | None
    k_rows: slice | torch.Tensor | None
    q_lens: list[int]
    k_lens: list[int]

    @property
    def documents(self) -> Documents:
        return Documents(self.q_lens, self.k_lens)


class ContextLayout:
    """
    A rank's share of a pack of documents.

    Rows are stored by document and position, documents that lie on several ranks first: their keys and values are the
    ones that travel, and lie together. Uneven and empty shards are legal.

    Args:
        doc_lens (`Sequence[int]`):
            Tokens per document, in pack order; zero is allowed.
        shards (`list[list[Segment]]`):
            Segments of each rank; together they tile the documents.
        group (`dist.ProcessGroup`, *optional*):
            Its ranks, in order, hold the shards. `None` for a single shard, or to look at a plan without talking to
            anyone.
        rank (`int`, *optional*):
            Whose share this is; by default this process's rank in `group`, or 0.
        first_valid_root (`Sequence[int]`, *optional*):
            Per document, as in [`PackedLayout`], the first row that passes after 0 compute. `None` keeps every row.
        device (`torch.device`, *optional*):
            Where the index tensors live.

    Attributes:
        num_rows (`int`): `T`.
        segments (`list[list[Segment]]`): segments of each rank in storage order.
        rows_of, split_rows (`list[int]`): rows of each rank, and how many of them (the first) travel.
        rows (`torch.LongTensor` of shape `(T,)`): row in the pack of each row of this rank.
        position_ids (`torch.LongTensor` of shape `(T,)`): its position in its document.
        last_rows (`torch.LongTensor` of shape `(T,)`): pack row of the last token of its document.

    Raises:
        ValueError: if the segments do not tile the documents, or the group has another size.
    """

    def __init__(
        self,
        doc_lens: Sequence[int],
        shards: Shards,
        group: dist.ProcessGroup | None = None,
        *,
        rank: int | None = None,
        first_valid_root: Sequence[int] | None = None,
        device: torch.device | str | None = None,
    ):
        self.doc_lens = [int(length) for length in doc_lens]
        self.first_valid_root = [0] * len(self.doc_lens) if first_valid_root is None else list(first_valid_root)
        _check(self.doc_lens, shards, self.first_valid_root, group)
        self.group, self.cp_size = group, len(shards)
        self.rank = (0 if group is None else dist.get_rank(group)) if rank is None else rank
        self.device = torch.device("cpu" if device is None else device)
        owners: list[set[int]] = [set() for _ in self.doc_lens]
        for holder, segments in enumerate(shards):
            for segment in segments:
                owners[segment.doc].add(holder)
        self.segments = [
            sorted(segments, key=lambda piece: (len(owners[piece.doc]) == 1, piece)) for segments in shards
        ]
        self.rows_of = [sum(piece.num_rows for piece in segments) for segments in self.segments]
        self.split_rows = [
            sum(piece.num_rows for piece in segments if len(owners[piece.doc]) > 1) for segments in self.segments
        ]
        self.num_rows = self.rows_of[self.rank]
        self.doc_starts = [0, *accumulate(self.doc_lens)][:-1]
        self._owned = self._owned_runs()
        own = self.segments[self.rank]
        self.rows = self.pack_rows(self.rank)
        self.position_ids = self._tensor([range(p.start, p.end) for p in own])
        self.last_rows = self._per_row([self.doc_starts[p.doc] + self.doc_lens[p.doc] - 1 for p in own])
        roots = self._per_row([self.first_valid_root[p.doc] for p in own])
        self._all_rows = torch.arange(self.num_rows, device=self.device)
        self._suffix_rows = self._all_rows[self.position_ids >= roots]
        self._remote: dict[tuple[int, bool], Block | None] = {}
        self._windows: dict[tuple[int, bool], tuple[RowExchange, Block]] = {}

    @classmethod
    def plan(
        cls,
        doc_lens: Sequence[int],
        group: dist.ProcessGroup | None = None,
        *,
        mode: str = "hybrid",
        balance_length: float = BALANCE_LENGTH,
        first_valid_root: Sequence[int] | None = None,
        device: torch.device | str | None = None,
    ) -> "ContextLayout":
        """
        Plans the shards and builds this rank's layout. All ranks of the group must pass the same values.

        Args:
            doc_lens (`Sequence[int]`):
                Tokens per document.
            group (`dist.ProcessGroup`, *optional*):
                The context-parallel group; `None` for a single process.
            mode (`str`, *optional*, defaults to `"hybrid"`):
                `"document"`: every document zigzag over all ranks ([`~planner.plan_document`]). `"hybrid"`: long
                documents zigzag, short ones whole ([`~planner.plan_hybrid`]).
            balance_length (`float`, *optional*, defaults to `16384`):
                Only for `"hybrid"`: length at which a document costs as much in attention as in linear layers.
            first_valid_root, device:
                See the class.

        Raises:
            ValueError: on an unknown mode.
        """
        if mode not in ("document", "hybrid"):
            raise ValueError(f"The layout of context parallelism is 'document' or 'hybrid', got {mode!r}.")
        cp_size = 1 if group is None else dist.get_world_size(group)
        if mode == "document":
            shards = plan_document(doc_lens, cp_size)
        else:
            shards = plan_hybrid(doc_lens, cp_size, balance_length)
        return cls(doc_lens, shards, group, first_valid_root=first_valid_root, device=device)

    # Rows of passes, as `PackedLayout` has them

    def query_rows(self, num_pass: int) -> torch.Tensor:
        """`(Ts,)` rows of this rank's storage that a pass computes, ascending; the same for all passes after 0."""
        return self._all_rows if num_pass == 0 else self._suffix_rows

    def query_lens(self, num_pass: int) -> list[int]:
        """Rows per segment of this rank that a pass computes: each segment's last ones."""
        return [end - start for _, start, end in self._queries(self.rank, num_pass > 0)]

    # The whole pack and this rank's share

    def pack_rows(self, rank: int) -> torch.Tensor:
        """`(rows_of[rank],)` rows in the pack of the rows that a rank stores, in storage order."""
        starts = self.doc_starts
        return self._tensor([range(starts[p.doc] + p.start, starts[p.doc] + p.end) for p in self.segments[rank]])

    def shard(self, values: torch.Tensor, offset: int = 0, fill: float | None = None) -> torch.Tensor:
        """
        This rank's rows of a tensor over the whole pack, or the entries `offset` tokens after them. Shift before
        sharding, never after: the next token of a segment's last row lies on another rank.

        Args:
            values (`torch.Tensor` of shape `(S, ...)`):
                Ids, labels, masks, advantages and the like.
            offset (`int`, *optional*, defaults to `0`):
                How many tokens ahead to look, within the document.
            fill (`float`, *optional*):
                Value past the end of a document; `None` repeats the document's last entry.

        Returns:
            `torch.Tensor` of shape `(T, ...)`.
        """
        rows = self.rows + offset
        taken = values[torch.minimum(rows, self.last_rows)]
        if fill is not None and offset:
            taken[rows > self.last_rows] = fill
        return taken

    def unshard(self, values: torch.Tensor) -> torch.Tensor:
        """
        The whole pack on every rank. Differentiable: each rank takes its own rows of the gradient, without
        communication, so that a loss computed alike on all ranks counts once when gradients are summed over them.

        Args:
            values (`torch.Tensor` of shape `(T, ...)`):
                This rank's rows.

        Returns:
            `torch.Tensor` of shape `(S, ...)`.
        """
        return _Unshard.apply(values, self)

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        """[`unshard`] without a gradient."""
        whole = values.new_empty(sum(self.doc_lens), *values.shape[1:])
        for segments, rows in zip(self.segments, gather_rows(self.group, values, self.rows_of), strict=True):
            for piece, part in zip(segments, rows.split([piece.num_rows for piece in segments]), strict=True):
                start = self.doc_starts[piece.doc]
                whole[start + piece.start : start + piece.end] = part
        return whole

    # Who sees whom

    def local_lens(self, num_pass: int) -> tuple[list[int], list[int]]:
        """
        Query and key rows per document of this rank. Rows of a document are stored by position, so that each sees the
        earlier ones: the plain causal mask.
        """
        q_lens, k_lens = [0] * len(self.doc_lens), [0] * len(self.doc_lens)
        for piece, start, end in self._queries(self.rank, num_pass > 0):
            q_lens[piece.doc] += end - start
            k_lens[piece.doc] += piece.num_rows
        docs = dict.fromkeys(piece.doc for piece in self.segments[self.rank])
        return [q_lens[doc] for doc in docs], [k_lens[doc] for doc in docs]

    def remote_block(self, source: int, num_pass: int) -> Block | None:
        """
        Which of this rank's queries see which travelling rows of `source`: for each segment the keys of all segments
        that end before it, the first ones that `source` has of the document. `None` if nothing is seen.
        """
        key = (source, num_pass > 0)
        if key not in self._remote:
            self._remote[key] = self._plan_remote(source, num_pass > 0)
        return self._remote[key]

    def window_block(self, left: int, num_pass: int) -> tuple[RowExchange, Block]:
        """
        The exchange of the rows before each segment (the halo), and a block over this rank's rows followed by the
        halo, for attention to a row's own key and the `left` keys before it.
        """
        key = (left, num_pass > 0)
        if key not in self._windows:
            self._windows[key] = self._plan_window(left, num_pass > 0)
        return self._windows[key]

    def exchange(self, wanted: Shards, what: str) -> RowExchange:
        """An exchange of the segments that each rank wants."""
        runs = [[run for segment in segments for run in self.locate(segment)] for segments in wanted]
        return RowExchange(self.group, self.rank, runs, self.device, what)

    def locate(self, segment: Segment) -> list[tuple[int, int, int]]:
        """Where the rows of a segment are stored: runs of (rank, first, last + 1) in order of position."""
        runs = []
        for start, end, rank, row in self._owned[segment.doc]:
            low, high = max(start, segment.start), min(end, segment.end)
            if low < high:
                runs.append((rank, row + low - start, row + high - start))
        return runs

    # Building blocks

    def _queries(self, rank: int, suffix: bool) -> list[tuple[Segment, int, int]]:
        """Each segment of a rank and the positions in it that are computed."""
        return [
            (
                piece,
                max(piece.start, min(self.first_valid_root[piece.doc], piece.end)) if suffix else piece.start,
                piece.end,
            )
            for piece in self.segments[rank]
        ]

    def _plan_remote(self, source: int, suffix: bool) -> Block | None:
        keys: dict[int, list[tuple[int, Segment]]] = {}
        row = 0
        for piece in self.segments[source]:
            keys.setdefault(piece.doc, []).append((row, piece))
            row += piece.num_rows
        # (query rows, key rows); neighbours in storage that see the same keys become one.
        pairs: list[tuple[range, range]] = []
        first = 0
        for piece, start, end in self._queries(self.rank, suffix):
            queries = range(first, first + end - start)
            first = queries.stop
            earlier = [(row, other) for row, other in keys.get(piece.doc, []) if other.end <= piece.start]
            if not earlier or not queries:
                continue
            seen = range(earlier[0][0], earlier[-1][0] + earlier[-1][1].num_rows)
            if pairs and pairs[-1][1] == seen and pairs[-1][0].stop == queries.start:
                pairs[-1] = (range(pairs[-1][0].start, queries.stop), seen)
            else:
                pairs.append((queries, seen))
        if not pairs:
            return None
        queries, seen = zip(*pairs, strict=True)
        q_rows, k_rows = rows_of(queries, self.device), rows_of(seen, self.device)
        return Block(q_rows, k_rows, [len(q) for q in queries], [len(k) for k in seen])

    def _plan_window(self, left: int, suffix: bool) -> tuple[RowExchange, Block]:
        halos: Shards = []
        for rank in range(self.cp_size):
            queries = self._queries(rank, suffix)
            spans = [(piece, _first_seen(start, left), piece.start) for piece, start, end in queries if end > start]
            halos.append([Segment(piece.doc, low, high) for piece, low, high in spans if low < high])
        exchange = self.exchange(halos, "keys and values before a segment")
        ranges, q_lens, k_lens = [], [], []
        row, halo_row = 0, self.num_rows
        for piece, start, end in self._queries(self.rank, suffix):
            if end > start:
                low = _first_seen(start, left)
                num_halo = max(0, piece.start - low)
                ranges.append(range(halo_row, halo_row + num_halo))
                ranges.append(range(row + max(0, low - piece.start), row + piece.num_rows))
                halo_row += num_halo
                q_lens.append(end - start)
                k_lens.append(len(ranges[-2]) + len(ranges[-1]))
            row += piece.num_rows
        k_rows = rows_of([piece for piece in ranges if piece], self.device)
        return exchange, Block(None, k_rows, q_lens, k_lens)

    def _owned_runs(self) -> list[list[tuple[int, int, int, int]]]:
        """Per document its segments by position: (start, end, rank, first storage row)."""
        owned: list[list[tuple[int, int, int, int]]] = [[] for _ in self.doc_lens]
        for rank, segments in enumerate(self.segments):
            row = 0
            for piece in segments:
                owned[piece.doc].append((piece.start, piece.end, rank, row))
                row += piece.num_rows
        return [sorted(runs) for runs in owned]

    def _tensor(self, ranges: Sequence[range]) -> torch.Tensor:
        pieces = [torch.arange(piece.start, piece.stop) for piece in ranges]
        return torch.cat([torch.empty(0, dtype=torch.int64), *pieces]).to(self.device)

    def _per_row(self, per_segment: list[int]) -> torch.Tensor:
        counts = torch.tensor([piece.num_rows for piece in self.segments[self.rank]], dtype=torch.int64)
        return torch.tensor(per_segment, dtype=torch.int64).repeat_interleave(counts).to(self.device)


def _first_seen(position: int, left: int) -> int:
    """First position of a document that a row with a window of `left` keys before it sees."""
    return max(0, position - left)


class _Unshard(torch.autograd.Function):
    """Gathers every rank's rows; the backward keeps this rank's."""

    @staticmethod
    def forward(ctx, values, layout):
        ctx.rows = layout.rows
        return layout.gather(values)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dwhole):
        return dwhole[ctx.rows], None


def _check(doc_lens: list[int], shards: Shards, first_valid_root: list[int], group: dist.ProcessGroup | None) -> None:
    """Segments tile the documents, roots lie in them, the group has a rank per shard."""
    runs = sorted(segment for segments in shards for segment in segments)
    reached = [0] * len(doc_lens)
    for piece in runs:
        if not (0 <= piece.doc < len(doc_lens) and piece.start == reached[piece.doc] < piece.end):
            raise ValueError(f"Segments must tile the documents without gap or overlap, {piece} does not fit.")
        reached[piece.doc] = piece.end
    if reached != doc_lens:
        raise ValueError(f"The segments cover {reached} tokens of documents of {doc_lens}.")
    require_roots(doc_lens, first_valid_root)
    if group is not None and dist.get_world_size(group) != len(shards):
        raise ValueError(
            f"The group has {dist.get_world_size(group)} ranks but the plan {len(shards)} shards. Plan for the size "
            "of the group."
        )
