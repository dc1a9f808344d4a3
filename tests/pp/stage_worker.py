"""
Ranks of `test_stages.py`: `python stage_worker.py FOLDER` checks every claim of this file on all ranks, each against
the whole policy in its own process: what a trainer does with stages around its forwards and backwards.
"""

import math
import re
import sys
import time
import zlib
from datetime import timedelta
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from forked_ranks import watch_ranks
from peft import LoraConfig, inject_adapter_in_model
from pipeline_worker import CASES as PIPELINES
from pipeline_worker import LAYERS_4, inputs_of, ragged_microbatches, score
from tiny import BALANCED_EXPERTS, tiny_policy
from transformers import AutoModelForCausalLM

from trl_codraft.group.mesh import RankMesh
from trl_codraft.pp.padding import pad_microbatches
from trl_codraft.pp.pipeline import Pipeline
from trl_codraft.pp.stages.checkpoint import load_optimizer, save_optimizer, save_policy
from trl_codraft.pp.stages.gradients import average_gradients, clip_grad_norm, reduce_gradients
from trl_codraft.pp.stages.replica import PolicyReplica
from trl_codraft.pp.stages.split import keep_stages, split_policy
from trl_codraft.pp.stages.weights import align_stage_weights


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


def pipeline_of(rank, world_size, num_ranks, layers):
    """
    The stages of this rank in one of `world_size / num_ranks` pipelines, the number of that, and its process groups.
    """
    mesh = RankMesh(world_size, num_ranks)
    groups, place = mesh.new_groups(timedelta(seconds=60)), mesh.place_of(rank)
    return stages_of(place.pp, num_ranks, layers), place.dp, groups


def gradients_and_their_norm_are_those_of_one_process(rank, world_size, folder, num_ranks, layers):
    """Of the mean over four microbatches, shared out over pipelines; reduced, clipped, and not clipped."""
    stages, own, groups = pipeline_of(rank, world_size, num_ranks, layers)
    schedule = "1F1B" if len(stages) == 1 else "Interleaved1F1B"
    settings = {"hidden_size": 32, "dtype": torch.float32, "device": torch.device("cpu"), "schedule": schedule}
    pipeline = Pipeline(stages, groups.pipeline, **settings)
    batches = padded_rows()
    share = len(batches) * num_ranks // world_size
    mine = batches[own * share : (own + 1) * share]
    # A rank has `accumulation` microbatches of its own, each with a loss divided by that, as in a plain run.
    accumulation = len(batches) // world_size
    pipeline.step(
        [inputs_of(rows) for rows in mine],
        lambda number, output: loss_of(mine[number])(output) / num_ranks / accumulation,
    )
    reduce_gradients(stages, groups.pipeline, groups.holders)
    whole = policy_of()
    whole_backward(whole, batches, len(batches))
    assert worst_difference(stages, whole) <= 1e-6
    norm = clip_grad_norm(stages, 0.5, groups.pipeline)
    expected = torch.nn.utils.clip_grad_norm_(whole.parameters(), 0.5)
    assert norm > 0.5
    assert abs(norm / expected - 1) <= 1e-6
    norms = [torch.zeros_like(norm) for _ in range(world_size)]
    dist.all_gather(norms, norm)
    assert all(torch.equal(other, norm) for other in norms)
    assert worst_difference(stages, whole) <= 1e-6
    assert abs(clip_grad_norm(stages, 10.0, groups.pipeline) - 0.5) <= 1e-5
    assert worst_difference(stages, whole) <= 1e-6


def a_norm_that_is_not_finite_on_one_stage_is_so_on_all(rank, world_size, folder, num_ranks, layers):
    stages, _, groups = pipeline_of(rank, world_size, num_ranks, layers)
    for value, is_so in ((torch.inf, math.isinf), (torch.nan, math.isnan)):
        for stage in stages:
            for _, parameter in stage.named_own_parameters():
                parameter.grad = torch.ones_like(parameter)
        if stages[-1].is_last:
            list(stages[-1].named_own_parameters())[-1][1].grad[0] = value
        assert is_so(clip_grad_norm(stages, 0.5, groups.pipeline))


def a_gradient_that_is_missing_counts_as_zero_unless_all_lack_it(rank, world_size, folder):
    first, second = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    if rank == 0:
        first.grad = torch.full((2,), 6.0)
    average_gradients([first, second], dist.group.WORLD)
    assert first.grad.tolist() == [6.0 / world_size] * 2
    assert second.grad is None


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


def a_replica_is_the_whole_policy_and_generates_the_same_tokens(
    rank, world_size, folder, layers, adapters=False, **overrides
):
    """After its assembly and two refreshes. A replica without the stages' adapters is refused on all ranks."""
    stages, trained = stages_of(rank, world_size, layers, **overrides), lambda name: True
    make, whole = partial(policy_of, **overrides), None
    if adapters:
        make, trained = (lambda: with_adapters(policy_of())), lambda name: "lora_" in name
        for stage in stages:
            with_adapters(stage.policy)
        whole = disturbed(with_adapters(policy_of()), 99)
        with pytest.raises(ValueError, match=r"lora_A.default.weight.*same class, config and adapters"):
            PolicyReplica(stages, dist.group.WORLD)
    expected = make()
    models = [*(stage.policy for stage in stages), expected]
    for model in models:
        disturbed(model, 1)
    state = torch.get_rng_state()
    replica = PolicyReplica(stages, dist.group.WORLD, whole)
    assert torch.equal(state, torch.get_rng_state())
    places = {name: value.data_ptr() for name, value in replica.model.state_dict().items()}
    num_trained = sum(trained(name) for name, _ in expected.named_parameters())
    ids = torch.tensor([[0, 0, 5, 17, 33], [9, 41, 60, 88, 12]])
    prompts = {"input_ids": ids, "attention_mask": (ids > 0).long(), "do_sample": False}
    generated = []
    for step in range(3):
        if step:
            for model in models:
                disturbed(model, step + 1, trained)
            with mock.patch.object(dist, "broadcast", side_effect=dist.broadcast) as broadcast:
                replica.refresh()
            # Frozen tensors are sent once, when the replica is made.
            assert broadcast.call_count == num_trained
        assert same(replica.model, expected)
        ours, wanted = (
            model.generate(**prompts, max_new_tokens=8, min_new_tokens=8).tolist()
            for model in (replica.model, expected.eval())
        )
        assert ours == wanted
        generated.append(str(ours))
    # The refreshes change the tokens, or the comparison would say little.
    assert len(set(generated)) > 1
    assert places == {name: value.data_ptr() for name, value in replica.model.state_dict().items()}
    assert replica.model.lm_head.weight is replica.model.model.embed_tokens.weight
    assert not any(parameter.requires_grad for parameter in replica.model.parameters())


def weights_of_the_first_rank_that_holds_a_stage_count(rank, world_size, folder):
    """Two pipelines of two stages, the weights of each rank moved by another amount before they are aligned."""
    mesh = RankMesh(world_size, 2)
    groups, place = mesh.new_groups(timedelta(seconds=60)), mesh.place_of(rank).pp
    policy, whole = (policy_of(tie_word_embeddings=False) for _ in range(2))
    keep_stages(policy, (2, 2), (place,), embedding=True)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter += rank
    align_stage_weights(policy, groups.pipeline, groups.holders, embedding=True)
    expected, moved_by = dict(whole.named_parameters()), {"model.embed_tokens.weight": 0}
    names = [name for name, _ in policy.named_parameters()]
    assert "model.embed_tokens.weight" in names
    assert len(names) > 18
    for name, parameter in policy.named_parameters():
        assert torch.equal(parameter, expected[name] + moved_by.get(name, place)), name


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


def saved_after_two_steps(rank, folder):
    """Policy and optimizer of two stages in a folder of an earlier save; the whole policy and its optimizer."""
    whole, two = policy_of(), dist.new_group([0, 1])
    optimizer = optimizer_of([whole])
    if rank == 0:
        folder.mkdir(exist_ok=True)
        (folder / "model.safetensors").write_text("of an earlier save")
        (folder / "optimizer-00003-of-00003.pt").write_text("of an earlier save")
    dist.barrier()
    stages = stages_of(rank, 2, (2, 2)) if rank < 2 else []
    policies = [stage.policy for stage in stages]
    own = optimizer_of(policies) if stages else None
    for step in range(2):
        optimizer_step([whole], optimizer, step)
        if stages:
            optimizer_step(policies, own, step)
    if stages:
        save_policy(stages, folder, two)
        save_optimizer(own, stages, folder, two)
    dist.barrier()
    return stages, own, two, whole, optimizer


def a_checkpoint_of_two_stages_loads_as_a_whole_policy(rank, world_size, folder):
    *_, whole, _ = saved_after_two_steps(rank, folder)
    assert sorted(path.name for path in folder.iterdir()) == [
        "config.json",
        "generation_config.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
        "optimizer-00001-of-00002.pt",
        "optimizer-00002-of-00002.pt",
    ]
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    assert same(loaded, whole)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert loaded.config.architectures == ["LlamaForCausalLM"]
    assert (loaded.dtype, loaded.config.num_hidden_layers) == (torch.float32, 4)


def a_run_resumes_under_another_number_of_stages_to_the_same_step(rank, world_size, folder):
    """One stage, four stages, and four stages on two ranks; each is saved and loaded again."""
    *_, whole, optimizer = saved_after_two_steps(rank, folder)
    optimizer_step([whole], optimizer, 2)
    expected = dict(whole.named_parameters())
    for num_ranks, layers in ((1, (4,)), (4, LAYERS_4), (2, LAYERS_4)):
        group = dist.new_group(list(range(num_ranks)))
        if rank >= num_ranks:
            continue
        stages = [
            split_policy(AutoModelForCausalLM.from_pretrained(folder), layers, number, score)
            for number in range(rank, len(layers), num_ranks)
        ]
        policies = [stage.policy for stage in stages]
        own = optimizer_of(policies, lr=1.0)
        load_optimizer(own, stages, folder)
        optimizer_step(policies, own, 2)
        got = [pair for policy in policies for pair in policy.named_parameters()]
        assert got
        assert all(torch.equal(parameter, expected[name]) for name, parameter in got)
        again = folder.parent / f"again-{num_ranks}"
        save_policy(stages, again, group)
        assert same(AutoModelForCausalLM.from_pretrained(again), whole)


def saving_on_one_rank_only_is_an_error_soon(rank, world_size, folder):
    alone = [dist.new_group([0, 1], backend="gloo", timeout=timedelta(seconds=2)) for _ in range(2)]
    message = f"`save_policy` was called on rank {rank} of a pipeline, but not all of its 2 ranks came"
    start = time.monotonic()
    with pytest.raises(RuntimeError, match=re.escape(message)):
        save_policy(stages_of(rank, 2, (2, 2)), folder, alone[rank], timeout=1.0)
    assert time.monotonic() - start < 20


def checkpoints_refuse_by_name(rank, world_size, folder):
    stages, own, two, *_ = saved_after_two_steps(rank, folder)
    adapted = [split_policy(policy_of(), (2, 2), rank)]
    with_adapters(adapted[0].policy)
    with pytest.raises(ValueError, match="The stages together are not a LlamaForCausalLM.*with adapters"):
        save_policy(adapted, folder / "adapted", two)
    with pytest.raises(ValueError, match="not in the stages of this rank"):
        load_optimizer(own, adapted, folder)
    dist.barrier()
    if rank == 0:
        (folder / "optimizer-00001-of-00002.pt").unlink()
        with pytest.raises(ValueError, match="does not hold the optimizer files of all stages"):
            load_optimizer(own, stages, folder)


# Ranks in all; ranks of a pipeline, layers of stages.
PIPELINE_SIZES = [
    (4, {"num_ranks": 2, "layers": (2, 2)}),
    (4, {"num_ranks": 4, "layers": LAYERS_4}),
    (2, {"num_ranks": 2, "layers": LAYERS_4}),
]
REPLICAS = [
    {"layers": (2, 2)},
    {"layers": LAYERS_4, "adapters": True},
    {"layers": (2, 2), "model_type": "glm4_moe", **BALANCED_EXPERTS},
]
# Ranks, function, further arguments.
CLAIMS = [
    (4, a_gradient_that_is_missing_counts_as_zero_unless_all_lack_it, {}),
    (4, weights_of_the_first_rank_that_holds_a_stage_count, {}),
    (4, a_checkpoint_of_two_stages_loads_as_a_whole_policy, {}),
    (4, a_run_resumes_under_another_number_of_stages_to_the_same_step, {}),
    (2, saving_on_one_rank_only_is_an_error_soon, {}),
    (2, checkpoints_refuse_by_name, {}),
    *((2, a_replica_is_the_whole_policy_and_generates_the_same_tokens, settings) for settings in REPLICAS),
    *((ranks, gradients_and_their_norm_are_those_of_one_process, sizes) for ranks, sizes in PIPELINE_SIZES),
    *((ranks, a_norm_that_is_not_finite_on_one_stage_is_so_on_all, sizes) for ranks, sizes in PIPELINE_SIZES),
]


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    outcomes = [
        watch_ranks(partial(claim, **settings), ranks, folder / str(number), folder / str(number) / "saved")
        for number, (ranks, claim, settings) in enumerate(CLAIMS)
    ]
    torch.save(outcomes, folder / "outcomes.pt")
