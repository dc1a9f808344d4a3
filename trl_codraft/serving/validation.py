"""
Finds what a server would misread in a draft folder.

vLLM, SGLang and speculators load a draft with missing tensors or a wrong key without a word; the output stays right
and only acceptance drops to nothing. So each thing they do not check is checked here, on the files alone.
"""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

from ..modeling.configuration_eagle3 import check_rope, is_positive_number
from ..modeling.disk.config import (
    ARCHITECTURE,
    READABLE_ARCHITECTURES,
    check_sections,
    is_tap_list,
    layer_section,
    logit_scale_from_disk,
    server_default_tap_layers,
)
from ..modeling.disk.folder import CONFIG_NAME, WEIGHTS_NAME, read_config, read_tensors, stray_weight_files
from ..modeling.disk.foreign_keys import NORM_FLAGS, PARALLEL_DRAFTING_KEYS, TAP_KEY, unread_keys
from ..modeling.disk.tensors import (
    canonical_name,
    check_vocab_ids,
    expected_shapes,
    num_layers_of,
    refuse_policy_folder,
    shape_problems,
)
from ..modeling.naming import few, sentences, shown
from .policy_checks import FLOAT_DTYPES, NOTE, check_policy, check_policy_model


SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
    "draft_vocab_size",
    "target_hidden_size",
    "max_position_embeddings",
)
# vLLM takes these keys from `transformer_layer_config` and would otherwise find them in the defaults of a Llama model.
LAYER_KEYS = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rms_norm_eps",
    "vocab_size",
    "max_position_embeddings",
    "rope_parameters",
)
# These weights of a fresh draft are zero, and may still be after little training.
MAY_BE_ZERO = ("o_proj.weight", "down_proj.weight")


def validate_draft(path: str | os.PathLike, policy: nn.Module | PreTrainedConfig | None = None) -> list[str]:
    """
    Names everything in a draft folder that a server would refuse, misread or silently do without.

    Args:
        path (`str` or `os.PathLike`):
            Local folder.
        policy ([`~transformers.PreTrainedModel`] or [`~transformers.PreTrainedConfig`], *optional*):
            The policy the draft is for, to compare sizes, layers, RoPE and context; the model also compares a shipped
            `embed_tokens`.

    Returns:
        `list[str]`: one sentence each; empty if there is nothing to say. Sentences that begin with `"note: "` name
        limits of single servers, not defects: [`problems`] drops them.
    """
    path = Path(path)
    if not (path / CONFIG_NAME).is_file():
        return [f"{path} holds no {CONFIG_NAME}: not a draft, or its export was interrupted"]
    try:
        raw, tensors, strays = read_config(path), read_tensors(path), stray_weight_files(path)
        refuse_policy_folder(path, tensors)
        num_layers_of(canonical_name(name) for name in tensors)
        check_sections(raw)
    except ValueError as error:
        return [str(error)]
    model = policy if isinstance(policy, nn.Module) else None
    policy_config = model.config if model is not None else policy
    policy_dtype = None
    if policy_config is not None:
        policy_config = policy_config.get_text_config()
        policy_dtype = model.dtype if model is not None else policy_config.dtype
        if isinstance(policy_dtype, str):
            # A saved configuration names its dtype so.
            policy_dtype = getattr(torch, policy_dtype)
    checks = [
        _check_files(strays),
        _check_identity(raw),
        _check_sizes(raw),
        _check_features(raw),
        unread_keys(raw),
        _check_flags(raw),
        _check_rope(raw),
        _check_taps(raw, policy_config),
        _check_speculators(raw),
        _check_tensors(raw, tensors),
        _check_values(tensors),
        _check_dtypes(raw, tensors),
        _check_vocab_maps(raw, tensors),
    ]
    if policy_config is not None:
        checks.append(check_policy(raw, tensors, policy_config, policy_dtype))
    if model is not None:
        checks.append(check_policy_model(tensors, model))
    return [message for check in checks for message in check]


def problems(messages: list[str]) -> list[str]:
    """The sentences of [`validate_draft`] that are defects."""
    return [message for message in messages if not message.startswith(NOTE)]


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _check_files(strays: list[str]) -> Iterator[str]:
    """Weights that only some readers see."""
    if strays:
        yield (
            f"{few(strays)} beside {WEIGHTS_NAME}: servers load all safetensors files of a folder without an index, "
            "one over the other"
        )


def _check_identity(raw: Mapping[str, Any]) -> Iterator[str]:
    """model_type and architectures."""
    if "model_type" not in raw:
        yield "`model_type` is missing: vLLM and SGLang refuse the folder; write 'llama'"
    elif raw["model_type"] != "llama":
        yield f"`model_type` is {shown(raw['model_type'])}: servers would build another block than the plain Llama one"
    architectures = raw.get("architectures")
    if not architectures:
        yield f"`architectures` is missing: SGLang looks for {shown(ARCHITECTURE)}"
    elif architectures[0] not in READABLE_ARCHITECTURES:
        yield (
            f"`architectures` names {shown(architectures[0])}: servers would build another model than "
            f"{shown(ARCHITECTURE)}"
        )
    elif architectures[0] != ARCHITECTURE:
        yield f"{NOTE}`architectures` names {shown(architectures[0])}: SGLang knows only {shown(ARCHITECTURE)}"


def _check_sizes(raw: Mapping[str, Any]) -> Iterator[str]:
    """Sizes that must be written, and how they fit each other."""
    for key in SIZES:
        if key not in raw:
            yield f"`{key}` is missing: each server falls back to a default of its own"
        elif not _is_size(raw[key]):
            yield f"`{key}` is {shown(raw[key])}, not a positive integer"
    if "head_dim" not in raw:
        yield "`head_dim` is missing: servers take hidden_size // num_attention_heads"
    elif not _is_size(raw["head_dim"]) or raw["head_dim"] % 2:
        yield f"`head_dim` is {shown(raw['head_dim'])}, not a positive even integer"
    if not is_positive_number(raw.get("rms_norm_eps")):
        yield f"`rms_norm_eps` is {shown(raw.get('rms_norm_eps'))}, not a positive number"
    heads, groups = raw.get("num_attention_heads"), raw.get("num_key_value_heads")
    if _is_size(heads) and _is_size(groups) and heads % groups:
        yield f"`num_attention_heads` ({heads}) is not a multiple of `num_key_value_heads` ({groups})"
    hidden = raw.get("hidden_size")
    if _is_size(heads) and _is_size(hidden) and hidden % heads:
        yield (
            f"`hidden_size` ({hidden}) is not a multiple of `num_attention_heads` ({heads}): transformers' Llama "
            "refuses it"
        )
    width = raw.get("target_hidden_size")
    if _is_size(hidden) and _is_size(width) and hidden != width:
        yield (
            f"`hidden_size` ({hidden}) is not `target_hidden_size` ({width}): the draft reads the policy's embedding, "
            "which is as wide as its hidden states"
        )
    vocab, draft_vocab = raw.get("vocab_size"), raw.get("draft_vocab_size")
    if _is_size(vocab) and _is_size(draft_vocab) and draft_vocab > vocab:
        yield f"`draft_vocab_size` ({draft_vocab}) exceeds `vocab_size` ({vocab})"


def _check_features(raw: Mapping[str, Any]) -> Iterator[str]:
    """Keys that make a server build or compute something else."""
    if raw.get("tie_word_embeddings", True):
        yield (
            "`tie_word_embeddings` is not false: SGLang would use the embedding as the draft's head (absent also "
            "means true in some versions of transformers)"
        )
    for key in ("attention_bias", "mlp_bias", "bias"):
        if raw.get(key) or layer_section(raw).get(key):
            yield f"`{key}` is true: vLLM creates biases that the draft does not have and leaves them uninitialised"
    parallel = [key for key in PARALLEL_DRAFTING_KEYS if raw.get(key) not in (None, False)]
    if parallel:
        yield f"{', '.join(f'`{key}`' for key in parallel)}: marks a parallel-drafting (P-EAGLE) draft"
    if raw.get("hidden_act") != "silu":
        yield f"`hidden_act` is {shown(raw.get('hidden_act'))}: servers' Llama blocks know only 'silu'"
    scale = logit_scale_from_disk(raw)
    if scale != 1.0:
        yield f"`logit_scale` is {scale}: vLLM multiplies by it, SGLang does not; fold it into `lm_head`"


def _check_flags(raw: Mapping[str, Any]) -> Iterator[str]:
    """Norm flags and their like in `eagle_config`: explicit, compatible, and known to every server."""
    nested = raw.get("eagle_config") or {}
    if nested.get("use_aux_hidden_state") is False:
        yield "`use_aux_hidden_state` in `eagle_config` is false: servers would feed the draft another hidden state"
    for flag in NORM_FLAGS:
        if flag in nested and nested[flag] != raw.get(flag):
            yield f"`{flag}` is {shown(raw.get(flag))} at top level but {shown(nested[flag])} in `eagle_config`"
    if raw.get("use_aux_norm") and not raw.get("fc_norm"):
        yield "`use_aux_norm` is true but `fc_norm` is not: SGLang takes one for the other"
    for flag in NORM_FLAGS:
        if not isinstance(raw.get(flag), bool):
            yield f"`{flag}` is {shown(raw.get(flag, 'missing'))}: write true or false, the servers' defaults differ"
    if raw.get("norm_before_fc") and raw.get("fc_norm"):
        yield "`norm_before_fc` and `fc_norm` are both true: they exclude each other"
    if raw.get("norm_before_residual"):
        yield f"{NOTE}`norm_before_residual` is true: not SGLang, which does not implement it (0.5.23)"
    if raw.get("norm_before_fc"):
        yield f"{NOTE}`norm_before_fc` is true: not SGLang releases before it read that key (0.5.23 does)"


def _check_rope(raw: Mapping[str, Any]) -> Iterator[str]:
    """Both spellings of RoPE, saying the same."""
    theta, rope = raw.get("rope_theta"), raw.get("rope_parameters")
    if theta is None:
        yield "`rope_theta` is missing: servers built on transformers 4 take 10000"
    if not isinstance(rope, Mapping) or "rope_type" not in rope or "rope_theta" not in rope:
        yield "`rope_parameters` is missing or lacks rope_type or rope_theta: transformers 5 reads RoPE from it"
        return
    if theta is not None and theta != rope["rope_theta"]:
        yield f"`rope_theta` is {theta} but `rope_parameters` says {rope['rope_theta']}"
    try:
        check_rope(rope)
    except ValueError as error:
        yield str(error)
    scaling = raw.get("rope_scaling") or {}
    if rope["rope_type"] != "default" and scaling.get("rope_type") != rope["rope_type"]:
        yield f"`rope_scaling` does not repeat the {shown(rope['rope_type'])} scaling of `rope_parameters`"
    elif scaling.get("rope_type", "default") != rope["rope_type"]:
        yield (
            f"`rope_scaling` says {shown(scaling.get('rope_type'))} but `rope_parameters` says "
            f"{shown(rope['rope_type'])}"
        )
    else:
        for key in sorted(scaling.keys() & rope.keys()):
            if scaling[key] != rope[key]:
                yield f"`{key}` is {shown(scaling[key])} in `rope_scaling` but {shown(rope[key])} in `rope_parameters`"


def _check_taps(raw: Mapping[str, Any], policy_config: Any) -> Iterator[str]:
    """Tap ids in both numberings, and their count."""
    taps, nested = raw.get(TAP_KEY), (raw.get("eagle_config") or {}).get(TAP_KEY)
    num_layers = policy_config.num_hidden_layers if policy_config is not None else raw.get("target_num_hidden_layers")
    if not taps:
        yield f"`{TAP_KEY}` is missing: vLLM would read its default layers"
        return
    if not is_tap_list(taps):
        yield f"`{TAP_KEY}` is {shown(taps)}, not a list of integers"
        return
    if taps != sorted(set(taps)):
        yield f"`{TAP_KEY}` {shown(taps)} is not strictly ascending: vLLM sorts the ids and drops repeated ones"
    if min(taps) < 0 or (num_layers is not None and max(taps) > num_layers):
        yield f"`{TAP_KEY}` {shown(taps)} is out of range: a policy of {num_layers} layers has ids 0..{num_layers}"
    if nested is not None and nested != [tap - 1 for tap in taps]:
        yield (
            f"`eagle_config` says {shown(nested)}, `{TAP_KEY}` says {shown(taps)}: inside `eagle_config` (SGLang) "
            "every id must be one less than at top level (vLLM)"
        )
    if nested is None and num_layers is not None and taps != server_default_tap_layers(num_layers):
        yield (
            f"`eagle_config` is missing and {shown(taps)} are not the default layers: SGLang would read the default "
            "ones"
        )
    if len(taps) != 3 or "num_aux_hidden_states" in raw:
        for place, section in {"config.json": raw, "transformer_layer_config": layer_section(raw)}.items():
            if section.get("num_aux_hidden_states") != len(taps):
                found = section.get("num_aux_hidden_states")
                yield f"`num_aux_hidden_states` in {place} is {found} but there are {len(taps)} tap layers"
    if len(taps) != 3:
        yield (
            f"{NOTE}{len(taps)} tap layers: not servers that need 3, such as vLLM and SGLang releases before they "
            "read `num_aux_hidden_states` (0.32 and 0.5.23 do)"
        )
    if num_layers is not None and num_layers in taps:
        yield f"{NOTE}tap {num_layers} is the output of the last layer: not SGLang, which captures layer inputs only"


def _check_speculators(raw: Mapping[str, Any]) -> Iterator[str]:
    """The speculators sections, where a reader that knows them looks instead of the flat keys."""
    if "speculators_model_type" not in raw:
        return
    if raw["speculators_model_type"] != "eagle3":
        yield f"`speculators_model_type` is {shown(raw['speculators_model_type'])}, not 'eagle3'"
    section = raw.get("transformer_layer_config")
    if not isinstance(section, Mapping):
        yield "`transformer_layer_config` is missing: vLLM and speculators read the layer from it"
        return
    for key, value in section.items():
        if key in raw and raw[key] != value:
            yield f"`{key}` is {shown(raw[key])} at top level but {shown(value)} in `transformer_layer_config`"
    for key in LAYER_KEYS:
        if key not in section:
            yield f"`transformer_layer_config` lacks `{key}`: vLLM would take the default of a Llama model"
    if section.get("tie_word_embeddings", True):
        yield "`tie_word_embeddings` in `transformer_layer_config` is not false"
    try:
        drafted = raw["speculators_config"]["proposal_methods"][0]["speculative_tokens"]
        raw["speculators_config"]["verifier"]["name_or_path"]
    except (KeyError, IndexError, TypeError):
        yield "`speculators_config` lacks proposal_methods[0].speculative_tokens or verifier.name_or_path"
        return
    if not _is_size(drafted):
        yield f"`speculative_tokens` in `speculators_config` is {shown(drafted)}, not a positive integer"


def _check_tensors(raw: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> Iterator[str]:
    """Names and shapes."""
    prefixed = [name for name in tensors if name.startswith("model.")]
    if prefixed:
        yield f"tensor names begin with `model.` ({prefixed[0]}, ...): vLLM adds that prefix itself and refuses them"
    if any(canonical_name(name).startswith("layers.0.") and not name.startswith("layers.0.") for name in tensors):
        yield f"{NOTE}the layer is called `midlayer`: servers know it, speculators does not"
    canonical = {canonical_name(name): tensor for name, tensor in tensors.items()}
    if len(canonical) != len(tensors):
        yield "a tensor is stored twice, under its name and an older one"
    embedding = canonical.pop("embed_tokens.weight", None)
    if embedding is not None:
        yield (
            "extra tensor `embed_tokens.weight`: SGLang replaces it, vLLM keeps it even when the policy's has moved on"
        )
    if not all(_is_size(raw.get(key)) for key in (*SIZES, "head_dim")) or not isinstance(raw.get(TAP_KEY), list):
        return
    num_layers = num_layers_of(canonical)
    if num_layers and num_layers != raw["num_hidden_layers"]:
        yield (
            f"`num_hidden_layers` is {raw['num_hidden_layers']} but the tensors are of {num_layers} layer(s): servers "
            "build as many layers as the key says and leave those without tensors uninitialised"
        )
    config = SimpleNamespace(
        **{key: raw[key] for key in (*SIZES, "head_dim")},
        **{flag: bool(raw.get(flag)) for flag in NORM_FLAGS},
        tap_layers=raw[TAP_KEY],
    )
    config.num_hidden_layers = num_layers or config.num_hidden_layers
    expected = expected_shapes(config)
    for index in range(1, config.num_hidden_layers):
        name, twin = f"layers.{index}.hidden_norm.weight", canonical.get(f"layers.{index}.input_layernorm.weight")
        expected[name] = (config.hidden_size,)
        if name in canonical and twin is not None and not torch.equal(canonical[name], twin):
            yield f"tensor `{name}` (SGLang) differs from `layers.{index}.input_layernorm.weight` (vLLM)"
    yield from shape_problems(expected, canonical)


def _check_values(tensors: Mapping[str, torch.Tensor]) -> Iterator[str]:
    """NaN and infinity, and weights that were never filled."""
    floats = {name: tensor for name, tensor in tensors.items() if tensor.dtype in FLOAT_DTYPES}
    broken = [name for name, tensor in floats.items() if not tensor.isfinite().all()]
    zeros = [name for name, tensor in floats.items() if not tensor.any() and not name.endswith(MAY_BE_ZERO)]
    yield from sentences(broken, "tensor `{}` holds NaN or infinite values", "tensors with NaN or infinite values")
    yield from sentences(zeros, "tensor `{}` holds nothing but zeros", "tensors of nothing but zeros")


def _check_dtypes(raw: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> Iterator[str]:
    """One floating-point dtype, the declared one; integers and booleans for the maps."""
    maps = {"d2t": torch.int64, "t2d": torch.bool}
    floats = {}
    for name, tensor in tensors.items():
        if name in maps and tensor.dtype != maps[name]:
            yield f"tensor `{name}` has dtype {tensor.dtype}, expected {maps[name]}"
        elif name not in maps:
            floats.setdefault(tensor.dtype, name)
    for dtype in [dtype for dtype in floats if dtype not in FLOAT_DTYPES]:
        yield f"tensor `{floats[dtype]}` has dtype {dtype}; servers expect one of float32, bfloat16, float16"
    if len(floats) > 1:
        found = ", ".join(f"{dtype} (`{name}`)" for dtype, name in floats.items())
        yield f"the tensors have several dtypes: {found}"
    for key in ("dtype", "torch_dtype"):
        if len(floats) == 1 and raw.get(key) is not None and f"torch.{raw[key]}" != str(next(iter(floats))):
            yield f"`{key}` says {raw[key]} but the tensors are {next(iter(floats))}"


def _check_vocab_maps(raw: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> Iterator[str]:
    """d2t within range, ascending, without repetition, and t2d saying the same."""
    d2t, t2d, vocab_size = tensors.get("d2t"), tensors.get("t2d"), raw.get("vocab_size")
    if d2t is None or d2t.dim() != 1 or d2t.is_floating_point() or not _is_size(vocab_size):
        return
    try:
        check_vocab_ids(d2t, vocab_size)
    except ValueError as error:
        yield str(error)
        return
    ids = torch.arange(len(d2t)) + d2t.long()
    if not torch.equal(ids, ids.sort().values):
        yield "`d2t` is not ascending: trainers that read only `t2d` would pair the head's rows with other tokens"
    if t2d is not None and not torch.equal(t2d.bool().nonzero().flatten(), ids.sort().values):
        yield "`t2d` does not select the tokens that `d2t` names"
