"""
From a draft in training to one that is served: write, score, push.

Shapes: `B` prompts of a batch, `S` padded columns.
"""

import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import CommitInfo, HfApi
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..modeling.disk.tensors import check_fits_policy, save_draft
from ..modeling.modeling_eagle3 import Eagle3DraftModel
from ..modeling.naming import few, shown
from ..rollout.speculative import speculative_generate
from ..rollout.stats import SpeculativeStats
from .model_card import draft_card
from .policy_source import merged_name
from .validation import problems, validate_draft


__all__ = ["export_draft", "push_draft", "score_draft", "validate_draft"]


def export_draft(
    draft: Eagle3DraftModel,
    policy: PreTrainedModel,
    path: str | os.PathLike,
    *,
    dtype: torch.dtype | None = None,
    repo_id: str | None = None,
    base_model: str | None = None,
    adapter_of: str | None = None,
    in_policy_repo: bool = False,
    scores: Mapping[str, Any] | None = None,
    license: str | None = None,
    tags: Sequence[str] = (),
    provenance: Mapping[str, Any] | None = None,
    num_draft_tokens: int = 3,
) -> list[str]:
    """
    Writes a draft as one folder that vLLM, SGLang and speculators load, with its model card. The folder is written
    beside `path`, validated against the policy, and only then moved there.

    Args:
        draft ([`Eagle3DraftModel`]):
            The draft.
        policy ([`~transformers.PreTrainedModel`]):
            The policy it drafts for.
        path (`str` or `os.PathLike`):
            Folder to write; an earlier draft in it is replaced.
        dtype (`torch.dtype`, *optional*):
            Dtype of the stored weights; defaults to the policy's dtype, which is what servers run the draft in.
        repo_id (`str`, *optional*):
            Future repository of the draft; stands in the card's commands.
        base_model (`str`, *optional*):
            Repository id or path of the policy; defaults to where the policy was loaded from.
        adapter_of (`str`, *optional*):
            The base model, if `base_model` is a LoRA adapter. Card and `config.json` then name the two merged.
        in_policy_repo (`bool`, *optional*, defaults to `False`):
            Whether the draft is pushed as the folder `draft` of the policy's repository, for the card.
        scores (`Mapping[str, Any]`, *optional*):
            Results of [`score_draft`], for the card.
        license (`str`, *optional*):
            Licence identifier for the card.
        tags (`Sequence[str]`, *optional*, defaults to `()`):
            More tags for the card.
        provenance (`Mapping[str, Any]`, *optional*):
            How the draft was made, for the card.
        num_draft_tokens (`int`, *optional*, defaults to `3`):
            Draft tokens per verification of `vllm serve <draft>`.

    Returns:
        `list[str]`: the notes of [`validate_draft`], which name servers that cannot serve this draft.

    Raises:
        ValueError: if the draft does not fit the policy, or the folder would not validate; `path` is then untouched.
    """
    check_fits_policy(draft, policy)
    base_model = base_model or policy.config._name_or_path or None
    notes: list[str] = []

    def check(folder: Path) -> None:
        messages = validate_draft(folder, policy)
        if problems(messages):
            raise ValueError("The draft is not written, servers would misread it: " + few(problems(messages), "; "))
        notes.extend(messages)

    card = draft_card(
        draft.config,
        repo_id=repo_id,
        path=os.fspath(path),
        base_model=base_model,
        adapter_of=adapter_of,
        policy_class=type(policy).__name__ if hasattr(transformers, type(policy).__name__) else "AutoModelForCausalLM",
        in_policy_repo=in_policy_repo,
        scores=scores,
        license=license,
        tags=tuple(tags),
        provenance=provenance,
    )
    save_draft(
        draft,
        path,
        dtype=dtype or policy.dtype,
        base_model=base_model if adapter_of is None else merged_name(base_model),
        base_architectures=policy.config.architectures or [type(policy).__name__],
        num_draft_tokens=num_draft_tokens,
        texts={"README.md": card},
        check=check,
    )
    return notes


def check_repo_id(name: str, repo_id: str) -> None:
    """
    Refuses what the Hub would: before a training that ends with a push, not after it.

    Args:
        name (`str`):
            The setting, as its user writes it.
        repo_id (`str`):
            Its value.

    Raises:
        ValueError: naming both.
    """
    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        raise ValueError(f"`{name}={shown(repo_id)}` can be no repository of the Hub: {error}") from error


def push_draft(
    draft: Eagle3DraftModel,
    policy: PreTrainedModel,
    repo_id: str,
    *,
    private: bool | None = None,
    token: str | None = None,
    revision: str | None = None,
    create_pr: bool = False,
    commit_message: str = "Upload draft",
    **export_kwargs: Any,
) -> CommitInfo:
    """
    Exports a draft and uploads it to a Hub repository of its own (servers take a repository, not a folder inside one).

    Args:
        draft ([`Eagle3DraftModel`]):
            The draft.
        policy ([`~transformers.PreTrainedModel`]):
            The policy it drafts for.
        repo_id (`str`):
            Repository to create or update.
        private, token, revision, create_pr, commit_message (*optional*):
            As in [`~huggingface_hub.HfApi.create_repo`] and [`~huggingface_hub.HfApi.upload_folder`].
        **export_kwargs:
            As in [`export_draft`].

    Returns:
        [`~huggingface_hub.CommitInfo`]

    Raises:
        ValueError: as in [`export_draft`], or if `repo_id` can be no repository; nothing is uploaded then.
    """
    check_repo_id("repo_id", repo_id)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "draft"
        export_draft(draft, policy, folder, repo_id=repo_id, **export_kwargs)
        api = HfApi(token=token)
        repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
        return api.upload_folder(
            repo_id=repo_id,
            folder_path=folder,
            commit_message=commit_message,
            revision=revision,
            create_pr=create_pr,
        )


def score_draft(
    policy: PreTrainedModel,
    draft: Eagle3DraftModel,
    prompts: Sequence[str] | Sequence[Sequence[int]],
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    num_draft_tokens: int = 3,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    batch_size: int = 8,
    generator: torch.Generator | None = None,
    **generate_kwargs: Any,
) -> dict[str, Any]:
    """
    Measures what a draft is worth: speculative rollouts on held-out prompts. Counters are those of a vLLM server asked
    the same (greedily, or with `"draft_sample_method": "probabilistic"`): a prompt's last block counts in full, also
    what lies behind its end. They are summed over all prompts and divided once.

    Args:
        policy ([`~transformers.PreTrainedModel`]):
            The policy.
        draft ([`Eagle3DraftModel`]):
            The draft.
        prompts (`Sequence[str]` or `Sequence[Sequence[int]]`):
            Held-out prompts, as text (needs `tokenizer`) or token ids.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`], *optional*):
            The policy's tokenizer.
        num_draft_tokens (`int`, *optional*, defaults to `3`):
            Draft tokens per verification, at least 1.
        max_new_tokens (`int`, *optional*, defaults to `128`):
            Longest completion.
        temperature (`float`, *optional*, defaults to `0.0`):
            0 decodes greedily.
        batch_size (`int`, *optional*, defaults to `8`):
            Prompts generated together.
        generator (`torch.Generator`, *optional*):
            For sampling.
        **generate_kwargs:
            More arguments of [`speculative_generate`].

    Returns:
        `dict[str, Any]`: `accept_length` = 1 + accepted / verifications (vLLM's definition), `accept_rate` = accepted
        / drafted, `accept_rate_per_position`, `tokens_per_row_forward`, `tokens_per_second` (wall-clock, prefill
        included), the raw counters `verifications`, `drafted`, `accepted`, `accepted_per_position`, `committed`,
        `row_forwards`, `policy_forwards`, and the settings `num_draft_tokens`, `temperature`, `num_prompts`.

    Raises:
        ValueError: if there are no prompts, or text without a tokenizer, or nothing is to be drafted.
    """
    if num_draft_tokens < 1:
        raise ValueError(
            f"`num_draft_tokens` must be at least 1, got {num_draft_tokens}: without drafted tokens nothing of the "
            "draft is measured."
        )
    if not prompts:
        raise ValueError("There are no prompts to score the draft on; give at least one.")
    if tokenizer is None and any(isinstance(prompt, str) for prompt in prompts):
        raise ValueError("Prompts are text, so `tokenizer=` is needed; or pass lists of token ids.")
    rows = [tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else list(prompt) for prompt in prompts]
    sampling = {"do_sample": True, "temperature": temperature} if temperature > 0 else {"do_sample": False}
    totals = SpeculativeStats()
    started = time.perf_counter()
    for start in range(0, len(rows), batch_size):
        input_ids, attention_mask = _left_padded(rows[start : start + batch_size], policy)
        output = speculative_generate(
            policy,
            draft,
            input_ids,
            attention_mask,
            num_draft_tokens=num_draft_tokens,
            generator=generator,
            counts_overrun=True,
            max_new_tokens=max_new_tokens,
            **sampling,
            **generate_kwargs,
        )
        totals.add(output.stats)
    seconds = time.perf_counter() - started
    return {
        "accept_length": totals.accept_length,
        "accept_rate": totals.accept_rate,
        "accept_rate_per_position": totals.accept_rate_per_position[:num_draft_tokens],
        "tokens_per_row_forward": totals.tokens_per_row_forward,
        "tokens_per_second": totals.committed / seconds,
        "verifications": totals.verifications,
        "drafted": totals.drafted,
        "accepted": totals.accepted,
        "accepted_per_position": totals.accepted_per_position[:num_draft_tokens],
        "committed": totals.committed,
        "row_forwards": totals.row_forwards,
        "policy_forwards": totals.policy_forwards,
        "num_draft_tokens": num_draft_tokens,
        "temperature": temperature,
        "num_prompts": len(rows),
    }


def _left_padded(rows: Sequence[Sequence[int]], policy: PreTrainedModel) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and mask `(B, S)`, padded on the left with any token: the mask hides it."""
    width = max(len(row) for row in rows)
    input_ids = torch.zeros(len(rows), width, dtype=torch.long)
    attention_mask = torch.zeros(len(rows), width, dtype=torch.long)
    for index, row in enumerate(rows):
        input_ids[index, width - len(row) :] = torch.tensor(row)
        attention_mask[index, width - len(row) :] = 1
    return input_ids.to(policy.device), attention_mask.to(policy.device)
