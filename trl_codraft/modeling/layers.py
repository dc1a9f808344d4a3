"""
The parts of the draft's block: float32 norms, linears from master weights, RoPE, and the decoder layer.

Shapes: `...` rows of any leading shape, `H` draft hidden size, `I` MLP width, `Hq` / `Hkv` query / key-value heads,
`D` head dim.
"""

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from .configuration_eagle3 import Eagle3DraftConfig


class DraftLinear(nn.Module):
    """
    A linear map without bias whose matmul runs in a dtype given per call. Where it is not the dtype of the weight, the
    cast copy is made anew in the backward instead of being kept, and the weight's gradient leaves in its own dtype.

    Args:
        in_features, out_features (`int`): sizes.
    """

    def __init__(self, in_features: int, out_features: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features))

    def forward(self, inputs: torch.Tensor, compute_dtype: torch.dtype) -> torch.Tensor:
        """`(..., in_features)` to `(..., out_features)` in `compute_dtype`."""
        inputs = inputs.to(compute_dtype)
        if self.weight.dtype == compute_dtype:
            return F.linear(inputs, self.weight)
        return _CastLinear.apply(inputs, self.weight)


class _CastLinear(torch.autograd.Function):
    """Linear in the dtype of the input from a weight of another dtype."""

    @staticmethod
    def forward(ctx, inputs, weight):
        ctx.save_for_backward(inputs, weight)
        return F.linear(inputs, weight.to(inputs.dtype))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dout):
        inputs, weight = ctx.saved_tensors
        dinputs = dweight = None
        if ctx.needs_input_grad[0]:
            dinputs = dout @ weight.to(dout.dtype)
        if ctx.needs_input_grad[1]:
            dweight = (dout.flatten(0, -2).T @ inputs.flatten(0, -2)).to(weight.dtype)
        return dinputs, dweight


class DraftRMSNorm(nn.Module):
    """
    RMSNorm computed in float32 (float64 if its input or weight is).

    Args:
        size (`int`): width.
        eps (`float`): epsilon.
    """

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, inputs: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """`(..., size)` normed, in `dtype` (the input's if not given)."""
        dtype = inputs.dtype if dtype is None else dtype
        wide = torch.promote_types(torch.promote_types(inputs.dtype, self.weight.dtype), torch.float32)
        return F.rms_norm(inputs.to(wide), self.weight.shape, self.weight.to(wide), self.eps).to(dtype)


class DraftRotary(nn.Module):
    """
    RoPE with the frequencies of Transformers' own initialisers. They follow from the configuration, so they are no
    buffer: casts, meta devices and `to_empty` leave them as they are.

    Args:
        config ([`Eagle3DraftConfig`]): RoPE parameters and head dim.

    Attributes:
        inv_freq (`torch.Tensor` of shape `(D / 2,)`): the frequencies, float32 on the CPU.
        attention_scaling (`float`): factor on cosines and sines.
    """

    def __init__(self, config: Eagle3DraftConfig):
        super().__init__()
        rope_type = config.rope_parameters["rope_type"]
        frequencies = ROPE_INIT_FUNCTIONS.get(rope_type, LlamaRotaryEmbedding.compute_default_rope_parameters)
        with torch.device("cpu"):
            inv_freq, self.attention_scaling = frequencies(config)
        self.inv_freq = self._placed = inv_freq.float()

    def _on(self, device: torch.device) -> torch.Tensor:
        """The frequencies on a device, copied there once."""
        if self._placed.device != device:
            self._placed = self.inv_freq.to(device)
        return self._placed

    def forward(self, position_ids: torch.Tensor, compute_dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines `(..., 1, D)` of int positions `(...)`, in float32 (float64 for a float64 draft)."""
        wide = torch.promote_types(compute_dtype, torch.float32)
        angles = position_ids.to(wide)[..., None, None] * self._on(position_ids.device).to(wide)
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos() * self.attention_scaling, angles.sin() * self.attention_scaling


def rotate(heads: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """
    Applies RoPE in the half-split form of Llama.

    Args:
        heads (`torch.Tensor` of shape `(..., heads, D)`):
            Queries or keys.
        rotation (`tuple[torch.Tensor, torch.Tensor]` of shape `(..., 1, D)`):
            Cosines and sines.

    Returns:
        `torch.Tensor`: like `heads`, computed in the dtype of `rotation`.
    """
    cos, sin = rotation
    wide = heads.to(cos.dtype)
    first, second = wide.chunk(2, dim=-1)
    return (wide * cos + torch.cat((-second, first), dim=-1) * sin).to(heads.dtype)


def take_columns(rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """One column of each row: `(B, q, ...)` and `(B,)` to `(B, 1, ...)`."""
    return rows[torch.arange(len(rows), device=rows.device), columns][:, None]


class DraftAttention(nn.Module):
    """
    Projections and RoPE of one layer; who attends to which keys is the caller's business.

    Args:
        config ([`Eagle3DraftConfig`]): sizes.
        layer_idx (`int`): layer 0 reads embedding and hidden state side by side.
    """

    def __init__(self, config: Eagle3DraftConfig, layer_idx: int):
        super().__init__()
        self.layer_idx = layer_idx
        self.head_dim = config.head_dim
        input_size = config.hidden_size * (2 if layer_idx == 0 else 1)
        self.q_proj = DraftLinear(input_size, config.num_attention_heads * config.head_dim)
        self.k_proj = DraftLinear(input_size, config.num_key_value_heads * config.head_dim)
        self.v_proj = DraftLinear(input_size, config.num_key_value_heads * config.head_dim)
        self.o_proj = DraftLinear(config.num_attention_heads * config.head_dim, config.hidden_size)

    def forward(
        self,
        inputs: torch.Tensor,
        rotation: tuple[torch.Tensor, torch.Tensor],
        attend: Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor],
        compute_dtype: torch.dtype,
        columns: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """`(..., H or 2H)` to `(..., H)`; with `columns`, `(B, q, H or 2H)` to `(B, 1, H)` at those."""
        queries = inputs if columns is None else take_columns(inputs, columns)
        q, k, v = (
            projection(rows, compute_dtype).unflatten(-1, (-1, self.head_dim))
            for projection, rows in ((self.q_proj, queries), (self.k_proj, inputs), (self.v_proj, inputs))
        )
        q_rotation = rotation if columns is None else tuple(take_columns(part, columns) for part in rotation)
        heads = attend(self.layer_idx, rotate(q, q_rotation), rotate(k, rotation), v)
        return self.o_proj(heads.flatten(-2), compute_dtype)


class DraftMLP(nn.Module):
    """
    Llama's gated MLP.

    Args:
        config ([`Eagle3DraftConfig`]): sizes and activation.
    """

    def __init__(self, config: Eagle3DraftConfig):
        super().__init__()
        self.gate_proj = DraftLinear(config.hidden_size, config.intermediate_size)
        self.up_proj = DraftLinear(config.hidden_size, config.intermediate_size)
        self.down_proj = DraftLinear(config.intermediate_size, config.hidden_size)
        self.act_fn = ACT2FN[config.hidden_act]

    def forward(self, inputs: torch.Tensor, compute_dtype: torch.dtype) -> torch.Tensor:
        """`(..., H)` to `(..., H)`."""
        gate, up = self.gate_proj(inputs, compute_dtype), self.up_proj(inputs, compute_dtype)
        return self.down_proj(self.act_fn(gate) * up, compute_dtype)


class DraftLayer(nn.Module):
    """
    One decoder layer. Layer 0 reads `cat[input_layernorm(embed), hidden_norm(hidden)]`; later ones, as in vLLM, are
    ordinary Llama layers over the hidden state.

    Args:
        config ([`Eagle3DraftConfig`]): sizes and flags.
        layer_idx (`int`): position in the stack.
    """

    def __init__(self, config: Eagle3DraftConfig, layer_idx: int):
        super().__init__()
        self.norm_before_residual = config.norm_before_residual
        self.input_layernorm = DraftRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hidden_norm = DraftRMSNorm(config.hidden_size, config.rms_norm_eps) if layer_idx == 0 else None
        self.self_attn = DraftAttention(config, layer_idx)
        self.post_attention_layernorm = DraftRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = DraftMLP(config)

    def forward(
        self,
        hidden: torch.Tensor,
        embeds: torch.Tensor,
        rotation: tuple[torch.Tensor, torch.Tensor],
        attend: Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor],
        compute_dtype: torch.dtype,
        columns: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """`(..., H)` hidden states to `(..., H)`; with `columns`, `(B, q, H)` to `(B, 1, H)` at those."""
        residual = hidden
        if self.hidden_norm is not None:
            normed = self.hidden_norm(hidden, compute_dtype)
            residual = normed if self.norm_before_residual else hidden
            inputs = torch.cat((self.input_layernorm(embeds, compute_dtype), normed), dim=-1)
        else:
            inputs = self.input_layernorm(hidden, compute_dtype)
        if columns is not None:
            residual = take_columns(residual, columns)
        residual = residual + self.self_attn(inputs, rotation, attend, compute_dtype, columns)
        return residual + self.mlp(self.post_attention_layernorm(residual, compute_dtype), compute_dtype)
