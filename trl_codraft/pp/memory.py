"""
Plans the memory of a pipeline by rank, and how long ranks wait, before anything is allocated.

Weights, gradients, optimizer state, taps and the replica follow from shapes. Activations are what autograd saves in
one layer, counted on fake tensors of the real sizes. Not counted: the allocator's fragments, temporaries of single
operations, libraries, and the cache of rollouts.

Letters: `p` ranks, `v` stages per rank, `n` microbatches, `B` rows, `S` columns, `H` hidden size, `V` vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from ..modeling.policy import decoder_of, two_layer_config
from .order import Order
from .shape import PipelineShape, stages_of_layers
from .taps.plan import TapPlan


# What to change when a rank's largest part does not fit.
ADVICE = {
    "weights": "raise `pipeline_parallel_size`, load the policy in bf16, or train adapters (LoRA)",
    "gradients": "raise `pipeline_parallel_size` or train adapters (LoRA)",
    "optimizer": "set `pipeline_shard_optimizer=True`, raise `pipeline_parallel_size`, train adapters (LoRA), or "
    "choose an optimizer with less state",
    "activations": "set `gradient_checkpointing=True`, lower `per_device_train_batch_size`, raise "
    "`context_parallel_size`, or use the 1F1B schedule",
    "taps": "tap fewer layers, or lower `gradient_accumulation_steps` or `per_device_train_batch_size`",
    "draft": "set `draft_shard_optimizer=True`, use a smaller draft (`draft_vocab_size`), or give the last stage "
    "fewer layers",
    "replica": "roll out with a vLLM server instead of a replica per rank",
}


class PlanUnavailable(ValueError):
    """The bytes that layers of a policy keep cannot be counted without running it."""


@dataclass(frozen=True)
class RankMemory:
    """
    Bytes that one rank holds at its peak.

    Attributes:
        weights (`int`), gradients (`int`), optimizer (`int`):
            Bytes of its stages. A reference policy counts among the weights.
        activations (`int`):
            Tensors that autograd keeps of the microbatches under way, and the hidden states that travel.
        taps (`int`):
            On the draft's rank landing slots, and the taps and last hidden states of a step; copies that are under way
            on others.
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
        """Shows a row per rank in GiB, or in MiB where that is little; the bubble below."""
        names = [field.name for field in fields(RankMemory)] + ["total"]
        unit, size = ("GiB", 2**30) if max(memory.total for memory in self.ranks) >= 2**30 else ("MiB", 2**20)
        lines = ["rank " + " ".join(f"{name:>11}" for name in names)]
        for rank, memory in enumerate(self.ranks):
            lines.append(f"{rank:>4} " + " ".join(f"{getattr(memory, name) / size:>11.2f}" for name in names))
        return "\n".join([*lines, f"{unit} per rank; bubble {self.bubble:.1%}"])

    def require_room(self, memory: int) -> None:
        """
        Checks that every rank gets along with so many bytes.

        Raises:
            ValueError: if one does not: which, how much it needs, and what to change.
        """
        rank = max(range(len(self.ranks)), key=lambda number: self.ranks[number].total)
        needed = self.ranks[rank]
        if needed.total > memory:
            largest = sorted(ADVICE, key=lambda name: -getattr(needed, name))[:2]
            advice = "; ".join(f"{name} ({getattr(needed, name) / 2**30:.2f} GiB): {ADVICE[name]}" for name in largest)
            raise ValueError(
                f"Rank {rank} of the pipeline needs {needed.total / 2**30:.2f} GiB and has {memory / 2**30:.2f} GiB. "
                f"Its largest parts are {advice}.\n{self.table()}"
            )


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


@dataclass(frozen=True)
class Holdings:
    """
    Memory that ranks hold besides the microbatches of a step.

    Args:
        states_per_parameter (`int`, *optional*, defaults to `2`):
            Tensors that the optimizer keeps for a trained one: 2 for AdamW.
        state_sharers (`int`, *optional*, defaults to `1`):
            Ranks that share the optimizer's state of a stage: see [`SharedOptimizer`].
        draft_bytes (`int`, *optional*, defaults to `0`):
            Bytes of the draft: see [`draft_memory`].
        draft_everywhere (`bool`, *optional*, defaults to `False`):
            Whether every rank holds the draft, not only that of the last stage.
        replica (`bool`, *optional*, defaults to `True`):
            Whether every rank holds the whole policy for rollouts.
        views (`bool`, *optional*, defaults to `False`):
            Whether the stages are views of it ([`StageView`]): it then holds their weights.
        reference_bytes (`int`, *optional*, defaults to `0`):
            Bytes of a reference policy that every rank holds besides.
        stage_weights (`Sequence[tuple[int, int]]`, *optional*):
            By rank, the bytes of its weights (of policy and reference) and of those it trains, where no rank has the
            whole policy.
    """

    states_per_parameter: int = 2
    state_sharers: int = 1
    draft_bytes: int = 0
    draft_everywhere: bool = False
    replica: bool = True
    views: bool = False
    reference_bytes: int = 0
    stage_weights: Sequence[tuple[int, int]] | None = None


def plan_memory(
    policy: nn.Module,
    shape: PipelineShape,
    *,
    rows: int,
    columns: int,
    tap_layers: Sequence[int] = (),
    gradient_checkpointing: bool = False,
    holdings: Holdings = Holdings(),
) -> PipelineMemory:
    """
    Plans the memory of a training step.

    Args:
        policy ([`~transformers.PreTrainedModel`]):
            Whole, on any device (`meta` too); trained parameters require gradients. With `holdings.stage_weights` only
            its class, config and dtype matter.
        shape ([`PipelineShape`]):
            Its stages, and the microbatches of the step.
        rows (`int`), columns (`int`):
            `B` and `S` of a microbatch. Columns of a context-parallel shard if there is one.
        tap_layers (`Sequence[int]`, *optional*):
            Taps of the draft.
        gradient_checkpointing (`bool`, *optional*, defaults to `False`):
            Whether layers keep their inputs only.
        holdings ([`Holdings`], *optional*):
            Memory that ranks hold besides.

    Returns:
        [`PipelineMemory`]

    Raises:
        ValueError: if the schedule cannot run with these sizes.
        PlanUnavailable: if fake tensors do not do for the forward of the policy: its rotary embeddings follow the
        length, or
            kernels of experts lack a fake form.
    """
    if holdings.stage_weights is None:
        weights, trained = (_rank_weights(policy, shape, trained=only) for only in (False, True))
    else:
        weights, trained = zip(*holdings.stage_weights, strict=True)
    activations = _activation_bytes(policy, shape, rows, columns, gradient_checkpointing)
    taps = _tap_bytes(policy, shape, (rows, columns), tap_layers)
    whole = sum(parameter.nbytes for parameter in policy.parameters()) if holdings.replica else 0
    ranks = [
        RankMemory(
            weights=weights[rank] + holdings.reference_bytes,
            gradients=trained[rank],
            optimizer=-(-holdings.states_per_parameter * trained[rank] // holdings.state_sharers),
            activations=activations[rank],
            taps=taps[rank],
            draft=holdings.draft_bytes if holdings.draft_everywhere or rank == shape.rank_of_last else 0,
            replica=whole - (weights[rank] if holdings.replica and holdings.views else 0),
        )
        for rank in range(shape.num_ranks)
    ]
    return PipelineMemory(tuple(ranks), shape.bubble)


def _rank_weights(policy: nn.Module, shape: PipelineShape, trained: bool) -> list[int]:
    """Bytes of the weights of each rank, or of the trained ones; a tied embedding on the first and the last."""
    decoder = decoder_of(policy)
    embedding = policy.get_input_embeddings().weight

    def bytes_of(parameters) -> int:
        return sum(parameter.nbytes for parameter in parameters if parameter.requires_grad or not trained)

    stages = [0] * shape.num_stages
    for stage, layer in zip(stages_of_layers(shape.layers), decoder.layers, strict=True):
        stages[stage] += bytes_of(layer.parameters())
    others = bytes_of(policy.parameters()) - sum(stages) - bytes_of([embedding])
    stages[0] += bytes_of([embedding])
    stages[-1] += others
    if policy.config.tie_word_embeddings and len(stages) > 1:
        stages[-1] += bytes_of([embedding])
    return [sum(stages[stage] for stage in shape.stages_of(rank)) for rank in range(shape.num_ranks)]


def _activation_bytes(
    policy: nn.Module, shape: PipelineShape, rows: int, columns: int, checkpointing: bool
) -> list[int]:
    """By rank, bytes that autograd keeps at its peak, and torch's buffers for the messages of a whole step."""
    layer, shared = saved_by_layer(policy, rows, columns)
    hidden = _hidden_bytes(policy, (rows, columns))
    # Bytes that each stage keeps of a microbatch from its forward to its backward.
    kept = [count * (hidden if checkpointing else layer) + shared for count in shape.layers]
    # Logits of all columns in fp32: their log-softmax is kept.
    kept[-1] += rows * columns * policy.config.vocab_size * 4
    recomputed = layer if checkpointing else 0
    activations = []
    for rank in range(shape.num_ranks):
        # A stage receives hidden states in forwards and gradients in backwards, but for the two ends.
        received = sum((stage > 0) + (stage < shape.num_stages - 1) for stage in shape.stages_of(rank))
        activations.append(_peak(shape.order, rank, kept) + recomputed + received * shape.num_microbatches * hidden)
    return activations


def _hidden_bytes(policy: nn.Module, leading: tuple[int, int]) -> int:
    """Bytes of the hidden states of a microbatch."""
    return leading[0] * leading[1] * policy.config.hidden_size * policy.dtype.itemsize


def saved_by_layer(policy: nn.Module, rows: int, columns: int) -> tuple[int, int]:
    """
    Counts the tensors that autograd saves in a decoder layer, in a forward of a layer of the policy's class and config
    on fake tensors (nothing is allocated), without weights.

    Args:
        policy ([`~transformers.PreTrainedModel`]):
            Only its class, config and dtype matter. Attention that is not eager is taken to be that of
            torch with a mask, as padded rows need it: no scores are kept.
        rows (`int`), columns (`int`):
            `B` and `S`.

    Returns:
        `tuple[int, int]`: bytes of a layer, and of tensors that layers share, such as masks and rotary embeddings.

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
                f"What a layer of {type(policy).__name__} saves cannot be counted without running it: its forward "
                "looks at values, as rotary embeddings that follow the length do, or has operations that fake tensors "
                f"lack, as some kernels of experts ({error}). Leave the plan out."
            ) from error
    return tuple(sum(storage.nbytes() for storage in found.values()) for found in (saved, shared))


def _peak(order: Order, rank: int, kept: Sequence[int]) -> int:
    """Most bytes that a rank keeps of microbatches whose backward has not run."""
    now = most = 0
    for action in order[rank]:
        now += -kept[action.stage] if action.backward else kept[action.stage]
        most = max(most, now)
    return most


def _tap_bytes(
    policy: nn.Module, shape: PipelineShape, leading: tuple[int, int], tap_layers: Sequence[int]
) -> list[int]:
    """By rank: slots, staged messages, and on the draft's rank taps and last hidden states of a whole step."""
    taps = [0] * shape.num_ranks
    if not tap_layers:
        return taps
    plan = TapPlan.for_layers(tap_layers, shape, policy.config.hidden_size, policy.dtype)
    for lane in plan.lanes:
        taps[lane.source] += lane.slots * plan.message_bytes(lane.stage, leading)
        taps[lane.sink] += lane.slots * plan.message_bytes(lane.stage, leading)
    # The teacher reads the last hidden states, which the draft's rank has of itself.
    kept = sum(tap.num_bytes(leading) for tap in plan.taps) + _hidden_bytes(policy, leading)
    taps[shape.rank_of_last] += shape.num_microbatches * kept
    return taps
