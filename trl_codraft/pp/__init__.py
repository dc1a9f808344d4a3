"""
Pipeline parallelism: a policy split by layers, and the tap channel that brings its hidden states to the draft's stage.

Knows nothing of TRL. Process groups and devices are arguments.
"""

from .balance import balance_layers, draft_cost_of, fastest_layers, head_cost_of, step_time
from .checkpoint import (
    has_stage_files,
    load_optimizer,
    load_whole_optimizer,
    remove_stage_files,
    save_optimizer,
    save_policy,
)
from .cuda import CudaTransport
from .gloo import GlooTransport
from .gradients import average_gradients, clip_grad_norm, reduce_gradients
from .message import TapChannelError, TapMismatch, TapTimeout
from .opening import open_channel
from .order import Action, required_slots, schedule_order
from .part import WholeStream, align_parts, load_part, send_embedding
from .plan import Tap, TapPlan
from .planner import PipelineMemory, PlanUnavailable, RankMemory, bubble_share, draft_memory, plan_memory
from .replica import PolicyReplica
from .rows import Rows, pad_microbatches
from .schedule import Microbatch, Pipeline
from .shared_memory import SharedMemoryTransport
from .shared_optimizer import SharedOptimizer, shard_optimizer
from .split import (
    PolicyStage,
    keep_stages,
    require_split,
    split_policy,
    sum_tied_gradients,
    two_layer_copy,
    verify_split,
)
from .tap_channel import TapChannel
from .transport import TransportUnavailable
from .view import Shard, StageContext, StageView


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
