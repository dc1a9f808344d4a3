"""
How the loop gets behind `generate`: it stands where Transformers' own decoding methods stand.

`generate` merges what the call, its configuration and the model say, prepares processors and criteria, and then calls a
method of the model's class. Whatever somebody stored with the model or put around `generate` has had its say by then: what
arrives is what would have been decoded, and nothing extra is handed through wrappers that may not pass it on.
"""

import copy
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel

from .support import call_reason, refused_reason, unsupported_reason


# What `generate` chooses from. Other modes are code from the Hub, which it asks permission for.
DECODING_METHODS = ("_sample", "_beam_search", "_assisted_decoding")
NOT_REACHED = (
    "the `generate` that was called is another policy's, or has been replaced by one that does not decode by Transformers' own "
    "methods. Put the original back, or let yours call it."
)
# The prompt that `generate` is asked with.
NUM_ASKED_TOKENS = 4


class CallRefused(ValueError):
    """
    A call of `generate` that cannot be served speculatively.

    Attributes:
        reason (`str`):
            What stands in the way and what to set instead.
    """

    def __init__(self, reason: str):
        super().__init__(
            f"Speculative rollouts cannot serve this call: {reason} Or set `speculative_rollouts='false'`."
        )
        self.reason = reason


@contextmanager
def decoding_by(policy: PreTrainedModel, decode: Callable[..., Any]) -> Iterator[None]:
    """
    Calls of the policy's `generate` inside decode by `decode(plain, input_ids, **arguments)`: `plain` is what would have
    run, `arguments` what it would have got, all by name.
    """
    own = type(policy)

    def seat(name: str) -> Callable:
        method = getattr(own, name)

        @functools.wraps(method)
        def seated(self, input_ids, **arguments):
            # Forwards, and what compiled them, see the class they know.
            self.__class__ = own
            try:
                return decode(functools.partial(method, self), input_ids, **arguments)
            finally:
                self.__class__ = bound

        return seated

    bound = type(
        own.__name__, (own,), {"__module__": own.__module__} | {name: seat(name) for name in DECODING_METHODS}
    )
    policy.__class__ = bound
    try:
        yield
    finally:
        policy.__class__ = own


def merged_config(policy: PreTrainedModel, generation_config: GenerationConfig | None, **kwargs) -> GenerationConfig:
    """What `generate` makes of a configuration, further arguments and what is stored with the model, as it would itself."""
    config = GenerationConfig() if generation_config is None else generation_config
    return policy._prepare_generation_config(config, **kwargs)[0]


def reason_of_generate(
    policy: PreTrainedModel, generate: Callable, generation_config: GenerationConfig, training: bool
) -> str | None:
    """
    Why calls of a `generate` cannot be served speculatively. Asks `generate` itself: it runs until it would decode, and
    decodes nothing.

    Args:
        policy ([`~transformers.PreTrainedModel`]):
            The policy (the base model of a `PeftModel`).
        generate (`Callable`):
            What will be called: the policy's `generate`, that of the `PeftModel` around it, or what somebody has put in
            their place.
        generation_config ([`~transformers.GenerationConfig`]):
            The configuration it will be called with.
        training (`bool`):
            Whether the policy will be in training mode.

    Returns:
        `str` or `None`: what stands in the way and what to set instead, None if nothing does.
    """
    reason = unsupported_reason(policy, training=training) or refused_reason(merged_config(policy, generation_config))
    if reason is not None:
        return reason
    reasons = []

    def decode(plain, input_ids, **arguments):
        reasons.append(call_reason(policy, training=training, **arguments))
        return torch.cat([input_ids, input_ids[:, -1:]], dim=1)

    # On the CPU, which `generate` takes wherever the policy is.
    ids = torch.ones(1, NUM_ASKED_TOKENS, dtype=torch.long)
    with decoding_by(policy, decode):
        generate(input_ids=ids, attention_mask=ids.clone(), generation_config=copy.deepcopy(generation_config))
    return next((reason for reason in reasons if reason is not None), None) if reasons else NOT_REACHED
