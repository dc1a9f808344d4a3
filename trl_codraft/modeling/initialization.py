"""
Starting a fresh draft from its policy.

Shapes: `n` taps, `H` draft hidden size, `Ht` policy hidden size, `V` / `Vd` policy / draft vocabulary.
"""

import math
from collections.abc import Iterable, Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from .layers import DraftLinear, DraftRMSNorm
from .policy import decoder_of
from .teacher import PolicyHead


# Measured on SmolLM2-135M (3 passes, 2230 draft tokens, AdamW 1e-3, held-out loss per token of pass 0): after 20 steps
# 3.7 with the last tap passed through, this noise and this spread; 5.0 with the policy's final norm unscaled (it
# starts at 13.3 instead of 6.2); 4.9 with a random `fc` and the norm unscaled (starts at 23.2).
_NOISE = 0.5
_LOGIT_SPREAD = 1.6


def fill_at_random(modules: Iterable[nn.Module], seed: int, std: float | None = None) -> None:
    """
    Fills the draft's linears with normal numbers and sets its norms to ones; weights on the meta device are left out.
    Numbers are drawn on the CPU in float32 from a generator of our own: equal on every device and rank, and the global
    random state does not move.

    Args:
        modules (`Iterable[nn.Module]`):
            Modules of a draft; other kinds than linears and norms are skipped.
        seed (`int`):
            Seed of the numbers.
        std (`float`, *optional*):
            Their standard deviation; `in_features ** -0.5` of each linear if not given.
    """
    generator = torch.Generator("cpu").manual_seed(seed)
    with torch.no_grad():
        for module in modules:
            if isinstance(module, DraftRMSNorm):
                module.weight.fill_(1.0)
            elif isinstance(module, DraftLinear) and not module.weight.is_meta:
                spread = std if std is not None else module.weight.shape[1] ** -0.5
                numbers = torch.randn(module.weight.shape, generator=generator, device="cpu")
                module.weight.copy_(numbers * spread)


@torch.no_grad()
def initialize_draft(
    draft: nn.Module,
    head: PolicyHead,
    final_norm_weight: torch.Tensor | None = None,
    tap_scales: Sequence[float] | torch.Tensor | None = None,
    seed: int = 0,
) -> None:
    """Does the work of [`Eagle3DraftModel.initialize_from_policy`], and is documented there."""
    config = draft.config
    weight = head.weight
    if final_norm_weight is None:
        final_norm_weight = _final_norm_weight(head.policy, weight.shape[1])
    scales = _checked(draft, weight, final_norm_weight, tap_scales)
    if config.fc_norm or config.norm_before_fc:
        scales = [1.0] * len(scales)
    fill_at_random((module for module in draft.modules() if module is not draft.lm_head), seed)
    for layer in draft.layers:
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
    draft.fc.weight.mul_(_NOISE)
    pieces = draft.fc.weight.split(config.target_hidden_size, dim=1)
    pieces[-1].diagonal().add_(1.0)
    for piece, scale in zip(pieces, scales, strict=True):
        piece.div_(scale)
    rows = weight[draft.target_ids.to(weight.device)]
    draft.lm_head.weight.copy_(rows.to(draft.lm_head.weight.dtype) * head.logit_scale)
    if final_norm_weight is not None:
        draft.norm.weight.copy_(final_norm_weight)
    # Logits of a random state have this spread; the rows of a head times the final norm can make it 6 and the first
    # guesses confidently wrong.
    spread = (draft.lm_head.weight.float() * draft.norm.weight.float()).square().sum(dim=1).mean().sqrt()
    draft.norm.weight.mul_((_LOGIT_SPREAD / spread).clamp(max=1.0))


def tap_log_scales(taps: torch.Tensor, num_taps: int) -> torch.Tensor:
    """
    Sum over tokens of the logarithm of each tap's root mean square; `exp` of the mean is the scale of a typical token.
    A mean of squares would not do: attention sinks are 50 to 150 times larger than other tokens (SmolLM2-135M: 1044
    at the first token, 6 and 22 elsewhere) and would set the scale alone.

    Args:
        taps (`torch.Tensor` of shape `(T, n*Ht)`):
            Tap layers side by side.
        num_taps (`int`):
            `n`.

    Returns:
        `torch.Tensor`: `(n,)` in float64; sums, so that ranks can add theirs.
    """
    squares = taps.detach().double().square().unflatten(-1, (num_taps, -1)).mean(dim=-1)
    return squares.clamp(min=torch.finfo(torch.float32).tiny).log().sum(dim=0) / 2


def effective_norm_weight(norm: nn.Module) -> torch.Tensor:
    """
    What a norm multiplies its normalised input by, whatever the family calls or stores it (Gemma's norms multiply by
    `1 + weight`): read off the norm's answer to a vector of +1 and -1.

    Args:
        norm (`nn.Module`):
            The policy's final norm (RMSNorm or LayerNorm).

    Returns:
        `torch.Tensor`: `(Ht,)` in float32, detached. Collective where the norm is sharded by FSDP2.
    """
    weights = {
        name: parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        for name, parameter in norm.named_parameters()
    }
    signs = torch.ones_like(weights["weight"])
    signs[1::2] = -1.0
    with torch.no_grad(), torch.autocast(signs.device.type, enabled=False):
        plus, minus = (torch.func.functional_call(norm, weights, (sign * signs[None],)) for sign in (1.0, -1.0))
    # Half the difference drops a LayerNorm's bias.
    return ((plus - minus)[0] * signs / 2).float().detach()


def _final_norm_weight(policy: nn.Module, size: int) -> torch.Tensor | None:
    """The effective weight of the decoder's final norm: its last child with one weight per hidden unit, if any."""
    norms = [
        child
        for child in decoder_of(policy).children()
        if any(name == "weight" and weight.shape == (size,) for name, weight in child.named_parameters())
    ]
    return effective_norm_weight(norms[-1]) if norms else None


def _checked(
    draft: nn.Module,
    weight: torch.Tensor,
    final_norm_weight: torch.Tensor | None,
    tap_scales: Sequence[float] | torch.Tensor | None,
) -> list[float]:
    """The scale of each tap, after checking that everything fits the draft."""
    config = draft.config
    num_taps = len(config.tap_layers)
    # Heads may be padded beyond the vocabulary.
    if weight.shape[0] < config.vocab_size or weight.shape[1] != config.hidden_size:
        raise ValueError(
            f"The policy's head is {tuple(weight.shape)}, the draft needs ({config.vocab_size}, {config.hidden_size})"
            ". Build its configuration with `Eagle3DraftConfig.from_policy`."
        )
    if final_norm_weight is not None and final_norm_weight.shape != (config.hidden_size,):
        raise ValueError(
            f"The policy's final norm has {tuple(final_norm_weight.shape)} weights, the draft's has "
            f"({config.hidden_size},)."
        )
    if tap_scales is None:
        return [1.0] * num_taps
    scales = [float(scale) for scale in tap_scales]
    if len(scales) != num_taps or not all(0 < scale < math.inf for scale in scales):
        raise ValueError(f"Expected one positive scale for each of {num_taps} taps, got {scales}.")
    return scales
