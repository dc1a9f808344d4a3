"""
The `config.json` of a draft: one file that vLLM, SGLang and speculators all read the same way.

Three readers, one file. vLLM and speculators follow `speculators_model_type` and build the draft from
`transformer_layer_config` plus a few top-level keys; SGLang reads the flat Llama keys and nothing else; vLLM falls
back to the flat keys too when the speculators keys are removed. Every value is therefore written in each place a
reader looks for it, and never left to a default, because the defaults of the readers differ.

Tap ids, the one key with two meanings: at top level id `i` is the input of decoder layer `i` (vLLM, speculators, this
package); inside `eagle_config` id `i` is the *output* of layer `i` (SGLang, SpecForge), one less for the same tensor.
"""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import LlamaConfig

from ..configuration_eagle3 import SIZES, Eagle3DraftConfig, default_tap_layers
from ..naming import few, shown
from .foreign_keys import NORM_FLAGS, PARALLEL_DRAFTING_KEYS, ROPE_READ, TAP_KEY, refuse_unread_keys


# Read as they are wherever they stand; a value of another kind would surface far from here.
WHOLE_NUMBERS = (*SIZES, "target_num_hidden_layers")
ARCHITECTURE = "LlamaForCausalLMEagle3"
# All of these name the plain Llama block; the first is the only one SGLang knows.
READABLE_ARCHITECTURES = (
    ARCHITECTURE,
    "Eagle3LlamaForCausalLM",
    "LlamaForCausalLM",
    "Eagle3DraftModel",
    "Eagle3Speculator",
)
# What a layer computes: two values of one of these in a file leave open which draft it is.
MEANING_KEYS = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "rms_norm_eps",
    "vocab_size",
    "rope_theta",
    "rope_parameters",
    "rope_scaling",
    "logit_scale",
    "num_aux_hidden_states",
)
REQUIRED_KEYS = ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size", "rms_norm_eps")
# Every reader falls back to this, and transformers' Llama configuration uses it.
DEFAULT_ROPE_THETA = 10000.0


def server_default_tap_layers(num_policy_layers: int | None) -> list[int] | None:
    """
    The tap ids a server uses when the file names none: `[2, n // 2, n - 3]`.

    Args:
        num_policy_layers (`int` or `None`):
            Number of decoder layers `n` of the policy.

    Returns:
        `list[int]` or `None`: `None` when `n` is unknown or below 7, where the three ids would not be ascending.
    """
    if num_policy_layers is None or num_policy_layers < 7:
        return None
    return [2, num_policy_layers // 2, num_policy_layers - 3]


def dtype_name(dtype: torch.dtype) -> str:
    """`torch.bfloat16` -> `"bfloat16"`."""
    return str(dtype).removeprefix("torch.")


def config_to_disk(
    config: Eagle3DraftConfig,
    *,
    dtype: torch.dtype,
    base_model: str | None = None,
    base_architectures: Sequence[str] = (),
    num_draft_tokens: int = 3,
) -> dict[str, Any]:
    """
    The content of `config.json`.

    Args:
        config ([`Eagle3DraftConfig`]):
            The draft's configuration.
        dtype (`torch.dtype`):
            What the tensors beside this file are stored in.
        base_model (`str`, *optional*):
            Repository id or path of the policy. `vllm serve <draft>` alone finds the policy through it.
        base_architectures (`Sequence[str]`, *optional*, defaults to `()`):
            `architectures` of the policy.
        num_draft_tokens (`int`, *optional*, defaults to `3`):
            Draft tokens per verification that `vllm serve <draft>` alone would use.

    Returns:
        `dict[str, Any]`: JSON-serialisable.
    """
    layer = _layer_to_disk(config, dtype)
    disk = {
        "architectures": [ARCHITECTURE],
        **layer,
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        TAP_KEY: list(config.tap_layers),
        **{flag: getattr(config, flag) for flag in NORM_FLAGS},
    }
    if config.num_policy_layers is not None:
        disk["target_num_hidden_layers"] = config.num_policy_layers
    if list(config.tap_layers) != server_default_tap_layers(config.num_policy_layers):
        disk["eagle_config"] = {"use_aux_hidden_state": True, TAP_KEY: [tap - 1 for tap in config.tap_layers]}
    return disk | {
        "speculators_model_type": "eagle3",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": num_draft_tokens,
                    "accept_tolerance": 0.0,
                    "verifier_accept_k": 1,
                }
            ],
            "verifier": {"name_or_path": base_model, "architectures": list(base_architectures)},
        },
        "transformer_layer_config": layer,
    }


def _layer_to_disk(config: Eagle3DraftConfig, dtype: torch.dtype) -> dict[str, Any]:
    """The Llama keys, which stand both flat and in `transformer_layer_config`."""
    rope = dict(config.rope_parameters)
    layer = {
        "model_type": "llama",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "hidden_act": config.hidden_act,
        "rms_norm_eps": config.rms_norm_eps,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_position_embeddings,
        "rope_theta": rope["rope_theta"],
        "rope_parameters": rope,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "dtype": dtype_name(dtype),
        "torch_dtype": dtype_name(dtype),
    }
    if rope["rope_type"] != "default":
        # Readers built on transformers 4 know scaling only under its old name.
        layer["rope_scaling"] = {key: value for key, value in rope.items() if key != "rope_theta"}
    if len(config.tap_layers) != 3:
        # vLLM takes this one from `transformer_layer_config` and drops the top-level key.
        layer["num_aux_hidden_states"] = len(config.tap_layers)
    return layer


def is_speculators(raw: Mapping[str, Any]) -> bool:
    """Whether a reader that knows speculators takes the speculators path for this file."""
    return "speculators_model_type" in raw


def check_sections(raw: Mapping[str, Any]) -> None:
    """
    Checks the kinds of values: JSON objects, whole numbers, lists of names. Each may be absent.

    Raises:
        ValueError: naming the key.
    """
    for key in ("transformer_layer_config", "speculators_config", "eagle_config"):
        _check_kind(raw, key, Mapping, "an object")
    for section in (raw, raw.get("transformer_layer_config") or {}):
        for key in ("rope_parameters", "rope_scaling"):
            _check_kind(section, key, Mapping, "an object")
            _check_kind(section.get(key) or {}, "rope_theta", (int, float), "a number")
        for key in WHOLE_NUMBERS:
            _check_kind(section, key, int, "a whole number")
        _check_kind(section, "logit_scale", (int, float), "a number")
    names = raw.get("architectures") or []
    if not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        raise ValueError(f"`architectures` in the draft's config.json must be a list of names, not {shown(names)}.")


def _check_kind(section: Mapping[str, Any], key: str, kind: type | tuple[type, ...], words: str) -> None:
    """Raises ValueError unless the value is of the kind, null or absent."""
    if section.get(key) is not None and not isinstance(section[key], kind):
        raise ValueError(f"`{key}` in the draft's config.json must be {words}, not {shown(section[key])}.")


def layer_section(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of the decoder layer: `transformer_layer_config` where speculators readers look, else the flat file."""
    if not raw.get("transformer_layer_config"):
        return dict(raw)
    # speculators writes only values that differ from the defaults of the configuration class.
    defaults = LlamaConfig()
    filled = {key: getattr(defaults, key) for key in (*REQUIRED_KEYS, "num_hidden_layers", "max_position_embeddings")}
    return {**filled, **raw["transformer_layer_config"]}


def rope_from_disk(layer: Mapping[str, Any]) -> dict[str, Any]:
    """
    RoPE parameters in the flat form of transformers 5 from either spelling.

    Raises:
        ValueError: for one set of parameters per layer type, which a draft layer cannot choose from, or spellings that
            differ.
    """
    rope, scaling = dict(layer.get("rope_parameters") or {}), dict(layer.get("rope_scaling") or {})
    for section in (rope, scaling):
        if "type" in section:
            section.setdefault("rope_type", section.pop("type"))
    if rope and scaling and scaling != {key: rope.get(key) for key in scaling}:
        raise ValueError(
            f"The draft's config.json says two things of RoPE: {shown(scaling)} in `rope_scaling`, {shown(rope)} in "
            "`rope_parameters`. Keep the one the draft was trained with."
        )
    rope = rope or scaling
    if any(isinstance(value, Mapping) for value in rope.values()):
        raise ValueError(
            f"The draft's `rope_parameters` hold one set per layer type ({sorted(rope)}); a draft layer needs one "
            "flat set. Keep the set the draft was trained with."
        )
    rope.pop("type", None)
    rope["rope_type"] = rope.get("rope_type") or "default"
    given = [section["rope_theta"] for section in (rope, layer) if section.get("rope_theta") is not None]
    if len(set(given)) > 1:
        raise ValueError(
            f"The draft's config.json says two values of `rope_theta`: {given[0]} in its RoPE parameters, {given[1]} "
            "beside them. Keep the one the draft was trained with."
        )
    rope["rope_theta"] = given[0] if given else DEFAULT_ROPE_THETA
    # Neutral keys, checked in `foreign_keys.py`, and nulls say nothing of a draft.
    return {key: value for key, value in rope.items() if key in ROPE_READ and value is not None}


def is_tap_list(value: Any) -> bool:
    """Whether a value is a list of whole numbers (JSON's true counts as a number in Python)."""
    return isinstance(value, list) and all(type(tap) is int for tap in value)


def taps_from_disk(raw: Mapping[str, Any], num_policy_layers: int | None) -> list[int]:
    """
    Tap ids in this package's numbering. The top-level key wins over `eagle_config`; ids found only in `eagle_config`
    count layer outputs (SGLang, SpecForge), so 1 is added; no ids at all means the servers' default.

    Raises:
        ValueError: if no ids are given and the number of policy layers is unknown.
    """
    nested = (raw.get("eagle_config") or {}).get(TAP_KEY)
    found = raw.get(TAP_KEY) or nested
    if found and not is_tap_list(found):
        raise ValueError(f"`{TAP_KEY}` in the draft's config.json must be a list of integers, not {shown(found)}.")
    if found:
        return list(found) if raw.get(TAP_KEY) else [tap + 1 for tap in nested]
    if num_policy_layers is None:
        raise ValueError(
            f"The draft's config.json names no tap layers (`{TAP_KEY}`), so they follow from the number of policy "
            "layers: pass `policy=`."
        )
    return server_default_tap_layers(num_policy_layers) or default_tap_layers(num_policy_layers)


def _read_flag(raw: Mapping[str, Any], flag: str) -> bool:
    """A norm flag from the top level or `eagle_config`; ValueError if the two differ or one is no boolean."""
    found = [section[flag] for section in (raw, raw.get("eagle_config") or {}) if section.get(flag) is not None]
    if not all(isinstance(value, bool) for value in found) or len(set(found)) > 1:
        raise ValueError(
            f"`{flag}` in the draft's config.json must be true or false, the same at top level and in `eagle_config`: "
            f"found {found}."
        )
    return found[0] if found else False


def refuse_foreign_config(raw: Mapping[str, Any]) -> None:
    """
    Refuses, by name, drafts that are not the plain EAGLE-3 Llama block.

    Raises:
        ValueError: naming the feature.
    """
    layer = layer_section(raw)
    kind = raw.get("speculators_model_type", "eagle3")
    parallel = [key for key in PARALLEL_DRAFTING_KEYS if raw.get(key) not in (None, False)]
    if kind == "peagle" or parallel:
        raise ValueError(
            f"The draft uses parallel drafting (P-EAGLE: {', '.join(parallel) or 'speculators_model_type'}), which is "
            "not supported. Use an autoregressive EAGLE-3 draft."
        )
    if kind != "eagle3":
        raise ValueError(f"The draft is of kind {kind!r}; only 'eagle3' can be read.")
    if (raw.get("eagle_config") or {}).get("use_aux_hidden_state") is False:
        raise ValueError(
            "The draft reads no hidden states of inner layers (`use_aux_hidden_state: false` in `eagle_config`), "
            "which is not supported. Use an EAGLE-3 draft that does."
        )
    for key in ("attention_bias", "mlp_bias", "bias"):
        if layer.get(key):
            raise ValueError(
                f"The draft has biases (`{key}: true`), which are not supported: servers disagree on them."
            )
    architecture = (raw.get("architectures") or [ARCHITECTURE])[0]
    if layer.get("model_type") == "qwen3" or architecture == "Eagle3Qwen3ForCausalLM":
        raise ValueError(
            "The draft is the Qwen3 variant with q_norm and k_norm, which is not supported: SGLang skips these norms. "
            "Use a Llama-type draft; it works for any policy."
        )
    if layer.get("model_type", "llama") != "llama" or architecture not in READABLE_ARCHITECTURES:
        raise ValueError(
            f"The draft is a {architecture} of model type {layer.get('model_type')!r}; only the plain Llama block "
            f"({', '.join(READABLE_ARCHITECTURES)}) can be read."
        )
    section = raw.get("transformer_layer_config") or {}
    two = [key for key in MEANING_KEYS if None not in (raw.get(key), section.get(key)) and raw[key] != section[key]]
    if two:
        raise ValueError(
            "The draft's config.json says two things: "
            + few(
                (
                    f"`{key}` is {shown(raw[key])} but {shown(section[key])} in `transformer_layer_config`"
                    for key in two
                ),
                "; ",
            )
            + ". Keep the one the draft was trained with in both places."
        )
    refuse_unread_keys(raw)


def logit_scale_from_disk(raw: Mapping[str, Any]) -> float:
    """The factor of the logits, wherever the file says it."""
    found = (section.get("logit_scale") for section in (raw, raw.get("transformer_layer_config") or {}))
    return next((value for value in found if value is not None), 1.0)


def config_from_disk(
    raw: Mapping[str, Any], policy_config: Any = None, num_layers: int | None = None
) -> Eagle3DraftConfig:
    """
    Reads the content of a draft's `config.json`: flat (EAGLE, SpecForge, SGLang), speculators, or both.

    Absent norm flags are read as vLLM reads them: `False`, except `norm_before_residual` of a speculators file, which
    vLLM reads as `True` (the speculators library itself would say `False` and always writes the key; a warning tells).

    Args:
        raw (`Mapping[str, Any]`):
            Parsed JSON.
        policy_config ([`~transformers.PreTrainedConfig`], *optional*):
            The policy's text configuration, for keys that the file leaves out (tap layers, `target_hidden_size`, a
            `max_position_embeddings` shorter than the policy's).
        num_layers (`int`, *optional*):
            Layers that the tensors hold. They decide: some files hold the policy's number.

    Returns:
        [`Eagle3DraftConfig`]

    Raises:
        ValueError: naming the unsupported feature or the missing key.
    """
    check_sections(raw)
    refuse_foreign_config(raw)
    layer = layer_section(raw)
    absent = [key for key in REQUIRED_KEYS if layer.get(key) is None]
    if absent:
        raise ValueError(f"The draft's config.json lacks {', '.join(absent)}.")
    taps = taps_from_disk(
        raw, raw.get("target_num_hidden_layers") if policy_config is None else policy_config.num_hidden_layers
    )
    counted = layer.get("num_aux_hidden_states") or raw.get("num_aux_hidden_states")
    if counted not in (None, len(taps)):
        raise ValueError(
            f"`num_aux_hidden_states` in the draft's config.json is {shown(counted)}, but there are {len(taps)} tap "
            f"layers: {taps}. Write the tap layers the draft was trained with in `{TAP_KEY}`."
        )
    rope = rope_from_disk(layer)
    num_policy_layers = raw.get("target_num_hidden_layers")
    max_position_embeddings = layer.get("max_position_embeddings") or 2048
    if policy_config is not None:
        num_policy_layers = policy_config.num_hidden_layers
        if rope["rope_type"] in ("default", "linear", "llama3") or "original_max_position_embeddings" in rope:
            # Only a bound here, not part of the formula: old EAGLE files say 2048 whatever the policy's context is.
            # Policies without a longest context (ALiBi and the like) have no such key.
            context = getattr(policy_config, "max_position_embeddings", None) or 0
            max_position_embeddings = max(max_position_embeddings, context)
    flags = {flag: _read_flag(raw, flag) for flag in NORM_FLAGS}
    flags["fc_norm"] = flags["fc_norm"] or bool(raw.get("use_aux_norm"))
    if is_speculators(raw) and raw.get("norm_before_residual") is None:
        flags["norm_before_residual"] = True
        warnings.warn(
            "The draft's speculators config.json has no `norm_before_residual`. It is read as true, as vLLM does; the "
            "speculators library would read false. If acceptance is poor, write the key and load again.",
            stacklevel=2,
        )
    heads = layer["num_attention_heads"]
    return Eagle3DraftConfig(
        hidden_size=layer["hidden_size"],
        intermediate_size=layer["intermediate_size"],
        num_hidden_layers=num_layers or layer.get("num_hidden_layers") or 1,
        num_attention_heads=heads,
        num_key_value_heads=layer.get("num_key_value_heads") or heads,
        head_dim=layer.get("head_dim") or layer["hidden_size"] // heads,
        hidden_act=layer.get("hidden_act", "silu"),
        rms_norm_eps=layer["rms_norm_eps"],
        vocab_size=layer["vocab_size"],
        draft_vocab_size=raw.get("draft_vocab_size") or layer["vocab_size"],
        target_hidden_size=raw.get("target_hidden_size") or layer["hidden_size"],
        tap_layers=taps,
        num_policy_layers=num_policy_layers,
        max_position_embeddings=max_position_embeddings,
        rope_parameters=rope,
        **flags,
    )
