"""
Ranks of `test_stages.py`: `python stage_worker.py FOLDER` runs what a trainer does with the stages of a policy around its
forwards and backwards, and each rank compares with the whole policy in its own process.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from forked import fork_ranks
from pipeline_worker import CASES as PIPELINES
from pipeline_worker import LAYERS_4, inputs_of, ragged_microbatches, score
from tiny import tiny_policy

from trl_codraft.pp import (
    Pipeline,
    average_gradients,
    clip_grad_norm,
    pad_microbatches,
    reduce_gradients,
    split_policy,
)


def policy_of(**overrides):
    return tiny_policy("llama", seed=3, scale=2.0, **{"tie_word_embeddings": True, **overrides}).train()


def stages_of(rank, num_ranks, layers, **overrides):
    numbers = range(rank, len(layers), num_ranks)
    return [split_policy(policy_of(**overrides), layers, number, score) for number in numbers]


def padded_rows(step=0):
    """Four microbatches of one shape."""
    return pad_microbatches(ragged_microbatches(PIPELINES["1F1B, 2 ranks"], step), bucket=8)


def loss_of(rows):
    """The loss of a microbatch, of its own rows: very different ones, so that a wrong mean shows."""
    mask = rows.attention_mask[:, -rows.completion_length :]

    def loss(output):
        return (output * mask * torch.linspace(-1, 2, len(mask))[:, None]).sum() / mask.sum()

    return loss


def whole_backward(whole, batches, division):
    for rows in batches:
        arguments = {"input_ids": rows.input_ids, "attention_mask": rows.attention_mask, "use_cache": False}
        (loss_of(rows)(score(whole, arguments, inputs_of(rows))) / division).backward()


def worst_difference(stages, whole):
    expected = dict(whole.named_parameters())
    pairs = [(p.grad, expected[name].grad) for stage in stages for name, p in stage.policy.named_parameters()]
    return max(((a - b).abs().max() / b.abs().max().clamp(min=1)).item() for a, b in pairs)


def gradients(rank, world_size, num_ranks, layers):
    """
    `world_size / num_ranks` pipelines with four microbatches in all, against one process that takes the mean over them:
    gradients, norms, clipped gradients.
    """
    replicas = world_size // num_ranks
    own, place = divmod(rank, num_ranks)
    members = [dist.new_group([row * num_ranks + i for i in range(num_ranks)]) for row in range(replicas)]
    holders = [dist.new_group([row * num_ranks + i for row in range(replicas)]) for i in range(num_ranks)]
    pipeline_group, holder_group = members[own], holders[place]
    stages = stages_of(place, num_ranks, layers)
    schedule = "1F1B" if len(stages) == 1 else "Interleaved1F1B"
    settings = {"hidden_size": 32, "dtype": torch.float32, "device": torch.device("cpu"), "schedule": schedule}
    pipeline = Pipeline(stages, pipeline_group, **settings)
    batches = padded_rows()
    share = len(batches) // replicas
    mine = batches[own * share : (own + 1) * share]
    # A rank has `accumulation` microbatches of its own, each with a loss divided by that, as in a plain run.
    accumulation = len(batches) // world_size
    pipeline.step(
        [inputs_of(rows) for rows in mine],
        lambda number, output: loss_of(mine[number])(output) / num_ranks / accumulation,
    )
    reduce_gradients(stages, pipeline_group, holder_group)
    whole = policy_of()
    whole_backward(whole, batches, len(batches))
    result = {"reduced": worst_difference(stages, whole)}
    norm = clip_grad_norm(stages, 0.5, pipeline_group)
    expected = torch.nn.utils.clip_grad_norm_(whole.parameters(), 0.5)
    result["norm"], result["norm ratio"] = norm.item(), (norm / expected).item()
    result["clipped"] = worst_difference(stages, whole)
    again = clip_grad_norm(stages, 10.0, pipeline_group)
    result["clipped norm"] = again.item()
    result["unclipped"] = worst_difference(stages, whole)
    result["not finite"] = []
    for value in (torch.inf, torch.nan):
        if place == num_ranks - 1:  # of one stage only
            list(stages[-1].named_own_parameters())[-1][1].grad[0] = value
        result["not finite"].append(clip_grad_norm(stages, 0.5, pipeline_group).item())
    # Missing on one rank: zero there. Missing on all: stays so.
    first, second = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    if rank == 0:
        first.grad = torch.full((2,), 6.0)
    average_gradients([first, second], dist.group.WORLD)
    result["missing"] = [first.grad.tolist(), second.grad]
    return result


RUNS = {
    "2 x 2 ranks": (4, 2, (2, 2)),
    "4 ranks": (4, 4, LAYERS_4),
    "2 ranks, interleaved": (2, 2, LAYERS_4),
}

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    outcomes = {
        name: fork_ranks(gradients, size, folder / f"gradients-{number}", *arguments)
        for number, (name, (size, *arguments)) in enumerate(RUNS.items())
    }
    torch.save(outcomes, folder / "outcomes.pt")
