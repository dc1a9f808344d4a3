"""
Facts about a policy: which module it is, its name, decoder, layer types, rotary embeddings and dropout, the modules
that another stage of a pipeline owns, and a small copy for tests of its class.
"""

import copy
from typing import Any

import torch
from accelerate.utils import is_compiled_module, is_peft_model
from torch import nn
from transformers import PreTrainedModel


# Layers whose attention is a causal mask, perhaps with a window, and whose cache holds keys and values.
LAYER_TYPES = ("full_attention", "sliding_attention")
# Sizes of small policies for tests of a class.
SMALL_VOCABULARY, SMALL_WINDOW = 64, 4


def base_policy(model: nn.Module) -> nn.Module:
    """The causal language model itself, with PEFT adapters injected if there are any, whatever compiles it."""
    if is_compiled_module(model):
        model = model._orig_mod
    return model.get_base_model() if is_peft_model(model) else model


def name_of(policy: nn.Module) -> str:
    """A policy's class and model type, as errors name them."""
    return f"{type(policy).__name__} (model type `{policy.config.model_type}`)"


def decoder_of(policy: nn.Module) -> nn.Module:
    """
    The decoder stack of a causal language model: the module that owns `.layers` and returns `last_hidden_state`.

    Args:
        policy ([`~transformers.PreTrainedModel`]):
            A causal language model, possibly with PEFT adapters injected (pass the base model, not the `PeftModel`).

    Returns:
        `nn.Module`: the decoder.

    Raises:
        ValueError: if the model has no decoder with a `ModuleList` called `layers`.
    """
    decoder = policy.get_decoder() if hasattr(policy, "get_decoder") else None
    if policy.config.is_encoder_decoder or not isinstance(getattr(decoder, "layers", None), nn.ModuleList):
        raise ValueError(
            f"{name_of(policy)} has no decoder with a list of `layers` whose hidden states a draft could read "
            "(encoder-decoder models and custom stacks are not supported). Set `use_draft=False` to train it without "
            "a draft."
        )
    return decoder


def other_layer_types(config: Any) -> list[str]:
    """
    Types of layers that are neither full nor sliding attention, sorted: linear attention, state-space layers, chunks.

    Args:
        config ([`~transformers.PreTrainedConfig`]):
            Text configuration of a policy. A class that does not declare `layer_types` has full attention only.
    """
    return sorted(set(getattr(config, "layer_types", None) or ()) - set(LAYER_TYPES))


class PassThrough(nn.Module):
    """Stands in a policy where another stage of a pipeline owns a module."""

    def forward(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return hidden


def is_elsewhere(module: nn.Module) -> bool:
    """Whether another stage of a pipeline owns a module, perhaps one that PEFT has wrapped (`modules_to_save`)."""
    return any(isinstance(part, PassThrough) for part in module.modules())


def rope_types(module: nn.Module) -> set[str]:
    """Types of rotary embedding that a module computes; empty for other modules."""
    declared = vars(module).get("rope_type")
    return set(declared.values()) if isinstance(declared, dict) else {declared} - {None}


def follows_length(module: nn.Module) -> bool:
    """Whether the frequencies of a module depend on the length of the batch."""
    return any("dynamic" in kind or kind == "longrope" for kind in rope_types(module))


def dropout_reason(policy: PreTrainedModel, training: bool) -> str | None:
    """Names the dropout that makes forwards random in training, and the setting to change; `None` without one."""
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


def two_layer_copy(policy: nn.Module) -> nn.Module:
    """
    A policy of the same class, device and dtype with two layers, a small vocabulary and weights of its own: for tests
    of the class.

    Args:
        policy ([`~transformers.PreTrainedModel`]):
            The policy, or a stage of it.
    """
    device = policy.device
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(0)
        return type(policy)._from_config(two_layer_config(policy.config), dtype=policy.dtype).to(device)


def two_layer_config(config: Any) -> Any:
    """The config of a two-layer model of the same kind: two different kinds of layers if it has several."""
    config = copy.deepcopy(config)
    if getattr(config, "layer_types", None):
        kinds = list(dict.fromkeys(config.layer_types))
        config.layer_types = [kinds[0], kinds[-1]]
    config.num_hidden_layers = 2
    config.vocab_size = SMALL_VOCABULARY
    config.pad_token_id, config.bos_token_id, config.eos_token_id = 0, 1, 2
    if getattr(config, "sliding_window", None):
        config.sliding_window = SMALL_WINDOW
    return config
