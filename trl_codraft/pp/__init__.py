"""
Pipeline parallelism: a policy split by layers, and the tap channel that brings its hidden states to the draft's stage.

- `shape`, `order`: how layers lie on ranks, and what each rank runs when.
- `pipeline`, `padding`: a step of a schedule, and its microbatches in one shape.
- `memory`, `balance`: what ranks will hold, and which layers each stage gets.
- `stages/`: a policy by stages: split, gradients, replica, weights, checkpoints.
- `taps/`: the tap channel and its transports.

Knows nothing of TRL. Process groups and devices are arguments. The tap channel is public here; everything else is
imported from its own module.
"""

from .shape import PipelineShape
from .taps.channel import TapChannel
from .taps.gloo import GlooTransport
from .taps.message import TapChannelError, TapMismatch, TapTimeout
from .taps.opening import open_channel
from .taps.plan import Tap, TapPlan


__all__ = [
    "GlooTransport",
    "PipelineShape",
    "Tap",
    "TapChannel",
    "TapChannelError",
    "TapMismatch",
    "TapPlan",
    "TapTimeout",
    "open_channel",
]
