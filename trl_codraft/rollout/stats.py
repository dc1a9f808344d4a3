"""Raw counters of speculative rollouts, and the ratios derived from them."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch


# Longest draft per verification. Counters have this fixed width, so that ranks with other draft lengths can sum them.
MAX_DRAFT_TOKENS = 16

_SCALARS = ("rows", "policy_forwards", "row_forwards", "verifications", "drafted", "accepted", "committed")


@dataclass
class SpeculativeStats:
    """
    Counters of one or many rollouts; sums of them are meaningful, the derived ratios are taken after summing.

    Attributes:
        rows (`int`):
            Prompts rolled out. Each got its first token from the prefill.
        policy_forwards (`int`):
            Forwards of the policy, those over prompts (one or two per call) included.
        row_forwards (`int`):
            (row, forward) pairs after the prefill, drafted or not.
        verifications (`int`):
            (row, forward) pairs with at least one drafted token.
        drafted (`int`):
            Drafted tokens that were verified.
        accepted (`int`):
            Drafted tokens kept before the token that ended the block: the corrected or extra one, EOS, or the cap.
        accepted_per_position (`list[int]`):
            `accepted` by position in the draft.
        committed (`int`):
            Tokens appended to the prompts, EOS included and padding excluded.
    """

    rows: int = 0
    policy_forwards: int = 0
    row_forwards: int = 0
    verifications: int = 0
    drafted: int = 0
    accepted: int = 0
    committed: int = 0
    accepted_per_position: list[int] = field(default_factory=lambda: [0] * MAX_DRAFT_TOKENS)

    @property
    def accept_length(self) -> float:
        """Tokens per verification, `1 + accepted / verifications` (vLLM's definition); 1 without verifications."""
        return 1.0 + self.accepted / self.verifications if self.verifications else 1.0

    @property
    def accept_rate(self) -> float:
        """Share of drafted tokens that were kept; 0 without drafted tokens."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def accept_rate_per_position(self) -> list[float]:
        """Accepted at each draft position / verifications; zeros without verifications."""
        return [count / self.verifications if self.verifications else 0.0 for count in self.accepted_per_position]

    @property
    def tokens_per_row_forward(self) -> float:
        """Tokens per (row, forward) after the prefill; plain decoding has exactly 1."""
        return (self.committed - self.rows) / self.row_forwards if self.row_forwards else 1.0

    @property
    def num_draft_tokens(self) -> float:
        """Mean number of drafted tokens per verification; 0 without verifications."""
        return self.drafted / self.verifications if self.verifications else 0.0

    def count_round(self, counts: Sequence[int], committed: Sequence[int], kept: Sequence[int] | None = None) -> None:
        """
        Adds one decoding forward.

        Args:
            counts (`Sequence[int]`):
                Drafted tokens of each row in the forward.
            committed (`Sequence[int]`):
                Tokens each row committed.
            kept (`Sequence[int]`, *optional*):
                Drafted tokens of each row to count as accepted; `committed - 1` if not given.
        """
        kept = [tokens - 1 for tokens in committed] if kept is None else kept
        self.policy_forwards += 1
        self.row_forwards += len(counts)
        self.committed += sum(committed)
        for drafted, accepted in zip(counts, kept, strict=True):
            if drafted:
                self.verifications += 1
                self.drafted += drafted
                self.accepted += accepted
                for position in range(accepted):
                    self.accepted_per_position[position] += 1

    def add(self, other: "SpeculativeStats") -> None:
        """Adds the counters of another rollout."""
        for name in _SCALARS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        pairs = zip(self.accepted_per_position, other.accepted_per_position, strict=True)
        self.accepted_per_position = [mine + theirs for mine, theirs in pairs]

    def reset(self) -> None:
        """Sets every counter to zero."""
        self.__init__()

    def as_tensor(self) -> torch.Tensor:
        """`(7 + MAX_DRAFT_TOKENS,)` float64 counters, to be summed over ranks."""
        return torch.tensor([getattr(self, name) for name in _SCALARS] + self.accepted_per_position).double()

    @classmethod
    def from_tensor(cls, counters: torch.Tensor) -> "SpeculativeStats":
        """Inverse of [`~SpeculativeStats.as_tensor`]."""
        values = [round(value) for value in counters.tolist()]
        scalars = dict(zip(_SCALARS, values[: len(_SCALARS)], strict=True))
        return cls(**scalars, accepted_per_position=values[len(_SCALARS) :])


@dataclass
class SpeculativeOutput:
    """
    Result of [`speculative_generate`].

    Attributes:
        sequences (`torch.LongTensor` of shape `(B, S)`):
            Prompts and completions, as `generate` returns them.
        stats ([`SpeculativeStats`]):
            Counters of this call.
    """

    sequences: torch.Tensor
    stats: SpeculativeStats
