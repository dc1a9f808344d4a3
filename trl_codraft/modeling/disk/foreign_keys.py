"""
The meaning of each key of a draft's `config.json` to this package, whoever wrote the file: keys of flat files (EAGLE,
SpecForge, SGLang, vLLM), of ModelOpt, of speculators, and of the Llama family around them.

A key is one of four things. It is *read*. Or it is *neutral*: the draft computes the thing in one way, and the key
must say that way. Or it is *without effect* on the draft's mathematics, for a reason that stands here. Or it is
unknown; then it may change the draft's mathematics, and is refused unless it is null. Whoever knows better removes the
key from a copy of the file.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ..naming import few, shown


TAP_KEY = "eagle_aux_hidden_state_layer_ids"
NORM_FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
PARALLEL_DRAFTING_KEYS = ("parallel_drafting", "pard_token", "ptd_token_id", "mask_token_id")
# Read, and checked where they are read.
READ = frozenset(
    (
        *("architectures", "model_type", "hidden_size", "intermediate_size", "num_hidden_layers"),
        *("num_attention_heads", "num_key_value_heads", "head_dim", "hidden_act", "rms_norm_eps"),
        *("vocab_size", "draft_vocab_size", "target_hidden_size", "target_num_hidden_layers"),
        *("max_position_embeddings", "rope_theta", "rope_parameters", "rope_scaling"),
        *("attention_bias", "mlp_bias", "bias", "logit_scale", "tie_word_embeddings", "num_aux_hidden_states"),
        *("use_aux_norm", "eagle_config", "transformer_layer_config", "speculators_config", "speculators_model_type"),
        *(TAP_KEY, *NORM_FLAGS, *PARALLEL_DRAFTING_KEYS),
    )
)
OFF, ONE, NONE = (None, False), (None, 1), (None, 0)


def _without_experts(value: Any, config: Mapping[str, Any]) -> bool:
    return not value


def _without_window(value: Any, config: Mapping[str, Any]) -> bool:
    return value is None or config.get("use_sliding_window") is False


def _full_attention(value: Any, config: Mapping[str, Any]) -> bool:
    return value is None or set(value) <= {"full_attention"}


def _scale_of_heads(value: Any, config: Mapping[str, Any]) -> bool:
    return value is None or value == config.get("head_dim")


def _square_root_scale(value: Any, config: Mapping[str, Any]) -> bool:
    return value is None or value == (config.get("head_dim") or 0) ** -0.5


def _same_activation(value: Any, config: Mapping[str, Any]) -> bool:
    return value in (None, config.get("hidden_act", "silu"))


# The values that a key must have, or a test of its value within its section, and the reason.
NEUTRAL: dict[str, tuple[tuple | Callable[[Any, Mapping[str, Any]], bool], str]] = {
    **dict.fromkeys(
        ("qkv_bias", "use_qkv_bias", "use_bias", "o_bias", "lm_head_bias", "fc_bias", "add_bias_linear"),
        (OFF, "the draft has no biases"),
    ),
    **dict.fromkeys(
        ("use_qk_norm", "qk_norm", "qk_layernorm", "use_query_key_norm"), (OFF, "the draft has no q_norm and k_norm")
    ),
    **dict.fromkeys(
        ("partial_rotary_factor", "rotary_pct", "rotary_percentage"), (ONE, "the draft rotates whole heads")
    ),
    **dict.fromkeys(("rope_interleave", "rope_interleaved"), (OFF, "the draft rotates halves of heads, not pairs")),
    "position_embedding_type": ((None, "rope"), "the draft's positions are rotary"),
    **dict.fromkeys(
        ("alibi", "use_alibi", "no_rope_layers"), (lambda value, config: not value, "the draft's positions are rotary")
    ),
    **dict.fromkeys(
        ("no_rope_layer_interval", "attention_chunk_size"),
        (NONE, "every layer is rotary and attends to all before it"),
    ),
    "use_rope": ((None, True), "the draft's positions are rotary"),
    **dict.fromkeys(
        ("sliding_window", "attention_window", "window_size"),
        (_without_window, "the draft attends to all rows before"),
    ),
    "use_sliding_window": (
        lambda value, config: not value or config.get("sliding_window") is None,
        "the draft attends to all rows before",
    ),
    **dict.fromkeys(("layer_types", "attn_types"), (_full_attention, "the draft attends to all rows before")),
    "is_causal": ((None, True), "the draft attends to rows before"),
    **dict.fromkeys(
        ("use_bidirectional_attention", "is_encoder_decoder", "add_cross_attention"),
        (OFF, "the draft is a causal decoder"),
    ),
    "cross_attention_hidden_size": ((None,), "the draft is a causal decoder"),
    **dict.fromkeys(
        ("attn_logit_softcapping", "final_logit_softcapping", "logits_soft_cap", "logit_softcap"),
        (NONE, "the draft caps no logits"),
    ),
    "query_pre_attn_scalar": (_scale_of_heads, "attention is scaled by head_dim ** -0.5"),
    "attention_multiplier": (_square_root_scale, "attention is scaled by head_dim ** -0.5"),
    **dict.fromkeys(
        (
            "residual_multiplier",
            "embedding_multiplier",
            "logits_scaling",
            "scale_emb",
            "embedding_scale",
            "lm_head_multiplier",
        ),
        (ONE, "the draft scales nothing but the logits, by `logit_scale`"),
    ),
    **dict.fromkeys(
        ("scale_depth", "dim_model_base", "mup_enabled", "use_mup", "scale_embedding"),
        (OFF, "the draft scales nothing but the logits, by `logit_scale`"),
    ),
    **dict.fromkeys(
        (
            "num_experts",
            "num_local_experts",
            "n_routed_experts",
            "n_shared_experts",
            "num_shared_experts",
            "moe_num_experts",
        ),
        (_without_experts, "the draft has one dense MLP"),
    ),
    **dict.fromkeys(
        (
            "kv_lora_rank",
            "q_lora_rank",
            "qk_rope_head_dim",
            "qk_nope_head_dim",
            "v_head_dim",
            "linear_num_value_heads",
        ),
        (NONE, "the draft has ordinary heads"),
    ),
    **dict.fromkeys(
        ("hidden_activation", "activation_function"), (_same_activation, "`hidden_act` names the activation")
    ),
    **dict.fromkeys(
        ("quantization_config", "compression_config", "pruned_heads"),
        (lambda value, config: not value, "the weights are read as they are"),
    ),
    "additional_fc": (OFF, "one `fc` reads the taps"),
    **dict.fromkeys(
        ("dflash_config", "dspark_config", "mtp_config", "medusa_config"), ((None,), "the draft is EAGLE-3")
    ),
}
_OF_TRAINING = "matters in training alone"
_OF_EXPERTS = "matters with experts alone, which are refused"
_OF_GENERATION = "is a setting of generation"
_BOOKKEEPING = "is bookkeeping of transformers"
WITHOUT_EFFECT: dict[str, str] = {
    **dict.fromkeys(
        (
            *("attention_dropout", "hidden_dropout", "hidden_dropout_prob", "dropout", "resid_pdrop", "embd_pdrop"),
            *("initializer_range", "embed_requires_grad", "enable_sp_ulysses", "gradient_checkpointing"),
        ),
        _OF_TRAINING,
    ),
    **dict.fromkeys(
        (
            *("num_experts_per_tok", "experts_per_token", "moe_intermediate_size", "shared_expert_intermediate_size"),
            *(
                "decoder_sparse_step",
                "mlp_only_layers",
                "norm_topk_prob",
                "router_aux_loss_coef",
                "output_router_logits",
            ),
            *("first_k_dense_replace", "moe_layer_freq", "n_group", "topk_group", "topk_method", "scoring_func"),
            *("routed_scaling_factor", "aux_loss_alpha", "seq_aux", "ep_size"),
        ),
        _OF_EXPERTS,
    ),
    **dict.fromkeys(
        (
            *("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "decoder_start_token_id", "prefix"),
            *("use_cache", "cache_implementation", "max_length", "min_length", "do_sample", "early_stopping"),
            *("num_beams", "num_beam_groups", "diversity_penalty", "temperature", "top_k", "top_p", "typical_p"),
            *("repetition_penalty", "length_penalty", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size"),
            *("bad_words_ids", "num_return_sequences", "output_scores", "return_dict_in_generate"),
            *("forced_bos_token_id", "forced_eos_token_id", "remove_invalid_values", "begin_suppress_tokens"),
            *("suppress_tokens", "exponential_decay_length_penalty", "task_specific_params"),
        ),
        _OF_GENERATION,
    ),
    **dict.fromkeys(
        (
            *("_name_or_path", "name_or_path", "transformers_version", "dtype", "torch_dtype", "return_dict"),
            *("output_attentions", "output_hidden_states", "torchscript", "use_bfloat16", "tf_legacy_loss"),
            *(
                "id2label",
                "label2id",
                "num_labels",
                "problem_type",
                "finetuning_task",
                "tokenizer_class",
                "is_decoder",
            ),
            *("tie_encoder_decoder", "chunk_size_feed_forward", "_attn_implementation", "attn_implementation"),
            *("_attn_implementation_autoset", "_commit_hash", "kernel_config", "unsloth_version", "unsloth_fixed"),
        ),
        _BOOKKEEPING,
    ),
    "pretraining_tp": "splits matrix products and changes no result",
    "max_window_layers": "matters with a sliding window alone, which is refused",
    **dict.fromkeys(
        ("target_model_type", "target_layer_count", "num_target_layers", "modal_type", "base_model_name_or_path"),
        "describes the policy",
    ),
    "reuse_target_lm_head": "says where the head started; the stored one counts",
    "auto_map": "names code beside the weights, which no server runs",
    **dict.fromkeys(("speculators_version", "has_no_defaults_at_init"), "is bookkeeping of speculators"),
    "num_lookahead_tokens": "is how many tokens a server drafts",
}
# ModelOpt's, beside the keys that `eagle_config` shares with the top level.
EAGLE_CONFIG_NEUTRAL = {
    "use_input_layernorm_in_first_layer": ((None, True), "the embedding is normed in the first layer"),
    "use_last_layernorm": ((None, True), "the output is normed before the head"),
    "use_mtp_layernorm": (OFF, "the taps have no such norm"),
    "next_layer_regular": ((None, True), "layers after the first are ordinary ones"),
    "parallel_draft_step": (ONE, "the draft proposes one token at a time"),
    "parallel_draft_heads_num_layers": (lambda value, config: True, ""),
}
EAGLE_CONFIG_READ = frozenset(("use_aux_hidden_state", TAP_KEY, *NORM_FLAGS))
ROPE_READ = frozenset(
    (
        *("rope_type", "type", "rope_theta", "factor", "low_freq_factor", "high_freq_factor"),
        *(
            "original_max_position_embeddings",
            "attention_factor",
            "beta_fast",
            "beta_slow",
            "mscale",
            "mscale_all_dim",
        ),
        *("truncate", "short_factor", "long_factor"),
    )
)
# What other places than its own must not say otherwise: read at top level, and read from the layer's section if there
# is one. Not among these: names of classes, which configurations of models bring along, and what the tensors decide.
OF_THE_TOP = frozenset(
    (
        *("draft_vocab_size", "target_hidden_size", "target_num_hidden_layers", "use_aux_norm", "eagle_config"),
        *("transformer_layer_config", "speculators_config", "speculators_model_type"),
        *(TAP_KEY, *NORM_FLAGS, *PARALLEL_DRAFTING_KEYS),
    )
)
OF_THE_LAYER = frozenset(
    (
        *("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size"),
        *("hidden_act", "rms_norm_eps", "attention_bias", "mlp_bias", "bias"),
    )
)
LAYER_DEFAULTS = {"hidden_act": "silu", "rms_norm_eps": 1e-6}
ROPE_DEFAULTS = {"rope_type": "default", "rope_theta": 10000.0}
# For servers, but for the algorithm.
SPECULATORS_READ = frozenset(("default_proposal_method", "proposal_methods", "verifier"))
SPECULATORS_NEUTRAL = {"algorithm": ((None, "eagle3"), "the draft is EAGLE-3")}
ROPE_NEUTRAL = {
    "partial_rotary_factor": NEUTRAL["partial_rotary_factor"],
    **dict.fromkeys(
        ("mrope_section", "mrope_interleaved"),
        (lambda value, config: not value, "the draft has one position per token, not three as for images"),
    ),
}


def unread_keys(raw: Mapping[str, Any]) -> Iterator[str]:
    """
    Yields a sentence for each key of a draft's `config.json`, also inside its sections, that may change what the draft
    computes and that this package does not read.

    Args:
        raw (`Mapping[str, Any]`):
            Parsed JSON whose sections are objects or absent.
    """
    layer = raw.get("transformer_layer_config") or {}
    whole = {**raw, **layer}
    yield from _unread(raw, whole, "", READ, NEUTRAL, WITHOUT_EFFECT)
    yield from _unread(layer, whole, " in `transformer_layer_config`", READ, NEUTRAL, WITHOUT_EFFECT)
    yield from _unread(
        raw.get("eagle_config") or {}, whole, " in `eagle_config`", EAGLE_CONFIG_READ, EAGLE_CONFIG_NEUTRAL, {}
    )
    yield from _unread(
        raw.get("speculators_config") or {},
        whole,
        " in `speculators_config`",
        SPECULATORS_READ,
        SPECULATORS_NEUTRAL,
        {},
    )
    if layer:
        yield from _elsewhere(layer, raw, OF_THE_TOP, " in `transformer_layer_config`", "at top level")
        yield from _elsewhere(raw, LAYER_DEFAULTS | layer, OF_THE_LAYER, "", "in `transformer_layer_config`")
        yield from _elsewhere(
            _rope_of(raw), ROPE_DEFAULTS | _rope_of(layer), ROPE_READ, " of RoPE", "in `transformer_layer_config`"
        )
    for section in (raw, layer):
        for key in ("rope_parameters", "rope_scaling"):
            rope = section.get(key) or {}
            if not any(isinstance(value, Mapping) for value in rope.values()):
                yield from _unread(rope, whole, f" in `{key}`", ROPE_READ, ROPE_NEUTRAL, {})


def _elsewhere(
    section: Mapping[str, Any], own: Mapping[str, Any], keys: frozenset[str], place: str, own_place: str
) -> Iterator[str]:
    """The sentences about keys of a section that are read from another one, which says something else."""
    for key, value in section.items():
        counts = own.get(key)
        if key in keys and value is not None and value != counts and (value or counts):
            said = "is absent" if counts is None else f"is {shown(counts)}"
            yield f"`{key}`{place} is {shown(value)}, but it is read {own_place}, where it {said}"


def _rope_of(section: Mapping[str, Any]) -> dict[str, Any]:
    """What a section says of RoPE, in one spelling."""
    said = {"rope_theta": section.get("rope_theta")}
    for key in ("rope_scaling", "rope_parameters"):
        said |= section.get(key) or {}
    said["rope_type"] = said.pop("type", None) or said.get("rope_type")
    return {key: value for key, value in said.items() if value is not None}


def _unread(
    section: Mapping[str, Any],
    whole: Mapping[str, Any],
    place: str,
    read: frozenset[str],
    neutral: Mapping[str, tuple],
    without_effect: Mapping[str, str],
) -> Iterator[str]:
    """The sentences about one section."""
    unknown = []
    for key, value in section.items():
        if key in read or key in without_effect or value is None:
            continue
        if key not in neutral:
            unknown.append(f"`{key}` ({shown(value)})")
            continue
        accepted, reason = neutral[key]
        # 1 == True in Python: `true` is no number here.
        fits = (
            accepted(value, whole)
            if callable(accepted)
            else any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in accepted)
        )
        if not fits:
            yield f"`{key}`{place} is {shown(value)}: {reason}"
    if unknown:
        yield (
            f"keys{place} that this package does not know and that may change what the draft computes: {few(unknown)}"
        )


def refuse_unread_keys(raw: Mapping[str, Any]) -> None:
    """
    Refuses a `config.json` with keys that would be dropped though they may change the draft's mathematics.

    Raises:
        ValueError: naming them.
    """
    found = list(unread_keys(raw))
    if found:
        raise ValueError(
            f"The draft's config.json says what this package does not compute: {few(found, '; ')}. If you know that "
            "such a key changes nothing for this draft, remove it from a copy of the folder."
        )
