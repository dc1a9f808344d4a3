"""
A Hugging Face policy whose attention runs over shards: every attention layer of a forward on this rank's rows goes
through [`ring_attention`].

The layout of a forward travels through the policy as a keyword argument, down to the attention function. Gradient
checkpointing, of either kind, keeps a layer's keyword arguments for the recomputation, so a recomputation always has
the layout that its forward had, whatever ran in between. Which attention function a policy uses is a name in its
configuration. It is changed only while a forward on shards runs, and, for recomputations, while an attention module
runs that was handed a layout: rollouts, evaluation by `generate` and callbacks keep the user's implementation.

Shapes: `T` rows of this rank, `Hq` / `Hkv` query / key-value heads, `D` / `Dv` head dims of keys and values.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers import AttentionInterface, AttentionMaskInterface, PretrainedConfig, PreTrainedModel

from ..modeling.policy import decoder_of
from .attention import ring_attention
from .layout import ContextLayout
from .rotary import decided_by_length, rotary_by_length


# Name of the attention implementation, and of the keyword argument that a forward on shards is recognised by.
IMPLEMENTATION = "context_parallel"
KEYWORD = "context_parallel"


class ShardForward:
    """
    One forward of a policy on this rank's rows.

    Args:
        policy ([`RoutedPolicy`]):
            The policy that runs.
        layout ([`ContextLayout`]):
            Whose rows they are.

    Attributes:
        attended (`list[nn.Module]`): modules whose attention came by, in order.
    """

    def __init__(self, policy: "RoutedPolicy", layout: ContextLayout):
        self.policy, self.layout = policy, layout
        # Longer than every document: nothing is hidden, and the ring sends less than a halo of everything.
        self.longest = max(layout.doc_lens, default=0)
        self.attended: list[nn.Module] = []


class RoutedPolicy:
    """
    A causal language model that can run on shards.

    Args:
        policy ([`~transformers.PreTrainedModel`]):
            The model, possibly with PEFT adapters injected (the base model, not the `PeftModel`).

    Raises:
        ValueError: if it has no decoder with a list of layers.
    """

    def __init__(self, policy: PreTrainedModel):
        self.policy = policy
        self.layers = decoder_of(policy).layers
        # Parents first: setting the name on a configuration sets it on those inside.
        configs = [
            module.config for module in policy.modules() if isinstance(vars(module).get("config"), PretrainedConfig)
        ]
        self._configs = list({id(config): config for config in configs}.values())
        self._rotary = rotary_by_length(policy)
        self._followed: set[nn.Module] = set()
        self._handles: list[RemovableHandle] = []

    @contextmanager
    def forward_on(
        self, layout: ContextLayout, padded_length: int, layers: Sequence[int] | None = None
    ) -> Iterator[dict[str, ShardForward]]:
        """
        Routes the one forward that runs inside the context.

        Args:
            layout ([`ContextLayout`]):
                Whose rows are passed to it.
            padded_length (`int`):
                Columns of the microbatch with padding; rotary embeddings that follow the length go by it.
            layers (`Sequence[int]`, *optional*):
                Layers that the forward runs; all by default.

        Returns:
            `Iterator[dict[str, ShardForward]]`: a keyword argument for the forward.

        Raises:
            ValueError: on leaving, if a layer did not attend through [`ring_attention`].
        """
        forward = ShardForward(self, layout)
        with self.attending_by(IMPLEMENTATION), decided_by_length(self._rotary, padded_length):
            yield {KEYWORD: forward}
        self._require_every_layer(forward, range(len(self.layers)) if layers is None else layers)

    @contextmanager
    def attending_by(self, implementation: str) -> Iterator[None]:
        """Forwards inside use an attention implementation of Transformers, whatever the user chose."""
        with ExitStack() as stack:
            for config in self._configs:
                stack.enter_context(_implementation_set(config, implementation))
            yield

    def follow(self, module: nn.Module) -> None:
        """Routes a module's later calls by themselves, when recomputation calls it outside [`forward_on`]."""
        if module in self._followed:
            return
        self._followed.add(module)
        calls = _RoutedCalls()
        self._handles.append(module.register_forward_pre_hook(calls.enter, with_kwargs=True))
        # Last in, first out: the settings of several routings of one policy are put back in reverse.
        self._handles.append(
            module.register_forward_hook(calls.leave, with_kwargs=True, always_call=True, prepend=True)
        )

    def close(self) -> None:
        """Removes the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._followed = [], set()

    def _require_every_layer(self, forward: ShardForward, layers: Sequence[int]) -> None:
        attended = set(forward.attended)
        silent = [index for index in layers if attended.isdisjoint(self.layers[index].modules())]
        if silent:
            kinds = ", ".join(sorted({type(self.layers[index]).__name__ for index in silent}))
            raise ValueError(
                f"Layers {silent} ({kinds}) of {type(self.policy).__name__} do not attend through Transformers' "
                "attention interface, or do not hand its keyword arguments on, so they would see this rank's tokens "
                "only. Set `context_parallel_size=1`."
            )


class _RoutedCalls:
    """Hooks of one module. A copy of it has its own, with no call under way."""

    def __init__(self):
        self._entered: list[ExitStack] = []

    def __getstate__(self) -> dict[str, list]:
        return {"_entered": []}

    def enter(self, module, args, kwargs):
        if kwargs.get(KEYWORD) is not None:
            self._entered.append(ExitStack())
            self._entered[-1].enter_context(_implementation_set(module.config, IMPLEMENTATION))

    def leave(self, module, args, kwargs, output):
        # The first call had begun when these hooks were added.
        if kwargs.get(KEYWORD) is not None and self._entered:
            self._entered.pop().close()


@contextmanager
def _implementation_set(config: PretrainedConfig, implementation: str) -> Iterator[None]:
    before = config._attn_implementation
    config._attn_implementation = implementation
    try:
        yield
    finally:
        config._attn_implementation = before


def sharded_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    is_causal: bool | None = None,
    context_parallel: ShardForward | None = None,
    **kwargs,
) -> tuple[torch.Tensor, None]:
    """
    [`ring_attention`] as an attention function of Transformers.

    Args:
        module (`nn.Module`):
            The attention module.
        query (`torch.Tensor` of shape `(1, Hq, T, D)`), key (`torch.Tensor` of shape `(1, Hkv, T, D)`), value
        (`torch.Tensor` of shape `(1, Hkv, T, Dv)`):
            This rank's rows.
        attention_mask (`None`):
            The layout is the mask.
        scaling, sliding_window, s_aux:
            `scale`, `window` and `sinks` of [`ring_attention`].
        dropout, softcap, is_causal:
            Only zero, none and causal.
        context_parallel ([`ShardForward`]):
            The forward this call is part of.

    Returns:
        `tuple`: output `(1, T, Hq, Dv)` and `None` for the probabilities.

    Raises:
        ValueError: naming the setting that cannot be honoured.
    """
    name = type(module).__name__
    if context_parallel is None:
        raise ValueError(
            f"{name} was called without the layout of context parallelism: the policy does not hand keyword arguments "
            "on to its attention. Set `context_parallel_size=1`."
        )
    for unsupported, what in (
        (attention_mask is not None, "a mask of its own"),
        (dropout, "attention dropout (set `attention_dropout=0.0`)"),
        (softcap, "softcapped scores"),
        (is_causal is False, "attention to later tokens"),
        (query.shape[0] != 1 or query.shape[2] != context_parallel.layout.num_rows, "rows other than the shard's"),
        (key.shape[2] != query.shape[2], "keys that are no rows of the shard"),
    ):
        if unsupported:
            raise ValueError(
                f"{name} asks for {what}, which context parallelism cannot do. Set `context_parallel_size=1`."
            )
    context_parallel.attended.append(module)
    context_parallel.policy.follow(module)
    if torch.is_autocast_enabled(query.device.type):
        # Every matmul under autocast computes so.
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = (tensor.to(dtype) for tensor in (query, key, value))
    window = None if sliding_window is None or sliding_window >= context_parallel.longest else sliding_window
    out = ring_attention(
        *(tensor[0].transpose(0, 1) for tensor in (query, key, value)),
        context_parallel.layout,
        window=window,
        sinks=s_aux,
        scale=scaling,
    )
    return out.unsqueeze(0), None


def no_mask(*, attention_mask: torch.Tensor | None = None, use_vmap: bool = False, **kwargs) -> None:
    """
    The mask of a forward on shards: none, because the layout says who sees whom.

    Raises:
        ValueError: if the policy wants padding or a mask other than causal or a window.
    """
    if attention_mask is not None and not attention_mask.all():
        raise ValueError("A shard has no padding, but a mask with padding was passed to the policy's forward.")
    if use_vmap:
        raise ValueError(
            "The policy adds a mask of its own to the causal one (such as blocks of image tokens), which context "
            "parallelism cannot do. Set `context_parallel_size=1`."
        )


AttentionInterface.register(IMPLEMENTATION, sharded_attention)
AttentionMaskInterface.register(IMPLEMENTATION, no_mask)
