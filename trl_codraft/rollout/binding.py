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
def decoding_by(
    policy: PreTrainedModel, examine: Callable[[GenerationConfig], None], decode: Callable[..., Any]
) -> Iterator[None]:
    """
    Calls of the policy's `generate` inside show each configuration, when it has been merged, to `examine`, and decode by
    `decode(plain, input_ids, **arguments)`: `plain` is what would have run, `arguments` what it would have got, by name.
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

    def prepare(self, *args, **kwargs):
        config, model_kwargs = own._prepare_generation_config(self, *args, **kwargs)
        examine(config)
        return config, model_kwargs

    methods = {name: seat(name) for name in DECODING_METHODS} | {"_prepare_generation_config": prepare}
    bound = type(own.__name__, (own,), {"__module__": own.__module__} | methods)
    policy.__class__ = bound
    try:
        yield
    finally:
        policy.__class__ = own


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
    reason = unsupported_reason(policy, training=training)
    if reason is not None:
        return reason
    reached = []

    def examine(config: GenerationConfig) -> None:
        refuse(refused_reason(config))

    def decode(plain, input_ids, **arguments):
        reached.append(True)
        refuse(call_reason(policy, training=training, **arguments))
        return torch.cat([input_ids, input_ids[:, -1:]], dim=1)

    # On the CPU, which `generate` takes wherever the policy is.
    ids = torch.ones(1, NUM_ASKED_TOKENS, dtype=torch.long)
    try:
        with decoding_by(policy, examine, decode):
            generate(input_ids=ids, attention_mask=ids.clone(), generation_config=copy.deepcopy(generation_config))
    except CallRefused as refusal:
        return refusal.reason
    return None if reached else NOT_REACHED


def refuse(reason: str | None) -> None:
    """
    Raises if there is a reason.

    Raises:
        CallRefused: with the reason.
    """
    if reason is not None:
        raise CallRefused(reason)
