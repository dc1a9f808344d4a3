"""What hands hidden states to a tap channel: hooks, and the forward that they belong to."""

from typing import TYPE_CHECKING, Any

import torch
from torch import nn


if TYPE_CHECKING:
    from .channel import TapChannel


class ForwardTaps:
    """
    The taps of one forward of one stage, while it runs.

    Args:
        stage (`int`), microbatch (`int`):
            Which.

    Attributes:
        seen (`set[int]`): ids of the taps that were captured.
        views (`dict[int, torch.Tensor]` or `None`): where they are copied to, from the first one on.
    """

    def __init__(self, stage: int, microbatch: int):
        self.stage = stage
        self.microbatch = microbatch
        self.seen: set[int] = set()
        self.views: dict[int, torch.Tensor] | None = None


class Capture:
    """
    Hands one tap to its channel whenever the hooked module runs inside [`~TapChannel.forward`].

    A copy of the module, by `copy.deepcopy` or `pickle`, keeps the hook without a channel, which does nothing: what a copy
    computes is no tap of the pipeline.

    Args:
        channel ([`TapChannel`]):
            The channel.
        layer (`int`):
            Id of the tap.
    """

    def __init__(self, channel: "TapChannel", layer: int):
        self.channel: TapChannel | None = channel
        self.layer = layer

    def __getstate__(self) -> dict[str, Any]:
        return {"channel": None, "layer": self.layer}

    def from_input(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        """Forward pre-hook, with keyword arguments: takes the first argument or `hidden_states`."""
        self._take(args[0] if args else kwargs["hidden_states"])

    def from_output(self, module: nn.Module, args: tuple, result: torch.Tensor | tuple) -> None:
        """Forward hook: takes the output, or the first of a tuple."""
        self._take(result[0] if isinstance(result, tuple) else result)

    def _take(self, hidden: torch.Tensor) -> None:
        if self.channel is not None and self.channel.captures:
            self.channel.capture(self.layer, hidden)
