"""
The reduced draft vocabulary.

Shapes: `V` policy vocabulary, `Vd` draft vocabulary.
"""

from collections.abc import Iterable

import torch


def choose_draft_vocab(counts: torch.Tensor, size: int, always: Iterable[int] = ()) -> torch.Tensor:
    """
    Chooses the tokens a draft may propose: first the ids in `always` (special and EOS ids), then ids by count, ties by
    lower id. Ids that never occurred fill the rest, lowest first.

    Args:
        counts (`torch.Tensor` of shape `(V,)`):
            How often each token occurred, summed over ranks.
        size (`int`):
            Size `Vd` of the draft vocabulary.
        always (`Iterable[int]`, *optional*):
            Ids that must be in it; duplicates count once.

    Returns:
        `torch.LongTensor`: `(Vd,)` distinct policy ids, ascending, on the device of `counts`.

    Raises:
        ValueError: if `counts` is not a vector of non-negative numbers, if `size` is not in `1..V`, if an id in
            `always` is not in `0..V-1`, or if `always` alone does not fit.
    """
    if counts.dim() != 1 or bool((counts < 0).any()):
        raise ValueError(f"`counts` must be one non-negative number per token, got shape {tuple(counts.shape)}.")
    vocab_size = counts.numel()
    if not 1 <= size <= vocab_size:
        raise ValueError(
            f"`draft_vocab_size` is {size}, but the policy has {vocab_size} tokens. Choose between 1 and "
            f"{vocab_size}, or None for the full vocabulary."
        )
    forced = sorted({int(token) for token in always})
    if forced and not 0 <= forced[0] <= forced[-1] < vocab_size:
        raise ValueError(
            f"The ids {forced} that must be in the draft vocabulary do not all lie in 0..{vocab_size - 1}."
        )
    if len(forced) > size:
        raise ValueError(
            f"`draft_vocab_size` is {size}, but {len(forced)} special and EOS tokens must be in the draft vocabulary. "
            f"Set it to at least {len(forced)}."
        )
    is_forced = torch.zeros(vocab_size, dtype=torch.bool, device=counts.device)
    is_forced[torch.tensor(forced, dtype=torch.long, device=counts.device)] = True
    # Two stable sorts: by count, then forced ids to the front; equal keys keep ascending ids.
    order = torch.argsort(counts, descending=True, stable=True)
    order = order[torch.argsort(is_forced[order].to(torch.uint8), descending=True, stable=True)]
    return order[:size].sort().values
