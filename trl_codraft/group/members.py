"""
The loss of every member of a group, one after the other, each split over all of them.

Shapes: `B` rows, `P` prompt columns, `C` completion columns, `n` completion tokens that one rank owns.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from .exchange import LossGroup
from .header import Header


class Scores(NamedTuple):
    """
    The policy's scores of the completions of a microbatch, whole.

    Args:
        log_probs (`torch.Tensor` of shape `(B, C)`):
            Log-probability of each completion token, 0 at padding.
        entropies (`torch.Tensor` of shape `(B, C)`, *optional*):
            Entropy of the distribution each was drawn from, 0 at padding.
        aux_loss (`torch.Tensor` of shape `()`, *optional*):
            Load-balancing loss of a mixture of experts.
    """

    log_probs: torch.Tensor
    entropies: torch.Tensor | None
    aux_loss: torch.Tensor | None

    def detach(self) -> "Scores":
        """The same without a graph."""
        return Scores(*(None if value is None else value.detach() for value in self))


class ShardScores(NamedTuple):
    """
    One rank's share of [`Scores`].

    Args:
        log_probs (`torch.Tensor` of shape `(n,)`), entropies (`torch.Tensor` of shape `(n,)`, *optional*):
            Scores of the completion tokens that this rank owns.
        aux_loss (`torch.Tensor` of shape `()`, *optional*):
            The value of the whole microbatch on every rank; its gradient, this rank's share.
        positions (`list[torch.LongTensor]`, each of shape `(n,)`):
            Per member, where in the flattened `(B, C)` its tokens belong; see [`LossGroup.gather_shards`].
    """

    log_probs: torch.Tensor
    entropies: torch.Tensor | None
    aux_loss: torch.Tensor | None
    positions: list[torch.Tensor]


class Sharding(Protocol):
    """How a microbatch is split over the ranks of a group, and how a rank runs its shard."""

    def count_tokens(self, attention_mask: torch.Tensor) -> tuple[int, ...]:
        """Number of tokens that each member runs of a microbatch with this mask `(B, P+C)`."""

    def pack(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, logits_to_keep: int) -> Any:
        """
        Splits a microbatch that all members hold whole: ids and mask `(B, P+C)`, the last `logits_to_keep` columns are
        the completion.
        """

    def score(self, model: nn.Module, packed: Any, compute_entropy: bool, compute_aux_loss: bool) -> ShardScores:
        """
        Runs this rank's tokens of a microbatch that `pack` has split. All parameters must take part in the graph, also
        with an empty shard: one dummy token (position -1) then keeps the gradient hooks of DDP and FSDP firing.
        """


def score_together(
    group: LossGroup,
    sharding: Sharding,
    model: nn.Module,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    logits_to_keep: int,
    compute_entropy: bool,
    compute_aux_loss: bool,
) -> tuple[Scores, Any]:
    """
    Scores one microbatch that every member of the group holds, each running its shard. Collective in the group.

    Returns:
        [`Scores`], whole on every rank, where the gradient that reaches a rank's parameters is that of its own tokens;
        and the microbatch as [`Sharding.pack`] has split it.
    """
    packed = sharding.pack(input_ids, attention_mask, logits_to_keep)
    shard = sharding.score(model, packed, compute_entropy, compute_aux_loss)
    values = [shard.log_probs, shard.entropies] if compute_entropy else [shard.log_probs]
    full = group.gather_shards(torch.stack(values), shard.positions, (len(input_ids), logits_to_keep))
    return Scores(full[0], full[1] if compute_entropy else None, shard.aux_loss), packed


def score_members(
    group: LossGroup,
    headers: list[Header],
    tensors: dict[str, torch.Tensor],
    score: Callable[[torch.Tensor, torch.Tensor, int], Scores],
) -> Scores:
    """
    Scores the rows of every member in turn, in chunks, without gradient. Collective in the group: each rank takes
    part in the sum over members of their chunks, however few its own are.

    Args:
        group ([`LossGroup`]):
            The group.
        headers (`list[Header]`):
            Headers of its members.
        tensors (`dict[str, torch.Tensor]`):
            This rank's `input_ids` and `attention_mask` of shape `(B, P+C)`.
        score (`Callable`):
            Given ids, mask and `C` of a chunk, returns its [`Scores`].

    Returns:
        [`Scores`]: of this rank's own rows. Log-probs are of shape `(0, C)` if it has none.
    """
    chunks = []
    for member, header in enumerate(headers):
        if header.rows == 0:
            continue
        rows = group.send_rows(tensors, header, member)
        ids = rows["input_ids"].tensor_split(header.chunk_starts)
        masks = rows["attention_mask"].tensor_split(header.chunk_starts)
        for chunk_ids, chunk_mask in zip(ids, masks, strict=True):
            scores = score(chunk_ids, chunk_mask, header.completion_length)
            if member == group.rank:
                chunks.append(scores)
    if not chunks:
        return Scores(torch.zeros(0, headers[group.rank].completion_length, device=group.device), None, None)
    log_probs, entropies, aux_losses = zip(*chunks, strict=True)
    return Scores(
        torch.cat(log_probs),
        None if entropies[0] is None else torch.cat(entropies),
        None if aux_losses[0] is None else torch.stack(aux_losses).mean(),
    )


def backward_members(
    group: LossGroup,
    headers: list[Header],
    tensors: dict[str, torch.Tensor],
    *,
    loss_of: Callable[[int, dict[str, torch.Tensor]], torch.Tensor],
    backward: Callable[[torch.Tensor], None],
    no_sync: Callable[[], AbstractContextManager],
) -> torch.Tensor:
    """
    Backpropagates the loss of every member in turn, except the last, whose loss it returns with its graph: the caller
    backpropagates that one, so that the gradient reduction that ends a step happens where it always does. Collective
    in the group.

    Args:
        group ([`LossGroup`]), headers (`list[Header]`):
            As in [`score_members`].
        tensors (`dict[str, torch.Tensor]`):
            This rank's microbatch.
        loss_of (`Callable`):
            Given a member and its microbatch, its loss as data-parallel training defines it.
        backward (`Callable`):
            Backpropagates a loss.
        no_sync (`Callable`):
            Makes the context in which gradients stay local until the last member.

    Returns:
        `torch.Tensor` of shape `()`: the loss of the last member with rows.

    Raises:
        ValueError: if no member has rows.
    """
    members = [member for member, header in enumerate(headers) if header.rows]
    if not members:
        raise ValueError("No rank of the group has rows to train on. Raise `per_device_train_batch_size`.")
    for member in members[:-1]:
        with no_sync():
            backward(loss_of(member, group.send_rows(tensors, headers[member], member)))
    return loss_of(members[-1], group.send_rows(tensors, headers[members[-1]], members[-1]))


class MemberAccelerator:
    """
    Stands in for an accelerator while the loss of one member is computed on all ranks of its group. Collectives
    return what they are given, as in a world of one rank; it is never the end of a step; everything else, such as
    `num_processes`, is the accelerator's.

    Args:
        accelerator (`Accelerator`):
            The one to stand in for.
    """

    sync_gradients = False

    def __init__(self, accelerator: Any):
        self._accelerator = accelerator

    def gather(self, tensor: Any) -> Any:
        return tensor

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        return input_data

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        return tensor

    def pad_across_processes(self, tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
        return tensor

    def __getattr__(self, name: str) -> Any:
        return getattr(self._accelerator, name)


@contextmanager
def attributes_set(owner: Any, **attributes: Any) -> Iterator[None]:
    """Sets attributes of an object, methods included, and puts the former ones back, whatever happens in between."""
    before = {name: vars(owner)[name] for name in attributes if name in vars(owner)}
    vars(owner).update(attributes)
    try:
        yield
    finally:
        for name in attributes:
            del vars(owner)[name]
        vars(owner).update(before)


def report_as(loss: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """A tensor with the value of `value` that backpropagates as `loss`."""
    return _ReportAs.apply(loss, value.detach())


class _ReportAs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, loss, value):
        return value.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None
