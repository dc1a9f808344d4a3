"""
Who computes which rows: plans that cut the documents of a pack into segments and hand them to ranks.

Attention is causal, so a row late in a document costs more than an early one. A *zigzag* document is cut into
`2 * cp` chunks and rank `i` takes chunks `i` and `2 * cp - 1 - i`: every rank gets the same work, and in each step of
the ring the part it can see is one rectangle (arXiv 2310.03294 and the zigzag order of ring-flash-attention).
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class Segment:
    """
    A run of rows of one document.

    Attributes:
        doc (`int`): index of the document in the pack.
        start, end (`int`): positions in the document, half-open.
    """

    doc: int
    start: int
    end: int

    @property
    def num_rows(self) -> int:
        return self.end - self.start


Shards = list[list[Segment]]

# A document of this many tokens costs about as much in attention as in the linear layers of a typical model; shorter
# ones cost mostly by the token.
BALANCE_LENGTH = 16384


def plan_document(doc_lens: Sequence[int], cp_size: int) -> Shards:
    """
    Every document zigzag over all ranks.

    Args:
        doc_lens (`Sequence[int]`):
            Tokens per document.
        cp_size (`int`):
            Number of ranks.

    Returns:
        `list[list[Segment]]`: segments of each rank, by document and position. A document shorter than `2 * cp_size`
        tokens leaves some ranks without a segment of it.
    """
    shards: Shards = [[] for _ in range(cp_size)]
    for doc, length in enumerate(doc_lens):
        _add_zigzag(shards, doc, length)
    return shards


def plan_hybrid(
    doc_lens: Sequence[int],
    cp_size: int,
    balance_length: float = BALANCE_LENGTH,
    max_cost: float = 1.10,
    max_tokens: float = 1.15,
) -> Shards:
    """
    Long documents zigzag, short ones whole: a whole document needs no communication and fewer, larger kernel blocks.
    Whole documents are placed longest first on the rank with the least cost that has room for their tokens, and as
    few documents as possible are cut such that both limits hold.

    Args:
        doc_lens (`Sequence[int]`):
            Tokens per document.
        cp_size (`int`):
            Number of ranks.
        balance_length (`float`, *optional*, defaults to `16384`):
            `b` in the cost `n**2 + b * n` of a document of `n` tokens.
        max_cost, max_tokens (`float`, *optional*, defaults to `1.10` and `1.15`):
            Largest allowed ratio of a rank's cost and tokens to the mean. Where no plan reaches both (fewer tokens
            than ranks, say), the one that misses them least.

    Returns:
        `list[list[Segment]]`: segments of each rank.
    """
    order = sorted((doc for doc, length in enumerate(doc_lens) if length), key=lambda doc: -doc_lens[doc])
    mean_cost = sum(_cost(0, doc_lens[doc], balance_length) for doc in order) / cp_size
    num_cut = sum(_cost(0, doc_lens[doc], balance_length) > max_cost * mean_cost for doc in order)
    best, best_miss = None, float("inf")
    while best_miss > 1.0 and num_cut <= len(order):
        shards: Shards = [[] for _ in range(cp_size)]
        for doc in order[:num_cut]:
            _add_zigzag(shards, doc, doc_lens[doc])
        _place_whole(shards, order[num_cut:], doc_lens, balance_length, max_tokens)
        cost, tokens = imbalance(shards, balance_length)
        miss = max(cost / max_cost, tokens / max_tokens)
        if miss < best_miss:
            best, best_miss = shards, miss
        if num_cut == len(order):
            break
        # Growing steps keep the search short for packs of hundreds of documents.
        num_cut = min(num_cut + 1 + num_cut // 8, len(order))
    return [sorted(segments) for segments in best]


def imbalance(shards: Shards, balance_length: float = BALANCE_LENGTH) -> tuple[float, float]:
    """
    How uneven a plan is.

    Args:
        shards (`list[list[Segment]]`):
            Segments of each rank.
        balance_length (`float`, *optional*, defaults to `16384`):
            See [`plan_hybrid`].

    Returns:
        `tuple[float, float]`: largest over mean, of cost and of tokens; 1 for an empty pack.
    """
    costs = [sum(_cost(piece.start, piece.end, balance_length) for piece in segments) for segments in shards]
    tokens = [sum(piece.num_rows for piece in segments) for segments in shards]
    return tuple(max(loads) * len(loads) / sum(loads) if sum(loads) else 1.0 for loads in (costs, tokens))


def _cost(start: int, end: int, balance_length: float) -> float:
    """Attention and linear work of rows `start` to `end` of a document; a whole one costs `n**2 + b * n`."""
    return end**2 - start**2 + balance_length * (end - start)


def _add_zigzag(shards: Shards, doc: int, length: int) -> None:
    """Cuts a document into two chunks per rank; neighbouring chunks of a rank become one segment."""
    cp_size = len(shards)
    # The tokens left over by the division go to other chunks in every document.
    edges = [(chunk * length + doc % (2 * cp_size)) // (2 * cp_size) for chunk in range(2 * cp_size + 1)]
    for rank, segments in enumerate(shards):
        early, late = ((edges[chunk], edges[chunk + 1]) for chunk in (rank, 2 * cp_size - 1 - rank))
        pieces = [(early[0], late[1])] if early[1] == late[0] else [early, late]
        segments.extend(Segment(doc, start, end) for start, end in pieces if end > start)


def _place_whole(
    shards: Shards, docs: Sequence[int], doc_lens: Sequence[int], balance_length: float, max_tokens: float
) -> None:
    """Longest processing time first, on cost, with a cap on tokens."""
    costs = [sum(_cost(piece.start, piece.end, balance_length) for piece in segments) for segments in shards]
    tokens = [sum(piece.num_rows for piece in segments) for segments in shards]
    cap = max_tokens * sum(doc_lens) / len(shards)
    for doc in docs:
        length = doc_lens[doc]
        open_ranks = [rank for rank in range(len(shards)) if tokens[rank] + length <= cap]
        rank = (
            min(open_ranks, key=costs.__getitem__) if open_ranks else min(range(len(shards)), key=tokens.__getitem__)
        )
        shards[rank].append(Segment(doc, 0, length))
        costs[rank] += _cost(0, length, balance_length)
        tokens[rank] += length
