"""
The acceptance rule: which drafted tokens a round keeps, so that the committed tokens follow the policy's distribution
exactly, whatever the draft (Leviathan et al., arXiv 2211.17192, algorithm 1; Chen et al., arXiv 2302.01318, algorithm
2).

A token drawn from `q` is accepted when `u * q < p`, with `u` uniform in `[0, 1)`: with probability `min(1, p / q)`.
The first refusal ends the block, and the token there is drawn from `norm(max(p - q, 0))`. If all are accepted, one
more is drawn from `p`. A position then holds token `x` with probability
`min(p(x), q(x)) + (1 - sum min(p, q)) * max(p(x) - q(x), 0) / sum max(p - q, 0) = p(x)`.

Shapes: `B` rows, `k` drafted tokens, `V` policy vocabulary, `Vq` the vocabulary drafts are drawn from (the policy's or
the draft's own). `p` is the policy's distribution, `q` the draft's.
"""

from dataclasses import dataclass

import torch


@dataclass
class Drafts:
    """
    Drafted tokens and the distributions they were drawn from.

    Attributes:
        tokens (`torch.LongTensor` of shape `(B, k)`):
            Drafted tokens, as ids of the policy.
        choices (`torch.LongTensor` of shape `(B, k)`):
            The same tokens, as columns of `q`.
        q (`torch.FloatTensor` of shape `(B, k, Vq)` or `None`):
            Distributions; `None` if the tokens were chosen greedily.
        vocab (`torch.LongTensor` of shape `(Vq,)` or `None`):
            Policy id of each column of `q`; `None` if they are the policy's own.
    """

    tokens: torch.Tensor
    choices: torch.Tensor
    q: torch.Tensor | None
    vocab: torch.Tensor | None


def accepts(uniform: torch.Tensor, p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """
    Tests drafted tokens that have probability `p` under the policy and `q` under the draft.

    The comparison is strict, so that a token with `p = 0` is never kept, not even when `uniform` is exactly 0.
    """
    return uniform * q < p


def residual(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """
    Returns the distribution to draw from after a refusal: `max(p - q, 0)`, renormalised.

    If nothing remains (`p == q` up to rounding, when a refusal has probability zero), it is `p` itself.
    """
    rest = (p - q).clamp_(min=0)
    mass = rest.sum(-1, keepdim=True)
    return torch.where(mass > 0, rest / mass.clamp(min=torch.finfo(p.dtype).tiny), p)


def draw(probabilities: torch.Tensor, generator: torch.Generator | None = None) -> torch.Tensor:
    """
    Draws one token per row of `(B, V)` probabilities (any positive multiple of them): `(B,)`.

    A CPU inverts the cumulative sum, in float64: `multinomial` draws a random number for every entry of the vocabulary
    there, which takes as long as several layers of a small policy.

    Raises:
        RuntimeError: on a CPU if a row holds NaN, infinity or nothing but zeros; on a GPU `multinomial` fails by
        itself.
    """
    if probabilities.device.type != "cpu":
        return torch.multinomial(probabilities, num_samples=1, generator=generator).squeeze(-1)
    cumulative = probabilities.cumsum(-1, dtype=torch.float64)
    total = cumulative[:, -1:]
    if not bool((total.isfinite() & (total > 0)).all()):
        raise RuntimeError("The policy's probabilities are NaN or infinite, or processors left it no token to sample.")
    uniform = torch.rand(total.shape, dtype=torch.float64, generator=generator)
    # The first entry whose sum exceeds the target: never one of probability zero, and never none, whatever is rounded.
    target = (uniform * total).minimum(torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulative, target, right=True).squeeze(-1)


def leading_run(flags: torch.Tensor) -> torch.Tensor:
    """Counts the leading True values in each row of `(B, k)`: `(B,)`."""
    return flags.long().cumprod(-1).sum(-1)


def verify_sampled(
    p: torch.Tensor,
    drafts: Drafts,
    counts: torch.Tensor,
    generator: torch.Generator | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Keeps a prefix of each row's drafted tokens and draws the token after it.

    Args:
        p (`torch.FloatTensor` of shape `(B, k + 1, V)`):
            Policy distribution at each drafted position and at the one after the last.
        drafts ([`Drafts`]):
            The drafted tokens and the distributions they were drawn from.
        counts (`torch.LongTensor` of shape `(B,)`):
            How many of them count in each row; the rest is padding.
        generator (`torch.Generator`, *optional*):
            Source of randomness, the global one by default.

    Returns:
        `tuple[torch.LongTensor, torch.LongTensor]`: number of kept tokens `(B,)` and the next token `(B,)`.
    """
    tokens, q = drafts.tokens, drafts.q
    rows = torch.arange(len(tokens), device=tokens.device)
    columns = torch.arange(tokens.shape[1], device=tokens.device)
    uniform = torch.rand(tokens.shape, dtype=p.dtype, device=p.device, generator=generator)
    p_drafted = p[:, :-1].gather(-1, tokens[..., None]).squeeze(-1)
    q_drafted = q.gather(-1, drafts.choices[..., None]).squeeze(-1)
    kept = leading_run(accepts(uniform, p_drafted, q_drafted) & (columns < counts[:, None]))

    p_next = p[rows, kept]
    q_next = q[rows, kept.clamp(max=q.shape[1] - 1)]
    if drafts.vocab is not None:
        q_next = torch.zeros_like(p_next).index_copy_(1, drafts.vocab, q_next)
    p_next = torch.where((kept < counts)[:, None], residual(p_next, q_next), p_next)
    return kept, draw(p_next, generator)


def verify_greedy(
    best: torch.Tensor, drafted: torch.Tensor, counts: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Does greedily what [`verify_sampled`] does: keeps drafted tokens while they equal the policy's choice.

    Args:
        best (`torch.LongTensor` of shape `(B, k + 1)`):
            The policy's most likely token at each position.
        drafted (`torch.LongTensor` of shape `(B, k)`):
            Drafted tokens.
        counts (`torch.LongTensor` of shape `(B,)`):
            How many of them count in each row.

    Returns:
        `tuple[torch.LongTensor, torch.LongTensor]`: number of kept tokens `(B,)` and the next token `(B,)`.
    """
    columns = torch.arange(drafted.shape[1], device=drafted.device)
    kept = leading_run((drafted == best[:, :-1]) & (columns < counts[:, None]))
    return kept, best.gather(1, kept[:, None]).squeeze(1)


def draft_distribution(scores: torch.Tensor, raw: torch.Tensor) -> torch.Tensor:
    """
    Returns the draft's distribution after the processors.

    A row that the processors left without any token (a constraint that allows only tokens outside the draft's
    vocabulary) gets the distribution before them, and a draft whose scores are not numbers the uniform one: any
    distribution is lossless if tokens are drawn from the one that is later compared with the policy's, so a broken
    draft costs speed and nothing else.

    Args:
        scores (`torch.FloatTensor` of shape `(B, Vq)`):
            Processed scores.
        raw (`torch.FloatTensor` of shape `(B, Vq)`):
            Scores before processing, `-inf` outside the draft's vocabulary.

    Returns:
        `torch.FloatTensor` of shape `(B, Vq)`: probabilities.
    """
    for fallback in (raw, torch.zeros_like(raw)):
        usable = scores.softmax(-1).sum(-1, keepdim=True).isfinite()
        scores = torch.where(usable, scores, fallback)
    return scores.softmax(-1)
