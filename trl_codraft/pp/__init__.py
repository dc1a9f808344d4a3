"""
Pipeline parallelism: a policy split by layers, and the tap channel that brings its hidden states to the draft's stage.

Knows nothing of TRL. Process groups and devices are arguments.
"""

from .balance import balance_layers, draft_cost_of, fastest_layers, head_cost_of, step_time
from .memory import PipelineMemory, PlanUnavailable, RankMemory, bubble_share, draft_memory, plan_memory
from .order import Action, required_slots, schedule_order
from .pipeline import Microbatch, Pipeline
from .rows import Rows, pad_microbatches
from .stages.checkpoint import (
    has_stage_files,
    load_optimizer,
    load_whole_optimizer,
    remove_stage_files,
    save_optimizer,
    save_policy,
)
from .stages.gradients import average_gradients, clip_grad_norm, reduce_gradients
from .stages.loading import WholeStream, align_parts, load_part, send_embedding
from .stages.replica import PolicyReplica
from .stages.shared_optimizer import SharedOptimizer, shard_optimizer
from .stages.split import (
    PolicyStage,
    keep_stages,
    require_split,
    split_policy,
    sum_tied_gradients,
    two_layer_copy,
    verify_split,
)
from .stages.view import Shard, StageContext, StageView
from .taps.channel import TapChannel
from .taps.cuda import CudaTransport
from .taps.gloo import GlooTransport
from .taps.message import TapChannelError, TapMismatch, TapTimeout
from .taps.opening import open_channel
from .taps.plan import Tap, TapPlan
from .taps.shared_memory import SharedMemoryTransport
from .taps.transport import TransportUnavailable


__all__ = [
    "Action",
    "CudaTransport",
    "GlooTransport",
    "Microbatch",
    "Pipeline",
    "PipelineMemory",
    "PlanUnavailable",
    "PolicyReplica",
    "PolicyStage",
    "RankMemory",
    "Rows",
    "Shard",
    "SharedMemoryTransport",
    "SharedOptimizer",
    "StageContext",
    "StageView",
    "Tap",
    "TapChannel",
    "TapChannelError",
    "TapMismatch",
    "TapPlan",
    "TapTimeout",
    "TransportUnavailable",
    "WholeStream",
    "align_parts",
    "average_gradients",
    "balance_layers",
    "bubble_share",
    "clip_grad_norm",
    "draft_cost_of",
    "draft_memory",
    "fastest_layers",
    "has_stage_files",
    "head_cost_of",
    "keep_stages",
    "load_optimizer",
    "load_part",
    "load_whole_optimizer",
    "open_channel",
    "pad_microbatches",
    "plan_memory",
    "reduce_gradients",
    "remove_stage_files",
    "require_split",
    "required_slots",
    "save_optimizer",
    "save_policy",
    "schedule_order",
    "send_embedding",
    "shard_optimizer",
    "split_policy",
    "step_time",
    "sum_tied_gradients",
    "two_layer_copy",
    "verify_split",
]
