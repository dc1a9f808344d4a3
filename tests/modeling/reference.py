"""
The draft written a second time, from the papers' description alone: plain torch, dense, one document at a time, masked
softmax over concatenated keys. Shares no code with the package; reads weights by their checkpoint names.

Shapes: `N` tokens of a document, `K` TTT passes, `H` hidden size, `D` head dim.
"""

import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding


def rms_norm(x, weight, eps):
    wide = torch.promote_types(x.dtype, torch.float32)
    x = x.to(wide)
    return x * (x.pow(2).mean(-1, keepdim=True) + eps) ** -0.5 * weight.to(wide)


def dense_attention(q, k, v, visible, scale):
    """q [Nq, Hq, D], k and v [Nk, Hkv, D], visible [Nq, Nk] -> out [Nq, Hq, D] by a masked softmax."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    probs = scores.masked_fill(~visible, float("-inf")).softmax(-1)
    return torch.einsum("hqk,khd->qhd", probs, v)


def branch_mask(num_tokens, num_pass):
    """[N, (1 + s) N] visibility of trunk keys, then of each branch pass's keys."""
    causal = torch.ones(num_tokens, num_tokens, dtype=torch.bool).tril()
    return torch.cat([causal] + [torch.eye(num_tokens, dtype=torch.bool)] * num_pass, dim=1)


class ReferenceDraft:
    """`config`: sizes and flags; `weights`: leaves by checkpoint name, which require grad if gradients are wanted."""

    def __init__(self, config, weights):
        self.config, self.weights = config, weights
        fields = {name: getattr(config, name) for name in ("head_dim", "max_position_embeddings", "rope_parameters")}
        rotary = LlamaRotaryEmbedding(LlamaConfig(**fields))
        self.inv_freq, self.rope_scaling = rotary.inv_freq, rotary.attention_scaling

    def norm(self, x, name):
        return rms_norm(x, self.weights[name + ".weight"], self.config.rms_norm_eps)

    def linear(self, x, name):
        return x @ self.weights[name + ".weight"].T

    def rope(self, x, positions):
        angles = positions.to(x.dtype)[:, None] * self.inv_freq.to(x.dtype)[None, :]
        cos, sin = (f(angles)[:, None, :] * self.rope_scaling for f in (torch.cos, torch.sin))
        half = x.shape[-1] // 2
        a, b = x[..., :half], x[..., half:]
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)

    def fuse(self, taps):
        if self.config.fc_norm:
            pieces = taps.chunk(len(self.config.tap_layers), dim=-1)
            taps = torch.cat([self.norm(piece, f"fc_norm.{i}") for i, piece in enumerate(pieces)], dim=-1)
        if self.config.norm_before_fc:
            taps = self.norm(taps, "input_norm")
        return self.linear(taps, "fc")

    def logits(self, hidden):
        return self.linear(self.norm(hidden, "norm"), "lm_head")

    def unroll(self, taps, embeds, num_passes, detach_passes=False):
        """Outputs [N, H] of every pass at every row of one document; past its end the last embedding is repeated."""
        num_tokens = taps.shape[0]
        positions = torch.arange(num_tokens)
        hidden, outputs = self.fuse(taps), []
        keys = [[] for _ in range(self.config.num_hidden_layers)]
        for s in range(num_passes):
            if s > 0:
                hidden = hidden.detach() if detach_passes else hidden
                hidden = self.norm(hidden, "norm") if self.config.norm_output else hidden
            shifted = embeds[(positions + 1 + s).clamp(max=num_tokens - 1)]
            for index, layer_keys in enumerate(keys):
                if detach_passes:
                    layer_keys[:] = [(k.detach(), v.detach()) for k, v in layer_keys]
                hidden = self.layer(index, hidden, shifted, positions + s, layer_keys, branch_mask(num_tokens, s))
            outputs.append(hidden)
        return outputs

    def layer(self, index, hidden, embeds, positions, layer_keys, visible):
        name, config = f"layers.{index}.", self.config
        if index == 0:
            normed = self.norm(hidden, name + "hidden_norm")
            inputs = torch.cat([self.norm(embeds, name + "input_layernorm"), normed], dim=-1)
            residual = normed if config.norm_before_residual else hidden
        else:
            inputs, residual = self.norm(hidden, name + "input_layernorm"), hidden
        q, k, v = (
            self.linear(inputs, f"{name}self_attn.{part}_proj").view(len(positions), -1, config.head_dim)
            for part in "qkv"
        )
        layer_keys.append((self.rope(k, positions), v))
        all_k, all_v = (torch.cat(parts) for parts in zip(*layer_keys, strict=True))
        heads = dense_attention(self.rope(q, positions), all_k, all_v, visible, config.head_dim**-0.5)
        residual = residual + self.linear(heads.flatten(1), name + "self_attn.o_proj")
        inner = self.norm(residual, name + "post_attention_layernorm")
        gate, up = self.linear(inner, name + "mlp.gate_proj"), self.linear(inner, name + "mlp.up_proj")
        return residual + self.linear(gate * torch.sigmoid(gate) * up, name + "mlp.down_proj")
