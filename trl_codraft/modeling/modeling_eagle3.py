"""
The EAGLE-3 draft: its block, the training-time-test unroll over a pack, and the same block with a cache for rollouts.

Shapes: `T` packed rows, `Ts` rows of pass `s`, `B` rows of a batch, `q` new tokens, `H` draft hidden size, `Ht` policy
hidden size, `n` taps, `Hq` / `Hkv` query / key-value heads, `D` head dim, `V` / `Vd` policy / draft vocabulary,
`K` TTT passes.
"""

from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.nn import functional as F

from .attention import branch_attention
from .configuration_eagle3 import Eagle3DraftConfig
from .disk.tensors import load_draft, save_draft
from .initialization import fill_at_random, initialize_draft
from .layers import DraftLayer, DraftLinear, DraftRMSNorm, DraftRotary, take_columns
from .packing import PackedLayout
from .teacher import PolicyHead


# A mask is built in pieces of at most this many bytes, one an entry.
MAX_MASK_BYTES = 2**26


class Eagle3DraftModel(nn.Module):
    """
    An EAGLE-3 draft (https://huggingface.co/papers/2503.01840): `fc` fuses the taps, one or more Llama layers read the
    fused state beside the embedding of the next token, and an own head predicts the token after it. Modules are named
    as the tensors of the checkpoint format. The draft owns no embedding table: callers pass rows of the policy's.

    A draft may be built on the meta device, which costs no memory; after `to_empty` its weights and vocabulary are
    whatever `load_state_dict` brings.

    Parameters are the master copy; matmuls run in `compute_dtype`, norms, RoPE and softmax in float32 (float64 when
    everything is float64), and ambient autocast has no effect.

    Args:
        config ([`Eagle3DraftConfig`]):
            Sizes and flags.
        compute_dtype (`torch.dtype`, *optional*):
            Dtype of the matmuls; `None` follows the parameters.

    Attributes:
        compute_dtype (`torch.dtype`): see above; may be set.
        d2t (`torch.LongTensor` of shape `(Vd,)`), t2d (`torch.BoolTensor` of shape `(V,)`):
            Only with a reduced vocabulary: offset from draft to policy id, and membership of policy ids.
    """

    def __init__(self, config: Eagle3DraftConfig, compute_dtype: torch.dtype | None = None):
        super().__init__()
        self.config = config
        self._compute_dtype = compute_dtype
        taps_width = len(config.tap_layers) * config.target_hidden_size
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(
                DraftRMSNorm(config.target_hidden_size, config.rms_norm_eps) for _ in config.tap_layers
            )
        if config.norm_before_fc:
            self.input_norm = DraftRMSNorm(taps_width, config.rms_norm_eps)
        self.fc = DraftLinear(taps_width, config.hidden_size)
        self.layers = nn.ModuleList(DraftLayer(config, index) for index in range(config.num_hidden_layers))
        self.norm = DraftRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = DraftLinear(config.hidden_size, config.draft_vocab_size)
        self.rotary = DraftRotary(config)
        self.scale = config.head_dim**-0.5
        if config.draft_vocab_size < config.vocab_size:
            # The first tokens, written without a look at values: a meta device has none.
            self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
            self.register_buffer("t2d", torch.arange(config.vocab_size) < config.draft_vocab_size)
        fill_at_random(self.modules(), seed=0, std=0.02)

    @property
    def compute_dtype(self) -> torch.dtype:
        return self.fc.weight.dtype if self._compute_dtype is None else self._compute_dtype

    @compute_dtype.setter
    def compute_dtype(self, dtype: torch.dtype | None) -> None:
        self._compute_dtype = dtype

    # Vocabulary

    @property
    def target_ids(self) -> torch.Tensor:
        """`(Vd,)` int64: the policy's id of each draft token, ascending."""
        draft_ids = torch.arange(self.config.draft_vocab_size, device=self.fc.weight.device)
        return draft_ids + self.d2t if self.config.draft_vocab_size < self.config.vocab_size else draft_ids

    @torch.no_grad()
    def set_vocab(self, target_ids: torch.Tensor) -> None:
        """
        Chooses the tokens a reduced draft can propose; the head's rows keep their values.

        Args:
            target_ids (`torch.LongTensor` of shape `(Vd,)`):
                Policy ids, strictly ascending.

        Raises:
            ValueError: if the draft has the full vocabulary, or the ids are not `Vd` ascending ids of the policy.
        """
        size, vocab_size = self.config.draft_vocab_size, self.config.vocab_size
        if size == vocab_size:
            raise ValueError("A draft of the full vocabulary has no token map. Set `draft_vocab_size` to reduce it.")
        ids = target_ids.to(torch.int64)
        if ids.shape != (size,) or ids[0] < 0 or ids[-1] >= vocab_size or not bool((ids.diff() > 0).all()):
            raise ValueError(
                f"A draft vocabulary is {size} strictly ascending ids in 0..{vocab_size - 1}, got {tuple(ids.shape)} "
                "ids that are not. Sort and deduplicate them."
            )
        self.d2t.copy_(ids - torch.arange(size, device=ids.device))
        self.t2d.zero_()
        self.t2d[ids.to(self.t2d.device)] = True

    # Forward pieces

    def fuse_taps(self, taps: torch.Tensor) -> torch.Tensor:
        """
        The hidden input of pass 0.

        Args:
            taps (`torch.Tensor` of shape `(..., n*Ht)`):
                Tap layers side by side, ascending.

        Returns:
            `torch.Tensor`: `(..., H)` in the compute dtype.
        """
        with _outside_autocast(taps):
            if self.config.fc_norm:
                pieces = taps.split(self.config.target_hidden_size, dim=-1)
                taps = torch.cat(
                    [norm(piece, self.compute_dtype) for norm, piece in zip(self.fc_norm, pieces, strict=True)], dim=-1
                )
            elif self.config.norm_before_fc:
                taps = self.input_norm(taps, self.compute_dtype)
            return self.fc(taps, self.compute_dtype)

    def feedback(self, hidden: torch.Tensor) -> torch.Tensor:
        """
        The hidden input of the next pass or the next draft step: the output, after the final norm if `norm_output`.

        Args:
            hidden (`torch.Tensor` of shape `(..., H)`):
                Output of a pass or a step, before the final norm.

        Returns:
            `torch.Tensor`: `(..., H)`.
        """
        if not self.config.norm_output:
            return hidden
        with _outside_autocast(hidden):
            return self.norm(hidden, self.compute_dtype)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """
        Logits over the draft vocabulary.

        Args:
            hidden (`torch.Tensor` of shape `(..., H)`):
                Output of a pass or a step, before the final norm.

        Returns:
            `torch.Tensor`: `(..., Vd)` in float32 (float64 for a float64 draft).
        """
        with _outside_autocast(hidden):
            logits = self.lm_head(self.norm(hidden, self.compute_dtype), self.compute_dtype)
            return logits.to(torch.promote_types(logits.dtype, torch.float32))

    # Training

    def unroll(
        self,
        taps: torch.Tensor,
        token_embeds: torch.Tensor,
        layout: PackedLayout,
        num_passes: int,
        detach_passes: bool = False,
        attention: Callable[..., torch.Tensor] = branch_attention,
    ) -> list[torch.Tensor]:
        """
        The training-time-test unroll: pass `s` at root row `r` reads the embedding of token `r+1+s` and the previous
        pass's output at the same row (pass 0: the fused taps), rotates by `pos(r)+s`, attends to the trunk (keys of
        pass 0, rows up to `r` of the document) and to its own row's keys of passes 1 to `s`, and predicts token
        `r+2+s`. Equal to decoding with a cache from every root at once. Each layer has its own trunk and branch.

        Args:
            taps (`torch.Tensor` of shape `(T, n*Ht)`):
                Tap layers side by side, ascending.
            token_embeds (`torch.Tensor` of shape `(T, H)`):
                The policy's embedding of each row's own token (unshifted).
            layout ([`PackedLayout`]):
                Documents of the pack.
            num_passes (`int`):
                `K >= 1`.
            detach_passes (`bool`, *optional*, defaults to `False`):
                Whether each pass takes outputs and keys of earlier passes as constants.
            attention (`Callable`, *optional*, defaults to [`branch_attention`]):
                Attention of a pass, with the signature of [`branch_attention`].

        Returns:
            `list[torch.Tensor]`: for each pass `s` the output before the final norm at rows `layout.query_rows(s)`,
            `(Ts, H)`, `T0 = T`. Rows whose target lies past the document's end hold numbers without meaning.

        Raises:
            ValueError: if the rows do not fit the layout or `num_passes < 1`.
        """
        if num_passes < 1:
            raise ValueError(f"The draft needs at least one TTT pass, got num_passes={num_passes}.")
        if taps.shape[0] != layout.num_rows or token_embeds.shape[0] != layout.num_rows:
            raise ValueError(
                f"The layout has {layout.num_rows} rows, but there are {taps.shape[0]} rows of taps and "
                f"{token_embeds.shape[0]} of embeddings."
            )
        keys = [_PassKeys(detach_passes) for _ in self.layers]
        outputs: list[torch.Tensor] = []
        with _outside_autocast(taps):
            hidden = self.fuse_taps(taps)
            for num_pass in range(num_passes):
                rows = layout.query_rows(num_pass)
                if num_pass > 0:
                    hidden = self.feedback(hidden.detach() if detach_passes else hidden)
                if num_pass == 1 and rows.shape[0] != layout.num_rows:
                    hidden = hidden[rows]
                embeds = layout.shifted(token_embeds, 1 + num_pass, num_pass)
                position_ids = layout.position_ids[rows] + num_pass

                def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
                    trunk_k, trunk_v, branch = keys[layer].extend(k, v)
                    return attention(q, trunk_k, trunk_v, layout, branch=branch, scale=self.scale)

                hidden = self._run_layers(hidden, embeds, position_ids, attend)
                outputs.append(hidden)
        return outputs

    # Rollouts

    def step(
        self,
        hidden: torch.Tensor,
        token_embeds: torch.Tensor,
        position_ids: torch.Tensor,
        cache,
        attention_mask: torch.Tensor | Callable[[slice | torch.Tensor], torch.Tensor] | None = None,
        columns: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """
        The block over new tokens and a KV cache.

        Args:
            hidden (`torch.Tensor` of shape `(B, q, H)`):
                `fuse_taps` of a row's taps, or `feedback` of the previous step's output.
            token_embeds (`torch.Tensor` of shape `(B, q, H)`):
                The policy's embedding of the token after each row.
            position_ids (`torch.LongTensor` of shape `(B, q)`):
                Position of each row in its document.
            cache (an object with `update(k, v, layer_idx) -> (k_all, v_all)`, for example
                [`~transformers.DynamicCache`]):
                Receives `(B, Hkv, q, D)` keys and values and returns all of them, `(B, Hkv, kv, D)`.
            attention_mask (`torch.BoolTensor` of shape `(B, 1, q, kv)` or `Callable`, *optional*):
                True where a row sees a key. A callable returns it for a slice of the `q` or for the columns `(B,)`,
                and is asked for at most 64 MiB at once. `None`: every row sees all keys up to its own, the last `q` of
                the `kv`.
            columns (`torch.LongTensor` of shape `(B,)`, *optional*):
                The one column of each row whose output is wanted; needs `attention_mask`. The last layer then computes
                only keys and values at the others.

        Returns:
            `torch.Tensor`: `(B, q, H)`, or `(B, 1, H)` with `columns`, before the final norm. Rows that see no key
            hold numbers without meaning.
        """

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            k_all, v_all = cache.update(k.transpose(1, 2), v.transpose(1, 2), layer)
            mask = attention_mask
            if q.shape[1] != k.shape[1]:
                mask = mask(columns) if callable(mask) else take_columns(mask.transpose(1, 2), columns)
            return _cached_attention(q.transpose(1, 2), k_all, v_all, mask, self.scale).transpose(1, 2)

        with _outside_autocast(hidden):
            return self._run_layers(hidden, token_embeds, position_ids, attend, columns)

    def _run_layers(
        self,
        hidden: torch.Tensor,
        embeds: torch.Tensor,
        position_ids: torch.Tensor,
        attend: Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor],
        columns: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """
        Runs all layers over rows of any leading shape; `attend(layer, q, k, v)` owns the keys. `columns` as in `step`.
        """
        hidden, embeds = hidden.to(self.compute_dtype), embeds.to(self.compute_dtype)
        rotation = self.rotary(position_ids, self.compute_dtype)
        for layer in self.layers[:-1]:
            hidden = layer(hidden, embeds, rotation, attend, self.compute_dtype)
        return self.layers[-1](hidden, embeds, rotation, attend, self.compute_dtype, columns)

    # Initialisation

    def initialize_from_policy(
        self,
        head: PolicyHead,
        final_norm_weight: torch.Tensor | None = None,
        tap_scales: Sequence[float] | torch.Tensor | None = None,
        seed: int = 0,
    ) -> None:
        """
        Starts a fresh draft from the policy. The head's rows (times the policy's logit scale) and the final norm are
        copied, the norm scaled down as far as needed for the first guesses to be unsure rather than confidently wrong;
        `o_proj` and `down_proj` are zero, so that the block starts as the identity; `fc` brings the taps to one scale
        and passes on the last one, plus a random mixture of all. The global random state is not touched, and equal
        seeds give equal drafts on every rank.

        Args:
            head ([`PolicyHead`]):
                The policy's head.
            final_norm_weight (`torch.Tensor` of shape `(H,)`, *optional*):
                Factors of the policy's final norm; read off the policy if not given.
            tap_scales (`Sequence[float]` or `torch.Tensor`, *optional*):
                Size of a typical token's entries in each tap (see [`~initialization.tap_log_scales`]); ones if not
                given. With `fc_norm` or `norm_before_fc` the taps arrive normed and the scales are not used.
            seed (`int`, *optional*, defaults to `0`):
                Seed of the random part.

        Raises:
            ValueError: if the policy's head or norm does not fit the draft, or there is not one scale per tap.
        """
        initialize_draft(self, head, final_norm_weight, tap_scales, seed)

    # Disk

    def save_pretrained(self, path, **kwargs) -> None:
        """Writes the draft as one folder for vLLM, SGLang and speculators; see [`~disk.tensors.save_draft`]."""
        save_draft(self, path, **kwargs)

    @classmethod
    def from_pretrained(cls, path_or_repo, **kwargs) -> "Eagle3DraftModel":
        """Reads a draft from a folder or a Hub repository; see [`~disk.tensors.load_draft`]."""
        return load_draft(cls, path_or_repo, **kwargs)


class _PassKeys:
    """Keys and values of one layer: the trunk of pass 0 and one branch entry per later pass."""

    def __init__(self, detach_passes: bool):
        self.detach_passes = detach_passes
        self.trunk: tuple[torch.Tensor, torch.Tensor] | None = None
        self.branch: list[tuple[torch.Tensor, torch.Tensor]] = []

    def extend(self, k: torch.Tensor, v: torch.Tensor):
        """Takes a pass's keys and values; returns the trunk and the branch that this pass sees."""
        if self.trunk is None:
            self.trunk = (k, v)
            return k, v, None
        earlier = [self.trunk, *self.branch]
        if self.detach_passes:
            earlier = [(key.detach(), value.detach()) for key, value in earlier]
        self.branch.append((k, v))
        (trunk_k, trunk_v), *branch = *earlier, (k, v)
        return trunk_k, trunk_v, ([key for key, _ in branch], [value for _, value in branch])


def _cached_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | Callable[[slice], torch.Tensor] | None,
    scale: float,
) -> torch.Tensor:
    """Attention of (B, Hq, q, D) queries to (B, Hkv, kv, D) cached keys."""
    num_new, num_keys = q.shape[2], k.shape[2]
    if mask is None and num_new > 1:
        mask = torch.ones(num_new, num_keys, dtype=torch.bool, device=q.device).tril(num_keys - num_new)
    if q.is_cuda and mask is not None:
        # Only the memory-efficient kernel takes a mask without the whole score matrix, and it knows no shared heads.
        k, v = (tensor.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for tensor in (k, v))
    settings = {"scale": scale, "enable_gqa": q.shape[1] != k.shape[1]}
    if not callable(mask):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, **settings)
    size = max(1, MAX_MASK_BYTES // (len(q) * num_keys))
    parts = [slice(start, min(start + size, num_new)) for start in range(0, num_new, size)]
    outputs = [F.scaled_dot_product_attention(q[:, :, part], k, v, attn_mask=mask(part), **settings) for part in parts]
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)


def _outside_autocast(tensor: torch.Tensor) -> torch.autocast:
    """The draft chooses its own dtypes."""
    return torch.autocast(tensor.device.type, enabled=False)
