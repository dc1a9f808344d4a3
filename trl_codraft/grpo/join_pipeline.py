"""
Pipeline parallelism in the trainer: what is refused, and how ranks join.

To TRL and Accelerate all ranks stay data-parallel workers; see `grpo/pipelined_losses.py` for the losses and `pp/` for the parts.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from accelerate.utils import DistributedType
from torch import nn
from transformers.training_args import OptimizerNames
from transformers.utils import logging

from ..config import CoDraftGRPOConfig
from ..cp.rotary import rotary_by_length
from ..cp.sharding import ContextSharding
from ..group.exchange import LossGroup, new_loss_group
from ..modeling.taps import decoder_of
from ..pp.memory import PlanUnavailable, bubble_share, draft_memory, plan_memory
from ..pp.pipeline import Pipeline
from ..pp.stages.loading import align_parts
from ..pp.stages.replica import PolicyReplica
from ..pp.stages.split import verify_split
from ..pp.stages.view import StageView
from ..pp.taps.channel import TapChannel
from ..pp.taps.opening import open_channel
from ..pp.taps.plan import TapPlan
from .grouped_losses import TRAVELLING_TENSORS
from .join_context import require_shards
from .pipeline_microbatches import ShardedRows, WholeRows
from .pipelined_losses import Pipelining, StagedModel
from .pretraining import longest_prompt
from .stage_weights import PolicyParts, layers_of_stages, place_in_pipeline
from .support import base_policy, unsupported_in_groups


if TYPE_CHECKING:
    from ..trainer import CoDraftGRPOTrainer


logger = logging.get_logger(__name__)

INSTEAD = "Set `pipeline_parallel_size=1`."
# Of the training set, that memory is planned for.
PLANNED_PROMPTS = 256


def join_pipeline_group(trainer: "CoDraftGRPOTrainer", parts: PolicyParts | None) -> None:
    """
    Splits the layers of a trainer's policy over groups of `pipeline_parallel_size` ranks from now on. Collective.

    Args:
        trainer ([`CoDraftGRPOTrainer`]):
            The trainer, at the end of its construction.
        parts ([`~grpo.stage_weights.PolicyParts`] or `None`):
            What cut its policy down to this rank's stages; `None` if it is whole.

    Raises:
        ValueError: on all ranks, if the policy or the settings do not allow it; the message says what to set.
    """
    args, accelerator, policy = trainer.args, trainer.accelerator, base_policy(trainer.model)
    reason = unsupported_in_stages(trainer)
    if reason is not None:
        raise ValueError(f"`pipeline_parallel_size={args.pipeline_parallel_size}` is not possible: {reason}")
    verify_split(policy)
    rotary_by_length(policy)
    if args.context_parallel_size > 1:
        require_shards(trainer)
    layers = layers_of_stages(args, policy, trainer.draft_model) if parts is None else parts.layers
    groups = _Groups(args, accelerator.device)
    _announce_plan(trainer, layers, None if parts is None else _bytes_of_parts(trainer, groups.host))
    if parts is None:
        # As DDP would: one process's weights count, should they differ.
        for tensor in [*policy.parameters(), *policy.buffers()]:
            dist.broadcast(tensor.data, src=0)
    else:
        align_parts(policy, groups.pipeline, groups.holders, embedding=_has_embedding_copy(trainer))
    dtypes = [hidden_dtype(policy, accelerator.autocast) if groups.place == 0 else None]
    dist.broadcast_object_list(dtypes, group=groups.host, group_src=0)
    dtype = dtypes[0]
    channel = _open_channel(trainer, layers, dtype, groups.host)
    staged = _stage_model(trainer, policy, layers, groups, dtype, channel)
    replica = PolicyReplica(staged.pipeline.stages, groups.pipeline, whole=policy) if parts is None else None
    # Before training: it would be wrapped for data parallelism otherwise.
    trainer.model = trainer.model_wrapped = accelerator.prepare_model(trainer.model, evaluation_mode=True)
    trainer.model._is_accelerate_prepared = True
    reference = None
    if parts is not None and trainer.ref_model is not None:
        align_parts(trainer.ref_model, groups.pipeline, groups.holders)
        reference = _stage_model(trainer, trainer.ref_model, layers, groups, dtype)
    last = (len(layers) - 1) % args.pipeline_parallel_size * args.context_parallel_size
    pipelining = Pipelining(
        policy=staged,
        reference=reference,
        replica=replica,
        parts=parts,
        holders=groups.holders,
        host_group=groups.host,
        rank_of_last=last,
        saves=groups.saves,
        sends_embedding=parts is not None and _embedding_moves(trainer, groups.host),
    )
    trainer.join_pipeline(groups.loss, pipelining)
    if args.pipeline_shard_optimizer and dist.get_world_size(groups.holders) == 1 and accelerator.is_main_process:
        logger.warning("`pipeline_shard_optimizer=True` has no effect: no two ranks hold the same stage.")
    if parts is not None and args.use_vllm:
        trainer.vllm_generation.push_parts(groups.pipeline if groups.saves else None)


def _stage_model(
    trainer: "CoDraftGRPOTrainer",
    model: nn.Module,
    layers: tuple[int, ...],
    groups: "_Groups",
    dtype: torch.dtype,
    channel: TapChannel | None = None,
) -> StagedModel:
    """The pipeline of a policy, and what brings microbatches into its shape."""
    args = trainer.args
    stages = [
        StageView(model, layers, index, context=trainer.stage_forward)
        for index in range(groups.place, len(layers), args.pipeline_parallel_size)
    ]
    stages[-1].score = partial(trainer.score_stage, stages[-1])
    pipeline = Pipeline(
        stages,
        groups.pipeline,
        hidden_size=model.config.get_text_config().hidden_size,
        dtype=dtype,
        device=trainer.accelerator.device,
        schedule=args.pipeline_schedule,
        channel=channel,
    )
    rows_of = partial(WholeRows, pad_token_id=trainer._tokenizer.pad_token_id, rotary=rotary_by_length(model))
    if args.context_parallel_size > 1:
        if trainer.sharding is None:
            trainer.sharding = ContextSharding(groups.shards, base_policy, args.context_parallel_layout)
        shards = LossGroup(groups.shards, dist.group.WORLD, trainer.accelerator.device, TRAVELLING_TENSORS)
        rows_of = partial(ShardedRows, sharding=trainer.sharding, group=shards, policy=model)
    return StagedModel(pipeline, rows_of)


def _has_embedding_copy(trainer: "CoDraftGRPOTrainer") -> bool:
    """Whether the last stage of a policy in parts holds the input embedding too."""
    return trainer.args.use_draft or base_policy(trainer.model).config.tie_word_embeddings


def _embedding_moves(trainer: "CoDraftGRPOTrainer", group: dist.ProcessGroup) -> bool:
    """Whether the first stage trains an embedding of which the last one has a copy for the draft. Collective."""
    policy = base_policy(trainer.model)
    moves = [False]
    if dist.get_rank(group) == 0:
        trained = any(parameter.requires_grad for parameter in policy.get_input_embeddings().parameters())
        moves = [trainer.args.use_draft and trained and not policy.config.tie_word_embeddings]
    dist.broadcast_object_list(moves, group=group, group_src=0)
    return moves[0]


class _Groups:
    """
    The process groups of this rank. Of the `p * c` neighbours that compute losses together, the `c` that run the same
    stage are neighbours too. Collective.

    Attributes:
        loss ([`~group.LossGroup`]): ranks that compute losses together.
        pipeline (`ProcessGroup`), host (`ProcessGroup`): those of one pipeline, and the same on gloo.
        shards (`ProcessGroup`): those that run the same stage of the same microbatches, each on its shard; only with
            context parallelism.
        holders (`ProcessGroup`): all ranks of the run with the same stages.
        place (`int`): of this rank in its pipeline.
        saves (`bool`): whether this pipeline writes checkpoints: the one of rank 0.
    """

    def __init__(self, args: CoDraftGRPOConfig, device: torch.device):
        p, c = args.pipeline_parallel_size, args.context_parallel_size
        world, rank, timeout = dist.get_world_size(), dist.get_rank(), timedelta(seconds=args.ddp_timeout)
        self.loss = new_loss_group(p * c, device, TRAVELLING_TENSORS, timeout=timeout)
        pipelines = [
            list(range(first + shard, first + p * c, c)) for first in range(0, world, p * c) for shard in range(c)
        ]
        holders = [[r for r in range(world) if r % (p * c) // c == place] for place in range(p)]
        self.pipeline = self.loss.members  # they do nothing else while a schedule runs
        if c > 1:
            self.pipeline, _ = dist.new_subgroups_by_enumeration(pipelines, timeout=timeout)
            self.shards, _ = dist.new_subgroups(c, timeout=timeout)
        self.host, _ = dist.new_subgroups_by_enumeration(pipelines, timeout=timeout, backend="gloo")
        self.holders, _ = dist.new_subgroups_by_enumeration(holders, timeout=timeout)
        self.place = place_in_pipeline(args, rank)
        self.saves = rank in pipelines[0]


def hidden_dtype(policy: nn.Module, context: Callable[[], AbstractContextManager]) -> torch.dtype:
    """Dtype of the hidden states between layers, seen in a forward of one token. The policy needs its first stage."""
    seen = []

    def look(module, args, kwargs):
        seen.append((args[0] if args else kwargs["hidden_states"]).dtype)

    decoder, was_training = decoder_of(policy), policy.training
    handle = decoder.layers[-1].register_forward_pre_hook(look, with_kwargs=True)
    policy.eval()
    try:
        with torch.no_grad(), context():
            decoder(input_ids=torch.zeros(1, 1, dtype=torch.long, device=policy.device), use_cache=False)
    finally:
        handle.remove()
        policy.train(was_training)
    return seen[0]


def _open_channel(
    trainer: "CoDraftGRPOTrainer", layers: tuple[int, ...], dtype: torch.dtype, group: dist.ProcessGroup
) -> TapChannel | None:
    """The channel that brings taps to the draft's stage, if a draft learns from them."""
    args, size = trainer.args, trainer.args.pipeline_parallel_size
    if not _draft_learns(args):
        return None
    plan = TapPlan.for_layers(
        trainer.recorder.tap_layers,
        layers,
        trainer.draft_model.config.target_hidden_size,
        dtype,
        num_ranks=size,
        num_microbatches=args.gradient_accumulation_steps * size * args.context_parallel_size,
        schedule=args.pipeline_schedule,
        slots=args.tap_channel_slots,
    )
    place = dist.get_rank(group)
    return open_channel(
        plan,
        range(place, len(layers), size),
        group,
        timeout=float(args.ddp_timeout),
        device=trainer.accelerator.device,
    )


def _draft_learns(args: CoDraftGRPOConfig) -> bool:
    """Whether a draft needs taps of the pipeline: in training steps, or where no rank has the whole policy before them."""
    return args.use_draft and (args.draft_train or (args.draft_pretrain_steps > 0 and not args.holds_whole_policy))


def _announce_plan(
    trainer: "CoDraftGRPOTrainer", layers: tuple[int, ...], parts: list[tuple[int, int]] | None = None
) -> None:
    """Says what each rank will hold and wait; raises where that is more than a GPU has."""
    args, policy, device = trainer.args, base_policy(trainer.model), trainer.accelerator.device
    size, draft = args.pipeline_parallel_size, trainer.draft_model
    num_microbatches = args.gradient_accumulation_steps * size * args.context_parallel_size
    memory = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None
    sharers = args.world_size if args.draft_shard_optimizer else 1
    prompt = longest_prompt(trainer, PLANNED_PROMPTS)
    try:
        plan = plan_memory(
            policy,
            layers,
            num_ranks=size,
            num_microbatches=num_microbatches,
            rows=args.per_device_train_batch_size,
            # Of a shard, as if every row were cut.
            columns=-(-(prompt + args.max_completion_length) // args.context_parallel_size),
            schedule=args.pipeline_schedule,
            tap_layers=trainer.recorder.tap_layers if _draft_learns(args) else (),
            gradient_checkpointing=args.gradient_checkpointing,
            state_sharers=args.world_size // size if args.pipeline_shard_optimizer else 1,
            draft_bytes=draft_memory(draft, sharers=sharers, rolls_out=not args.use_vllm) if args.use_draft else 0,
            draft_everywhere=True,
            replica=parts is None,
            views=True,
            reference_bytes=_bytes_of_reference(trainer) if parts is None else 0,
            parts=parts,
            memory=memory,
        )
    except PlanUnavailable as reason:
        if trainer.accelerator.is_main_process:
            bubble = bubble_share(size, num_microbatches, len(layers) // size)
            logger.warning(f"The memory of the pipeline is not planned: {reason} Its bubble is {bubble:.1%}.")
        return
    if trainer.accelerator.is_main_process:
        prompts = f"prompts of {prompt}, longest of the first {PLANNED_PROMPTS}" if prompt else "prompts come on top"
        logger.warning(
            f"Pipeline of {size} ranks, layers {list(layers)}, for completions of {args.max_completion_length} tokens "
            f"({prompts}):\n{plan.table()}"
        )


def _bytes_of_parts(trainer: "CoDraftGRPOTrainer", group: dist.ProcessGroup) -> list[tuple[int, int]]:
    """By rank of the pipeline, the bytes of what it holds of the policy and its reference, and of what it trains."""
    weights = sum(p.nbytes for p in trainer.model.parameters()) + _bytes_of_reference(trainer)
    own = weights, sum(p.nbytes for p in trainer.model.parameters() if p.requires_grad)
    parts = [own] * dist.get_world_size(group)
    dist.all_gather_object(parts, own, group)
    return parts


def _bytes_of_reference(trainer: "CoDraftGRPOTrainer") -> int:
    """Of what this rank holds of a reference policy that is a model of its own."""
    return 0 if trainer.ref_model is None else sum(p.nbytes for p in trainer.ref_model.parameters())


def unsupported_in_stages(trainer: "CoDraftGRPOTrainer") -> str | None:
    """
    Why a run cannot split its policy into stages, as far as settings and configurations tell.

    Args:
        trainer ([`CoDraftGRPOTrainer`]):
            The trainer, after `GRPOTrainer.__init__`.

    Returns:
        `str` or `None`: what stands in the way and what to set instead.
    """
    args, accelerator, policy = trainer.args, trainer.accelerator, base_policy(trainer.model)
    if accelerator.distributed_type in (DistributedType.DEEPSPEED, DistributedType.FSDP):
        return (
            f"{accelerator.distributed_type.value} shards the parameters that a stage holds whole. Use plain data "
            f"parallelism (DDP) around pipelines. {INSTEAD}"
        )
    reason = unsupported_in_groups(trainer, INSTEAD)
    if reason is not None:
        return reason
    if trainer.aux_loss_enabled:
        return "the load-balancing loss of experts needs all layers at once. Set `router_aux_loss_coef=0.0`."
    if args.use_vllm and args.vllm_mode == "colocate":
        return "vLLM in colocate mode is not supported. Set `vllm_mode='server'`, or `use_vllm=False`."
    if args.use_vllm and getattr(policy, "quantization_method", None) is not None:
        return (
            "its weights are quantised, and a vLLM server would be sent packed bytes without their scales. Set "
            "`use_vllm=False`, or load the policy in bf16."
        )
    if not args.holds_whole_policy and not args.use_vllm and trainer.rollout_func is None:
        return (
            "`pipeline_replica=False` leaves no rank with a policy that could roll out. Generate with a vLLM server "
            "(`use_vllm=True`, `vllm_mode='server'`) or a `rollout_func`, or set `pipeline_replica=True`."
        )
    if not args.holds_whole_policy and not args.use_vllm and args.use_draft and args.draft_pretrain_steps:
        return (
            "`draft_pretrain_steps` needs rollouts of the policy, which `rollout_func` does not give. Start from a trained "
            "draft (`draft_model_name_or_path`) with `draft_pretrain_steps=0`, use a vLLM server, or set "
            "`pipeline_replica=True`."
        )
    if args.use_transformers_continuous_batching:
        return "continuous batching is not supported. Set `use_transformers_continuous_batching=False`."
    optim = OptimizerNames(args.optim).value
    if "layerwise" in optim or "lomo" in optim:
        return f"`optim={optim!r}` steps inside the backward. Choose another, such as 'adamw_torch'."
    if optim.startswith("schedule_free"):
        return (
            f"`optim={optim!r}` evaluates and saves other weights than it trains, which only the rank of a stage "
            "would see. Choose another, such as 'adamw_torch'."
        )
    tied = policy.config.tie_word_embeddings
    embedding, head = policy.get_input_embeddings(), policy.get_output_embeddings()
    if tied and any(p is not embedding.weight for module in (embedding, head) for p in module.parameters()):
        return (
            "its embedding is tied to the head and one of them carries an adapter, which the first and the last stage would "
            f"train apart. Leave embedding and head out of the adapter's modules. {INSTEAD}"
        )
    return None
