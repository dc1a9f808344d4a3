"""
Taps: the hidden states of a few policy layers, recorded while the policy's own forward runs.

Shapes: `B` rows, `S` padded columns, `Ht` policy hidden size, `n` policy layers.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from .policy import decoder_of, name_of


# Fields that families with several hidden states of each token declare: AltUp, hyper-connections.
SEVERAL_STATES = ("altup_num_inputs", "hc_mult")
# Fields that families declare whose layers run several times for each token.
LOOPS = ("n_recurrent_loops", "loop_num_passes")


def let_compiled_forwards_see_hooks() -> None:
    """
    Makes `torch.compile` tell modules with hooks from modules without, in this process from now on. By default it does
    not look (`torch._dynamo.config.skip_nnmodule_hook_guards`): a forward compiled for another model of the same class
    would serve the policy too, and its taps would not be recorded. What has been compiled so far is compiled anew when
    it runs next.
    """
    if torch._dynamo.config.skip_nnmodule_hook_guards:
        torch._dynamo.config.skip_nnmodule_hook_guards = False
        torch.compiler.reset()


class TapRecord:
    """
    What one policy forward left behind.

    Attributes:
        taps (`list[torch.Tensor]`):
            One detached `(B, S, Ht)` tensor per tap layer, ascending.
        last_hidden (`torch.Tensor`):
            Detached `(B, S, Ht)` output of the decoder, after the final norm, the input of the policy's head.
    """

    def __init__(self, tap_layers: Sequence[int]):
        self.tap_layers = tuple(tap_layers)
        self._by_layer: dict[int, torch.Tensor] = {}
        self._last_hidden: torch.Tensor | None = None

    @property
    def taps(self) -> list[torch.Tensor]:
        missing = [layer for layer in self.tap_layers if layer not in self._by_layer]
        if missing:
            raise RuntimeError(
                f"The policy's forward did not deliver the taps of layers {missing}: the layers were bypassed or the "
                "forward did not run. A draft trained without them would be silently useless. Where the forward is "
                "compiled, `torch._dynamo.config.skip_nnmodule_hook_guards` must be False."
            )
        return [self._by_layer[layer] for layer in self.tap_layers]

    @property
    def last_hidden(self) -> torch.Tensor:
        if self._last_hidden is None:
            raise RuntimeError("The policy's decoder did not run inside `TapRecorder.record()`.")
        return self._last_hidden


class TapRecorder:
    """
    Records taps with forward hooks. Id `i` in `0..n-1` is the input of decoder layer `i` (`hidden_states[i]` of
    Transformers); id `n` is the output of the last layer before the final norm.

    Hooks stay on the modules, but only forwards inside [`~TapRecorder.record`] leave anything behind, so rollouts,
    reference and evaluation forwards are not affected.

    A policy can be copied and pickled with its hooks. The hooks of the copy belong to a copy of the recorder, which
    nobody has unless both are copied together: forwards of the copy leave nothing behind in the original's record.

    Args:
        policy ([`~transformers.PreTrainedModel`]):
            The causal language model to record from.
        tap_layers (`Sequence[int]`):
            Tap ids, strictly ascending.

    Raises:
        ValueError: if an id lies outside `0..n`, the ids are not strictly ascending, or the policy has several hidden
            states per token.
    """

    def __init__(self, policy: nn.Module, tap_layers: Sequence[int]):
        decoder = decoder_of(policy)
        self._policy_name = name_of(policy)
        config = policy.config.get_text_config()
        for field in SEVERAL_STATES:
            if (getattr(config, field, None) or 1) > 1:
                raise ValueError(_several_states(self._policy_name, f"`{field}={getattr(config, field)}`"))
        for field in LOOPS:
            turns = getattr(config, field, None) or 1
            if turns > 1:
                raise ValueError(
                    f"{self._policy_name} runs layers several times for each token (`{field}={turns}`), "
                    "of which a draft would see one turn. Set `use_draft=False` to train it without a draft."
                )
        num_layers = len(decoder.layers)
        tap_layers = tuple(tap_layers)
        if not tap_layers or list(tap_layers) != sorted(set(tap_layers)):
            raise ValueError(f"Tap layers must be strictly ascending and at least one, got {list(tap_layers)}.")
        if tap_layers[0] < 0 or tap_layers[-1] > num_layers:
            raise ValueError(
                f"Tap layers {list(tap_layers)} do not fit a policy of {num_layers} layers: ids run from 0 (input of "
                f"the first layer) to {num_layers} (output of the last layer)."
            )
        self.tap_layers = tap_layers
        self._record: TapRecord | None = None
        self._handles = [
            decoder.register_forward_pre_hook(self._on_decoder_input, with_kwargs=True),
            decoder.register_forward_hook(self._on_decoder),
        ]
        for layer in tap_layers:
            if layer < num_layers:
                hook = partial(self._on_input, layer)
                self._handles.append(decoder.layers[layer].register_forward_pre_hook(hook, with_kwargs=True))
            else:
                hook = partial(self._on_output, layer)
                self._handles.append(decoder.layers[num_layers - 1].register_forward_hook(hook))

    def __getstate__(self) -> dict[str, Any]:
        # What is being recorded is of this policy, not of a copy.
        return {**self.__dict__, "_record": None}

    @contextmanager
    def record(self) -> Iterator[TapRecord]:
        """Records the one policy forward that runs inside the context."""
        if self._record is not None:
            raise RuntimeError("`TapRecorder.record()` is already active; records do not nest.")
        self._record = TapRecord(self.tap_layers)
        try:
            yield self._record
        finally:
            self._record = None

    def close(self) -> None:
        """Removes the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _on_input(self, layer: int, module, args, kwargs):
        if self._record is not None:
            self._keep(layer, args[0] if args else kwargs["hidden_states"])

    def _on_output(self, layer: int, module, args, output):
        if self._record is not None:
            self._keep(layer, output[0] if isinstance(output, tuple) else output)

    def _keep(self, layer: int, hidden: torch.Tensor) -> None:
        # Reentrant checkpointing recomputes with the record already closed, so a second arrival is a second forward.
        if layer in self._record._by_layer:
            raise RuntimeError(
                f"Tap {layer} arrived twice in one record: the policy's backbone ran more than once per loss, or runs "
                "its layers in a loop, of which a draft would see one turn. Set `use_draft=False` for such a policy."
            )
        self._record._by_layer[layer] = hidden.detach()

    def _on_decoder_input(self, module, args, kwargs):
        # Layers that read the keys of earlier ones (Gemma 4) would run only where logits are wanted.
        if self._record is not None and "logits_to_keep" in kwargs:
            return args, {**kwargs, "logits_to_keep": 0}

    def _on_decoder(self, module, args, output):
        if self._record is None:
            return
        last_hidden = output.last_hidden_state
        for layer, tap in self._record._by_layer.items():
            if tap.shape != last_hidden.shape:
                shapes = f"tap {layer} is {tuple(tap.shape)}, the decoder's output {tuple(last_hidden.shape)}"
                raise ValueError(_several_states(self._policy_name, shapes))
        self._record._last_hidden = last_hidden.detach()


def _several_states(policy_name: str, found: str) -> str:
    return (
        f"{policy_name} carries several hidden states of each token from layer to layer, or others than its head "
        f"reads ({found}); a draft reads one. Set `use_draft=False` to train it without a draft."
    )
