"""
What a pipeline holds per rank, and how long its ranks wait, before any of it is allocated.

Weights, gradients, optimizer state, taps and the replica follow from shapes. Activations are what autograd saves in one
layer, counted on fake tensors of the real sizes. Not counted: the allocator's fragments, temporaries of single operations,
libraries, and the cache of rollouts.

Letters: `p` ranks, `v` stages per rank, `n` microbatches, `B` rows, `S` columns, `H` hidden size, `V` vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from ..modeling.taps import decoder_of
from .order import Order, schedule_order
from .stages.split import two_layer_config
from .taps.plan import TapPlan


# What to change when a rank's largest part does not fit.
ADVICE = {
    "weights": "raise `pipeline_parallel_size`, load the policy in bf16, or train adapters (LoRA)",
    "gradients": "raise `pipeline_parallel_size` or train adapters (LoRA)",
    "optimizer": "set `pipeline_shard_optimizer=True`, raise `pipeline_parallel_size`, train adapters (LoRA), or choose an "
    "optimizer with less state",
    "activations": "set `gradient_checkpointing=True`, lower `per_device_train_batch_size`, raise "
    "`context_parallel_size`, or use the 1F1B schedule",
    "taps": "tap fewer layers, or lower `gradient_accumulation_steps` or `per_device_train_batch_size`",
    "draft": "set `draft_shard_optimizer=True`, use a smaller draft (`draft_vocab_size`), or give the last stage fewer layers",
    "replica": "roll out with a vLLM server instead of a replica per rank",
}


class PlanUnavailable(ValueError):
    """What the layers of a policy keep cannot be counted without running it."""


@dataclass(frozen=True)
class RankMemory:
    """
    Bytes that one rank holds at its peak.

    Attributes:
        weights (`int`), gradients (`int`), optimizer (`int`):
            Of its stages. A reference policy counts among the weights.
        activations (`int`):
            What autograd keeps of the microbatches under way, and the hidden states that travel.
        taps (`int`):
            On the draft's rank landing slots, and the taps and last hidden states of a step; copies that are under way on
            others.
        draft (`int`):
            On the draft's rank.
        replica (`int`):
            The whole policy for rollouts.
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int
    taps: int
    draft: int
    replica: int

    @property
    def total(self) -> int:
        return sum(getattr(self, field.name) for field in fields(self))


@dataclass(frozen=True)
class PipelineMemory:
    """
    Attributes:
        ranks (`tuple[RankMemory, ...]`): by rank.
        bubble (`float`): share of a step that a rank waits, at equal stage times.
    """

    ranks: tuple[RankMemory, ...]
    bubble: float

    def table(self) -> str:
        """In GiB, or MiB where that is little, a row per rank; the bubble below."""
        names = [field.name for field in fields(RankMemory)] + ["total"]
        unit, size = ("GiB", 2**30) if max(memory.total for memory in self.ranks) >= 2**30 else ("MiB", 2**20)
        lines = ["rank " + " ".join(f"{name:>11}" for name in names)]
        for rank, memory in enumerate(self.ranks):
            lines.append(f"{rank:>4} " + " ".join(f"{getattr(memory, name) / size:>11.2f}" for name in names))
        return "\n".join([*lines, f"{unit} per rank; bubble {self.bubble:.1%}"])


def bubble_share(num_ranks: int, num_microbatches: int, stages_per_rank: int = 1) -> float:
    """
    Share of a step that a rank waits, `(p - 1) / (v * n + p - 1)`, at equal stage times (arXiv 2104.04473, section 2.2).

    Args:
        num_ranks (`int`):
            `p`.
        num_microbatches (`int`):
            `n`: `GA * p * c` in training, with `GA` micro-steps, `c` context-parallel ranks.
        stages_per_rank (`int`, *optional*, defaults to `1`):
            `v`.
    """
    return (num_ranks - 1) / (stages_per_rank * num_microbatches + num_ranks - 1)


def draft_memory(draft: nn.Module, *, sharers: int = 1, rolls_out: bool = False) -> int:
    """
    Bytes that a rank has of a draft that learns: weights, gradients, two moments, and the copy that rolls out.

    Args:
        draft ([`Eagle3DraftModel`]):
            On any device.
        sharers (`int`, *optional*, defaults to `1`):
            Ranks that share the moments: see [`ShardedAdamW`].
        rolls_out (`bool`, *optional*, defaults to `False`):
            Whether there is that copy; it is taken to have the draft's dtype.
    """
    weights = sum(parameter.nbytes for parameter in draft.parameters())
    return (3 if rolls_out else 2) * weights - (-2 * weights // sharers)


def plan_memory(
    policy: nn.Module,
    layers_per_stage: Sequence[int],
    *,
    num_ranks: int,
    num_microbatches: int,
    rows: int,
    columns: int,
    schedule: str = "1F1B",
    tap_layers: Sequence[int] = (),
    gradient_checkpointing: bool = False,
    states_per_parameter: int = 2,
    state_sharers: int = 1,
    draft_bytes: int = 0,
    draft_everywhere: bool = False,
    replica: bool = True,
    views: bool = False,
    reference_bytes: int = 0,
    parts: Sequence[tuple[int, int]] | None = None,
    memory: int | None = None,
) -> PipelineMemory:
    """
    Args:
        policy ([`~transformers.PreTrainedModel`]):
            Whole, on any device (`meta` too); what is trained requires gradients. With `parts` only its class, config and
            dtype matter.
        layers_per_stage (`Sequence[int]`), num_ranks (`int`), schedule (`str`):
            As in [`split_policy`] and [`Pipeline`].
        num_microbatches (`int`), rows (`int`), columns (`int`):
            `n`, `B` and `S` of a step. Columns of a context-parallel shard if there is one.
        tap_layers (`Sequence[int]`, *optional*):
            Taps of the draft.
        gradient_checkpointing (`bool`, *optional*, defaults to `False`):
            Whether layers keep their inputs only.
        states_per_parameter (`int`, *optional*, defaults to `2`):
            Tensors that the optimizer keeps for a trained one: 2 for AdamW.
        state_sharers (`int`, *optional*, defaults to `1`):
            Ranks that share the optimizer's state of a stage: see [`SharedOptimizer`].
        draft_bytes (`int`, *optional*, defaults to `0`):
            Of the draft: see [`draft_memory`].
        draft_everywhere (`bool`, *optional*, defaults to `False`):
            Whether every rank holds the draft, not only that of the last stage.
        replica (`bool`, *optional*, defaults to `True`):
            Whether every rank holds the whole policy for rollouts.
        views (`bool`, *optional*, defaults to `False`):
            Whether the stages are views of it ([`StageView`]): it then holds their weights.
        reference_bytes (`int`, *optional*, defaults to `0`):
            Of a reference policy that every rank holds besides.
        parts (`Sequence[tuple[int, int]]`, *optional*):
            By rank, the bytes of its weights (of policy and reference) and of those it trains, where no rank has the whole
            policy.
        memory (`int`, *optional*):
            Bytes that a rank has.

    Returns:
        [`PipelineMemory`]

    Raises:
        ValueError: if a rank needs more than `memory`: which, how much, and what to change.
        PlanUnavailable: if fake tensors do not do for the forward of the policy: its rotary embeddings follow the length, or
            kernels of experts lack a fake form.
    """
    num_stages = len(layers_per_stage)
    order = schedule_order(schedule, num_ranks, num_stages, num_microbatches)
    if parts is None:
        weights, trained = (_rank_weights(policy, layers_per_stage, num_ranks, trained=only) for only in (False, True))
    else:
        weights, trained = zip(*parts, strict=True)
    hidden = rows * columns * policy.config.hidden_size * policy.dtype.itemsize
    kept, extra = _kept_per_stage(policy, layers_per_stage, rows, columns, gradient_checkpointing)
    taps = [0] * num_ranks
    if tap_layers:
        sizes = {"num_ranks": num_ranks, "num_microbatches": num_microbatches, "schedule": schedule}
        plan = TapPlan.for_layers(tap_layers, layers_per_stage, policy.config.hidden_size, policy.dtype, **sizes)
        taps = _tap_bytes(plan, (rows, columns), num_ranks)
        # The teacher reads the last hidden states, which the draft's rank has of itself.
        taps[(num_stages - 1) % num_ranks] += num_microbatches * hidden
    whole = sum(parameter.nbytes for parameter in policy.parameters())
    ranks = []
    for rank in range(num_ranks):
        stages = range(rank, num_stages, num_ranks)
        # Buffers of torch for a whole step: what a stage receives of forwards and of backwards.
        travelling = sum((stage > 0) + (stage < num_stages - 1) for stage in stages) * num_microbatches * hidden
        ranks.append(
            RankMemory(
                weights=weights[rank] + reference_bytes,
                gradients=trained[rank],
                optimizer=-(-states_per_parameter * trained[rank] // state_sharers),
                activations=_peak(order, rank, kept) + max(extra[stage] for stage in stages) + travelling,
                taps=taps[rank],
                draft=draft_bytes if draft_everywhere or rank == (num_stages - 1) % num_ranks else 0,
                replica=whole - (weights[rank] if views else 0) if replica else 0,
            )
        )
    result = PipelineMemory(tuple(ranks), bubble_share(num_ranks, num_microbatches, num_stages // num_ranks))
    if memory is not None:
        _require_room(result, memory)
    return result


def _require_room(plan: PipelineMemory, memory: int) -> None:
    rank = max(range(len(plan.ranks)), key=lambda number: plan.ranks[number].total)
    needed = plan.ranks[rank]
    if needed.total > memory:
        parts = sorted(ADVICE, key=lambda name: -getattr(needed, name))[:2]
        advice = "; ".join(f"{name} ({getattr(needed, name) / 2**30:.2f} GiB): {ADVICE[name]}" for name in parts)
        raise ValueError(
            f"Rank {rank} of the pipeline needs {needed.total / 2**30:.2f} GiB and has {memory / 2**30:.2f} GiB. Its "
            f"largest parts are {advice}.\n{plan.table()}"
        )


def _rank_weights(policy: nn.Module, layers_per_stage: Sequence[int], num_ranks: int, trained: bool) -> list[int]:
    """Bytes of the parameters of each rank, or of those that are trained; a tied embedding on the first and the last."""
    decoder = decoder_of(policy)
    embedding = policy.get_input_embeddings().weight

    def bytes_of(parameters) -> int:
        return sum(parameter.nbytes for parameter in parameters if parameter.requires_grad or not trained)

    ends = [sum(layers_per_stage[: stage + 1]) for stage in range(len(layers_per_stage))]
    stages = [
        sum(bytes_of(layer.parameters()) for layer in decoder.layers[end - count : end])
        for end, count in zip(ends, layers_per_stage, strict=True)
    ]
    others = bytes_of(policy.parameters()) - sum(stages) - bytes_of([embedding])
    stages[0] += bytes_of([embedding])
    stages[-1] += others
    if policy.config.tie_word_embeddings and len(stages) > 1:
        stages[-1] += bytes_of([embedding])
    return [sum(stages[rank::num_ranks]) for rank in range(num_ranks)]


def _kept_per_stage(
    policy: nn.Module, layers_per_stage: Sequence[int], rows: int, columns: int, checkpointing: bool
) -> tuple[list[int], list[int]]:
    """Bytes that each stage keeps of a microbatch from its forward to its backward, and takes in a backward besides."""
    layer, shared = saved_by_layer(policy, rows, columns)
    hidden = rows * columns * policy.config.hidden_size * policy.dtype.itemsize
    per_layer = hidden if checkpointing else layer
    kept = [count * per_layer + shared for count in layers_per_stage]
    # Logits of all columns in fp32: their log-softmax is kept.
    kept[-1] += rows * columns * policy.config.vocab_size * 4
    return kept, [layer if checkpointing else 0] * len(kept)


def saved_by_layer(policy: nn.Module, rows: int, columns: int) -> tuple[int, int]:
    """
    What autograd saves in a decoder layer, counted in a forward of a layer of the policy's class and config on fake tensors
    (nothing is allocated), without weights.

    Args:
        policy ([`~transformers.PreTrainedModel`]):
            Only its class, config and dtype matter. Attention that is not eager is taken to be that of
            torch with a mask, as padded rows need it: no scores are kept.
        rows (`int`), columns (`int`):
            `B` and `S`.

    Returns:
        `tuple[int, int]`: bytes of a layer, and of what layers share, such as masks and rotary embeddings.

    Raises:
        PlanUnavailable: if fake tensors do not do for the forward of the policy, as one that depends on values.
    """
    config = two_layer_config(policy.config)
    if config._attn_implementation != "eager":
        config._attn_implementation = "sdpa"
    # Kept alive, so that none takes another's place; not tensors, whose graph holds `pack` and would never be freed.
    saved: dict[int, torch.UntypedStorage] = {}
    shared: dict[int, torch.UntypedStorage] = {}
    counting: list[bool] = []

    def storage_of(tensor: torch.Tensor) -> int:
        return tensor.untyped_storage()._cdata

    def enter(module, args, kwargs):
        tensors = [leaf for leaf in tree_leaves((args[1:], kwargs)) if isinstance(leaf, torch.Tensor)]
        shared.update({storage_of(tensor): tensor.untyped_storage() for tensor in tensors})
        counting.append(True)

    def leave(module, args, output):
        counting.clear()

    def pack(tensor):
        if counting and storage_of(tensor) not in weights and storage_of(tensor) not in shared:
            saved[storage_of(tensor)] = tensor.untyped_storage()

    with FakeTensorMode():
        model = type(policy)._from_config(config, dtype=policy.dtype).train()
        weights = {storage_of(tensor) for tensor in [*model.parameters(), *model.buffers()]}
        layer = decoder_of(model).layers[1]
        layer.register_forward_pre_hook(enter, with_kwargs=True)
        layer.register_forward_hook(leave)
        ids = torch.zeros(rows, columns, dtype=torch.long)
        try:
            with saved_tensors_hooks(pack, lambda nothing: nothing):
                decoder_of(model)(input_ids=ids, use_cache=False)
        except RuntimeError as error:  # of operations on fakes: a policy that works with real tensors is not to blame
            raise PlanUnavailable(
                f"What a layer of {type(policy).__name__} saves cannot be counted without running it: its forward looks at "
                "values, as rotary embeddings that follow the length do, or has operations that fake tensors lack, as some "
                f"kernels of experts ({error}). Leave the plan out."
            ) from error
    return tuple(sum(storage.nbytes() for storage in found.values()) for found in (saved, shared))


def _peak(order: Order, rank: int, kept: Sequence[int]) -> int:
    """Most bytes that a rank keeps of microbatches whose backward has not run."""
    now = most = 0
    for action in order[rank]:
        now += -kept[action.stage] if action.backward else kept[action.stage]
        most = max(most, now)
    return most


def _tap_bytes(plan: TapPlan, shape: tuple[int, int], num_ranks: int) -> list[int]:
    """By rank: slots, staged messages, and on the draft's rank the taps of a whole step."""
    taps = [0] * num_ranks
    for lane in plan.lanes:
        taps[lane.source] += lane.slots * plan.message_bytes(lane.stage, shape)
        taps[lane.sink] += lane.slots * plan.message_bytes(lane.stage, shape)
    taps[plan.stage_ranks[plan.sink]] += plan.num_microbatches * sum(tap.num_bytes(shape) for tap in plan.taps)
    return taps
