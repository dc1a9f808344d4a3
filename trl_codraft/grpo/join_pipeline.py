"""
Joins the ranks of a run into pipelines. `support.py` says which runs cannot have one.

To TRL and Accelerate all ranks stay data-parallel workers; see `grpo/pipelined_losses.py` for the losses and `pp/` for
the stages.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from transformers.utils import logging
from trl import GRPOTrainer

from ..config import CoDraftGRPOConfig
from ..cp.draft import sharded_draft_loss
from ..cp.rotary import rotary_by_length
from ..cp.sharding import ContextSharding
from ..group.exchange import LossGroup
from ..group.mesh import PipelineGroups
from ..modeling.losses import draft_loss
from ..modeling.policy import base_policy, decoder_of
from ..pp.memory import Holdings, PlanUnavailable, draft_memory, plan_memory
from ..pp.pipeline import Pipeline
from ..pp.shape import PipelineShape
from ..pp.stages.replica import PolicyReplica
from ..pp.stages.split import verify_split
from ..pp.stages.view import StageView
from ..pp.stages.weights import align_stage_weights
from ..pp.taps.channel import TapChannel
from ..pp.taps.opening import open_channel
from ..pp.taps.plan import TapPlan
from .failures import HeldFailures
from .join_context import mesh_of, require_shards
from .member_passes import TRAVELLING_TENSORS
from .pipeline_microbatches import PaddedStep, ShardedStep
from .pipelined_losses import PipelinedLosses, Pipelining, StagedModel
from .pretraining import longest_prompt
from .run import Run
from .stage_forwards import StageForwards
from .stage_weights import StageWeights, layers_of_stages
from .support import unsupported_in_stages


logger = logging.get_logger(__name__)

# Memory is planned for the longest of so many prompts of the training set.
PLANNED_PROMPTS = 256


def join_pipeline_group(
    run: Run, trl: GRPOTrainer, failures: HeldFailures, stage_weights: StageWeights | None
) -> PipelinedLosses:
    """
    Splits the layers of a run's policy over groups of `pipeline_parallel_size` ranks. Collective.

    Args:
        run ([`~run.Run`]):
            The trainer, at the end of its construction.
        trl (`GRPOTrainer`):
            The same trainer without our overrides.
        failures ([`HeldFailures`]):
            Holds exceptions of this rank until the next header.
        stage_weights ([`~grpo.stage_weights.StageWeights`] or `None`):
            Cut the policy down to this rank's stages; `None` if it is whole.

    Returns:
        [`PipelinedLosses`]

    Raises:
        ValueError: on all ranks, if the policy or the settings do not allow it; the message says what to set.
    """
    args, accelerator, policy = run.args, run.accelerator, base_policy(run.model)
    _require_stages(run)
    mesh, alone = mesh_of(args), stage_weights is not None
    shape = _shape_of(run, stage_weights)
    groups = mesh.new_groups(timedelta(seconds=args.ddp_timeout))
    _announce_plan(run, shape, _bytes_of_stages(run, groups.host) if alone else None)
    if alone:
        align_stage_weights(policy, groups.pipeline, groups.holders, embedding=_has_embedding_copy(run))
    else:
        # As DDP would: one process's weights count, should they differ.
        for tensor in [*policy.parameters(), *policy.buffers()]:
            dist.broadcast(tensor.data, src=0)
    dtype = _shared_dtype(run, groups)
    channel = _open_channel(run, shape, dtype, groups.host)
    forwards = StageForwards(run, None if channel is None else run.learner.recorder)
    staged = _stage_model(run, policy, shape, groups, dtype, forwards, channel)
    replica = None if alone else PolicyReplica(staged.pipeline.stages, groups.pipeline, whole=policy)
    # Before training: it would be wrapped for data parallelism otherwise.
    run.model = run.model_wrapped = accelerator.prepare_model(run.model, evaluation_mode=True)
    run.model._is_accelerate_prepared = True
    reference = None
    if alone and run.ref_model is not None:
        align_stage_weights(run.ref_model, groups.pipeline, groups.holders)
        reference = _stage_model(run, run.ref_model, shape, groups, dtype, forwards)
    pipelining = Pipelining(
        policy=staged,
        reference=reference,
        forwards=forwards,
        replica=replica,
        stage_weights=stage_weights,
        loss_group=LossGroup(groups.loss, dist.group.WORLD, accelerator.device, TRAVELLING_TENSORS),
        holders=groups.holders,
        host_group=groups.host,
        rank_of_last=mesh.rank_of_last,
        saves=dist.get_rank() in mesh.pipeline(0),
        sends_embedding=alone and _embedding_moves(run, groups.host),
    )
    if args.pipeline_shard_optimizer and dist.get_world_size(groups.holders) == 1 and accelerator.is_main_process:
        logger.warning("`pipeline_shard_optimizer=True` has no effect: no two ranks hold the same stage.")
    if alone and args.use_vllm:
        run.vllm_generation.push_by_stages(groups.pipeline if pipelining.saves else None)
    split = args.context_parallel_size > 1
    loss = partial(sharded_draft_loss, trunk=args.context_parallel_trunk) if split else draft_loss
    return PipelinedLosses(run, trl, pipelining, failures, run.learner, loss)


def _require_stages(run: Run) -> None:
    """Refuses a policy or settings that no pipeline can run, and lets rotary embeddings follow the length."""
    args, policy = run.args, base_policy(run.model)
    reason = unsupported_in_stages(run)
    if reason is not None:
        raise ValueError(f"`pipeline_parallel_size={args.pipeline_parallel_size}` is not possible: {reason}")
    verify_split(policy)
    rotary_by_length(policy)
    if args.context_parallel_size > 1:
        require_shards(run)


def _shape_of(run: Run, stage_weights: StageWeights | None) -> PipelineShape:
    """Returns the layers of each stage, the ranks and the schedule."""
    args, mesh = run.args, mesh_of(run.args)
    if stage_weights is None:
        draft = None if run.learner is None else run.learner.draft
        layers = layers_of_stages(args, base_policy(run.model), draft)
    else:
        layers = stage_weights.layers
    num_microbatches = args.gradient_accumulation_steps * mesh.group_size
    return PipelineShape(layers, mesh.pipeline_size, num_microbatches, args.pipeline_schedule)


def _shared_dtype(run: Run, groups: PipelineGroups) -> torch.dtype:
    """Dtype of the hidden states between stages, which the first one sees. Collective."""
    is_first = dist.get_rank(groups.pipeline) == 0
    dtypes = [hidden_dtype(base_policy(run.model), run.accelerator.autocast) if is_first else None]
    dist.broadcast_object_list(dtypes, group=groups.host, group_src=0)
    return dtypes[0]


def _stage_model(
    run: Run,
    model: nn.Module,
    shape: PipelineShape,
    groups: PipelineGroups,
    dtype: torch.dtype,
    forwards: StageForwards,
    channel: TapChannel | None = None,
) -> StagedModel:
    """Builds the pipeline of a policy, and the function that brings microbatches into its shape."""
    args = run.args
    stages = [
        StageView(model, shape.layers, index, context=forwards.context)
        for index in shape.stages_of(dist.get_rank(groups.pipeline))
    ]
    stages[-1].score = partial(forwards.score, stages[-1])
    pipeline = Pipeline(
        stages,
        groups.pipeline,
        hidden_size=model.config.get_text_config().hidden_size,
        dtype=dtype,
        device=run.accelerator.device,
        schedule=args.pipeline_schedule,
        channel=channel,
    )
    lay_out = partial(PaddedStep, pad_token_id=run._tokenizer.pad_token_id, rotary=rotary_by_length(model))
    if args.context_parallel_size > 1:
        sharding = ContextSharding(groups.context, base_policy, args.context_parallel_layout)
        shards = LossGroup(groups.context, dist.group.WORLD, run.accelerator.device, TRAVELLING_TENSORS)
        lay_out = partial(ShardedStep, sharding=sharding, group=shards, policy=model)
    return StagedModel(pipeline, lay_out)


def _has_embedding_copy(run: Run) -> bool:
    """Whether the last stage holds the input embedding too, where no rank has the whole policy."""
    return run.args.use_draft or base_policy(run.model).config.tie_word_embeddings


def _embedding_moves(run: Run, group: dist.ProcessGroup) -> bool:
    """Whether the first stage trains an embedding of which the last one has a copy for the draft. Collective."""
    policy = base_policy(run.model)
    moves = [False]
    if dist.get_rank(group) == 0:
        trained = any(parameter.requires_grad for parameter in policy.get_input_embeddings().parameters())
        moves = [run.args.use_draft and trained and not policy.config.tie_word_embeddings]
    dist.broadcast_object_list(moves, group=group, group_src=0)
    return moves[0]


def hidden_dtype(policy: nn.Module, context: Callable[[], AbstractContextManager]) -> torch.dtype:
    """Looks at the dtype of the hidden states between layers in a forward of one token. Needs the first stage."""
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


def _open_channel(run: Run, shape: PipelineShape, dtype: torch.dtype, group: dist.ProcessGroup) -> TapChannel | None:
    """Opens the channel that brings taps to the draft's stage, if a draft learns from them."""
    args = run.args
    if not _draft_learns(args):
        return None
    learner = run.learner
    hidden_size = learner.draft.config.target_hidden_size
    plan = TapPlan.for_layers(learner.recorder.tap_layers, shape, hidden_size, dtype, slots=args.tap_channel_slots)
    return open_channel(
        plan,
        shape.stages_of(dist.get_rank(group)),
        group,
        timeout=float(args.ddp_timeout),
        device=run.accelerator.device,
    )


def _draft_learns(args: CoDraftGRPOConfig) -> bool:
    """Whether a draft needs taps of the pipeline, in training steps or in pretraining without a whole policy."""
    return args.use_draft and (args.draft_train or (args.draft_pretrain_steps > 0 and not args.holds_whole_policy))


def _announce_plan(run: Run, shape: PipelineShape, stage_bytes: list[tuple[int, int]] | None = None) -> None:
    """Logs how much each rank will hold and wait; raises if that is more than a GPU has."""
    args, policy, device = run.args, base_policy(run.model), run.accelerator.device
    mesh, learner, whole = mesh_of(args), run.learner, stage_bytes is None
    sharers = args.world_size if args.draft_shard_optimizer else 1
    prompt = longest_prompt(run, PLANNED_PROMPTS)
    holdings = Holdings(
        state_sharers=mesh.num_replicas * mesh.context_size if args.pipeline_shard_optimizer else 1,
        draft_bytes=draft_memory(learner.draft, sharers=sharers, rolls_out=not args.use_vllm) if learner else 0,
        draft_everywhere=True,
        replica=whole,
        views=True,
        reference_bytes=_bytes_of_reference(run) if whole else 0,
        stage_weights=stage_bytes,
    )
    try:
        plan = plan_memory(
            policy,
            shape,
            rows=args.per_device_train_batch_size,
            # A shard's columns, as if every row were cut.
            columns=-(-(prompt + args.max_completion_length) // args.context_parallel_size),
            tap_layers=learner.recorder.tap_layers if _draft_learns(args) else (),
            gradient_checkpointing=args.gradient_checkpointing,
            holdings=holdings,
        )
    except PlanUnavailable as reason:
        if run.accelerator.is_main_process:
            logger.warning(f"The memory of the pipeline is not planned: {reason} Its bubble is {shape.bubble:.1%}.")
        return
    if device.type == "cuda":
        plan.require_room(torch.cuda.get_device_properties(device).total_memory)
    if run.accelerator.is_main_process:
        prompts = f"prompts of {prompt}, longest of the first {PLANNED_PROMPTS}" if prompt else "prompts come on top"
        logger.warning(
            f"Pipeline of {shape.num_ranks} ranks, layers {list(shape.layers)}, for completions of "
            f"{args.max_completion_length} tokens ({prompts}):\n{plan.table()}"
        )


def _bytes_of_stages(run: Run, group: dist.ProcessGroup) -> list[tuple[int, int]]:
    """Gathers, by rank of the pipeline, the bytes of policy and reference that it holds, and that it trains."""
    weights = sum(p.nbytes for p in run.model.parameters()) + _bytes_of_reference(run)
    own = weights, sum(p.nbytes for p in run.model.parameters() if p.requires_grad)
    by_rank = [own] * dist.get_world_size(group)
    dist.all_gather_object(by_rank, own, group)
    return by_rank


def _bytes_of_reference(run: Run) -> int:
    """Counts the bytes that this rank holds of a reference policy that is a model of its own."""
    return 0 if run.ref_model is None else sum(p.nbytes for p in run.ref_model.parameters())
