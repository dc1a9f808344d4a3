"""
Configuration of an EAGLE-3 draft.

Shapes: `H` draft hidden size, `Ht` policy hidden size, `n` policy layers, `V` / `Vd` policy / draft vocabulary.
"""

import math
from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedConfig
from transformers.activations import ACT2FN


# Whole numbers of at least one.
SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "draft_vocab_size",
    "target_hidden_size",
    "max_position_embeddings",
)
# RoPE types whose frequencies do not depend on the length of the text at hand. The others ("dynamic", "longrope")
# would turn keys already in a cache into keys of another model, and servers disagree on them.
STATIC_ROPE_TYPES = ("default", "linear", "llama3", "yarn")

_ROPE_FIELDS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": (
        "factor",
        "original_max_position_embeddings",
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "truncate",
    ),
}
# Without these there are no frequencies; the rest have defaults.
_REQUIRED_ROPE_FIELDS = {**_ROPE_FIELDS, "yarn": ("factor",)}
# What a policy's configuration must say for a draft to have its sizes.
_POLICY_FIELDS = ("hidden_size", "vocab_size", "num_hidden_layers")


def default_tap_layers(num_policy_layers: int) -> list[int]:
    """
    The tap layers of a draft when none are asked for: a low, a middle and a high layer, `[2, n // 2, n - 3]` as in
    EAGLE-3 and its servers, as far as a policy of fewer than 7 layers has them.

    Args:
        num_policy_layers (`int`):
            Decoder layers of the policy, `n >= 1`.

    Returns:
        `list[int]`: ids, strictly ascending; id `i < n` is the input of decoder layer `i`.

    Raises:
        ValueError: if the policy has no layer.
    """
    n = num_policy_layers
    if n < 1:
        raise ValueError(f"A policy has at least one decoder layer, got num_policy_layers={n}.")
    return [2, n // 2, n - 3] if n >= 7 else sorted({min(1, n - 1), n // 2, n - 1})


class Eagle3DraftConfig(PreTrainedConfig):
    r"""
    Configuration of an [`Eagle3DraftModel`]: a plain Llama block (no biases, no query/key norm) that reads hidden
    states of the policy and predicts its next tokens (EAGLE-3, https://huggingface.co/papers/2503.01840). Field names
    follow the checkpoint format that vLLM, SGLang and speculators share.

    Args:
        hidden_size (`int`, *optional*, defaults to `4096`):
            Width `H` of the draft; also the width of the policy's token embeddings, which the draft reads.
        intermediate_size (`int`, *optional*, defaults to `11008`):
            Width of the draft's MLP.
        num_hidden_layers (`int`, *optional*, defaults to `1`):
            Decoder layers of the draft.
        num_attention_heads (`int`, *optional*, defaults to `32`):
            Query heads.
        num_key_value_heads (`int`, *optional*):
            Key and value heads; defaults to `num_attention_heads`.
        head_dim (`int`, *optional*):
            Width of one head, even; defaults to `hidden_size // num_attention_heads`.
        hidden_act (`str`, *optional*, defaults to `"silu"`):
            Activation of the MLP.
        rms_norm_eps (`float`, *optional*, defaults to `1e-6`):
            Epsilon of every RMSNorm.
        vocab_size (`int`, *optional*, defaults to `32000`):
            Policy vocabulary `V`.
        draft_vocab_size (`int`, *optional*):
            Draft vocabulary `Vd`; defaults to `vocab_size`, that is, the full vocabulary.
        target_hidden_size (`int`, *optional*):
            Width `Ht` of a tap; defaults to `hidden_size`.
        tap_layers (`list[int]`, *optional*):
            Policy layers to read, strictly ascending: id `i` in `0..n-1` is the input of decoder layer `i`, id `n` the
            output of the last layer before the final norm. Defaults to [`default_tap_layers`] of `num_policy_layers`.
        num_policy_layers (`int`, *optional*):
            Decoder layers `n` of the policy; bounds `tap_layers` when known.
        max_position_embeddings (`int`, *optional*, defaults to `2048`):
            Longest context of the draft.
        rope_parameters (`dict`, *optional*):
            Flat RoPE parameters (`rope_type`, `rope_theta` and the scaling fields of the type), as in Transformers 5.
            Types: `"default"`, `"linear"`, `"llama3"`, `"yarn"`.
        fc_norm (`bool`, *optional*, defaults to `False`):
            Whether each tap has an RMSNorm of its own before `fc` (EAGLE-3.1).
        norm_output (`bool`, *optional*, defaults to `False`):
            Whether the next pass reads the output after the final norm instead of before it (EAGLE-3.1).
        norm_before_residual (`bool`, *optional*, defaults to `False`):
            Whether the residual stream starts from the normed hidden state. SGLang does not implement it.
        norm_before_fc (`bool`, *optional*, defaults to `False`):
            Whether one RMSNorm over the concatenated taps comes before `fc`. Excludes `fc_norm`.

    Raises:
        ValueError: on sizes, taps, flags or a RoPE type that no draft can have; the message says what to set.
    """

    model_type = "eagle3_draft"

    hidden_size: int = 4096
    intermediate_size: int = 11008
    num_hidden_layers: int = 1
    num_attention_heads: int = 32
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-6
    vocab_size: int = 32000
    draft_vocab_size: int | None = None
    target_hidden_size: int | None = None
    tap_layers: list[int] | None = None
    num_policy_layers: int | None = None
    max_position_embeddings: int = 2048
    rope_parameters: dict | None = None
    fc_norm: bool = False
    norm_output: bool = False
    norm_before_residual: bool = False
    norm_before_fc: bool = False

    def __post_init__(self, **kwargs):
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if self.head_dim is None:
            self.head_dim = self.hidden_size // self.num_attention_heads
        if self.draft_vocab_size is None:
            self.draft_vocab_size = self.vocab_size
        if self.target_hidden_size is None:
            self.target_hidden_size = self.hidden_size
        if self.tap_layers is None:
            if self.num_policy_layers is None:
                raise ValueError("A draft needs `tap_layers`, or `num_policy_layers` to choose them by default.")
            self.tap_layers = default_tap_layers(self.num_policy_layers)
        self.tap_layers = list(self.tap_layers)
        # Transformers completes this dict in place; the caller's stays as it is.
        self.rope_parameters = dict(self.rope_parameters) if self.rope_parameters is not None else None
        super().__post_init__(**kwargs)
        self._validate()

    @classmethod
    def from_policy(cls, policy_config: PreTrainedConfig, **overrides) -> "Eagle3DraftConfig":
        """
        The configuration of a fresh draft for a policy: the policy's width, heads, vocabulary, context length and RoPE
        parameters in a plain Llama block.

        A RoPE type whose frequencies follow the length of the text (`"dynamic"`, `"longrope"`) or that rotates in its
        own way becomes plain RoPE at the policy's `rope_theta`. Full attention decides where layer types differ in
        their RoPE parameters, the first layer where layers differ in their sizes. A mixture of experts gets one dense
        MLP as wide as its active experts, within 2 to 4 times `hidden_size`; latent attention and state-space models
        get ordinary heads of width 128.

        Args:
            policy_config ([`~transformers.PreTrainedConfig`]):
                Configuration of the policy (composite ones: its text part is used).
            **overrides:
                Fields of this class to set instead, for example `tap_layers`, `num_hidden_layers`, `draft_vocab_size`,
                `fc_norm`, `norm_output`.

        Returns:
            [`Eagle3DraftConfig`]

        Raises:
            ValueError: if an override is no field of this class, or the result is no valid draft.
        """
        valid = _own_fields(cls)
        unknown = sorted(set(overrides) - valid)
        if unknown:
            raise ValueError(
                f"Unknown draft settings {unknown}: no field of `Eagle3DraftConfig`. Valid ones: {sorted(valid)}."
            )
        text_config = policy_config.get_text_config()
        missing = [name for name in _POLICY_FIELDS if getattr(text_config, name, None) is None]
        if missing:
            raise ValueError(
                f"The configuration of model type `{policy_config.model_type}` has no {missing}, from which a "
                "draft takes its sizes. Set `use_draft=False` to train without a draft."
            )
        # Layers may differ in their heads (Gemma 4) or MLPs, and such a configuration refuses to give one for all.
        first_layer = text_config.per_layer_config[0]
        fields = {
            "hidden_size": text_config.hidden_size,
            "target_hidden_size": text_config.hidden_size,
            "vocab_size": text_config.vocab_size,
            "num_policy_layers": text_config.num_hidden_layers,
            "intermediate_size": _dense_intermediate_size(first_layer),
            "rope_parameters": _flat_rope_parameters(text_config),
            # Families without RMSNorm or a maximal length do not have these fields.
            "rms_norm_eps": _first_number(text_config, "rms_norm_eps", "layer_norm_eps", default=1e-6),
            "max_position_embeddings": _first_number(text_config, "max_position_embeddings", default=32768),
            **_attention_sizes(first_layer),
        }
        return cls(**{**fields, **overrides})

    def _validate(self) -> None:
        """Raises ValueError on settings that make no draft."""
        for name in SIZES:
            if getattr(self, name) < 1:
                raise ValueError(f"`{name}` must be at least 1, got {getattr(self, name)}.")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"`num_attention_heads` ({self.num_attention_heads}) must be a multiple of `num_key_value_heads` "
                f"({self.num_key_value_heads}): each key/value head serves the same number of query heads."
            )
        if not isinstance(self.hidden_act, str) or self.hidden_act not in ACT2FN:
            raise ValueError(f"`hidden_act` {self.hidden_act!r} is no activation of Transformers, such as 'silu'.")
        if self.head_dim % 2:
            raise ValueError(f"`head_dim` must be even for RoPE, got {self.head_dim}.")
        if self.draft_vocab_size > self.vocab_size:
            raise ValueError(
                f"`draft_vocab_size` ({self.draft_vocab_size}) exceeds the policy's vocabulary ({self.vocab_size}). "
                "Set it to at most that, or leave it None for the full vocabulary."
            )
        if self.fc_norm and self.norm_before_fc:
            raise ValueError(
                "`fc_norm` and `norm_before_fc` both norm the taps before `fc`. Set one of them to False."
            )
        if not is_positive_number(self.rms_norm_eps):
            raise ValueError(f"`rms_norm_eps` must be a positive number, got {self.rms_norm_eps!r}.")
        _validate_tap_layers(self.tap_layers, self.num_policy_layers)
        check_rope(self.rope_parameters)


def is_positive_number(value: Any) -> bool:
    """Whether a value is a finite number above 0."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf


def check_rope(parameters: Mapping[str, Any]) -> None:
    """
    Checks flat RoPE parameters, with `rope_type` and `rope_theta`.

    Raises:
        ValueError: if no draft can have the type, or a number of it is missing or not positive.
    """
    rope_type = parameters["rope_type"]
    if rope_type not in STATIC_ROPE_TYPES:
        raise ValueError(
            f"RoPE type {rope_type!r} cannot be used in a draft: its frequencies change with the length of the "
            f"text, or servers read it differently. Use one of {list(STATIC_ROPE_TYPES)} in `rope_parameters`."
        )
    for name in ("rope_theta", *_REQUIRED_ROPE_FIELDS[rope_type]):
        if not is_positive_number(parameters.get(name)):
            raise ValueError(
                f"`{name}` of RoPE type {rope_type!r} must be a positive number, got {parameters.get(name)!r} in "
                "`rope_parameters`."
            )


def _own_fields(cls: type) -> set[str]:
    """Names of the fields that the configuration class itself declares."""
    return set(cls.__annotations__)


def _validate_tap_layers(tap_layers: list[int], num_policy_layers: int | None) -> None:
    """Raises ValueError unless the ids are strictly ascending and exist in the policy."""
    if not tap_layers or tap_layers != sorted(set(tap_layers)):
        raise ValueError(f"`tap_layers` must be strictly ascending and at least one, got {tap_layers}.")
    if tap_layers[0] < 0 or (num_policy_layers is not None and tap_layers[-1] > num_policy_layers):
        last = "n" if num_policy_layers is None else num_policy_layers
        raise ValueError(
            f"`tap_layers` {tap_layers} do not exist in the policy: ids run from 0 (input of the first decoder layer) "
            f"to {last} (output of the last one)."
        )


def _first_number(config: PreTrainedConfig, *names: str, default: float) -> float:
    """The first of the fields that the family declares as a number; families name or leave them out as they like."""
    for name in names:
        value = getattr(config, name, None)
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return value
    return default


def experts_per_token(config: PreTrainedConfig) -> int:
    """How many experts of a layer a token goes through; 0 where there are none."""
    return _first_number(config, "num_experts_per_tok", "moe_topk", "top_k_experts", default=0)


def _dense_intermediate_size(config: PreTrainedConfig) -> int:
    """Width of a dense MLP for the draft of a dense or mixture-of-experts policy."""
    hidden_size = config.hidden_size
    width = getattr(config, "intermediate_size", None)
    if isinstance(width, (list, tuple)):
        width = max(width)
    active = experts_per_token(config)
    if not active:
        return width if width is not None else 4 * hidden_size
    expert_width = _first_number(config, "moe_intermediate_size", default=width or hidden_size)
    return int(min(max(active * expert_width, 2 * hidden_size), 4 * hidden_size))


def _attention_sizes(config: PreTrainedConfig) -> dict[str, int]:
    """Heads and head width: the policy's, or ordinary ones for policies whose attention is of another kind."""
    num_heads = getattr(config, "num_attention_heads", None)
    if num_heads is None or getattr(config, "kv_lora_rank", None) is not None:
        # State-space models have no heads. Latent attention has as many key heads as query heads and no head width an
        # ordinary block could share.
        num_heads = max(1, config.hidden_size // 128)
        num_key_value_heads = next(count for count in range(min(8, num_heads), 0, -1) if num_heads % count == 0)
        head_dim = 128 if config.hidden_size >= 128 else config.hidden_size
    else:
        num_key_value_heads = _first_number(config, "num_key_value_heads", default=num_heads)
        head_dim = _first_number(config, "head_dim", default=config.hidden_size // num_heads)
        if config.hidden_size % num_heads:
            # Llama configurations, in which servers read a draft, want heads that divide the width, whatever head_dim.
            num_key_value_heads = math.gcd(int(num_key_value_heads), config.hidden_size)
            fitting = range(num_heads, 0, -1)
            num_heads = next(h for h in fitting if config.hidden_size % h == 0 and h % num_key_value_heads == 0)
    return {
        "num_attention_heads": int(num_heads),
        "num_key_value_heads": int(num_key_value_heads),
        "head_dim": int(head_dim),
    }


def _flat_rope_parameters(config: PreTrainedConfig) -> dict:
    """The policy's RoPE parameters as one flat dict of a static type; plain RoPE where it has none of those."""
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    if nested:
        parameters = parameters.get("full_attention") or nested[0]
    rope_type = parameters.get("rope_type", "default")
    if rope_type not in STATIC_ROPE_TYPES:
        rope_type = "default"
    theta = parameters.get("rope_theta") or PreTrainedConfig.default_theta
    scaling = {name: parameters[name] for name in _ROPE_FIELDS[rope_type] if parameters.get(name) is not None}
    return {"rope_type": rope_type, "rope_theta": theta, **scaling}
