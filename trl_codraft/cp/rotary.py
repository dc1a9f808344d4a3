"""
Rotary embeddings that follow the length of a batch (`dynamic`, `longrope`). The whole microbatch with its padding
decides the length, on a shard and on every stage of a pipeline, as in a forward without parallelism.

Shapes: `T` rows of this rank.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import nn

from ..modeling.policy import decoder_of, follows_length, rope_types


def rotary_by_length(policy: nn.Module) -> list[nn.Module]:
    """
    The modules of a policy whose frequencies depend on the length of the batch.

    Raises:
        ValueError: if a layer has one of its own: gradient checkpointing would compute it again, later.
    """
    inside = [module for module in decoder_of(policy).layers.modules() if follows_length(module)]
    if inside:
        raise ValueError(
            f"Layers of {type(policy).__name__} have rotary embeddings of type {sorted(rope_types(inside[0]))} of "
            "their own, which neither shards nor stages can follow. Set `context_parallel_size=1` and "
            "`pipeline_parallel_size=1`."
        )
    return [module for module in policy.modules() if follows_length(module)]


@contextmanager
def decided_by_length(modules: Sequence[nn.Module], length: int) -> Iterator[None]:
    """
    Modules called inside compute rotary embeddings as for a batch of `length` columns, whatever came before;
    afterwards they are as they were.

    Args:
        modules (`Sequence[nn.Module]`):
            The modules that [`rotary_by_length`] found.
        length (`int`):
            Columns of the microbatch, padding included.
    """
    with ExitStack() as stack:
        for module in modules:
            stack.enter_context(_as_for(module, length))
        yield


@contextmanager
def _as_for(module: nn.Module, length: int) -> Iterator[None]:
    """Feeds the module one more position, the last of the microbatch, and drops its embedding from the output."""

    def lengthen(_, args, kwargs):
        if "position_ids" in kwargs:
            return args, {**kwargs, "position_ids": _with_last(kwargs["position_ids"], length)}
        hidden, position_ids, *rest = args
        return (hidden, _with_last(position_ids, length), *rest), kwargs

    def shorten(_, args, output):
        return tuple(part[:, :-1] for part in output) if isinstance(output, tuple) else output[:, :-1]

    with _fresh_state(module):
        handles = [
            module.register_forward_pre_hook(lengthen, with_kwargs=True),
            module.register_forward_hook(shorten),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def _with_last(position_ids: torch.Tensor, length: int) -> torch.Tensor:
    last = position_ids.new_full((*position_ids.shape[:-1], 1), length - 1)
    return torch.cat([position_ids, last], dim=-1)


@contextmanager
def _fresh_state(module: nn.Module) -> Iterator[None]:
    """`dynamic` remembers the longest batch so far; inside it has seen none, outside it is as it was."""
    cached = _longest_seen(module)
    frequencies = {name: value for name, value in module._buffers.items() if name.endswith("inv_freq")}
    for name in cached:
        setattr(module, name, module.original_max_seq_len)
    for name in frequencies:
        prefix = name.removesuffix("inv_freq").removesuffix("original_")
        module._buffers[name] = frequencies[f"{prefix}original_inv_freq"].clone()
    try:
        yield
    finally:
        for name in _longest_seen(module).keys() - cached.keys():
            delattr(module, name)
        vars(module).update(cached)
        module._buffers.update(frequencies)


def _longest_seen(module: nn.Module) -> dict[str, object]:
    return {name: value for name, value in vars(module).items() if name.endswith("max_seq_len_cached")}
