"""
The teacher: the policy's own next-token distribution, computed from its last hidden state and its live head.

The teacher shift: root row `r` predicts token `r+2+s` in pass `s`, and the policy predicts the token after the one
that it reads, so the row is taught by the policy's distribution at position `r+1+s` ([`teacher_positions`]).

Shapes: `n` rows, `Ht` policy hidden size, `V` policy vocabulary.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from .policy import is_elsewhere, name_of


def teacher_positions(roots: torch.Tensor, num_pass: int) -> torch.Tensor:
    """
    Positions at which the policy teaches the rows of a pass (EAGLE-3's training-time test, arXiv 2503.01840,
    section 3.2).

    Args:
        roots (`torch.LongTensor` of shape `(n,)`):
            Root rows, where their branches leave the trunk.
        num_pass (`int`):
            Pass `s`, from 0.

    Returns:
        `torch.LongTensor` of shape `(n,)`: `r + 1 + s` for each root `r`.
    """
    return roots + 1 + num_pass


class PolicyHead:
    """
    The policy's language-model head and input embedding, read live: every use sees the weights as they are now, so the
    teacher follows the policy through its updates and nothing is copied. Everything returned is detached.

    Logits follow the rules of TRL's fused head (`trl.trainer.utils.add_fused_lm_head`): `logits = (W h + b) * scale`,
    then `cap * tanh(logits / cap)` where the policy caps its logits; the temperature is left out.

    Args:
        policy ([`~transformers.PreTrainedModel`]):
            A causal language model, possibly with PEFT adapters injected (pass the base model, not the `PeftModel`).
        cast_to_fp32 (`bool`, *optional*, defaults to `False`):
            Whether the head's matmul runs in float32, as with TRL's `cast_lm_head_to_fp32`.
        compute_dtype (`torch.dtype`, *optional*):
            Dtype of the head's matmul, for a policy that runs under autocast. `None` uses the dtype of the weight.

    Raises:
        ValueError: if the policy has no output or input embeddings, if one of them carries an adapter, whose part the
            weight alone does not show, or if the head has fewer rows than the policy has tokens (more are padding).
    """

    def __init__(self, policy: nn.Module, cast_to_fp32: bool = False, compute_dtype: torch.dtype | None = None):
        if cast_to_fp32 and compute_dtype not in (None, torch.float32):
            raise ValueError(
                f"`cast_to_fp32=True` contradicts `compute_dtype={compute_dtype}`. Leave `compute_dtype` at None."
            )
        self.policy = policy
        self.compute_dtype = torch.float32 if cast_to_fp32 else compute_dtype
        text_config = policy.config.get_text_config()
        self.logit_scale = _logit_scale(text_config)
        # Not every configuration class declares the field; absent and None both mean uncapped.
        self.logit_softcap: float | None = getattr(text_config, "final_logit_softcapping", None)
        self._held: dict[str, torch.Tensor | None] | None = None
        for role, module in (("output", policy.get_output_embeddings()), ("input", policy.get_input_embeddings())):
            _check_plain(name_of(policy), role, module)
        _check_rows(name_of(policy), policy.get_output_embeddings(), text_config.vocab_size)

    @property
    def weight(self) -> torch.Tensor:
        """`(V, Ht)` head weight, detached, whole (collective where the policy is sharded and nothing is gathered)."""
        return self._tensor("weight")

    @property
    def bias(self) -> torch.Tensor | None:
        """`(V,)` head bias or None, detached."""
        return self._tensor("bias")

    @property
    def embedding(self) -> torch.Tensor:
        """`(V, Ht)` input embedding table, detached."""
        return self._tensor("embedding")

    @contextmanager
    def gathered(self) -> Iterator["PolicyHead"]:
        """
        Keeps the whole head and embedding at hand inside the context: a weight sharded by FSDP2 is gathered once (tied
        weights once for both), and cast once where the matmul runs in another dtype.

        Gathering is a collective: every rank has to enter, also one without tokens. Entering again inside is free.
        """
        if self._held is not None:
            yield self
            return
        self._held = self._resolve()
        try:
            yield self
        finally:
            self._held = None

    @torch.no_grad()
    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """
        Rows of the input embedding table. A scaling that the policy's embedding module applies in its forward (Gemma's
        `sqrt(Ht)`) is left out: inference servers hand a draft the raw table.

        Args:
            input_ids (`torch.LongTensor` of any shape): token ids.

        Returns:
            `torch.Tensor`: `(*input_ids.shape, Ht)` in the dtype of the table.
        """
        return nn.functional.embedding(input_ids, self.embedding)

    @torch.no_grad()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """
        The policy's next-token logits, before temperature.

        Args:
            hidden (`torch.Tensor` of shape `(n, Ht)`):
                Outputs of the policy's decoder, after its final norm.

        Returns:
            `torch.Tensor`: `(n, V)` in float32 (float64 for a float64 policy). The matmul runs in the weight's dtype,
            or in `compute_dtype`; ambient autocast has no effect.
        """
        weight, bias = self.weight, self.bias
        dtype = self.compute_dtype or weight.dtype
        with torch.autocast(hidden.device.type, enabled=False):
            logits = nn.functional.linear(hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))
            logits = logits.to(torch.float64 if dtype == torch.float64 else torch.float32)
            if self.logit_scale != 1.0:
                logits.mul_(self.logit_scale)
            if self.logit_softcap is not None:
                logits.div_(self.logit_softcap).tanh_().mul_(self.logit_softcap)
        return logits

    def _tensor(self, name: str) -> torch.Tensor | None:
        """One of the held tensors, or its live counterpart when nothing is held."""
        return (self._held if self._held is not None else self._resolve(only=name))[name]

    def _resolve(self, only: str | None = None) -> dict[str, torch.Tensor | None]:
        """The live tensors, looked up on the modules (FSDP and PEFT replace parameters), whole and detached."""
        output, table = self.policy.get_output_embeddings(), self.policy.get_input_embeddings().weight
        parameters = {"weight": output.weight, "bias": output.bias, "embedding": table}
        if only is not None:
            return {only: _whole(parameters[only])}
        whole = {"weight": _whole(output.weight), "bias": _whole(output.bias)}
        whole["embedding"] = whole["weight"] if table is output.weight else _whole(table)
        if self.compute_dtype is not None:
            whole["weight"] = whole["weight"].to(self.compute_dtype)
        return whole


def _whole(parameter: torch.Tensor | None) -> torch.Tensor | None:
    """The detached parameter, gathered if FSDP2 shards it."""
    if isinstance(parameter, DTensor):
        parameter = parameter.full_tensor()
    return None if parameter is None else parameter.detach()


def _check_rows(policy_name: str, head: nn.Module, vocab_size: int) -> None:
    """Refuses a head without a row for each token. A rank whose stage has no head does not look."""
    # Quantised weights are stored in shapes of their own.
    if is_elsewhere(head) or not head.weight.is_floating_point():
        return
    weight = head.weight
    if weight.shape[0] < vocab_size:
        raise ValueError(
            f"The head of {policy_name} has {weight.shape[0]} rows, its config says `vocab_size={vocab_size}`: the "
            "draft would be taught tokens that have no logit. Call `resize_token_embeddings`, which changes both, or "
            "set `use_draft=False`."
        )


def _logit_scale(text_config) -> float:
    """Factor on the raw logits, by TRL's precedence; families name it differently and most do not have one."""
    for name in ("logit_scale", "output_multiplier", "lm_head_multiplier"):
        scale = getattr(text_config, name, None)
        if scale is not None:
            return float(scale)
    scaling = getattr(text_config, "logits_scaling", None)
    if scaling is None:
        return 1.0
    # Granite and MiniCPM3 divide by it, HyperCLOVA X multiplies.
    return float(scaling) if text_config.model_type == "hyperclovax" else 1.0 / float(scaling)


def _check_plain(policy_name: str, role: str, module: nn.Module | None) -> None:
    """Refuses a missing embedding and one whose PEFT adapter would be left out by reading `.weight`."""
    if module is None:
        raise ValueError(
            f"{policy_name} has no {role} embeddings, which the draft reads. Set `use_draft=False` to train it "
            "without a draft."
        )
    # LoRA wraps a `base_layer`; trained rows (`trainable_token_indices`) live in a `token_adapter`.
    if not {"base_layer", "token_adapter"}.isdisjoint(dict(module.named_children())):
        raise ValueError(
            f"The {role} embeddings of {policy_name} carry a PEFT adapter. The draft reads the plain weight, so its "
            "teacher would miss the adapter's part. Remove the module from `target_modules` and drop "
            "`trainable_token_indices` (or use `modules_to_save`, which replaces the whole weight), or set "
            "`use_draft=False`."
        )
