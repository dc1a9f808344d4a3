"""Every kind of language model that Transformers has, as small as it gets: `tiny_model(model_type, class_name)`."""

import torch
import transformers
from tiny import SIZES
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
)


LAYERS, HEADS, HEAD_SIZE, LARGEST = 4, 4, 8, 30_000_000
# What is set wherever a configuration has it and more of it.
SMALL = {
    **SIZES,
    "head_dim": HEAD_SIZE,
    "d_model": 32,
    "n_embd": 32,
    "embed_dim": 32,
    "word_embed_proj_dim": 32,
    "embedding_size": 32,
    "out_hidden_size": 32,
    "projection_dim": 32,
    "lru_width": 32,
    "d_head": HEAD_SIZE,
    "d_kv": HEAD_SIZE,
    "d_ff": 48,
    "ffn_dim": 48,
    "n_inner": 48,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": HEAD_SIZE,
    "qk_nope_head_dim": HEAD_SIZE,
    "qk_head_dim": 2 * HEAD_SIZE,
    "v_head_dim": HEAD_SIZE,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": HEAD_SIZE,
    "linear_value_head_dim": HEAD_SIZE,
    "mamba_n_heads": HEADS * 2,
    "mamba_d_head": HEAD_SIZE,
    "index_head_dim": 2 * HEAD_SIZE,
    "state_size": 8,
    "image_size": 16,
    "patch_size": 8,
    "sliding_window": 8,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": SIZES["vocab_size"],
    "attn_layer_offset": 1,
    "attn_layer_period": 2,
    "expert_layer_offset": 1,
}
# What some families need besides, because their sizes hang together.
BY_FAMILY = {
    "mamba2": {"num_heads": 8, "head_dim": HEAD_SIZE, "n_groups": 1},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "xlnet": {"n_head": HEADS, "d_head": HEAD_SIZE, "d_model": HEADS * HEAD_SIZE},
    "jamba": {"attn_layer_offset": 1, "attn_layer_period": 2},
}
NAMES_OF_LAYERS = ("layers", "layer", "depth", "blocks", "depths")


def language_models():
    """Pairs of model type and class name: causal, with images, sequence to sequence."""
    mappings = (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
        MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    )
    pairs = [
        (model_type, name)
        for mapping in mappings
        for model_type, names in mapping.items()
        for name in ([names] if isinstance(names, str) else names[:1])
    ]
    return sorted(set(pairs))


def tiny_model(model_type, class_name):
    """
    A model of random weights in float32.

    Raises:
        Exception: whatever Transformers raises for a configuration that our general rules do not make small.
    """
    values = smaller(CONFIG_MAPPING[model_type]().to_dict())
    config = CONFIG_MAPPING[model_type](**{**values, **BY_FAMILY.get(model_type, {})})
    for part in (config, config.get_text_config()):
        part.pad_token_id, part.bos_token_id, part.eos_token_id = (
            SIZES[f"{n}_token_id"] for n in ("pad", "bos", "eos")
        )
    model_class = getattr(transformers, class_name)
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in model_class._from_config(config).parameters())
    if size > LARGEST:
        raise ValueError(f"{model_type} has {size} parameters")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return model_class._from_config(config, dtype=torch.float32).eval()


def smaller(values):
    """The values of a configuration, sizes and counts small, with what hangs on the number of layers cut to it."""
    layers = next((values[n] for n in ("num_hidden_layers", "n_layer", "num_layers") if values.get(n)), None)
    small = {}
    for name, value in values.items():
        if name in ("architectures", "transformers_version", "dtype", "id2label", "label2id"):
            continue
        if isinstance(value, dict):
            small[name] = _smaller_rope(value) if "rope" in name else _smaller_part(name, value)
        elif isinstance(value, list) and layers and len(value) == layers and layers > LAYERS:
            # The last layer is of the last kind: with hybrid policies, one of attention.
            small[name] = [*value[: LAYERS - 1], value[-1]]
        elif isinstance(value, int) and not isinstance(value, bool):
            small[name] = _smaller_number(name, value)
        else:
            small[name] = value
    if small.get("kv_lora_rank") is not None and "num_key_value_heads" in small:
        small["num_key_value_heads"] = small["num_attention_heads"]
    return small


def _smaller_part(name, value):
    if name == "per_layer_config":
        return {}
    return smaller(value) if name.endswith("_config") or name in ("encoder", "decoder", "generator") else value


def _smaller_rope(value):
    value = {name: _smaller_rope(part) if isinstance(part, dict) else part for name, part in value.items()}
    if "mrope_section" in value:
        value["mrope_section"] = [2, 1, 1]
    if value.get("rope_type") and value.get("rope_theta", 1) is None:
        value["rope_theta"] = 10000.0
    return value


def _smaller_number(name, value):
    words = name.split("_")
    if name in SMALL:
        return min(value, SMALL[name])
    if name.endswith(("_token_id", "_token_index", "_index", "_id")):
        return value if value < SIZES["vocab_size"] else 100
    if "vocab" in words:
        return min(value, SIZES["vocab_size"])
    if any(word in NAMES_OF_LAYERS for word in words):
        return min(value, LAYERS)
    if any(word in ("experts", "heads", "head") for word in words):
        return min(value, HEADS)
    if any(word in ("size", "dim", "width", "rank", "hidden", "channels", "embd", "inner", "d") for word in words):
        return min(value, 32)
    if any(word in ("position", "positions", "length", "max") for word in words):
        return min(value, 256)
    return value
