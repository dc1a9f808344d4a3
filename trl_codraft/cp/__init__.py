"""Context parallelism: the tokens of a microbatch split over a process group, attention exact."""

from .attention import gather_trunk, ring_attention
from .layout import ContextLayout


__all__ = ["ContextLayout", "gather_trunk", "ring_attention"]
