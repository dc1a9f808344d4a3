"""Facts about a policy."""

import copy
from typing import Any

import torch
from torch import nn


# Sizes of policies that are made to see what their class computes.
SMALL_VOCABULARY, SMALL_WINDOW = 64, 4


def two_layer_copy(policy: nn.Module) -> nn.Module:
    """
    A policy of the same class, device and dtype with two layers, a small vocabulary and weights of its own: for tests
    of what the class computes.

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
