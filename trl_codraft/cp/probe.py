"""
Whether a policy can run on shards: refusals by name, and a small forward that must agree with the plain one.

Shapes: `T` packed tokens, `H` hidden size.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from transformers import PreTrainedModel

from ..modeling.policy import decoder_of, other_layer_types
from .layout import ContextLayout
from .planner import Segment
from .routing import RoutedPolicy


INSTEAD = "Set `context_parallel_size=1`."

# First column and last + 1 of two rows of 12 columns, padded on both sides as in a GRPO microbatch.
ROWS, COLUMNS = ((3, 10), (0, 12)), 12
# Median over tokens of the relative error of a hidden state. Rounding gives 1e-6 (float32) and 1e-2 (bfloat16, deep
# policies); a layer that misses its mask, sees other documents or loses its window 1e-1 and more.
TOLERANCES = {torch.float64: 1e-3, torch.float32: 5e-3}
HALF_TOLERANCE = 0.1


def unsupported_by_shards(policy: PreTrainedModel) -> str | None:
    """
    Why a policy cannot run on shards, as far as its configuration tells.

    Args:
        policy ([`~transformers.PreTrainedModel`]):
            Causal language model, without wrappers.

    Returns:
        `str` or `None`: the obstacle, and what to set.
    """
    name, config = type(policy).__name__, policy.config.get_text_config()
    try:
        decoder_of(policy)
    except ValueError:
        return f"{name} is an encoder-decoder model, or its decoder has no list of `layers`. {INSTEAD}"
    # Not every configuration class declares these fields; absent means plain causal attention.
    kinds = other_layer_types(config)
    if kinds:
        return (
            f"{name} has layers of type {kinds}, which carry a state from token to token or attend by other rules "
            f"than a causal mask or a window; their tokens cannot be split over ranks. {INSTEAD}"
        )
    if policy._is_stateful:
        return f"{name} keeps a recurrent state, which cannot be split over ranks. {INSTEAD}"
    if getattr(config, "attention_chunk_size", None) is not None:
        return f"{name} attends in chunks, which sharded attention does not offer. {INSTEAD}"
    if getattr(config, "attn_logit_softcapping", None) is not None:
        return (
            f"{name} caps its attention scores (`attn_logit_softcapping`), which no kernel of sharded attention does. "
            f"{INSTEAD}"
        )
    if not getattr(config, "is_causal", True) or getattr(config, "use_bidirectional_attention", None):
        return f"{name} attends to later tokens. {INSTEAD}"
    return None


@torch.no_grad()
def disagreement_with_plain(policy: PreTrainedModel) -> str | None:
    """
    Runs two short rows through the policy's backbone, padded as the trainer pads them and packed as a shard, and
    compares. No communication.

    Args:
        policy ([`~transformers.PreTrainedModel`]):
            Causal language model with its weights, without wrappers.

    Returns:
        `str` or `None`: the disagreement; `None` if both agree.
    """
    device = policy.get_input_embeddings().weight.device
    mask = torch.zeros(len(ROWS), COLUMNS, dtype=torch.long, device=device)
    for row, (start, end) in enumerate(ROWS):
        mask[row, start:end] = 1
    ids = (
        torch.arange(mask.numel(), device=device).view_as(mask) * 7 + 3
    ) % policy.config.get_text_config().vocab_size
    keep = mask.bool()
    doc_lens = [end - start for start, end in ROWS]
    layout = ContextLayout(doc_lens, [[Segment(doc, 0, length) for doc, length in enumerate(doc_lens)]], device=device)
    columns = torch.arange(COLUMNS, device=device).expand_as(mask)[keep]
    routed = RoutedPolicy(policy)
    with _evaluating(policy):
        # Flash kernels need a GPU, and under FSDP2 the policy is still on the CPU; every policy has the eager form.
        chosen = policy.config.get_text_config()._attn_implementation
        with routed.attending_by(chosen if chosen in ("sdpa", "eager") else "eager"):
            plain = policy.base_model(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state[keep]
        try:
            with routed.forward_on(layout, COLUMNS) as route:
                ours = policy.base_model(
                    input_ids=ids[keep].unsqueeze(0), position_ids=columns.unsqueeze(0), use_cache=False, **route
                ).last_hidden_state[0]
        except ValueError as error:
            return str(error)
        finally:
            routed.close()
    errors = ((ours - plain).float().norm(dim=-1) / plain.float().norm(dim=-1)).split(doc_lens)
    worst = max(error.median().item() for error in errors)
    # Not a number is no agreement either.
    if worst <= TOLERANCES.get(plain.dtype, HALF_TOLERANCE):
        return None
    return (
        f"The hidden states of {type(policy).__name__} on a shard differ from those of its plain forward by "
        f"{worst:.1e}, relatively: it mixes tokens in other ways than by attention, or positions are not what they "
        f"seem. {INSTEAD}"
    )


@contextmanager
def _evaluating(policy: nn.Module) -> Iterator[None]:
    """Evaluation mode, and the mode of each module afterwards."""
    training = [module for module in policy.modules() if module.training]
    policy.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
