"""
The gradients of a policy that is split into stages, from the last backward of a step to the optimizer.

Every rank of a run has rows of its own, and a plain run takes the mean of all ranks' gradients. In a pipeline of `p`
ranks each stage sees the microbatches of all of them, and the world's ranks divided by `p` hold that stage. So losses
are divided by `p`, and the mean over the ranks that hold a stage is the plain run's gradient:

    1 / (world / p) * sum over these ranks of (sum over the microbatches they see of loss / p) = 1 / world * sum of
    losses

With context parallelism the ranks that hold a stage include those that share its microbatches, each with the gradient
of its own tokens: the same formula.
"""

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from .split import PolicyStage, sum_tied_gradients


def average_gradients(parameters: Iterable[nn.Parameter], group: dist.ProcessGroup) -> None:
    """
    Gradient mean over the ranks that hold a stage. Collective in the group.

    Args:
        parameters (`Iterable[nn.Parameter]`):
            The same on all ranks, in the same order. `.grad` is changed in place. One that is missing on some ranks
            counts as zero there; one that is missing on all stays missing.
        group (`ProcessGroup`):
            The world's ranks that hold this stage.
    """
    parameters = [parameter for parameter in parameters if parameter.requires_grad]
    size = dist.get_world_size(group)
    if size == 1 or not parameters:
        return
    present = torch.tensor([parameter.grad is not None for parameter in parameters], dtype=torch.uint8)
    present = present.to(parameters[0].device)
    dist.all_reduce(present, dist.ReduceOp.MAX, group)
    works = []
    for parameter, anywhere in zip(parameters, present.tolist(), strict=True):
        if anywhere:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            works.append((parameter.grad, dist.all_reduce(parameter.grad, group=group, async_op=True)))
    for gradient, work in works:
        work.wait()
        gradient.div_(size)


def reduce_gradients(stages: Sequence[PolicyStage], pipeline: dist.ProcessGroup, replicas: dist.ProcessGroup) -> None:
    """
    Reduces gradients once all backwards of a step are done: adds up the two copies of a tied embedding's, then
    averages all over the ranks that hold the same stages. Collective in both groups.

    Args:
        stages (`Sequence[PolicyStage]`):
            The stages of this rank. Their gradients are changed in place.
        pipeline (`ProcessGroup`):
            The ranks of this pipeline, in order.
        replicas (`ProcessGroup`):
            The world's ranks that hold these stages.
    """
    num_ranks = dist.get_world_size(pipeline)
    tied = tied_embedding(stages)
    if tied is not None and tied.requires_grad:
        sum_tied_gradients(tied, 0, (stages[0].num_stages - 1) % num_ranks, pipeline)
    average_gradients(_parameters_of(stages), replicas)


def tied_embedding(stages: Sequence[PolicyStage]) -> nn.Parameter | None:
    """This rank's copy of an embedding that two ranks hold because it is tied to the head; `None` on other ranks."""
    first, last = stages[0], stages[-1]
    if first.num_stages == 1 or not first.policy.config.tie_word_embeddings:
        return None
    if first.is_first:
        return first.policy.get_input_embeddings().weight
    return last.tied_copy


def clip_grad_norm(stages: Sequence[PolicyStage], max_norm: float, pipeline: dist.ProcessGroup) -> torch.Tensor:
    """
    Clips the gradients of the whole policy, as `torch.nn.utils.clip_grad_norm_` would in one process. Collective in
    the group. Squares are summed over the stages of one pipeline only (others hold the same gradients); a tied
    embedding, which two stages hold, counts once. A norm that is not finite is so on all ranks.

    Args:
        stages (`Sequence[PolicyStage]`):
            The stages of this rank, their gradients reduced by [`reduce_gradients`]. Scaled in place.
        max_norm (`float`):
            Largest norm.
        pipeline (`ProcessGroup`):
            The ranks of this pipeline.

    Returns:
        `torch.Tensor`: the norm before clipping, fp32 (fp64 for a policy in that), the same on all ranks of the
        pipeline.
    """
    first = next(stages[0].policy.parameters())
    # fp64: squares of large norms would overflow.
    squares = torch.zeros((), dtype=torch.float64, device=first.device)
    for stage in stages:
        gradients = [parameter.grad for _, parameter in stage.named_own_parameters() if parameter.grad is not None]
        if gradients:
            squares += get_total_norm(gradients).double().square()
    dist.all_reduce(squares, group=pipeline)
    norm = squares.sqrt().to(torch.promote_types(torch.float32, first.dtype))
    clip_grads_with_norm_(_parameters_of(stages), max_norm, norm)
    return norm


def _parameters_of(stages: Sequence[PolicyStage]) -> list[nn.Parameter]:
    """Each parameter once: stages that are views of one policy share it."""
    return list(dict.fromkeys(parameter for stage in stages for parameter in stage.policy.parameters()))
