"""
The draft's side of a rollout: its cache of true rows, and the chain of tokens it proposes from the newest one.

Draft row `r` reads the taps of policy position `r` and the token at `r + 1`, sits at RoPE position `r` and predicts
the token at `r + 2`. Rows with true taps form the trunk. The chain leaves it at the newest row and feeds on its own
outputs; its keys take the slots behind the trunk, where the true rows overwrite them after the verification.

Shapes: `n` active rows, `q` columns, `F` concatenated tap width, `H` draft hidden size, `V` / `Vd` policy / draft
vocabulary.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from ..modeling.teacher import PolicyHead
from .cache import CausalMask
from .static_shapes import LiveSteps, padded


# Columns of true rows behind the prompt that may wait before they enter the cache although nobody drafts from them.
MAX_WAITING_COLUMNS = 32
# More of them than a round leaves make the next draft dearer than usual.
USUAL_WAITING_COLUMNS = 8


class DraftRollout:
    """
    State of the draft during one rollout.

    Args:
        draft ([`Eagle3DraftModel`]):
            The draft.
        head ([`PolicyHead`]):
            Reader of the policy's live input embedding.
        num_rows (`int`):
            Rows of the batch.
        max_positions (`int`):
            Largest number of positions a row can reach.
        initial_slots (`int`):
            Slots to allocate first.
        steps ([`LiveSteps`], *optional*):
            How forwards behind the prompt run; as they come by default.

    Attributes:
        vocab_size (`int`):
            Width of the scores to propose from: that of the policy's logits, which may be padded beyond the
            vocabulary.
    """

    def __init__(
        self,
        draft: nn.Module,
        head: PolicyHead,
        num_rows: int,
        max_positions: int,
        initial_slots: int,
        steps: LiveSteps | None = None,
    ):
        self.draft = draft
        self.head = head
        self.steps = LiveSteps() if steps is None else steps
        self.vocab_size = draft.config.vocab_size
        self.target_ids = draft.target_ids
        self.limit = min(max_positions, draft.config.max_position_embeddings)
        self.cache = self.steps.cache(num_rows, self.limit, min(initial_slots, self.limit))
        self._waiting: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        self._waiting_columns = 0
        self._root_hidden: torch.Tensor | None = None
        self._root: torch.Tensor | None = None
        self._reach = 0  # host-side upper bound of trunk length over rows

    def room(self, length: int) -> int:
        """
        How many tokens can be drafted for a row of `length` real tokens (the pending one included) before the draft's
        context ends: the chain uses positions `length - 2 .. length - 3 + k`.
        """
        return max(self.limit - length + 2, 0)

    def extend(self, taps: torch.Tensor, next_ids: torch.Tensor, positions: torch.Tensor, longest: int) -> bool:
        """
        Hands over true rows; they enter the cache when a draft is asked for.

        Args:
            taps (`torch.Tensor` of shape `(n, q, F)`):
                Concatenated taps of the policy.
            next_ids (`torch.LongTensor` of shape `(n, q)`):
                The token after each position.
            positions (`torch.LongTensor` of shape `(n, q)`):
                Position of each column, -1 for columns that are padding or were rejected.
            longest (`int`):
                Upper bound of `positions.max() + 1`.

        Returns:
            `bool`: whether so many were waiting that they entered the cache now.
        """
        positions = torch.where(positions < self.limit, positions, -1)
        self._reach = min(max(self._reach, longest), self.limit)
        self._waiting.append((taps, next_ids, positions))
        self._waiting_columns += positions.shape[1]
        prompt = self._waiting[0][2].shape[1] if self._root is None else 0
        too_many = self._waiting_columns > prompt + MAX_WAITING_COLUMNS
        if too_many:
            self._catch_up()
        return too_many

    @property
    def backlog(self) -> bool:
        """Whether the next draft has to read more than a round of drafting leaves."""
        return self._waiting_columns > USUAL_WAITING_COLUMNS

    @property
    def vocab(self) -> torch.Tensor | None:
        """`(Vd,)` policy ids that the draft's own scores belong to; None if they are the policy's vocabulary."""
        return None if len(self.target_ids) == self.vocab_size else self.target_ids

    def propose(self, counts: list[int], choose: Callable[[int, torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """
        Drafts a chain of tokens for every row.

        Args:
            counts (`list[int]` of length `n`):
                Tokens wanted per row; at most `room` of the row.
            choose (`Callable`):
                Called with the step and `(n, Vd)` fp32 scores over the draft's own vocabulary; returns the drafted
                tokens `(n,)`, ids of the policy.

        Returns:
            `torch.LongTensor` of shape `(n, max(counts))`.
        """
        self._catch_up()
        wanted = torch.tensor(counts, device=self._root.device)
        rows, size = len(counts), self.steps.rows(len(counts))
        (scores,) = self.steps(("scores",), lambda hidden: (self._scores(hidden),), padded(self._root_hidden, size))
        hidden, tokens = padded(self._root_hidden, size), [choose(0, scores[:rows])]
        for step in range(1, max(counts)):
            positions = torch.where(wanted > step, self._root + step, -1)[:, None]
            reach = self.steps.slots(min(self._reach + step, self.limit), self.limit)
            hidden, scores = self.steps(
                ("chain", reach),
                partial(self._chain, reach),
                hidden,
                padded(tokens[-1], size),
                padded(positions, size, fill=-1),
            )
            tokens.append(choose(step, scores[:rows]))
        return torch.stack(tokens, 1)

    def compact(self, keep: list[bool]) -> None:
        """Drops rows, in the order of [`RaggedCache.compact`]."""
        device = self._root.device if self._root is not None else self._waiting[0][2].device
        order = torch.tensor(self.cache.compact(keep), device=device)
        self._waiting = [tuple(part[order] for part in block) for block in self._waiting]
        if self._root is not None:
            self._root, self._root_hidden = self._root[order], self._root_hidden[order]

    def _catch_up(self) -> None:
        """Writes the waiting true rows into the cache and keeps the output of each row's newest one."""
        if not self._waiting:
            return
        taps, next_ids, positions = (torch.cat(parts, 1) for parts in zip(*self._waiting, strict=True))
        self._waiting, self._waiting_columns = [], 0
        if self._root is None:
            hidden, newest = self._read(self._reach, taps, next_ids, positions)
        else:
            rows, columns = positions.shape
            size = self.steps.rows(rows), self.steps.columns(columns)
            reach = self.steps.slots(self._reach, self.limit)
            hidden, newest = (
                out[:rows]
                for out in self.steps(
                    ("read", reach),
                    partial(self._read, reach),
                    padded(taps, *size),
                    padded(next_ids, *size),
                    padded(positions, *size, fill=-1),
                )
            )
            hidden = hidden.clone()  # the draft's next forward overwrites what this one left
        # Rows without a root (beyond the draft's context) are never drafted from.
        self._root, self._root_hidden = newest.clamp(min=0), hidden

    def _read(self, reach: int, taps, next_ids, positions) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes true rows; `(n, H)` output and `(n,)` position of each row's newest one."""
        newest, column = positions.max(1)
        embeds = self.head.embed(next_ids)
        return self._forward(self.draft.fuse_taps(taps), embeds, positions, reach, column)[:, 0], newest

    def _chain(self, reach: int, hidden, tokens, positions) -> tuple[torch.Tensor, torch.Tensor]:
        """One step behind the newest row: `(n, H)` output and `(n, Vd)` scores."""
        embeds = self.head.embed(tokens)[:, None]
        hidden = self._forward(self.draft.feedback(hidden)[:, None], embeds, positions, reach)[:, 0]
        return hidden, self._scores(hidden)

    def widen(self, scores: torch.Tensor) -> torch.Tensor:
        """`(n, Vd)` scores of the draft in the policy's vocabulary: `(n, V)`, `-inf` where the draft has no token."""
        if self.vocab is None:
            return scores
        wide = scores.new_full((len(scores), self.vocab_size), -torch.inf)
        return wide.index_copy_(1, self.target_ids, scores)

    def _forward(self, hidden, embeds, positions, reach: int, columns=None) -> torch.Tensor:
        """One draft forward: `(n, q, H)` outputs before the final norm, or `(n, 1, H)` at one column of each row."""
        self.cache.begin(positions, reach)
        mask = CausalMask(positions, reach)
        return self.draft.step(hidden, embeds, positions.clamp(min=0), self.cache, mask, columns)

    def _scores(self, hidden: torch.Tensor) -> torch.Tensor:
        """`(n, Vd)` fp32 draft scores."""
        logits = self.draft.compute_logits(hidden).float()
        # A draft that broke down guesses blindly: some processors raise on NaN, and nothing may depend on the draft.
        return torch.where(logits.amax(-1, keepdim=True).isfinite(), logits, 0.0)
