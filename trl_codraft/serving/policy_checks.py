"""
Finds where a draft folder and its policy disagree. `validation.py` checks the folder alone.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ..modeling.disk.tensors import canonical_name, check_embedding
from ..modeling.policy import is_elsewhere


NOTE = "note: "
# Dtypes in which servers run a draft.
FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def check_policy(
    raw: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], policy: Any, policy_dtype: torch.dtype | None
) -> Iterator[str]:
    """Sizes, context, RoPE and dtype of the policy."""
    pairs = {"hidden_size": "hidden_size", "target_hidden_size": "hidden_size", "vocab_size": "vocab_size"}
    for key, policy_key in pairs.items():
        if key in raw and raw[key] != getattr(policy, policy_key):
            yield f"`{key}` is {raw[key]} but the policy's {policy_key} is {getattr(policy, policy_key)}"
    if raw.get("target_num_hidden_layers", policy.num_hidden_layers) != policy.num_hidden_layers:
        yield (
            f"the draft was made for a policy of {raw['target_num_hidden_layers']} layers, this one has "
            f"{policy.num_hidden_layers}"
        )
    # Policies without a longest context (ALiBi and the like) have no such key.
    context = getattr(policy, "max_position_embeddings", None)
    if context is not None and (raw.get("max_position_embeddings") or context) < context:
        yield (
            f"`max_position_embeddings` is {raw['max_position_embeddings']}, the policy's {context}: servers read "
            "RoPE tables out of bounds, or acceptance collapses, beyond it"
        )
    rope, own = getattr(policy, "rope_parameters", None) or {}, raw.get("rope_parameters") or {}
    # Policies with one set per layer type have no set to compare with.
    for key in sorted({**rope, **own}) if "rope_type" in rope and own else ():
        if own.get(key) != rope.get(key):
            name = key if key.startswith("rope_") else f"rope_parameters.{key}"
            yield (
                f"{NOTE}`{name}` is {own.get(key)!r}, the policy's {rope.get(key)!r}: right only if the draft was "
                "trained so"
            )
    dtype = next((tensor.dtype for name, tensor in tensors.items() if canonical_name(name) == "fc.weight"), None)
    if policy_dtype is not None and dtype is not None and policy_dtype != dtype:
        yield f"{NOTE}the tensors are {dtype}, the policy is {policy_dtype}: servers run the draft in the policy's"
        for name, tensor in tensors.items():
            if (
                tensor.dtype in FLOAT_DTYPES
                and tensor.isfinite().all()
                and not tensor.to(policy_dtype).isfinite().all()
            ):
                yield (
                    f"tensor `{name}` holds values that are infinite in {policy_dtype}, which servers run the draft in"
                )


def check_policy_model(tensors: Mapping[str, torch.Tensor], policy: nn.Module) -> Iterator[str]:
    """A shipped embedding, and the head, against the policy's, as far as this rank has them of one in stages."""
    embedding = next((tensors[name] for name in tensors if canonical_name(name) == "embed_tokens.weight"), None)
    if embedding is not None:
        try:
            check_embedding(embedding, policy)
        except ValueError as error:
            yield str(error)
    if is_elsewhere(policy.get_output_embeddings()):
        return
    head, own = tensors.get("lm_head.weight"), policy.get_output_embeddings().weight
    if head is None or head.shape != own.shape or isinstance(own, DTensor):
        return
    # A few rows tell nearly always, without a copy of the whole head.
    if all(torch.equal(head[:rows], own[:rows].detach().to("cpu", head.dtype)) for rows in (4, len(head))):
        yield (
            f"{NOTE}`lm_head` equals the policy's: vLLM makes the two one tensor, which is fine to serve, but an "
            "update of either in the running server changes both"
        )
