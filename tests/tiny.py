"""Tiny models and tokenizers, built locally: no test needs the network."""

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast


CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

SIZES = {
    "vocab_size": 104,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


# What `glm4_moe` takes besides: experts that a buffer balances, after a dense layer.
BALANCED_EXPERTS = {
    "first_k_dense_replace": 1,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 16,
}


# Keys and values of the last layers are those of earlier ones, and layers read the tokens anew.
SHARED_KEYS = {
    "sliding_window": 5,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 104,
}


def tiny_policy(model_type="llama", dtype=torch.float32, seed=0, scale=None, **overrides):
    """A random causal LM in eval mode; `scale` multiplies every weight matrix (larger = peakier logits)."""
    sizes = {**SIZES, **overrides}
    if model_type in ("mixtral", "qwen3_moe"):
        sizes.setdefault("num_experts_per_tok", 2)
        sizes.setdefault("num_local_experts" if model_type == "mixtral" else "num_experts", 4)
        sizes.setdefault("moe_intermediate_size", 24)
    if model_type == "gemma4_text":
        sizes = {**SHARED_KEYS, **sizes}
    config = AutoConfig.for_model(model_type, **sizes)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_()
        if scale is not None:
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.dim() > 1:
                        parameter.mul_(scale)
    return model.eval()


def tiny_tokenizer(vocab_size=104):
    """A character-level tokenizer: pad 0, bos 1, eos 2, then printable characters, then fillers."""
    specials = ["<pad>", "<bos>", "<eos>", "<unk>", "<|user|>", "<|assistant|>", "<|system|>", "<|tool|>"]
    characters = [chr(code) for code in range(32, 127)]
    vocab = {token: index for index, token in enumerate((specials + characters)[:vocab_size])}
    for filler in range(len(vocab), vocab_size):
        vocab[f"<filler{filler}>"] = filler
    core = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    core.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        additional_special_tokens=specials[4:],
        padding_side="left",
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer
