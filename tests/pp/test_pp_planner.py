"""The memory that is planned for a pipeline against what its stages hold and autograd saves."""

import re

import pytest
import torch
from modeling.draft_cases import draft_case
from tiny import tiny_policy

from trl_codraft.pp.memory import Holdings, PlanUnavailable, draft_memory, plan_memory, saved_by_layer
from trl_codraft.pp.order import BACKWARD_TIME, FORWARD_TIME, action_ends
from trl_codraft.pp.shape import PipelineShape
from trl_codraft.pp.stages.split import split_policy
from trl_codraft.pp.taps.plan import TapPlan


ROWS, COLUMNS = 2, 24


def planned(policy, layers=(3, 1), *, num_ranks=2, schedule="1F1B", tap_layers=(), checkpointing=False, **held):
    """The plan of a step of 4 microbatches; `held` are fields of `Holdings`."""
    return plan_memory(
        policy,
        PipelineShape(layers, num_ranks, 4, schedule),
        rows=ROWS,
        columns=COLUMNS,
        tap_layers=tap_layers,
        gradient_checkpointing=checkpointing,
        holdings=Holdings(**held),
    )


def saved_bytes(policy, act):
    """Bytes of all storages that autograd saves in a real forward, without weights."""
    weights = {tensor.untyped_storage().data_ptr() for tensor in [*policy.parameters(), *policy.buffers()]}
    saved = {}

    def pack(tensor):
        if tensor.untyped_storage().data_ptr() not in weights:
            saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        act()
    return sum(tensor.untyped_storage().nbytes() for tensor in saved.values())


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("layers", "num_ranks"), [((3, 1), 2), ((1, 1, 1, 1), 2), ((4,), 1)])
def test_weights_and_optimizer_are_those_of_the_stages(layers, num_ranks, tied):
    policy = tiny_policy("llama", tie_word_embeddings=tied)
    policy.model.layers[1].requires_grad_(False)
    schedule = "Interleaved1F1B" if len(layers) > num_ranks else "1F1B"
    plan = planned(policy, layers, num_ranks=num_ranks, schedule=schedule)
    for rank, memory in enumerate(plan.ranks):
        weights = gradients = states = 0
        for number in range(rank, len(layers), num_ranks):
            stage = tiny_policy("llama", tie_word_embeddings=tied)
            stage.model.layers[1].requires_grad_(False)
            parameters = list(split_policy(stage, layers, number).policy.parameters())
            optimizer = torch.optim.AdamW(parameters)
            for parameter in parameters:
                parameter.grad = torch.ones_like(parameter) if parameter.requires_grad else None
            optimizer.step()
            weights += sum(parameter.nbytes for parameter in parameters)
            gradients += sum(parameter.grad.nbytes for parameter in parameters if parameter.grad is not None)
            states += sum(
                value.nbytes for state in optimizer.state.values() for value in state.values() if value.dim()
            )
        assert (memory.weights, memory.gradients, memory.optimizer) == (weights, gradients, states)
        assert memory.replica == sum(parameter.nbytes for parameter in policy.parameters())


@pytest.mark.parametrize("model", ["llama", "qwen3", "gemma3_text", "olmo2"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_what_a_layer_saves_is_what_real_layers_save(model, attention):
    policies = [tiny_policy(model, num_hidden_layers=count, attn_implementation=attention).train() for count in (2, 4)]
    ids = torch.zeros(ROWS, COLUMNS, dtype=torch.long)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0  # rows are padded, as those of GRPO are
    inputs = {"input_ids": ids, "attention_mask": mask, "use_cache": False}
    two, four = (saved_bytes(policy, lambda p=policy: p.model(**inputs)) for policy in policies)
    layer, _ = saved_by_layer(policies[0], ROWS, COLUMNS)
    assert layer == pytest.approx((four - two) / 2, rel=0.02)


def test_activations_follow_the_microbatches_under_way():
    policy = tiny_policy("llama")
    layer, shared = saved_by_layer(policy, ROWS, COLUMNS)
    hidden, logits = ROWS * COLUMNS * 32 * 4, ROWS * COLUMNS * 104 * 4
    travelling = 4 * hidden
    for schedule, under_way in (("1F1B", (2, 1)), ("GPipe", (4, 4))):
        plan = planned(policy, schedule=schedule)
        first, last = (memory.activations - travelling for memory in plan.ranks)
        assert first == under_way[0] * (3 * layer + shared)
        assert last == under_way[1] * (layer + shared + logits)
    plan = planned(policy, checkpointing=True)
    assert plan.ranks[0].activations - travelling == 2 * (3 * hidden + shared) + layer


def test_taps_draft_and_replica_lie_where_they_are_used():
    policy = tiny_policy("llama")
    plan = planned(policy, (2, 2), tap_layers=(1, 3, 4), draft_bytes=1000, replica=False)
    taps = TapPlan.for_layers((1, 3, 4), PipelineShape((2, 2), 2, 4), 32, torch.float32)
    slots, tap = taps.lanes[0].slots, ROWS * COLUMNS * 32 * 4
    # Of each of 4 microbatches three taps and what the teacher reads.
    assert [memory.taps for memory in plan.ranks] == [slots * tap, slots * tap + 4 * (3 + 1) * tap]
    assert [memory.draft for memory in plan.ranks] == [0, 1000]
    assert [memory.replica for memory in plan.ranks] == [0, 0]


@pytest.mark.parametrize(
    ("schedule", "num_ranks", "num_stages", "count"),
    [
        ("1F1B", 4, 4, 4),
        ("1F1B", 2, 2, 8),
        ("GPipe", 4, 4, 6),
        ("Interleaved1F1B", 2, 4, 4),
        ("Interleaved1F1B", 4, 8, 8),
    ],
)
def test_the_bubble_is_the_wait_of_the_schedule_run_by_its_order(schedule, num_ranks, num_stages, count):
    shape = PipelineShape((1,) * num_stages, num_ranks, count, schedule)
    ends = action_ends(shape.order, num_stages, lambda action: BACKWARD_TIME if action.backward else FORWARD_TIME)
    busy = count * (num_stages // num_ranks) * (FORWARD_TIME + BACKWARD_TIME)
    assert shape.bubble == pytest.approx(1 - busy / max(ends.values()))


def test_a_plan_that_does_not_fit_says_what_to_change():
    policy = tiny_policy("llama")
    fits = planned(policy, (2, 2), tap_layers=(1, 2))
    largest = max(memory.total for memory in fits.ranks)
    fits.require_room(largest)
    with pytest.raises(ValueError, match=r"Rank \d of the pipeline needs .*activations .*gradient_checkpointing=True"):
        fits.require_room(largest - 1)
    with pytest.raises(ValueError, match=re.escape("roll out with a vLLM server")):
        plan_memory(policy, PipelineShape((2, 2), 2, 4), rows=1, columns=1).require_room(1)
    with pytest.raises(ValueError, match=r"largest parts are draft .*draft_shard_optimizer=True"):
        planned(policy, (2, 2), draft_bytes=2**20).require_room(2**20)
    assert re.search(r"bubble 20\.0%", fits.table())
    assert len(fits.table().splitlines()) == 4


def test_a_forward_that_looks_at_values_is_refused_by_name():
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    with pytest.raises(ValueError, match="LlamaForCausalLM saves cannot be counted without running it"):
        planned(tiny_policy("llama", rope_parameters=rope))


def test_experts_whose_kernel_has_no_fake_form_are_refused_by_name():
    # As of torch 2.13: grouped matrix products of fp32.
    with pytest.raises(PlanUnavailable, match="MixtralForCausalLM saves cannot be counted without running it"):
        planned(tiny_policy("mixtral"))


def test_shared_state_is_divided_by_the_ranks_that_share_it():
    policy = tiny_policy("llama")
    alone, shared = (planned(policy, state_sharers=count) for count in (1, 4))
    for one, four in zip(alone.ranks, shared.ranks, strict=True):
        assert four.optimizer == one.optimizer / 4
        assert four.gradients == one.gradients


def test_a_draft_takes_what_it_has_after_a_step_and_the_copy_that_rolls_out():
    draft, _ = draft_case(dtype=torch.float32)
    optimizer = torch.optim.AdamW(draft.parameters())
    for parameter in draft.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    weights = sum(parameter.nbytes for parameter in draft.parameters())
    states = sum(value.nbytes for state in optimizer.state.values() for value in state.values() if value.dim())
    gradients = sum(parameter.grad.nbytes for parameter in draft.parameters())
    assert draft_memory(draft) == weights + gradients + states
    assert draft_memory(draft, rolls_out=True) == draft_memory(draft) + weights


def test_a_reference_policy_counts_as_weights_of_every_rank():
    policy = tiny_policy("llama")
    alone, beside = (planned(policy, reference_bytes=size) for size in (0, 999))
    assert [rank.weights for rank in beside.ranks] == [rank.weights + 999 for rank in alone.ranks]
    assert [rank.total for rank in beside.ranks] == [rank.total + 999 for rank in alone.ranks]


def test_the_table_shows_small_policies_in_a_unit_that_shows_them():
    table = planned(tiny_policy("llama")).table()
    assert "MiB per rank" in table
    assert all(float(row.split()[-1]) > 0 for row in table.splitlines()[1:3])
