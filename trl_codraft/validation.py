"""
What a server would misread in a draft folder.

vLLM, SGLang and speculators load a draft with missing tensors or a wrong key without a word; the output stays right and
only acceptance drops to nothing. So each thing they do not check is checked here, on the files alone.
"""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedConfig

from .modeling.checkpoint import canonical_name, check_embedding, check_vocab_ids, expected_shapes, shape_problems
from .modeling.disk_config import (
    ARCHITECTURE,
    NORM_FLAGS,
    PARALLEL_DRAFTING_KEYS,
    READABLE_ARCHITECTURES,
    TAP_KEY,
    check_sections,
    layer_section,
    server_default_tap_layers,
)
from .modeling.draft_folder import CONFIG_NAME, read_config, read_tensors
from .modeling.taps import is_elsewhere


NOTE = "note: "
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
FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


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
        raw, tensors = read_config(path), read_tensors(path)
        check_sections(raw)
    except ValueError as error:
        return [str(error)]
    model = policy if isinstance(policy, nn.Module) else None
    policy_config = model.config if model is not None else policy
    policy_dtype = None
    if policy_config is not None:
        policy_config = policy_config.get_text_config()
        policy_dtype = model.dtype if model is not None else policy_config.dtype
    checks = [
        _check_identity(raw),
        _check_sizes(raw),
        _check_features(raw),
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
        checks.append(_check_policy(raw, tensors, policy_config, policy_dtype))
    if model is not None:
        checks.append(_check_policy_model(tensors, model))
    return [message for check in checks for message in check]


def problems(messages: list[str]) -> list[str]:
    """The sentences of [`validate_draft`] that are defects."""
    return [message for message in messages if not message.startswith(NOTE)]


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _check_identity(raw: Mapping[str, Any]) -> Iterator[str]:
    """model_type and architectures."""
    if "model_type" not in raw:
        yield "`model_type` is missing: vLLM and SGLang refuse the folder; write 'llama'"
    elif raw["model_type"] != "llama":
        yield f"`model_type` is {raw['model_type']!r}: servers would build another block than the plain Llama one"
    architectures = raw.get("architectures")
    if not architectures:
        yield f"`architectures` is missing: SGLang looks for {ARCHITECTURE!r}"
    elif architectures[0] not in READABLE_ARCHITECTURES:
        yield f"`architectures` names {architectures[0]!r}: servers would build another model than {ARCHITECTURE!r}"
    elif architectures[0] != ARCHITECTURE:
        yield f"{NOTE}`architectures` names {architectures[0]!r}: SGLang knows only {ARCHITECTURE!r}"


def _check_sizes(raw: Mapping[str, Any]) -> Iterator[str]:
    """Sizes that must be written, and how they fit each other."""
    for key in SIZES:
        if key not in raw:
            yield f"`{key}` is missing: each server falls back to a default of its own"
        elif not _is_size(raw[key]):
            yield f"`{key}` is {raw[key]!r}, not a positive integer"
    if "head_dim" not in raw:
        yield "`head_dim` is missing: servers take hidden_size // num_attention_heads"
    elif not _is_size(raw["head_dim"]) or raw["head_dim"] % 2:
        yield f"`head_dim` is {raw['head_dim']!r}, not a positive even integer"
    if not isinstance(raw.get("rms_norm_eps"), float):
        yield f"`rms_norm_eps` is {raw.get('rms_norm_eps')!r}, not a number"
    heads, groups = raw.get("num_attention_heads"), raw.get("num_key_value_heads")
    if _is_size(heads) and _is_size(groups) and heads % groups:
        yield f"`num_attention_heads` ({heads}) is not a multiple of `num_key_value_heads` ({groups})"
    hidden = raw.get("hidden_size")
    if _is_size(heads) and _is_size(hidden) and hidden % heads:
        yield f"`hidden_size` ({hidden}) is not a multiple of `num_attention_heads` ({heads}): transformers' Llama refuses it"
    vocab, draft_vocab = raw.get("vocab_size"), raw.get("draft_vocab_size")
    if _is_size(vocab) and _is_size(draft_vocab) and draft_vocab > vocab:
        yield f"`draft_vocab_size` ({draft_vocab}) exceeds `vocab_size` ({vocab})"


def _check_features(raw: Mapping[str, Any]) -> Iterator[str]:
    """Keys that make a server build or compute something else."""
    if raw.get("tie_word_embeddings", True):
        yield (
            "`tie_word_embeddings` is not false: SGLang would use the embedding as the draft's head (absent also means "
            "true in some versions of transformers)"
        )
    for key in ("attention_bias", "mlp_bias", "bias"):
        if raw.get(key):
            yield f"`{key}` is true: vLLM creates biases that the draft does not have and leaves them uninitialised"
    parallel = [key for key in PARALLEL_DRAFTING_KEYS if raw.get(key) not in (None, False)]
    if parallel:
        yield f"{', '.join(f'`{key}`' for key in parallel)}: marks a parallel-drafting (P-EAGLE) draft"
    if raw.get("hidden_act") != "silu":
        yield f"`hidden_act` is {raw.get('hidden_act')!r}: servers' Llama blocks know only 'silu'"
    if raw.get("logit_scale", 1.0) != 1.0:
        yield f"`logit_scale` is {raw['logit_scale']}: vLLM multiplies by it, SGLang does not; fold it into `lm_head`"
    if raw.get("quantization_config"):
        yield "`quantization_config` is set: the tensors are not quantised"


def _check_flags(raw: Mapping[str, Any]) -> Iterator[str]:
    """Norm flags: explicit, compatible, and known to every server."""
    for flag in NORM_FLAGS:
        if not isinstance(raw.get(flag), bool):
            yield f"`{flag}` is {raw.get(flag, 'missing')!r}: write true or false, the servers' defaults differ"
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
    scaling = raw.get("rope_scaling") or {}
    if rope["rope_type"] != "default" and scaling.get("rope_type") != rope["rope_type"]:
        yield f"`rope_scaling` does not repeat the {rope['rope_type']!r} scaling of `rope_parameters`"
    if rope["rope_type"] == "default" and scaling.get("rope_type", "default") != "default":
        yield f"`rope_scaling` says {scaling['rope_type']!r} but `rope_parameters` says 'default'"
    partial = raw.get("partial_rotary_factor", rope.get("partial_rotary_factor", 1.0))
    if partial != 1.0:
        yield f"`partial_rotary_factor` is {partial}: the draft rotates whole heads"


def _check_taps(raw: Mapping[str, Any], policy_config: Any) -> Iterator[str]:
    """Tap ids in both numberings, and their count."""
    taps, nested = raw.get(TAP_KEY), (raw.get("eagle_config") or {}).get(TAP_KEY)
    num_layers = policy_config.num_hidden_layers if policy_config is not None else raw.get("target_num_hidden_layers")
    if not taps:
        yield f"`{TAP_KEY}` is missing: vLLM would read its default layers"
        return
    if not isinstance(taps, list) or not all(isinstance(tap, int) for tap in taps):
        yield f"`{TAP_KEY}` is {taps!r}, not a list of integers"
        return
    if taps != sorted(set(taps)):
        yield f"`{TAP_KEY}` {taps} is not strictly ascending: vLLM sorts the ids and drops repeated ones"
    if min(taps) < 0 or (num_layers is not None and max(taps) > num_layers):
        yield f"`{TAP_KEY}` {taps} is out of range: a policy of {num_layers} layers has ids 0..{num_layers}"
    if nested is not None and nested != [tap - 1 for tap in taps]:
        yield (
            f"`eagle_config` says {nested}, `{TAP_KEY}` says {taps}: inside `eagle_config` (SGLang) every id must be "
            "one less than at top level (vLLM)"
        )
    if nested is None and num_layers is not None and taps != server_default_tap_layers(num_layers):
        yield f"`eagle_config` is missing and {taps} are not the default layers: SGLang would read the default ones"
    if len(taps) != 3 or "num_aux_hidden_states" in raw:
        for place, section in {"config.json": raw, "transformer_layer_config": layer_section(raw)}.items():
            if section.get("num_aux_hidden_states") != len(taps):
                found = section.get("num_aux_hidden_states")
                yield f"`num_aux_hidden_states` in {place} is {found} but there are {len(taps)} tap layers"
    if len(taps) != 3:
        yield (
            f"{NOTE}{len(taps)} tap layers: not servers that need 3, such as vLLM and SGLang releases before they read "
            "`num_aux_hidden_states` (0.32 and 0.5.23 do)"
        )
    if num_layers is not None and num_layers in taps:
        yield f"{NOTE}tap {num_layers} is the output of the last layer: not SGLang, which captures layer inputs only"


def _check_speculators(raw: Mapping[str, Any]) -> Iterator[str]:
    """The speculators sections, where a reader that knows them looks instead of the flat keys."""
    if "speculators_model_type" not in raw:
        return
    if raw["speculators_model_type"] != "eagle3":
        yield f"`speculators_model_type` is {raw['speculators_model_type']!r}, not 'eagle3'"
    section = raw.get("transformer_layer_config")
    if not isinstance(section, Mapping):
        yield "`transformer_layer_config` is missing: vLLM and speculators read the layer from it"
        return
    for key, value in section.items():
        if key in raw and raw[key] != value:
            yield f"`{key}` is {raw[key]!r} at top level but {value!r} in `transformer_layer_config`"
    for key in ("hidden_size", "head_dim", "rope_parameters", "vocab_size", "num_hidden_layers"):
        if key not in section:
            yield f"`transformer_layer_config` lacks `{key}`: vLLM would take the default of a Llama model"
    if section.get("tie_word_embeddings", True):
        yield "`tie_word_embeddings` in `transformer_layer_config` is not false"
    try:
        raw["speculators_config"]["proposal_methods"][0]["speculative_tokens"]
        raw["speculators_config"]["verifier"]["name_or_path"]
    except (KeyError, IndexError, TypeError):
        yield "`speculators_config` lacks proposal_methods[0].speculative_tokens or verifier.name_or_path"


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
        yield "extra tensor `embed_tokens.weight`: SGLang replaces it, vLLM keeps it even when the policy's has moved on"
    if not all(_is_size(raw.get(key)) for key in (*SIZES, "head_dim")) or not isinstance(raw.get(TAP_KEY), list):
        return
    config = SimpleNamespace(
        **{key: raw[key] for key in (*SIZES, "head_dim")},
        **{flag: bool(raw.get(flag)) for flag in NORM_FLAGS},
        tap_layers=raw[TAP_KEY],
    )
    expected = expected_shapes(config)
    for index in range(1, config.num_hidden_layers):
        name, twin = f"layers.{index}.hidden_norm.weight", canonical.get(f"layers.{index}.input_layernorm.weight")
        expected[name] = (config.hidden_size,)
        if name in canonical and twin is not None and not torch.equal(canonical[name], twin):
            yield f"tensor `{name}` (SGLang) differs from `layers.{index}.input_layernorm.weight` (vLLM)"
    yield from shape_problems(expected, canonical)


def _check_values(tensors: Mapping[str, torch.Tensor]) -> Iterator[str]:
    """NaN and infinity."""
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not tensor.isfinite().all():
            yield f"tensor `{name}` holds NaN or infinite values"


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
    declared = raw.get("dtype", raw.get("torch_dtype"))
    if len(floats) == 1 and declared is not None and f"torch.{declared}" != str(next(iter(floats))):
        yield f"`dtype` says {declared} but the tensors are {next(iter(floats))}"


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


def _check_policy(
    raw: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], policy: Any, policy_dtype: torch.dtype | None
) -> Iterator[str]:
    """Sizes, context, RoPE and dtype of the policy."""
    pairs = {"hidden_size": "hidden_size", "target_hidden_size": "hidden_size", "vocab_size": "vocab_size"}
    for key, policy_key in pairs.items():
        if key in raw and raw[key] != getattr(policy, policy_key):
            yield f"`{key}` is {raw[key]} but the policy's {policy_key} is {getattr(policy, policy_key)}"
    if raw.get("target_num_hidden_layers", policy.num_hidden_layers) != policy.num_hidden_layers:
        yield (
            f"the draft was made for a policy of {raw['target_num_hidden_layers']} layers, this one has "
            f"{policy.num_hidden_layers}"
        )
    # Policies without a longest context (ALiBi and the like) have no such key.
    context = getattr(policy, "max_position_embeddings", None)
    if context is not None and (raw.get("max_position_embeddings") or context) < context:
        yield (
            f"`max_position_embeddings` is {raw['max_position_embeddings']}, the policy's {context}: servers read RoPE "
            "tables out of bounds, or acceptance collapses, beyond it"
        )
    rope, own = getattr(policy, "rope_parameters", None) or {}, raw.get("rope_parameters") or {}
    # Policies with one set per layer type have no set to compare with.
    for key in sorted({**rope, **own}) if "rope_type" in rope and own else ():
        if own.get(key) != rope.get(key):
            name = key if key.startswith("rope_") else f"rope_parameters.{key}"
            yield (
                f"{NOTE}`{name}` is {own.get(key)!r}, the policy's {rope.get(key)!r}: right only if the draft was trained so"
            )
    dtype = next((tensor.dtype for name, tensor in tensors.items() if canonical_name(name) == "fc.weight"), None)
    if policy_dtype is not None and dtype is not None and policy_dtype != dtype:
        yield f"{NOTE}the tensors are {dtype}, the policy is {policy_dtype}: servers run the draft in the policy's"


def _check_policy_model(tensors: Mapping[str, torch.Tensor], policy: nn.Module) -> Iterator[str]:
    """A shipped embedding, and the head, against the policy's, as far as this rank has them of one in stages."""
    embedding = next((tensors[name] for name in tensors if canonical_name(name) == "embed_tokens.weight"), None)
    if embedding is not None:
        try:
            check_embedding(embedding, policy)
        except ValueError as error:
            yield str(error)
    if is_elsewhere(policy.get_output_embeddings()):
        return
    head, own = tensors.get("lm_head.weight"), policy.get_output_embeddings().weight
    if head is None or head.shape != own.shape or isinstance(own, DTensor):
        return
    # A few rows tell nearly always, without a copy of the whole head.
    if all(torch.equal(head[:rows], own[:rows].detach().to("cpu", head.dtype)) for rows in (4, len(head))):
        yield (
            f"{NOTE}`lm_head` equals the policy's: vLLM makes the two one tensor, which is fine to serve, but an update of "
            "either in the running server changes both"
        )
