"""
What the policy computed while it rolled out: taps and last hidden state of every token it read and kept.

A rollout's verification forwards are forwards of the policy over the very tokens that the draft then learns from, so
training on them needs no forward of its own.

Shapes: `B` rows of the prompt batch, `n` active rows, `q` columns, `F` concatenated tap width, `Ht` policy hidden
size.
"""

import torch


class RolloutTrace:
    """
    Collects hidden states of one rollout; positions count from a row's first real token.

    The last token of a row is never read by the policy. No draft row that is trained needs it: its entries are zero.
    """

    def __init__(self):
        self._rows: list[torch.Tensor] = []
        self._positions: list[torch.Tensor] = []
        self._taps: list[torch.Tensor] = []
        self._last_hidden: list[torch.Tensor] = []
        self._order: torch.Tensor | None = None

    @property
    def is_empty(self) -> bool:
        """Whether no forward was recorded."""
        return not self._rows

    def add(self, rows: torch.Tensor, positions: torch.Tensor, taps: torch.Tensor, last_hidden: torch.Tensor) -> None:
        """
        Takes in one forward.

        Args:
            rows (`torch.LongTensor` of shape `(n,)`):
                Row of the prompt batch.
            positions (`torch.LongTensor` of shape `(n, q)`):
                Position of each column, -1 for columns that are padding or were rejected.
            taps (`torch.Tensor` of shape `(n, q, F)`), last_hidden (`torch.Tensor` of shape `(n, q, Ht)`):
                Hidden states.
        """
        true = positions >= 0
        self._rows.append(rows[:, None].expand_as(positions)[true])
        self._positions.append(positions[true])
        self._taps.append(taps[true])
        self._last_hidden.append(last_hidden[true])
        self._order = None

    def row(self, row: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """
        Hidden states of a row.

        Args:
            row (`int`):
                Row of the prompt batch.
            length (`int`):
                Its real tokens, the prompt's included.

        Returns:
            `tuple[torch.Tensor, torch.Tensor]`: taps `(length, F)` and last hidden states `(length, Ht)`, zero at the
            last token.

        Raises:
            RuntimeError: if the rollout did not read all of the row's other tokens.
        """
        if self._order is None:
            self._sort()
        start, end = self._starts[row], self._starts[row + 1]
        count = length - 1
        if end - start < count or not torch.equal(
            self._positions[0][start : start + count], torch.arange(count, device=self._order.device)
        ):
            raise RuntimeError(
                f"The rollout recorded {end - start} positions of row {row}, which has {length} tokens."
            )
        part = slice(start, start + count)
        return tuple(
            torch.cat((states[part], states.new_zeros(1, states.shape[-1])))
            for states in (self._taps[0], self._last_hidden[0])
        )

    def _sort(self) -> None:
        """Brings everything into the order of rows and positions, in one tensor of each kind."""
        rows, positions = torch.cat(self._rows), torch.cat(self._positions)
        self._order = torch.argsort(rows * (positions.max() + 1) + positions)
        counts = torch.bincount(rows)
        self._starts = [0, *counts.cumsum(0).tolist()]
        self._rows, self._positions = [rows[self._order]], [positions[self._order]]
        for kind in (self._taps, self._last_hidden):
            whole = torch.cat(kind)
            kind[:] = [whole[self._order]]
