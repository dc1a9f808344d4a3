"""
Stopping criteria at every committed position, each with the ids `generate` would have passed there.

Shapes: `n` active rows, `w` tokens of a block, `B` rows of the prompt batch, `S` columns of the sequence buffer.
"""

from collections.abc import Sequence

import torch
from transformers import MaxLengthCriteria, StoppingCriteria, StoppingCriteriaList
from transformers.generation.stopping_criteria import ConfidenceCriteria, EosTokenCriteria


def unsupported_criterion(criteria: Sequence[StoppingCriteria]) -> str | None:
    """Names the first criterion that needs scores, which are not kept, or returns None."""
    if any(isinstance(criterion, ConfidenceCriteria) for criterion in criteria):
        return "the stopping criterion ConfidenceCriteria belongs to an assistant model. Unset `is_assistant`."
    return None


class PositionwiseCriteria:
    """
    The stopping criteria that `generate` prepared, applied to blocks of tokens.

    The length limit becomes a budget and EOS a comparison; every other criterion is called as `generate` calls it,
    with all columns up to the token in question, left pads included, for the rows that have a token there.

    Args:
        criteria ([`~transformers.StoppingCriteriaList`]):
            The prepared list.
        max_length (`int`):
            Limit on columns where the list has none.
        device (`torch.device`):
            Where the sequences live.

    Raises:
        ValueError: if a criterion needs scores that are not kept.
    """

    def __init__(self, criteria: StoppingCriteriaList, max_length: int, device: torch.device):
        limits = [criterion.max_length for criterion in criteria if type(criterion) is MaxLengthCriteria]
        self.max_length = min(limits, default=max_length)
        eos = [criterion.eos_token_id for criterion in criteria if type(criterion) is EosTokenCriteria]
        # Whether finished rows are padded: without an EOS criterion `generate` lets them run on. It goes by this name.
        self.has_eos = any(hasattr(criterion, "eos_token_id") for criterion in criteria)
        self._eos = torch.cat([ids.flatten() for ids in eos]).to(device) if eos else None
        self._others = StoppingCriteriaList(
            criterion for criterion in criteria if type(criterion) not in (MaxLengthCriteria, EosTokenCriteria)
        )
        reason = unsupported_criterion(criteria)
        if reason is not None:
            raise ValueError(f"Speculative rollouts cannot honour this call: {reason}")

    def eos_offsets(self, block: torch.Tensor) -> torch.Tensor:
        """Offset of the first EOS in each row of a `(n, w)` block, `w` where there is none: `(n,)`."""
        width = block.shape[1]
        if self._eos is None:
            return torch.full((len(block),), width, device=block.device)
        offsets = torch.arange(width, device=block.device)
        return torch.where(torch.isin(block, self._eos), offsets, width).amin(1)

    def stops(
        self, sequences: torch.Tensor, rows: list[int], lengths: list[int], counts: list[int], eos: list[int]
    ) -> list[int | None]:
        """
        Offset of the token in each row's block that ends the row, None where the row goes on.

        Args:
            sequences (`torch.LongTensor` of shape `(B, S)`):
                Sequence buffer with the block already written.
            rows (`list[int]` of length `n`):
                Row of each block in the buffer.
            lengths (`list[int]` of length `n`):
                Columns before the block.
            counts (`list[int]` of length `n`):
                Tokens in the block, within the limit.
            eos (`list[int]` of length `n`):
                Offset of the first EOS, at least `counts` where the block has none.

        Returns:
            `list[int | None]` of length `n`.
        """
        ends: list[int | None] = []
        for length, count, offset in zip(lengths, counts, eos, strict=True):
            last = min(offset, self.max_length - length - 1)
            ends.append(last if last < count else None)
        if len(self._others) > 0:
            self._call_others(sequences, rows, lengths, counts, ends)
        return ends

    def _call_others(self, sequences, rows, lengths, counts, ends) -> None:
        """Calls the remaining criteria length by length, so that a row's calls come in the order of its tokens."""
        pending: dict[int, list[int]] = {}
        for index, (length, count, end) in enumerate(zip(lengths, counts, ends, strict=True)):
            for offset in range(count if end is None else end + 1):
                pending.setdefault(length + offset + 1, []).append(index)
        stopped: set[int] = set()
        for columns in sorted(pending):
            indices = [index for index in pending[columns] if index not in stopped]
            if not indices:
                continue
            ids = sequences[torch.tensor([rows[index] for index in indices], device=sequences.device), :columns]
            for index, done in zip(indices, self._others(ids, None).tolist(), strict=True):
                if done:
                    stopped.add(index)
                    ends[index] = columns - lengths[index] - 1
