"""Hooks that hand hidden states to a tap channel."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


class Capture:
    """
    Hands one tap on whenever the hooked module runs.

    A copy of the module, by `copy.deepcopy` or `pickle`, keeps the hook without its receiver, and the hook then does
    nothing: hidden states that a copy computes are no taps of the pipeline.

    Args:
        receiver (`Callable`):
            Takes the tap's id and the hidden state.
        layer (`int`):
            Id of the tap.
    """

    def __init__(self, receiver: Callable[[int, torch.Tensor], None], layer: int):
        self.receiver: Callable[[int, torch.Tensor], None] | None = receiver
        self.layer = layer

    def __getstate__(self) -> dict[str, Any]:
        return {"receiver": None, "layer": self.layer}

    def from_input(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        """Forward pre-hook, with keyword arguments: takes the first argument or `hidden_states`."""
        self._hand_on(args[0] if args else kwargs["hidden_states"])

    def from_output(self, module: nn.Module, args: tuple, result: torch.Tensor | tuple) -> None:
        """Forward hook: takes the output, or the first of a tuple."""
        self._hand_on(result[0] if isinstance(result, tuple) else result)

    def _hand_on(self, hidden: torch.Tensor) -> None:
        if self.receiver is not None:
            self.receiver(self.layer, hidden)
