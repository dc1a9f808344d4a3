"""How many layers each stage gets, against all splits there are and against what torch counts."""

from functools import cache
from itertools import combinations

import pytest
import torch
from modeling.draft_cases import draft_case, microbatch
from tiny import tiny_policy
from torch.utils.flop_counter import FlopCounterMode

from trl_codraft.modeling.policy import decoder_of
from trl_codraft.pp.balance import balance_layers, draft_cost_of, fastest_layers, head_cost_of, step_time
from trl_codraft.pp.order import schedule_order
from trl_codraft.training.draft_trainer import DraftTrainer, DraftTrainingArguments


@pytest.mark.parametrize(
    ("num_layers", "num_stages", "head_cost", "expected"),
    [
        (32, 4, 0.0, (8, 8, 8, 8)),
        (34, 4, 0.0, (8, 8, 9, 9)),
        (32, 4, 4.0, (9, 9, 9, 5)),
        (6, 3, 100.0, (2, 3, 1)),
    ],
)
def test_layers_are_balanced_with_the_head_counted(num_layers, num_stages, head_cost, expected):
    layers = balance_layers(num_layers, num_stages, head_cost=head_cost)
    assert layers == expected
    # No other split has a faster slowest stage.
    slowest = max(*layers[:-1], layers[-1] + head_cost)
    average = (num_layers - layers[-1]) / (num_stages - 1)
    assert slowest - max(average, layers[-1] + head_cost) < 1


def test_more_stages_than_layers_are_refused():
    with pytest.raises(ValueError, match="4 layers cannot be split into 5 stages"):
        balance_layers(4, 5)
    with pytest.raises(ValueError, match="4 layers cannot be split into 5 stages"):
        fastest_layers(4, schedule_order("GPipe", 5, 5, 5), draft_cost=1.0)


def dense_step_time(order, layers, head_cost, draft_cost):
    """
    The time at which the last thing of a step ends: each begins when its rank is free and what it needs has ended.
    """
    last = len(layers) - 1
    place = {action: (rank, index) for rank, actions in enumerate(order) for index, action in enumerate(actions)}

    @cache
    def end(action):
        (rank, index), (stage, microbatch, backward) = place[action], action
        needs = [order[rank][index - 1]] if index else []
        if backward and stage < last:
            needs.append((stage + 1, microbatch, True))
        if not backward and stage > 0:
            needs.append((stage - 1, microbatch, False))
        cost = layers[stage] + (head_cost if stage == last else 0)
        return max((end(need) for need in needs), default=0) + cost * (2 if backward else 1)

    microbatches = len({action.microbatch for action in place})
    return max(end(order[-1][-1]) + 3 * draft_cost * microbatches, *map(end, place))


SCHEDULES = [("GPipe", 3, 3, 3), ("1F1B", 2, 2, 4), ("1F1B", 4, 4, 4), ("1F1B", 3, 3, 9), ("Interleaved1F1B", 2, 4, 4)]


@pytest.mark.parametrize(("head_cost", "draft_cost"), [(0.3, 0.5), (0.3, 2.0), (1.0, 4.0), (3.0, 1.0), (0.0, 7.0)])
@pytest.mark.parametrize(
    "sizes", SCHEDULES, ids=lambda sizes: f"{sizes[0]}, {sizes[2]} stages, {sizes[3]} microbatches"
)
def test_no_split_with_equal_stages_on_the_other_ranks_and_little_larger_ones_is_faster(sizes, head_cost, draft_cost):
    (_, num_ranks, num_stages, _), num_layers, order = sizes, 18, schedule_order(*sizes)
    costs = {"head_cost": head_cost, "draft_cost": draft_cost}
    found = fastest_layers(num_layers, order, **costs)
    even = balance_layers(num_layers, num_stages, head_cost=head_cost)
    candidates = []
    for cuts in combinations(range(1, num_layers), num_stages - 1):
        layers = tuple(b - a for a, b in zip((0, *cuts), (*cuts, num_layers), strict=True))
        others = [count for stage, count in enumerate(layers) if (stage + 1) % num_ranks]
        if others == sorted(others) and others[-1] - others[0] <= 1 and max(layers) <= 1.125 * max(even):
            candidates.append(layers)
    times = {layers: dense_step_time(order, layers, **costs) for layers in candidates}
    for layers, time in times.items():
        assert step_time(order, layers, **costs) == pytest.approx(time)
    # Where the last rank has several stages, they are balanced, which is not always the very best.
    assert times[found] <= (1.000001 if num_stages == num_ranks else 1.03) * min(times.values())
    assert times[found] <= dense_step_time(order, even, **costs)


def test_a_draft_that_learns_long_takes_layers_from_the_last_stage():
    few, many = schedule_order("1F1B", 4, 4, 4), schedule_order("1F1B", 4, 4, 64)
    assert fastest_layers(32, few) == fastest_layers(32, many) == (8, 8, 8, 8)
    assert fastest_layers(32, few, draft_cost=7.0) == (9, 9, 9, 5)
    # With many microbatches little of a step is time in which it could run beside others.
    assert fastest_layers(32, many, draft_cost=7.0) == (8, 8, 8, 8)


def test_the_cost_of_a_head_is_in_layers():
    policy = tiny_policy("llama")
    # 104 x 32 weights; a layer has q, o 32 x 32, k, v 16 x 32, three 48 x 32 and two norms.
    assert head_cost_of(policy) == 104 * 32 / (2 * 32 * 32 + 2 * 16 * 32 + 3 * 48 * 32 + 2 * 32)


def test_the_cost_of_a_head_does_not_depend_on_how_weights_are_packed():
    policy = tiny_policy("llama")
    cost = head_cost_of(policy)
    for module in policy.model.layers.modules():
        if isinstance(module, torch.nn.Linear):
            # Two values of four bits to a byte, as bitsandbytes has them.
            packed = torch.zeros(module.weight.numel() // 2, 1, dtype=torch.uint8)
            module.weight = torch.nn.Parameter(packed, requires_grad=False)
    assert head_cost_of(policy) == cost


def counted(function):
    """Multiply-adds of matrix products, those of attention on a CPU left out, as torch counts them."""
    in_place = {torch.ops.aten.addmm_: lambda total, a, b, *rest, out_shape=None, **named: 2 * a[0] * a[1] * b[1]}
    with FlopCounterMode(display=False, custom_mapping=in_place) as counter:
        function()
    return counter.get_total_flops() / 2


@pytest.mark.parametrize(("model_type", "experts"), [("mixtral", "num_local_experts"), ("qwen3_moe", "num_experts")])
def test_of_experts_those_that_are_active_cost(model_type, experts):
    length, sizes = 400, {experts: 16, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    policy = tiny_policy(model_type, dtype=torch.float64, **sizes)
    policy.set_experts_implementation("eager")  # torch does not count the grouped products
    hidden = torch.randn(1, length, policy.config.hidden_size, dtype=torch.float64)
    positions = policy.model.rotary_emb(hidden, torch.arange(length)[None])
    with torch.no_grad():
        of_layer = counted(lambda: policy.model.layers[0](hidden, position_embeddings=positions))
        of_head = counted(lambda: policy.lm_head(hidden))
    assert head_cost_of(policy) == pytest.approx(of_head / of_layer, rel=0.03)


@pytest.mark.parametrize("settings", [{}, {"reduced": True}, {"num_hidden_layers": 2}, {"tap_layers": (0, 1, 2, 3)}])
@pytest.mark.parametrize("num_passes", [1, 4])
def test_the_cost_of_a_draft_is_what_torch_counts(settings, num_passes):
    length, dtype = 400, torch.float64
    draft, head = draft_case(dtype, **settings)
    batch, _ = microbatch(draft.config, [length], [[(0, length)]], num_passes, dtype)
    trainer = DraftTrainer(draft, head, DraftTrainingArguments(num_passes=num_passes), num_training_steps=1)
    layer, policy = decoder_of(head.policy).layers[0], head.policy
    hidden = torch.randn(1, length, policy.config.hidden_size, dtype=dtype, requires_grad=True)
    positions = policy.model.rotary_emb(hidden, torch.arange(length)[None])
    of_layer = counted(lambda: layer(hidden, position_embeddings=positions).sum().backward())
    of_draft = counted(lambda: trainer.accumulate(batch))
    # A few rows at the end predict nothing; weights of norms are no products.
    assert draft_cost_of(policy, draft.config, num_passes) == pytest.approx(of_draft / of_layer, rel=0.03)
