"""
How many decoder layers each stage of a pipeline gets, the policy's head and the draft counted.

Costs are times for a microbatch, forward and backward, in units of a decoder layer's.
"""

from torch import nn
from transformers import PreTrainedConfig

from ..modeling.configuration_eagle3 import experts_per_token
from ..modeling.policy import decoder_of
from .order import BACKWARD_TIME, FORWARD_TIME, Action, Order, action_ends


# Share by which the largest stage may grow, and with it the memory of its rank, for a draft that begins sooner.
MOST_GROWTH = 1 / 8


def balance_layers(num_layers: int, num_stages: int, *, head_cost: float = 0.0) -> tuple[int, ...]:
    """
    Layers per stage such that the slowest stage is as fast as can be, the head on the last one counted.

    Args:
        num_layers (`int`), num_stages (`int`):
            Decoder layers of the policy, and stages.
        head_cost (`float`, *optional*, defaults to `0.0`):
            See [`head_cost_of`].

    Returns:
        `tuple[int, ...]`: at least one per stage.

    Raises:
        ValueError: if there are more stages than layers.
    """
    if num_stages > num_layers:
        raise ValueError(
            f"{num_layers} layers cannot be split into {num_stages} stages: every stage needs at least one. Use at "
            f"most {num_layers} stages (in the trainer: lower `pipeline_parallel_size`)."
        )
    layers = [1] * num_stages
    extra = [0.0] * (num_stages - 1) + [head_cost]
    for _ in range(num_layers - num_stages):
        # The latest of equals: earlier stages hold the activations of more microbatches.
        layers[min(range(num_stages), key=lambda stage: (layers[stage] + extra[stage], -stage))] += 1
    return tuple(layers)


def fastest_layers(
    num_layers: int, order: Order, *, head_cost: float = 0.0, draft_cost: float = 0.0, most_growth: float = MOST_GROWTH
) -> tuple[int, ...]:
    """
    Layers per stage with which a step takes the least time, the draft's training counted. It runs on the last rank
    when that has done its last backward, while other ranks still run theirs: fewer layers there let it begin sooner
    and make the other stages slower. Which number of layers on that rank is best is simulated.

    Args:
        num_layers (`int`):
            Decoder layers of the policy.
        order (`tuple[tuple[Action, ...], ...]`):
            By rank, its actions: see [`schedule_order`].
        head_cost (`float`, *optional*, defaults to `0.0`), draft_cost (`float`, *optional*, defaults to `0.0`):
            See [`head_cost_of`] and [`draft_cost_of`].
        most_growth (`float`, *optional*, defaults to `1/8`):
            Share by which the largest stage may exceed the largest of [`balance_layers`].

    Returns:
        `tuple[int, ...]`: at least one per stage.

    Raises:
        ValueError: if there are more stages than layers.
    """
    num_ranks, num_stages = len(order), 1 + max(action.stage for actions in order for action in actions)
    even = balance_layers(num_layers, num_stages, head_cost=head_cost)
    if num_ranks == 1 or not draft_cost:
        return even
    is_last = [stage % num_ranks == num_ranks - 1 for stage in range(num_stages)]
    of_last = [count for count, last in zip(even, is_last, strict=True) if last]
    splits = [even]
    for count in range(sum(of_last) - 1, len(of_last) - 1, -1):
        own = iter(balance_layers(count, len(of_last), head_cost=head_cost))
        others = iter(balance_layers(num_layers - count, num_stages - len(of_last)))
        splits.append(tuple(next(own if last else others) for last in is_last))
    most = (1 + most_growth) * max(even)
    return min(
        (layers for layers in splits if max(layers) <= most),
        key=lambda layers: step_time(order, layers, head_cost=head_cost, draft_cost=draft_cost),
    )


def step_time(order: Order, layers: tuple[int, ...], *, head_cost: float = 0.0, draft_cost: float = 0.0) -> float:
    """
    From the first forward until all backwards have run and the draft has learned from every microbatch, if messages
    take no time: in units of a layer's forward, of which its backward takes two.

    Args:
        order (`tuple[tuple[Action, ...], ...]`), head_cost (`float`), draft_cost (`float`):
            As in [`fastest_layers`].
        layers (`tuple[int, ...]`):
            Decoder layers of each stage.
    """
    costs = [*layers[:-1], layers[-1] + head_cost]

    def time_of(action: Action) -> float:
        return costs[action.stage] * (BACKWARD_TIME if action.backward else FORWARD_TIME)

    ends = action_ends(order, len(layers), time_of)
    of_last = [ends[action] for action in order[-1]]
    num_microbatches = sum(action.stage == len(layers) - 1 and action.backward for action in order[-1])
    learning = num_microbatches * draft_cost * (FORWARD_TIME + BACKWARD_TIME)
    return max(max(of_last) + learning, *ends.values())


def head_cost_of(policy: nn.Module) -> float:
    """Weights of the policy's head per weight of a layer that a token goes through: about the ratio of their times."""
    return policy.get_output_embeddings().weight.numel() / _weights_of_layer(policy)


def draft_cost_of(policy: nn.Module, draft: PreTrainedConfig, num_passes: int) -> float:
    """
    Multiply-adds of the draft's training in units of those of a layer's forward and backward, attention's products
    left out of both: the formula of `benchmarks/cotraining_overhead.py` with every pass over all rows, which is an
    upper bound.

    Args:
        policy ([`~transformers.PreTrainedModel`]):
            The policy, whole.
        draft ([`Eagle3DraftConfig`]):
            Shape of the draft.
        num_passes (`int`):
            `draft_ttt_steps`.
    """
    width, heads = draft.hidden_size, draft.num_attention_heads * draft.head_dim
    kv_heads = draft.num_key_value_heads * draft.head_dim
    block = heads * width + 3 * width * draft.intermediate_size
    first = 2 * width * (heads + 2 * kv_heads)  # reads embeddings too
    later = width * (heads + 2 * kv_heads)
    layers = draft.num_hidden_layers * block + first + (draft.num_hidden_layers - 1) * later
    each_pass = 3 * (layers + width * draft.draft_vocab_size)
    # Taps need no gradient, and the teacher none at all.
    once = 2 * len(draft.tap_layers) * draft.target_hidden_size * width + policy.get_output_embeddings().weight.numel()
    return (num_passes * each_pass + once) / (3 * _weights_of_layer(policy))


def _weights_of_layer(policy: nn.Module) -> float:
    """Weights of the first decoder layer that a token goes through: of experts the active ones alone."""
    layer = decoder_of(policy).layers[0]
    active = experts_per_token(policy.config.get_text_config().per_layer_config[0])
    # Quantised matrices are packed into fewer values.
    packed = {m.weight: m.in_features * m.out_features for m in layer.modules() if isinstance(m, nn.Linear)}

    def count(parameter: nn.Parameter) -> float:
        values = packed.get(parameter, parameter.numel())
        # Matrices of experts are stacked.
        return values * active / len(parameter) if active and parameter.dim() == 3 else values

    return sum(map(count, layer.parameters()))
