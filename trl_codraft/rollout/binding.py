"""
Puts the loop behind `generate`, in the place of Transformers' own decoding methods.

`generate` merges the settings of the call, its configuration and the model, prepares processors and criteria, and then
calls a method of the model's class. Whatever was stored with the model or put around `generate` has been applied by
then: the method gets exactly what would have been decoded, and no extra argument has to come through wrappers that may
drop it.
"""

import copy
import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel

from .support import call_reason, refused_reason, unsupported_reason


# The methods `generate` chooses from. Other modes are code from the Hub, which it asks permission for.
DECODING_METHODS = ("_sample", "_beam_search", "_assisted_decoding")
NOT_REACHED = (
    "the `generate` that was called is another policy's, or has been replaced by one that does not decode by "
    "Transformers' own methods. Put the original back, or let yours call it."
)
# Length of the prompt with which `generate` is asked whether it can be served.
NUM_ASKED_TOKENS = 4
# Attribute of a policy meanwhile: its id, and the thread whose calls are served.
ENTERED = "_codraft_generates"


class CallRefused(ValueError):
    """
    A call of `generate` that cannot be served speculatively.

    Attributes:
        reason (`str`):
            The obstacle and what to set instead.
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
    Decodes in place of Transformers while it is entered, for one policy and in this thread.

    The policy gets a class of its own, derived from the one it has, and its old class back at the end. Other policies
    of the class, copies made meanwhile and calls from other threads decode as always.

    Args:
        policy ([`~transformers.PreTrainedModel`]):
            The policy whose `generate` will be called.
        examine (`Callable`):
            Called with each configuration when it has been merged.
        decode (`Callable`):
            Called as `decode(plain, input_ids, **arguments)`: `plain` is the method that would have run, `arguments`
            are what it would have got, by name.

    Raises:
        RuntimeError: if another thread decodes with this policy.
    """
    own, owner = type(policy), threading.get_ident()
    entered = policy.__dict__.get(ENTERED)
    # Copies made meanwhile carry the mark, but not the id.
    if entered is not None and entered[0] == id(policy) and entered[1] != owner:
        raise RuntimeError(
            f"Another thread is generating speculatively with this {own.__name__}, whose taps are recorded for one "
            "call at a time. Call `generate` from one thread, or give each thread a policy of its own."
        )

    policy.__class__ = _derived_class(own, owner, examine, decode)
    policy.__dict__[ENTERED] = (id(policy), owner)
    try:
        yield
    finally:
        policy.__class__ = own
        del policy.__dict__[ENTERED]
        if entered is not None:
            policy.__dict__[ENTERED] = entered


def _derived_class(own: type, owner: int, examine: Callable, decode: Callable) -> type:
    """The class of a policy whose calls from a thread are examined and decoded as [`decoding_by`] says."""

    @contextmanager
    def unbound(model: PreTrainedModel) -> Iterator[None]:
        model.__class__ = own
        try:
            yield
        finally:
            model.__class__ = bound

    def seat(name: str) -> Callable:
        method = getattr(own, name)

        @functools.wraps(method)
        def seated(self, input_ids, **arguments):
            if threading.get_ident() != owner:
                return method(self, input_ids, **arguments)
            # Forwards, and what compiled them, see the class they know.
            with unbound(self):
                return decode(functools.partial(method, self), input_ids, **arguments)

        return seated

    def prepare(self, *args, **kwargs):
        config, model_kwargs = own._prepare_generation_config(self, *args, **kwargs)
        if threading.get_ident() == owner:
            examine(config)
        return config, model_kwargs

    def reduce(self, protocol):
        with unbound(self):
            return own.__reduce_ex__(self, protocol)

    methods = {name: seat(name) for name in DECODING_METHODS}
    methods |= {"_prepare_generation_config": prepare, "__reduce_ex__": reduce}
    bound = type(own.__name__, (own,), {"__module__": own.__module__} | methods)
    return bound


def reason_of_generate(
    policy: PreTrainedModel, generate: Callable, generation_config: GenerationConfig, training: bool
) -> str | None:
    """
    Finds out why calls of a `generate` cannot be served speculatively, by calling it: it runs until it would decode,
    and decodes nothing.

    Args:
        policy ([`~transformers.PreTrainedModel`]):
            The policy (the base model of a `PeftModel`).
        generate (`Callable`):
            The function that will be called: the policy's `generate`, that of the `PeftModel` around it, or one that
            somebody has put in their place.
        generation_config ([`~transformers.GenerationConfig`]):
            The configuration it will be called with.
        training (`bool`):
            Whether the policy will be in training mode.

    Returns:
        `str` or `None`: the obstacle and what to set instead, None if there is none.
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
