"""Draft checkpoints written by hand, as other projects write them: the oracle for our reader and validator."""

import json

import torch
from safetensors.torch import save_file


H, MLP, V, HEADS, GROUPS, D = 32, 48, 104, 4, 2, 8


def flat_config(**changes):
    """A flat EAGLE-3 config.json for the tiny 8-layer policy; `None` removes a key."""
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": H,
        "intermediate_size": MLP,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": GROUPS,
        "head_dim": D,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "vocab_size": V,
        "draft_vocab_size": V,
        "target_hidden_size": H,
        "max_position_embeddings": 256,
        "rope_theta": 10000.0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": "float32",
        "eagle_aux_hidden_state_layer_ids": [2, 4, 5],
        "norm_before_residual": False,
        "norm_before_fc": False,
        "fc_norm": False,
        "norm_output": False,
    }
    config |= changes
    return {key: value for key, value in config.items() if value is not None}


def speculators_config(**changes):
    """What speculators itself writes: no flat layer keys, the layer as a nested config."""
    config = {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": V,
        "target_hidden_size": None,
        "norm_before_residual": False,
        "norm_before_fc": False,
        "fc_norm": False,
        "norm_output": False,
        "eagle_aux_hidden_state_layer_ids": [2, 4, 5],
        "transformer_layer_config": {
            "model_type": "llama",
            "hidden_size": H,
            "intermediate_size": MLP,
            "num_hidden_layers": 1,
            "num_attention_heads": HEADS,
            "num_key_value_heads": GROUPS,
            "head_dim": D,
            "vocab_size": V,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "verifier": {"name_or_path": "policy", "architectures": ["LlamaForCausalLM"]},
        },
        "tie_word_embeddings": False,
    }
    config |= changes
    return {key: value for key, value in config.items() if value is not None}


def flat_tensors(layer="midlayer", draft_vocab=V, prefix="", num_taps=3):
    """Random tensors under the names of the flat format."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape):
        return torch.randn(*shape, generator=generator) * 0.1

    tensors = {
        "fc.weight": random(H, num_taps * H),
        f"{layer}.hidden_norm.weight": random(H),
        f"{layer}.input_layernorm.weight": random(H),
        f"{layer}.post_attention_layernorm.weight": random(H),
        f"{layer}.self_attn.q_proj.weight": random(HEADS * D, 2 * H),
        f"{layer}.self_attn.k_proj.weight": random(GROUPS * D, 2 * H),
        f"{layer}.self_attn.v_proj.weight": random(GROUPS * D, 2 * H),
        f"{layer}.self_attn.o_proj.weight": random(H, HEADS * D),
        f"{layer}.mlp.gate_proj.weight": random(MLP, H),
        f"{layer}.mlp.up_proj.weight": random(MLP, H),
        f"{layer}.mlp.down_proj.weight": random(H, MLP),
        "norm.weight": random(H),
        "lm_head.weight": random(draft_vocab, H),
    }
    if draft_vocab < V:
        ids = torch.arange(draft_vocab) * 2 + 1
        tensors["d2t"] = ids - torch.arange(draft_vocab)
        tensors["t2d"] = torch.zeros(V, dtype=torch.bool).index_fill(0, ids, True)
    return {prefix + name: tensor for name, tensor in tensors.items()}


def write(folder, config, tensors):
    """Writes a folder; returns it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder
