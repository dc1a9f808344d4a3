"""
Where speculation is off, and why.

Two kinds of reasons: a policy whose attention or cache the loop cannot drive (`unsupported_reason(policy)`), and a
call that asks for something the loop cannot honour (`refused_reason`, and `call_reason` for all that `generate` has
prepared). Trainers roll out plainly then, and say so; `speculative_generate` raises, because silently generating
something else would be worse.
"""

import inspect
import sys

from transformers import GenerationConfig, GenerationMixin, LogitsProcessor, PreTrainedModel, StoppingCriteria
from transformers.cache_utils import StaticCache

from ..modeling.policy import dropout_reason, other_layer_types
from .criteria import unsupported_criterion
from .processors import unsupported_processor


ATTENTION_IMPLEMENTATIONS = ("sdpa", "eager")
# Settings of `GenerationConfig` that the loop does not have, and why.
UNSUPPORTED_SETTINGS = {
    "guidance_scale": "classifier-free guidance keeps state between calls",
    "watermarking_config": "watermarks are not known to be functions of the prefix alone",
    "penalty_alpha": "contrastive search is not sampling",
    "dola_layers": "DoLa contrasts layers at every step",
    "constraints": "constrained search is not sampling",
    "force_words_ids": "constrained search is not sampling",
    "encoder_repetition_penalty": "it is not evaluated at several positions at once",
    "encoder_no_repeat_ngram_size": "it is not evaluated at several positions at once",
    "forced_bos_token_id": "it is not evaluated at several positions at once",
    "prefill_chunk_size": "prompts are read in one piece",
    "token_healing": "it rewrites the prompt",
    "output_scores": "per-step outputs are not kept",
    "output_logits": "per-step outputs are not kept",
    "output_attentions": "per-step outputs are not kept",
    "output_hidden_states": "per-step outputs are not kept",
}
# Those of them that change nothing at 1.
FACTORS = ("guidance_scale", "encoder_repetition_penalty")
# Arguments that `generate` hands to decoding methods and not on to the model.
DECODING_ARGUMENTS = (
    "synced_gpus",
    "tokenizer",
    "assistant_model",
    "assistant_tokenizer",
    "streamer",
    "inputs_tensor",
)


def unsupported_reason(policy: PreTrainedModel, *, training: bool | None = None) -> str | None:
    """
    Why speculative rollouts are off for a policy, whatever is asked of it.

    Args:
        policy ([`~transformers.PreTrainedModel`]):
            The policy (the base model of a `PeftModel`).
        training (`bool`, *optional*):
            Whether the policy will be in training mode, where dropout acts. Defaults to its mode now.

    Returns:
        `str` or `None`: what stands in the way and what to set instead, None if nothing does.
    """
    training = policy.training if training is None else training
    return _architecture_reason(policy) or _attention_reason(policy) or dropout_reason(policy, training)


def refused_reason(config: GenerationConfig, **arguments) -> str | None:
    """
    Why a call of `generate` cannot be served speculatively, None if it can.

    Args:
        config ([`~transformers.GenerationConfig`]):
            The configuration as `generate` sees it, merged with what is stored with the model.
        **arguments:
            Further arguments of the call, such as `streamer`.
    """
    if (config.num_beams or 1) > 1:
        return f"`num_beams={config.num_beams}`: beams are not sampling. Set `num_beams=1`."
    if (config.num_return_sequences or 1) > 1:
        return (
            f"`num_return_sequences={config.num_return_sequences}`: repeat the prompts instead (GRPO does), and set "
            "`num_return_sequences=1`."
        )
    for name in ("prompt_lookup_num_tokens", "assistant_early_exit", "use_mtp", "is_assistant"):
        if getattr(config, name) not in (None, False):
            value = getattr(config, name)
            return f"`{name}={value!r}` is another way of drafting. Unset it: the rollout has its own draft."
    if config.cache_implementation not in (None, "dynamic", "hybrid"):
        return (
            f"`cache_implementation={config.cache_implementation!r}` (static, quantized, offloaded or paged) cannot "
            "hold rows of different lengths. Unset it."
        )
    for name, advice in UNSUPPORTED_SETTINGS.items():
        neutral = (None, False, 1) if name in FACTORS else (None, False, 0)
        if getattr(config, name) not in neutral:
            return f"`{name}={getattr(config, name)!r}`: {advice}. Unset it."
    return refused_argument(**arguments)


def refused_argument(**arguments) -> str | None:
    """Which argument of the call, besides its configuration, cannot be honoured."""
    for name in ("assistant_model", "assistant_tokenizer"):
        if arguments.get(name) is not None:
            return f"`{name}` is another way of drafting. Drop it: the rollout has its own draft."
    if arguments.get("custom_generate") is not None:
        return "`custom_generate` is another way of decoding. Drop it."
    if arguments.get("streamer") is not None:
        return "`streamer` expects one token per step. Drop it."
    for name in ("cache", "past_key_values"):
        cache = arguments.get(name)
        if cache is not None and (isinstance(cache, StaticCache) or cache.get_seq_length() > 0):
            return f"`{name}`: a static or filled cache cannot be continued row by row. Drop it and pass all ids."
    return unsupported_processor(arguments.get("logits_processor") or [])


def call_reason(
    policy: PreTrainedModel,
    *,
    generation_config: GenerationConfig,
    logits_processor: list[LogitsProcessor],
    stopping_criteria: list[StoppingCriteria],
    training: bool | None = None,
    **arguments,
) -> str | None:
    """
    Why what `generate` has prepared cannot be decoded speculatively, None if it can.

    Args:
        policy ([`~transformers.PreTrainedModel`]):
            The policy (the base model of a `PeftModel`).
        generation_config, logits_processor, stopping_criteria, **arguments:
            What `generate` hands to a decoding method.
        training (`bool`, *optional*):
            As in [`unsupported_reason`].
    """
    known = {"attention_mask", "position_ids", "logits_to_keep", "cache", "use_cache", *DECODING_ARGUMENTS}
    unknown = sorted(
        name
        for name, value in arguments.items()
        # What encoders made of no images is an empty mapping.
        if name not in known and value is not None and not (isinstance(value, dict) and not value)
    )
    reason = unsupported_reason(policy, training=training) or refused_reason(
        generation_config, logits_processor=logits_processor, **arguments
    )
    if reason is None and unknown:
        return f"the model arguments {unknown} would have to be extended by drafted tokens. Drop them."
    return reason or unsupported_criterion(stopping_criteria)


def _architecture_reason(policy: PreTrainedModel) -> str | None:
    config = policy.config.get_text_config()
    if policy.config.is_encoder_decoder:
        return f"{type(policy).__name__} is an encoder-decoder model; only decoder-only policies have a draft."
    kinds = other_layer_types(config)
    if kinds:
        return (
            f"{type(policy).__name__} has layers of type {kinds}, whose cache cannot roll back rejected tokens "
            "(linear attention and state-space layers keep one running state) or is not a plain key/value cache."
        )
    # `_is_stateful` is Transformers' own mark of models whose state cannot return to an earlier token.
    if policy._is_stateful or not policy._supports_default_dynamic_cache():
        return f"{type(policy).__name__} keeps a recurrent state, which cannot roll back rejected tokens."
    if getattr(config, "attention_chunk_size", None) is not None:
        return f"{type(policy).__name__} attends in chunks, a mask the speculative loop does not build."
    if type(policy)._sample is not GenerationMixin._sample:
        return f"{type(policy).__name__} decodes by a method of its own, which the speculative loop would replace."
    if "position_ids" not in inspect.signature(policy.forward).parameters:
        return (
            f"{type(policy).__name__} takes no `position_ids` but counts columns, which differ from positions where "
            "rows have different lengths."
        )
    if not (policy._supports_sdpa or policy._supports_attention_backend):
        return (
            f"{type(policy).__name__} attends by code of its own, which is not known to take the masks and the cache "
            "that rows of different lengths need."
        )
    window = getattr(config, "sliding_window", None)
    if window is not None and not getattr(config, "layer_types", None) and not _masks_windows(policy):
        return (
            f"the configuration says `sliding_window={window}`, which {type(policy).__name__} is not known to apply. "
            "Set it to None there if all layers see the whole text."
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
            f"attention implementation {implementation!r} cannot take the 4D mask that rows of different lengths "
            "need. Set `attn_implementation='sdpa'` in `model_init_kwargs` to speculate."
        )
    return None
