"""
Ranks of `test_stages.py`: `python stage_worker.py FOLDER` runs what a trainer does with the stages of a policy around its
forwards and backwards, and each rank compares with the whole policy in its own process.
"""

import sys
import time
import zlib
from datetime import timedelta
from functools import partial
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from forked import fork_ranks
from peft import LoraConfig, inject_adapter_in_model
from pipeline_worker import CASES as PIPELINES
from pipeline_worker import LAYERS_4, inputs_of, ragged_microbatches, score
from tiny import BALANCED_EXPERTS, tiny_policy
from transformers import AutoModelForCausalLM

from trl_codraft.pp.pipeline import Pipeline
from trl_codraft.pp.rows import pad_microbatches
from trl_codraft.pp.stages.checkpoint import load_optimizer, save_optimizer, save_policy
from trl_codraft.pp.stages.gradients import average_gradients, clip_grad_norm, reduce_gradients
from trl_codraft.pp.stages.loading import align_parts
from trl_codraft.pp.stages.replica import PolicyReplica
from trl_codraft.pp.stages.split import keep_stages, split_policy


def policy_of(model_type="llama", **overrides):
    return tiny_policy(model_type, seed=3, scale=2.0, **{"tie_word_embeddings": True, **overrides}).train()


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


def disturbed(policy, seed, trained=lambda name: True):
    """Adds to each parameter what its name says, as an optimizer step would."""
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if trained(name):
                draw = torch.Generator().manual_seed(zlib.crc32(name.encode()) + seed)
                parameter += 0.1 * torch.randn(parameter.shape, generator=draw)
    return policy


def with_adapters(policy):
    inject_adapter_in_model(LoraConfig(r=2, target_modules=["q_proj", "down_proj"]), policy)
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if "lora_" in name:
                parameter.fill_(0.1)
    return policy


def same(policy, expected):
    pairs = zip(policy.state_dict().items(), expected.state_dict().items(), strict=True)
    return all(a == b and torch.equal(x, y) for (a, x), (b, y) in pairs)


def replicas(rank, world_size, layers, adapters=False, **overrides):
    """A replica after assembly and two refreshes, against the whole policy."""
    stages, trained = stages_of(rank, world_size, layers, **overrides), lambda name: True
    make = partial(policy_of, **overrides)
    whole = None
    if adapters:
        make, trained = (lambda: with_adapters(policy_of())), lambda name: "lora_" in name
        for stage in stages:
            with_adapters(stage.policy)
        whole = disturbed(with_adapters(policy_of()), 99)
    expected = make()
    for model in (*(stage.policy for stage in stages), expected):
        disturbed(model, 1)
    result = {"refused": "", "equal": [], "tokens": [], "sent": []}
    if adapters:
        try:
            PolicyReplica(stages, dist.group.WORLD)
        except ValueError as error:
            result["refused"] = str(error)
    state = torch.get_rng_state()
    replica = PolicyReplica(stages, dist.group.WORLD, whole)
    result["random state kept"] = torch.equal(state, torch.get_rng_state())
    places = {name: value.data_ptr() for name, value in replica.model.state_dict().items()}
    ids = torch.tensor([[0, 0, 5, 17, 33], [9, 41, 60, 88, 12]])
    prompts = {"input_ids": ids, "attention_mask": (ids > 0).long()}
    for step in range(3):
        if step:
            for model in (*(stage.policy for stage in stages), expected):
                disturbed(model, step + 1, trained)
            with mock.patch.object(dist, "broadcast", side_effect=dist.broadcast) as broadcast:
                replica.refresh()
            result["sent"].append(broadcast.call_count)
        result["equal"].append(same(replica.model, expected))
        generated, wanted = (
            model.generate(**prompts, max_new_tokens=8, min_new_tokens=8, do_sample=False)
            for model in (replica.model, expected.eval())
        )
        result["tokens"].append((generated.tolist(), wanted.tolist()))
    result["trained"] = sum(trained(name) for name, _ in expected.named_parameters())
    result["in place"] = places == {name: value.data_ptr() for name, value in replica.model.state_dict().items()}
    result["tied"] = replica.model.lm_head.weight is replica.model.model.embed_tokens.weight
    result["gradients"] = any(parameter.requires_grad for parameter in replica.model.parameters())
    return result


def aligned(rank, world_size):
    """Parts of two pipelines of two stages, the weights of each rank moved by another amount before they are aligned."""
    row, place = divmod(rank, 2)
    pipelines, holders = (
        [dist.new_group(ranks) for ranks in groups] for groups in (([0, 1], [2, 3]), ([0, 2], [1, 3]))
    )
    policy, whole = (policy_of(tie_word_embeddings=False) for _ in range(2))
    keep_stages(policy, (2, 2), (place,), embedding=True)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter += rank
    align_parts(policy, pipelines[row], holders[place], embedding=True)
    expected, moved_by = dict(whole.named_parameters()), {"model.embed_tokens.weight": 0}
    return {
        name: torch.equal(parameter, expected[name] + moved_by.get(name, place))
        for name, parameter in policy.named_parameters()
    }


def optimizer_of(policies, lr=0.01):
    """AdamW with the usual two groups."""
    parameters = [parameter for policy in policies for parameter in policy.parameters()]
    matrices = [parameter for parameter in parameters if parameter.dim() > 1]
    others = [parameter for parameter in parameters if parameter.dim() <= 1]
    return torch.optim.AdamW([{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}], lr)


def optimizer_step(policies, optimizer, step):
    """With gradients that depend on a parameter's name, and another learning rate in every step."""
    for policy in policies:
        for name, parameter in policy.named_parameters():
            draw = torch.Generator().manual_seed(zlib.crc32(name.encode()) + step)
            parameter.grad = torch.randn(parameter.shape, generator=draw)
    optimizer.step()
    for group in optimizer.param_groups:
        group["lr"] *= 0.7


def message_of(error, act):
    start = time.monotonic()
    try:
        act()
    except error as raised:
        return str(raised), time.monotonic() - start
    return "", time.monotonic() - start


def checkpoints(rank, world_size, folder):
    """Saved under two stages after two steps, loaded under one, four and two times two, and compared after a third."""
    short = timedelta(seconds=2)
    groups = {1: dist.new_group([0]), 2: dist.new_group([0, 1]), 4: dist.new_group([0, 1, 2, 3])}
    alone = [dist.new_group([0, 1], backend="gloo", timeout=short) for _ in range(2)]
    whole = policy_of()
    optimizer = optimizer_of([whole])
    for step in range(2):
        optimizer_step([whole], optimizer, step)
    if rank == 0:
        folder.mkdir()
        (folder / "model.safetensors").write_text("of an earlier save")
        (folder / "optimizer-00003-of-00003.pt").write_text("of an earlier save")
    dist.barrier()
    if rank < 2:
        stages = stages_of(rank, 2, (2, 2))
        policies = [stage.policy for stage in stages]
        own = optimizer_of(policies)
        for step in range(2):
            optimizer_step(policies, own, step)
        save_policy(stages, folder, groups[2])
        save_optimizer(own, stages, folder, groups[2])
    dist.barrier()
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    result = {"files": sorted(path.name for path in folder.iterdir()), "weights": same(loaded, whole)}
    result["tied"] = loaded.lm_head.weight is loaded.model.embed_tokens.weight
    result["config"] = (loaded.config.architectures, str(loaded.dtype), loaded.config.num_hidden_layers)
    optimizer_step([whole], optimizer, 2)
    result["resumed"] = {}
    for num_ranks, layers in ((1, (4,)), (4, LAYERS_4), (2, LAYERS_4)):
        if rank < num_ranks:
            numbers = range(rank, len(layers), num_ranks)
            stages = [
                split_policy(AutoModelForCausalLM.from_pretrained(folder), layers, number, score) for number in numbers
            ]
            policies = [stage.policy for stage in stages]
            own = optimizer_of(policies, lr=1.0)
            load_optimizer(own, stages, folder)
            optimizer_step(policies, own, 2)
            expected = dict(whole.named_parameters())
            got = [pair for policy in policies for pair in policy.named_parameters()]
            equal = all(torch.equal(parameter, expected[name]) for name, parameter in got)
            again = folder.parent / f"again-{num_ranks}"
            save_policy(stages, again, groups[num_ranks])
            saved_again = same(AutoModelForCausalLM.from_pretrained(again), whole)
            result["resumed"][num_ranks] = len(got) > 0 and equal and saved_again
    if rank < 2:
        # Each of the two alone, in a group of its own.
        result["alone"] = message_of(RuntimeError, lambda: save_policy(stages, folder, alone[rank], timeout=1.0))
        adapted = [split_policy(policy_of(), (2, 2), rank)]
        with_adapters(adapted[0].policy)
        result["adapters"] = message_of(ValueError, lambda: save_policy(adapted, folder / "adapted", groups[2]))[0]
        result["other parameters"] = message_of(ValueError, lambda: load_optimizer(own, adapted, folder))[0]
    dist.barrier()
    if rank == 0:
        (folder / "optimizer-00001-of-00002.pt").unlink()
        result["missing file"] = message_of(ValueError, lambda: load_optimizer(own, stages, folder))[0]
    return result


REPLICAS = {
    "replica, 2 ranks": (2, {"layers": (2, 2)}),
    "replica, interleaved, adapters": (2, {"layers": LAYERS_4, "adapters": True}),
    "replica, buffers": (2, {"layers": (2, 2), "model_type": "glm4_moe", **BALANCED_EXPERTS}),
}
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
    for number, (name, (size, settings)) in enumerate(REPLICAS.items()):
        outcomes[name] = fork_ranks(partial(replicas, **settings), size, folder / f"replicas-{number}")
    outcomes["aligned"] = fork_ranks(aligned, 4, folder / "aligned")
    outcomes["checkpoints"] = fork_ranks(checkpoints, 4, folder / "checkpoints", folder / "saved")
    torch.save(outcomes, folder / "outcomes.pt")
