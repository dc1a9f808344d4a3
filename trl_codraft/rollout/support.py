"""
Where speculation is off, and why.

Two kinds of reasons: a policy whose attention or cache the loop cannot drive (`unsupported_reason(policy)`: rollouts
fall back to plain `generate`), and a call that asks for something the loop cannot honour (`refused_reason`: an error,
because silently generating something else would be worse).
"""

import sys

from torch import nn
from transformers import GenerationConfig, LogitsProcessor, PreTrainedModel
from transformers.cache_utils import StaticCache

from .processors import unsupported_processor


ATTENTION_IMPLEMENTATIONS = ("sdpa", "eager")
LAYER_TYPES = ("full_attention", "sliding_attention")


def unsupported_reason(
    policy: PreTrainedModel,
    generation_config: GenerationConfig | None = None,
    *,
    training: bool | None = None,
    **generate_kwargs,
) -> str | None:
    """
    Why speculative rollouts are off for a policy and a `generate` call.

    Args:
        policy ([`~transformers.PreTrainedModel`]):
            The policy (the base model of a `PeftModel`).
        generation_config ([`~transformers.GenerationConfig`], *optional*):
            The configuration of the call; looked at only if given.
        training (`bool`, *optional*):
            Whether the policy will be in training mode, where dropout acts. Defaults to its mode now.
        **generate_kwargs:
            Further arguments of the call.

    Returns:
        `str` or `None`: what stands in the way and what to set instead, None if nothing does.
    """
    training = policy.training if training is None else training
    for reason in (_architecture_reason(policy), _attention_reason(policy), dropout_reason(policy, training)):
        if reason is not None:
            return reason
    return refused_reason(generation_config, **generate_kwargs)


def refused_reason(generation_config: GenerationConfig | None = None, **generate_kwargs) -> str | None:
    """
    Why a `generate` call cannot be served speculatively, None if it can. Arguments as in [`unsupported_reason`];
    keyword arguments override the configuration, as in `generate`.
    """

    def setting(name: str):
        value = generate_kwargs.get(name)
        return getattr(generation_config, name, None) if value is None else value

    if (setting("num_beams") or 1) > 1:
        return f"`num_beams={setting('num_beams')}`: beams are not sampling. Set `num_beams=1`."
    if (setting("num_return_sequences") or 1) > 1:
        return (
            f"`num_return_sequences={setting('num_return_sequences')}`: repeat the prompts instead (GRPO does), and "
            "set `num_return_sequences=1`."
        )
    for name in ("assistant_model", "assistant_tokenizer", "prompt_lookup_num_tokens", "assistant_early_exit"):
        if setting(name) is not None:
            return f"`{name}` is another way of drafting. Drop it: the rollout has its own draft."
    if generate_kwargs.get("streamer") is not None:
        return "`streamer` expects one token per step. Drop it."
    if setting("cache_implementation") not in (None, "dynamic", "hybrid"):
        return (
            f"`cache_implementation={setting('cache_implementation')!r}` (static, quantized, offloaded or paged) "
            "cannot hold rows of different lengths. Unset it."
        )
    for name in ("cache", "past_key_values"):
        cache = generate_kwargs.get(name)
        if cache is not None and (isinstance(cache, StaticCache) or cache.get_seq_length() > 0):
            return f"`{name}`: a static or filled cache cannot be continued row by row. Drop it and pass all ids."
    for name, advice in (
        ("guidance_scale", "classifier-free guidance keeps state between calls"),
        ("watermarking_config", "watermarks are not known to be functions of the prefix alone"),
        ("penalty_alpha", "contrastive search is not sampling"),
        ("dola_layers", "DoLa contrasts layers at every step"),
        ("prefill_chunk_size", "prompts are read in one piece"),
        ("token_healing", "it rewrites the prompt"),
    ):
        if setting(name) not in (None, False, 0, 0.0) and not (name == "guidance_scale" and setting(name) == 1):
            return f"`{name}={setting(name)!r}`: {advice}. Unset it."
    for name in ("output_scores", "output_logits", "output_attentions", "output_hidden_states"):
        if setting(name):
            return f"`{name}=True`: per-step outputs are not kept. Unset it."
    return unsupported_processor(generate_kwargs.get("logits_processor") or [])


def check_call(generation_config: GenerationConfig, processors: list[LogitsProcessor], model_kwargs: dict) -> None:
    """
    Refuses what only shows once `generate` has prepared its call.

    Raises:
        ValueError: naming what cannot be honoured.
    """
    reason = refused_reason(generation_config, cache=model_kwargs.get("cache"), logits_processor=processors)
    known = {"attention_mask", "position_ids", "logits_to_keep", "cache", "use_cache"}
    unknown = sorted(name for name, value in model_kwargs.items() if name not in known and value is not None)
    if reason is None and unknown:
        reason = f"the model arguments {unknown} would have to be extended by drafted tokens. Drop them."
    if reason is not None:
        raise ValueError(f"Speculative rollouts cannot serve this call: {reason} Or set `speculative_rollouts=False`.")


def _architecture_reason(policy: PreTrainedModel) -> str | None:
    config = policy.config.get_text_config()
    if policy.config.is_encoder_decoder:
        return f"{type(policy).__name__} is an encoder-decoder model; only decoder-only policies have a draft."
    kinds = sorted(set(getattr(config, "layer_types", None) or ()) - set(LAYER_TYPES))
    if kinds:
        return (
            f"{type(policy).__name__} has layers of type {kinds}, whose cache cannot roll back rejected tokens (linear "
            "attention and state-space layers keep one running state) or is not a plain key/value cache."
        )
    # `_is_stateful` is Transformers' own mark of models whose state cannot return to an earlier token.
    if policy._is_stateful or not policy._supports_default_dynamic_cache():
        return f"{type(policy).__name__} keeps a recurrent state, which cannot roll back rejected tokens."
    if getattr(config, "attention_chunk_size", None) is not None:
        return f"{type(policy).__name__} attends in chunks, a mask the speculative loop does not build."
    window = getattr(config, "sliding_window", None)
    if window is not None and not getattr(config, "layer_types", None) and not _masks_windows(policy):
        return (
            f"the configuration says `sliding_window={window}`, which {type(policy).__name__} is not known to apply. Set it "
            "to None there if all layers see the whole text."
        )
    return None


def _masks_windows(policy: PreTrainedModel) -> bool:
    """Whether the policy's own code builds masks of sliding windows, as Transformers' models do."""
    # Code that was executed from a file need not be among the modules.
    modules = (sys.modules.get(kind.__module__) for kind in type(policy.get_decoder()).__mro__)
    return any(hasattr(module, "create_sliding_window_causal_mask") for module in modules)


def _attention_reason(policy: PreTrainedModel) -> str | None:
    implementation = policy.config.get_text_config()._attn_implementation
    if implementation not in ATTENTION_IMPLEMENTATIONS:
        return (
            f"attention implementation {implementation!r} cannot take the 4D mask that rows of different lengths need. "
            "Set `attn_implementation='sdpa'` in `model_init_kwargs` to speculate."
        )
    return None


def dropout_reason(policy: PreTrainedModel, training: bool) -> str | None:
    """Which dropout makes the policy's forwards random, and what to set instead; `None` if nothing does."""
    if not training:
        return None
    active = next(
        (name for name, module in policy.named_modules() if isinstance(module, nn.Dropout) and module.p), None
    )
    if active is not None:
        return (
            f"dropout is active in training mode (`{active}`), so the policy has no fixed distribution to verify "
            "against. Set `disable_dropout=True`."
        )
    if getattr(policy.config.get_text_config(), "attention_dropout", 0.0):
        return (
            "attention dropout is active in training mode, so the policy has no fixed distribution to verify against. "
            "Set `attention_dropout=0.0` in the model's configuration (`disable_dropout=True` does not reach it)."
        )
    return None
