"""
The load-balancing loss of a mixture of experts when the tokens it is about lie on several ranks.

The loss is `E * sum_e (C_e / N) * (P_e / N)`, where `C_e` counts the assignments to expert `e`, `P_e` sums its routing
probabilities, and `N` counts layers times tokens (Switch Transformer, arXiv 2101.03961, equations 4 to 6; as
`load_balancing_loss_func` of Transformers). It is linear in `P`, and `C` has no gradient: a rank's own `P`, with the
counts of the group, gives its share of the loss and of the gradient.

Shapes: `T` rows of this rank, `E` experts, `k` experts per token.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn


@contextmanager
def router_logits_of(backbone: nn.Module) -> Iterator[list[torch.Tensor]]:
    """Router logits `(T, E)` of each layer of the backbone's forward inside, with their graph."""
    layers: list[torch.Tensor] = []
    handle = backbone.register_forward_hook(lambda _, args, output: layers.extend(output.router_logits))
    try:
        yield layers
    finally:
        handle.remove()


def shared_load_balancing_loss(
    router_logits: Sequence[torch.Tensor],
    counted: torch.Tensor,
    num_experts: int,
    top_k: int,
    group: dist.ProcessGroup | None,
) -> torch.Tensor:
    """
    The load-balancing loss of the tokens of all ranks. Collective.

    Args:
        router_logits (`Sequence[torch.Tensor]` of shape `(T, E)`):
            Router logits of each layer that has a router.
        counted (`torch.BoolTensor` of shape `(T,)`):
            Rows that count.
        num_experts (`int`), top_k (`int`):
            `E` and `k`.
        group (`dist.ProcessGroup` or `None`):
            The ranks; `None` for one process.

    Returns:
        `torch.Tensor` of shape `()`: the loss of all tokens, on every rank; its gradient comes from
            this rank's tokens.
    """
    dtype = torch.promote_types(torch.float32, router_logits[0].dtype)
    assigned = router_logits[0].new_zeros(num_experts, dtype=dtype)
    probabilities = assigned.clone()
    for layer in router_logits:
        weights = layer.softmax(dim=-1)
        chosen = weights.topk(top_k, dim=-1).indices
        assigned = assigned + torch.bincount(chosen[counted].flatten(), minlength=num_experts)
        probabilities = probabilities + (weights.to(dtype) * counted.unsqueeze(-1)).sum(dim=0)
    own_rows = assigned.new_full((1,), len(router_logits)) * counted.sum()
    totals = torch.cat([assigned, probabilities.detach(), own_rows])
    if group is not None:
        dist.all_reduce(totals, group=group)
    assigned, all_probabilities, rows = totals.split([num_experts, num_experts, 1])
    weight = num_experts * assigned / rows / rows
    share = (weight * probabilities).sum()
    return share + ((weight * all_probabilities).sum() - share).detach()
