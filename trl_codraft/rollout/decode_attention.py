"""
Attention of a decoding round: a few query columns per row against a long cache.

With grouped heads Transformers' SDPA path repeats keys and values for every query head as soon as a row has more than
one query, which copies the whole cache in every layer of every verification. Here the queries that share a key/value
head become rows of one attention instead, and the cache is read where it lies.

Shapes: `B` rows, `q` query columns, `kv` slots, `Hq` / `Hkv` query / key-value heads, `D` head dim.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn import functional as F
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward


DECODING = "trl_codraft_decode"


def decode_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs,
) -> tuple[torch.Tensor, None]:
    """
    An attention function of Transformers: what `"sdpa"` computes, without repeating keys and values.

    Args:
        module (`nn.Module`):
            The calling attention module.
        query (`torch.Tensor` of shape `(B, Hq, q, D)`), key, value (`torch.Tensor` of shape `(B, Hkv, kv, D)`):
            States.
        attention_mask (`torch.Tensor` of shape `(B, 1, q, kv)`, *optional*):
            Mask shared by all heads. Its attribute `repeated`, where it has one, is what [`repeated`] made of it.
        dropout (`float`), scaling (`float`, *optional*), kwargs:
            As for every attention function.

    Returns:
        `tuple[torch.Tensor, None]`: `(B, q, Hq, D)`, and no weights.
    """
    batch, heads, columns, _ = query.shape
    groups = heads // key.shape[1]
    plain = attention_mask is not None and attention_mask.shape[1] == 1
    if not plain or kwargs.get("position_bias") is not None or kwargs.get("softcap") is not None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    packed = query.reshape(batch, key.shape[1], groups * columns, -1)
    # A mask that the policy made of ours, or one for fewer heads than this layer groups, has no copy that fits.
    mask = getattr(attention_mask, "repeated", attention_mask)
    if mask.shape[2] < packed.shape[2]:
        mask = repeated(attention_mask, groups)
    mask = mask[:, :, : packed.shape[2]]
    out = F.scaled_dot_product_attention(packed, key, value, attn_mask=mask, dropout_p=dropout, scale=scaling)
    return out.reshape(batch, heads, columns, -1).transpose(1, 2).contiguous(), None


def repeated(mask: torch.Tensor, groups: int) -> torch.Tensor:
    """A mask `(B, 1, q, kv)` for the query heads that share a key/value head: `(B, 1, groups * q, kv)`."""
    return mask.expand(-1, -1, groups, -1) if mask.shape[2] == 1 else mask.repeat(1, 1, groups, 1)


AttentionInterface.register(DECODING, decode_attention)


@contextmanager
def decoding_attention(policy: PreTrainedModel) -> Iterator[None]:
    """Policy forwards inside attend by [`decode_attention`], if the policy attends by SDPA outside."""
    config = policy.config.get_text_config()
    before = config._attn_implementation
    if before != "sdpa":
        yield
        return
    config._attn_implementation = DECODING
    try:
        yield
    finally:
        config._attn_implementation = before
