"""
Pipeline parallelism: a policy split by layers, and the tap channel that brings its hidden states to the draft's stage.

Knows nothing of TRL. Process groups and devices are arguments.
"""

from .gloo import GlooTransport
from .message import TapChannelError, TapMismatch, TapTimeout
from .order import Action, required_slots, schedule_order
from .plan import Tap, TapPlan
from .shared_memory import SharedMemoryTransport
from .tap_channel import TapChannel


__all__ = [
    "Action",
    "GlooTransport",
    "SharedMemoryTransport",
    "Tap",
    "TapChannel",
    "TapChannelError",
    "TapMismatch",
    "TapPlan",
    "TapTimeout",
    "required_slots",
    "schedule_order",
]
