"""
How a batch of prompts is read: what rows have in common once, and few pads.

GRPO rolls every prompt out several times, and prompts begin with the same system prompt, tools or examples. Equal
prompts are read as one. Where it saves enough, a first forward reads the beginnings of prompts, equal ones once, and a
second one what follows. Short prompts have all but their last token read in the first, so that they do not wait as
pads beside long ones. Afterwards the cache holds what it would hold if every row had been read by itself.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch


Tokens = tuple[int, ...]


def refuse_empty_prompts(lengths: Sequence[int]) -> None:
    """
    Raises for prompts without a token: there is no position whose distribution a rollout could begin with.

    Args:
        lengths (`Sequence[int]`):
            Tokens of each prompt of a batch, pads not counted.

    Raises:
        ValueError: saying which prompt.
    """
    empty = [index for index, length in enumerate(lengths) if not length]
    if empty:
        raise ValueError(
            f"Prompt {empty[0]} of this batch of {len(lengths)} is empty ({len(empty)} in all): its text, its chat "
            "template or what truncates it leaves no token. Drop such rows from the dataset, or have the tokenizer "
            "add a BOS token."
        )


@dataclass(frozen=True)
class PromptBlock:
    """
    The tokens that one forward reads.

    Args:
        tokens (`list[tuple[int, ...]]`):
            Of each row of the forward.
        starts (`list[int]`):
            Position of each row's first token.
        continued (`list[int]`):
            For each row of the next block, the row of this one that it continues; of the last block, `batch_rows`.
        batch_rows (`list[int]`):
            For each row of the batch the row of this block that it has a part of.
    """

    tokens: list[Tokens]
    starts: list[int]
    continued: list[int]
    batch_rows: list[int]

    @property
    def reach(self) -> int:
        """One more than the largest position."""
        return max(start + len(row) for start, row in zip(self.starts, self.tokens, strict=True))

    @property
    def is_plain(self) -> bool:
        """Whether the rows are whole texts of one length, which need no mask."""
        return not any(self.starts) and len({len(row) for row in self.tokens}) == 1

    def tensors(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids and positions, both `torch.LongTensor` of shape `(rows, columns)`, padded on the left with 0 and -1."""
        columns = max(len(row) for row in self.tokens)
        pads = [columns - len(row) for row in self.tokens]
        # By way of numpy, which reads long tuples several times faster.
        ids = np.array([(0,) * pad + row for pad, row in zip(pads, self.tokens, strict=True)])
        starts = torch.tensor(self.starts)[:, None]
        positions = starts - torch.tensor(pads)[:, None] + torch.arange(columns)
        return torch.from_numpy(ids).to(device), torch.where(positions < starts, -1, positions).to(device)


def prompt_blocks(prompts: Sequence[Tokens], min_saved_tokens: float) -> list[PromptBlock]:
    """
    Splits the reading of prompts into one forward or two.

    Args:
        prompts (`Sequence[tuple[int, ...]]`):
            Tokens of each row without pads, at least one.
        min_saved_tokens (`float`):
            How many tokens, pads included, a second forward has to save.

    Returns:
        `list[PromptBlock]`: in the order in which they have to be read. The last one ends with each prompt's last
        token.
    """
    distinct, rows = _numbered(prompts)
    cut = _best_cut(distinct, min_saved_tokens)
    if cut == 0:
        return [PromptBlock(distinct, [0] * len(distinct), rows, rows)]
    beginnings, groups = _numbered([_beginning(prompt, cut) for prompt in distinct])
    starts = [len(beginnings[group]) for group in groups]
    rests = [prompt[start:] for prompt, start in zip(distinct, starts, strict=True)]
    first = PromptBlock(beginnings, [0] * len(beginnings), groups, [groups[row] for row in rows])
    return [first, PromptBlock(rests, starts, rows, rows)]


def _beginning(prompt: Tokens, cut: int) -> Tokens:
    """What the first of two forwards reads: never the last token, whose logits the second one is to give."""
    return prompt[: min(cut, len(prompt) - 1)]


def _best_cut(prompts: list[Tokens], min_saved: float) -> int:
    """Length of the beginnings that save most when they are read first, each once; 0 if no length saves enough."""
    ordered = sorted(prompts)
    lengths = [len(prompt) for prompt in ordered]
    shared = [0, *(_common_length(one, other) for one, other in zip(ordered, ordered[1:], strict=False))]
    _, wholes = _numbered(prompt[:-1] for prompt in ordered)
    # Read at once, prompts of one length need no mask, which outweighs little that is shared
    # (benchmarks/prompt_reading.py).
    least = max(lengths) / 2 if len(set(lengths)) == 1 else 0
    best = 0
    # Between these lengths the number of beginnings is the same, so that the longest saves most.
    for cut in {*shared, *(length - 1 for length in lengths)}:
        if cut < least or cut * (len(prompts) - 1) < min_saved:
            continue
        saved = cut * (len(prompts) - _num_beginnings(lengths, shared, wholes, cut))
        if saved >= min_saved:
            best, min_saved = cut, saved
    return best


def _num_beginnings(lengths: list[int], shared: list[int], wholes: list[int], cut: int) -> int:
    """
    Distinct beginnings of sorted prompts, of which each shares `shared` tokens with the one before it and is number
    `whole` without its last token.
    """
    count, common, short = 0, 0, set()
    for length, same, whole in zip(lengths, shared, wholes, strict=True):
        common = min(common, same)
        if length <= cut:
            short.add(whole)
        else:
            count += common < cut
            common = cut
    return count + len(short)


def _common_length(first: Tokens, second: Tokens) -> int:
    """Number of tokens before two prompts part."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((place for place, (one, other) in pairs if one != other), min(len(first), len(second)))


def _numbered(values: Iterable[Tokens]) -> tuple[list[Tokens], list[int]]:
    """The distinct values in order of appearance, and the place of each value among them."""
    places: dict[Tokens, int] = {}
    numbers = [places.setdefault(value, len(places)) for value in values]
    return list(places), numbers
