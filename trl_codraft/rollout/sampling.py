"""
Accepting and resampling drafted tokens so that the committed tokens follow the policy's distribution exactly
(speculative sampling: Leviathan et al., arXiv 2211.17192, algorithm 1; Chen et al., arXiv 2302.01318, algorithm 2).

Shapes: `B` rows, `k` drafted tokens, `V` policy vocabulary. `p` is the policy's distribution, `q` the draft's.
"""

import torch


def accepts(uniform: torch.Tensor, p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """
    Acceptance test of drafted tokens with probability `p` under the policy and `q` under the draft.

    Strict, so that a token with `p = 0` is never kept, not even when `uniform` is exactly 0.
    """
    return uniform * q < p


def residual(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """
    The distribution to draw from after a rejection: `max(p - q, 0)`, renormalised.

    Where nothing remains (`p == q` up to rounding, where a rejection has probability zero), `p` itself.
    """
    rest = (p - q).clamp_(min=0)
    mass = rest.sum(-1, keepdim=True)
    return torch.where(mass > 0, rest / mass.clamp(min=torch.finfo(p.dtype).tiny), p)


def draw(probabilities: torch.Tensor, generator: torch.Generator | None = None) -> torch.Tensor:
    """One token per row of `(B, V)` probabilities: `(B,)`."""
    return torch.multinomial(probabilities, num_samples=1, generator=generator).squeeze(-1)


def leading_run(flags: torch.Tensor) -> torch.Tensor:
    """Number of leading True values in each row of `(B, k)`: `(B,)`."""
    return flags.long().cumprod(-1).sum(-1)


def verify_sampled(
    p: torch.Tensor,
    q: torch.Tensor,
    drafted: torch.Tensor,
    counts: torch.Tensor,
    generator: torch.Generator | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Keeps a prefix of each row's drafted tokens and draws the token after it.

    Args:
        p (`torch.FloatTensor` of shape `(B, k + 1, V)`):
            Policy distribution at each drafted position and at the one after the last.
        q (`torch.FloatTensor` of shape `(B, k, V)`):
            The distributions the drafted tokens were drawn from, zero outside the draft's vocabulary.
        drafted (`torch.LongTensor` of shape `(B, k)`):
            Drafted tokens.
        counts (`torch.LongTensor` of shape `(B,)`):
            How many of them count in each row; what follows is padding.
        generator (`torch.Generator`, *optional*):
            Source of randomness, the global one by default.

    Returns:
        `tuple[torch.LongTensor, torch.LongTensor]`: number of kept tokens `(B,)` and the next token `(B,)`.
    """
    rows = torch.arange(len(drafted), device=drafted.device)
    columns = torch.arange(drafted.shape[1], device=drafted.device)
    uniform = torch.rand(drafted.shape, dtype=p.dtype, device=p.device, generator=generator)
    p_drafted = p[:, :-1].gather(-1, drafted[..., None]).squeeze(-1)
    q_drafted = q.gather(-1, drafted[..., None]).squeeze(-1)
    kept = leading_run(accepts(uniform, p_drafted, q_drafted) & (columns < counts[:, None]))

    p_next = p[rows, kept]
    rejected = kept < counts
    q_next = q[rows, kept.clamp(max=q.shape[1] - 1)]
    p_next = torch.where(rejected[:, None], residual(p_next, q_next), p_next)
    return kept, draw(p_next, generator)


def verify_greedy(
    best: torch.Tensor, drafted: torch.Tensor, counts: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Greedy counterpart of [`verify_sampled`]: keeps drafted tokens while they equal the policy's choice.

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
    The draft's distribution after the processors. In rows the processors left without any token (a constraint that
    allows only tokens outside the draft's vocabulary) the distribution before them, and for a draft whose scores are not
    numbers the uniform one: any distribution is lossless if tokens are drawn from the one that is later compared with
    the policy's, so a broken draft costs speed and nothing else.

    Args:
        scores (`torch.FloatTensor` of shape `(B, V)`):
            Processed scores.
        raw (`torch.FloatTensor` of shape `(B, V)`):
            Scores before processing, `-inf` outside the draft's vocabulary.

    Returns:
        `torch.FloatTensor` of shape `(B, V)`: probabilities.
    """
    for fallback in (raw, torch.zeros_like(raw)):
        probabilities = scores.softmax(-1)
        scores = torch.where(probabilities.isfinite().all(-1, keepdim=True), scores, fallback)
    return scores.softmax(-1)
