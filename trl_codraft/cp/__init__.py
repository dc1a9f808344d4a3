"""Context parallelism: the tokens of a microbatch split over a process group, attention exact."""

from .attention import ring_attention
from .layout import ContextLayout


__all__ = ["ContextLayout", "ring_attention"]
