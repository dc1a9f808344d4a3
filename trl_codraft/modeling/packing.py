"""
Packing: rows of a microbatch without their padding, one document after the other.

Shapes: `B` rows, `S` padded columns, `T` packed tokens, `Ts` rows of pass `s`, `Ht` policy hidden size, `n` taps,
`K` TTT passes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch


class PackedLayout:
    """
    The places of documents in a pack, and the rows that each TTT pass computes.

    Pass 0 runs on every row, because its keys are the trunk. Later passes run on the suffix of each document that
    starts at its first root with a valid target in a pass after 0, and on no row of a document without one.

    Args:
        doc_lens (`Sequence[int]`):
            Tokens per document, in pack order; zero is allowed.
        first_valid_root (`Sequence[int]`, *optional*):
            Per document, the position of its first root needed after pass 0, and the document's length if it has none.
            `None` keeps every row.
        device (`torch.device`, *optional*):
            Where the index tensors live.

    Attributes:
        num_rows (`int`): `T`.
        doc_starts (`list[int]`): first row of each document.
        position_ids (`torch.LongTensor` of shape `(T,)`): position of each row in its document.

    Raises:
        ValueError: on negative lengths or roots outside their documents.
    """

    def __init__(
        self,
        doc_lens: Sequence[int],
        first_valid_root: Sequence[int] | None = None,
        device: torch.device | str | None = None,
    ):
        self.doc_lens = [int(length) for length in doc_lens]
        self.first_valid_root = [0] * len(self.doc_lens) if first_valid_root is None else list(first_valid_root)
        require_roots(self.doc_lens, self.first_valid_root)
        self.doc_starts = [0, *accumulate(self.doc_lens)][:-1]
        self.num_rows = sum(self.doc_lens)
        self.device = torch.device("cpu" if device is None else device)
        lens, starts, roots = (
            torch.tensor(values, dtype=torch.int64).repeat_interleave(torch.tensor(self.doc_lens, dtype=torch.int64))
            for values in (self.doc_lens, self.doc_starts, self.first_valid_root)
        )
        rows = torch.arange(self.num_rows)
        self._all_rows = rows.to(self.device)
        self.position_ids = (rows - starts).to(self.device)
        self._last_rows = (starts + lens - 1).to(self.device)
        self._suffix_rows = rows[rows - starts >= roots].to(self.device)

    def query_lens(self, num_pass: int) -> list[int]:
        """Rows per document that pass `num_pass` computes: each document's last ones."""
        if num_pass == 0:
            return list(self.doc_lens)
        return [length - root for length, root in zip(self.doc_lens, self.first_valid_root, strict=True)]

    def query_rows(self, num_pass: int) -> torch.Tensor:
        """
        The rows that a pass computes.

        Args:
            num_pass (`int`):
                Pass `s >= 0`. All passes after 0 have the same rows.

        Returns:
            `torch.LongTensor` of shape `(Ts,)`: rows of the pack, ascending.
        """
        return self._all_rows if num_pass == 0 else self._suffix_rows

    def shifted(self, values: torch.Tensor, offset: int, num_pass: int) -> torch.Tensor:
        """
        Entries `offset` tokens after each row of a pass, in the row's own document.

        Args:
            values (`torch.Tensor` of shape `(T, ...)`):
                One entry per row of the pack.
            offset (`int`):
                How many tokens ahead to look.
            num_pass (`int`):
                Pass `s` whose rows are wanted.

        Returns:
            `torch.Tensor` of shape `(Ts, ...)`. Past the end of a document its last entry is repeated: those rows have
            no target, and nothing of another document reaches them.
        """
        rows = self.query_rows(num_pass)
        return values[torch.minimum(rows + offset, self._last_rows[rows])]

    def within(self, offset: int) -> torch.Tensor:
        """`(T,)` bool: whether the token `offset` places after each row lies in the row's document."""
        return self._all_rows + offset <= self._last_rows


def require_roots(doc_lens: list[int], first_valid_root: list[int]) -> None:
    """Raises ValueError unless there is a first valid root for each document, between 0 and its length."""
    fits = len(first_valid_root) == len(doc_lens) and all(
        0 <= root <= length for root, length in zip(first_valid_root, doc_lens, strict=True)
    )
    if not fits:
        raise ValueError(
            f"Each document needs a first valid root between 0 and its length: got {first_valid_root} for lengths "
            f"{doc_lens}."
        )


@dataclass
class DraftBatch:
    """
    The tokens and hidden states of a microbatch for its draft: packed, detached, nothing padded.

    Attributes:
        input_ids (`torch.LongTensor` of shape `(T,)`): token ids.
        taps (`torch.Tensor` of shape `(T, n*Ht)`): tap layers side by side, ascending.
        last_hidden (`torch.Tensor` of shape `(T, Ht)`): output of the policy's decoder, the teacher's input.
        trained (`torch.BoolTensor` of shape `(T,)`): tokens the draft is trained to predict.
        layout ([`PackedLayout`]): where the documents lie.
    """

    input_ids: torch.Tensor
    taps: torch.Tensor
    last_hidden: torch.Tensor
    trained: torch.Tensor
    layout: PackedLayout

    def valid(self, num_pass: int) -> torch.Tensor:
        """
        Roots whose target in a pass counts: row `r` in pass `s` predicts token `r+2+s`, which must lie in the same
        document and be trained.

        Args:
            num_pass (`int`):
                Pass `s`.

        Returns:
            `torch.BoolTensor` of shape `(T,)`.
        """
        offset = 2 + num_pass
        reach = self.layout.within(offset)
        target = (self.layout.query_rows(0) + offset).clamp(max=max(self.layout.num_rows - 1, 0))
        return reach & self.trained[target]


def pack_rows(
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    trained_mask: torch.Tensor,
    taps: Sequence[torch.Tensor],
    last_hidden: torch.Tensor,
    num_passes: int,
) -> DraftBatch | None:
    """
    Packs the rows of a microbatch, dropping their padding.

    Args:
        input_ids (`torch.LongTensor` of shape `(B, S)`):
            Token ids.
        attention_mask (`torch.Tensor` of shape `(B, S)`):
            Nonzero where a token is no padding.
        trained_mask (`torch.Tensor` of shape `(B, S)`):
            Nonzero where the draft learns to predict the token; padding never counts.
        taps (`Sequence[torch.Tensor]` of shape `(B, S, Ht)`):
            Hidden states of the tap layers, ascending.
        last_hidden (`torch.Tensor` of shape `(B, S, Ht)`):
            Output of the policy's decoder after its final norm.
        num_passes (`int`):
            TTT passes `K`; decides which rows the later passes need.

    Returns:
        [`DraftBatch`], or `None` if there is no token at all.

    Raises:
        ValueError: if the shapes disagree or `num_passes < 1`.
    """
    if num_passes < 1:
        raise ValueError(f"The draft needs at least one TTT pass, got num_passes={num_passes}.")
    for name, tensor in (
        ("attention_mask", attention_mask),
        ("trained_mask", trained_mask),
        ("last_hidden", last_hidden),
        *((f"taps[{index}]", tap) for index, tap in enumerate(taps)),
    ):
        if tensor.shape[:2] != input_ids.shape:
            raise ValueError(
                f"`{name}` covers {tuple(tensor.shape[:2])} tokens but `input_ids` {tuple(input_ids.shape)}: they "
                "must come from the same forward."
            )
    keep = attention_mask.bool()
    trained = trained_mask.bool() & keep
    first_root = first_roots(trained, keep, num_passes)
    doc_lens, roots = torch.stack((keep.sum(dim=1), first_root)).tolist()
    if sum(doc_lens) == 0:
        return None
    return DraftBatch(
        input_ids=input_ids[keep],
        taps=torch.cat([tap[keep] for tap in taps], dim=-1).detach(),
        last_hidden=last_hidden[keep].detach(),
        trained=trained[keep],
        layout=PackedLayout(doc_lens, roots, device=input_ids.device),
    )


def first_roots(trained: torch.Tensor, keep: torch.Tensor, num_passes: int) -> torch.Tensor:
    """
    First rows of later passes.

    Args:
        trained (`torch.BoolTensor` of shape `(B, S)`):
            Tokens the draft is trained to predict.
        keep (`torch.BoolTensor` of shape `(B, S)`):
            Tokens that are no padding.
        num_passes (`int`):
            TTT passes `K`.

    Returns:
        `torch.LongTensor` of shape `(B,)`: position of each row's first root with a trained target in a pass after 0;
        the row's length if it has none.
    """
    doc_lens = keep.sum(dim=1)
    # A trained token at position t is the target of root t-2-s in pass s in 1..K-1. The earliest token that any such
    # root reaches (t >= 3) has the earliest root, at the start of the document if the deepest pass would go before it.
    positions = keep.cumsum(dim=1) - 1
    reachable = trained & (positions >= 3)
    past_end = torch.where(reachable, positions, positions.new_full((), torch.iinfo(torch.int64).max))
    earliest = past_end.amin(dim=1) if past_end.shape[1] else doc_lens
    roots = (earliest - 1 - num_passes).clamp(min=0)
    return torch.where(reachable.any(dim=1) & (num_passes > 1), roots, doc_lens)
