"""
The trunk of a sharded pack gathered once, for several passes: the blocks that a ring would bring again in every pass.

Shapes: `T` rows of this rank, `Hkv` key-value heads, `D` / `Dv` head dims of keys and values.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..modeling.attention_kernels import AttentionKernel
from ..modeling.kernel_call import Gradients
from .layout import ContextLayout
from .ring import RingTrunk, TrunkShape, Visits, add_home, make_ring, travelling_block


@dataclass
class TrunkStore:
    """
    What [`GatheredTrunk`] keeps from pass to pass.

    Attributes:
        k, v (`torch.Tensor`): this rank's keys and values, detached.
        blocks (`list[tuple[int, torch.Tensor]]`): source rank and flat block, in the order in which a ring visits.
        grads (`list[torch.Tensor]`, *optional*): gradients of the blocks so far, then of `k` and `v`; accumulation
            dtype.
    """

    k: Tensor
    v: Tensor
    blocks: list[tuple[int, Tensor]]
    grads: list[Tensor] | None = None


class GatheredTrunk(RingTrunk):
    """
    [`RingTrunk`] over blocks that are already there. Gradients of the trunk add up in the store and go home once, when
    the backward reaches the gathering.

    Args:
        layout, kernel, num_pass, scale:
            See [`RingTrunk`].
        store ([`TrunkStore`]):
            The blocks.
    """

    def __init__(self, layout: ContextLayout, kernel: AttentionKernel, num_pass: int, scale: float, store: TrunkStore):
        super().__init__(layout, kernel, num_pass, scale)
        self.store = store

    def _visits(self, k: Tensor, v: Tensor) -> Visits:
        return iter(self.store.blocks)

    def _collect(self, parts: Iterator[Tensor], shape: TrunkShape, dk: Tensor, dv: Tensor) -> None:
        grads = [*parts, dk, dv]
        if self.store.grads is None:
            self.store.grads = grads
        else:
            for total, grad in zip(self.store.grads, grads, strict=True):
                total += grad

    def _trunk_gradients(self, dq: Tensor, dk: Tensor, dv: Tensor) -> Gradients:
        return dq, None, None


class GatheredKeys:
    """
    Trunk keys and values of the whole group, gathered once; see [`gather_trunk`].

    Attributes:
        store ([`TrunkStore`]): the blocks and the gradients so far.
        token (`torch.Tensor`): ties every pass that uses the trunk to the gathering in the autograd graph, so that the
            gradients go home after the last of them.
    """

    def __init__(self, store: TrunkStore, token: Tensor):
        self.store, self.token = store, token


def gather_trunk(k: Tensor, v: Tensor, layout: ContextLayout) -> GatheredKeys:
    """
    Gathers the trunk's keys and values of all ranks, for several calls of [`ring_attention`] with the same trunk. What
    is sent no longer depends on the number of passes: keys and values once here, their gradients once in the backward,
    summed in float32. In exchange each rank holds the travelling rows of the whole group.

    Args:
        k (`torch.Tensor` of shape `(T, Hkv, D)`), v (`torch.Tensor` of shape `(T, Hkv, Dv)`):
            Trunk keys and values of this rank.
        layout ([`ContextLayout`]):
            Who has which rows.

    Returns:
        [`GatheredKeys`]: for the argument `trunk` of [`ring_attention`].
    """
    shape = TrunkShape.of(k, v)
    with torch.no_grad():
        blocks = list(make_ring(layout, shape).visits(travelling_block(layout, k, v)))
    store = TrunkStore(k.detach(), v.detach(), blocks)
    return GatheredKeys(store, _GatherTrunk.apply(k, v, layout, store))


class _GatherTrunk(torch.autograd.Function):
    """The end of the gathered trunk's way back: sends home the gradients that all passes have added to the store."""

    @staticmethod
    def forward(ctx, k: Tensor, v: Tensor, layout: ContextLayout, store: TrunkStore) -> Tensor:
        ctx.layout, ctx.store = layout, store
        return k.new_zeros(())

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, _: Tensor) -> tuple[Tensor, Tensor, None, None]:
        layout, store = ctx.layout, ctx.store
        if store.grads is None:
            return torch.zeros_like(store.k), torch.zeros_like(store.v), None, None
        *parts, dk, dv = store.grads
        store.grads = None
        shape = TrunkShape.of(store.k, store.v)
        if layout.cp_size > 1:
            add_home(layout, make_ring(layout, shape).send_home(iter(parts)), shape, dk, dv)
        return dk.to(store.k.dtype), dv.to(store.v.dtype), None, None
