"""The README of a draft: what it drafts for, how well, and how to serve it."""

import json
import os
import shlex
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
import transformers
from huggingface_hub import ModelCard, ModelCardData

from ..modeling.configuration_eagle3 import Eagle3DraftConfig
from ..modeling.disk.config import server_default_tap_layers
from .policy_source import holds_adapter, merged_name


CITATIONS = """\
```bibtex
@article{online2026codraft,
    title  = {Online Draft Co-Training for Speculative Decoding in Large-Scale, Long-Context RL Post-Training},
    eprint = {2609.07108},
    archivePrefix = {arXiv},
    url    = {https://arxiv.org/abs/2609.07108},
    year   = {2026}
}

@article{li2025eagle3,
    title  = {EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time Test},
    author = {Li, Yuhui and Wei, Fangyun and Zhang, Chao and Zhang, Hongyang},
    eprint = {2503.01840},
    archivePrefix = {arXiv},
    url    = {https://arxiv.org/abs/2503.01840},
    year   = {2025}
}
```"""


SAMPLING_HINT = (
    'Where it mostly samples, add `"draft_sample_method": "probabilistic"` to the configuration: vLLM drafts greedily '
    "by default, and of a greedy draft less is accepted at temperatures above 0."
)


ADAPTER_HINT = (
    "The policy is a LoRA adapter. Serve it merged into its base model: vLLM's table of features lists LoRA and "
    "speculative decoding as incompatible, and SGLang takes them together in recent releases alone. Once:"
)


# The card reports these keys of a measurement.
SCORE_KEYS = (
    "accept_length",
    "accept_rate",
    "accept_rate_per_position",
    "num_draft_tokens",
    "num_prompts",
    "committed",
    "temperature",
)


def serve_commands(draft: str, policy: str, num_draft_tokens: int = 3) -> dict[str, str]:
    """
    The command lines that serve a policy with its draft.

    Args:
        draft (`str`):
            Repository id or path of the draft.
        policy (`str`):
            Repository id or path of the policy.
        num_draft_tokens (`int`, *optional*, defaults to `3`):
            Draft tokens per verification.

    Returns:
        `dict[str, str]`: for `"vllm"` and `"sglang"`.
    """
    config = {"method": "eagle3", "model": draft, "num_speculative_tokens": num_draft_tokens}
    policy, draft = shlex.quote(policy), shlex.quote(draft)
    return {
        "vllm": f"vllm serve {policy} --speculative-config {shlex.quote(json.dumps(config))}",
        "sglang": (
            f"python -m sglang.launch_server --model-path {policy} --speculative-algorithm EAGLE3 \\\n"
            f"    --speculative-draft-model-path {draft} --speculative-num-steps {num_draft_tokens} \\\n"
            f"    --speculative-eagle-topk 1 --speculative-num-draft-tokens {num_draft_tokens + 1}"
        ),
    }


def merge_command(adapter: str, base: str, policy_class: str = "AutoModelForCausalLM") -> str:
    """
    The command line that merges a LoRA adapter into its base model.

    Args:
        adapter (`str`):
            Folder or repository id of the adapter.
        base (`str`):
            Folder or repository id of its base model.
        policy_class (`str`, *optional*, defaults to `"AutoModelForCausalLM"`):
            Class of Transformers that the base model is of.

    Returns:
        `str`: writes the folder [`~serving.policy_source.merged_name`], with the tokenizer.
    """
    merged = json.dumps(merged_name(adapter))
    # A run's folder has the tokenizer beside the adapter, also where it is still to be written; others may lack it.
    lacks_tokenizer = holds_adapter(adapter) and not os.path.isfile(os.path.join(adapter, "tokenizer_config.json"))
    lines = [
        "from peft import PeftModel",
        f"from transformers import AutoTokenizer, {policy_class}",
        f'base = {policy_class}.from_pretrained({json.dumps(base)}, dtype="auto")',
        f"PeftModel.from_pretrained(base, {json.dumps(adapter)}).merge_and_unload().save_pretrained({merged})",
        f"AutoTokenizer.from_pretrained({json.dumps(base if lacks_tokenizer else adapter)}).save_pretrained({merged})",
    ]
    return "python -c " + shlex.quote("\n".join(lines))


def download_command(repo_id: str) -> str:
    """The command line that fetches a draft lying in the folder `draft` of its policy's repository."""
    return f"hf download {shlex.quote(repo_id)} --include 'draft/*' --local-dir {shlex.quote(repo_id.split('/')[-1])}"


def limits(config: Eagle3DraftConfig) -> list[str]:
    """Sentences about servers that cannot serve this draft; empty for an ordinary one."""
    sentences = []
    if config.norm_before_residual:
        sentences.append("Not SGLang: `norm_before_residual` is on, which SGLang (0.5.23) does not implement.")
    if config.norm_before_fc:
        sentences.append("Not SGLang releases that ignore `norm_before_fc` (0.5.23 reads it).")
    if len(config.tap_layers) != 3:
        sentences.append(
            f"Not servers that need 3 tap layers: this draft reads {len(config.tap_layers)}. vLLM 0.32 and SGLang "
            "0.5.23 read `num_aux_hidden_states`; their releases before that key assume 3."
        )
    if config.num_policy_layers in config.tap_layers:
        sentences.append("Not SGLang: one tap is the output of the last layer, and SGLang captures layer inputs only.")
    return sentences


def draft_card(
    config: Eagle3DraftConfig,
    *,
    repo_id: str | None = None,
    path: str | None = None,
    base_model: str | None = None,
    adapter_of: str | None = None,
    policy_class: str = "AutoModelForCausalLM",
    in_policy_repo: bool = False,
    scores: Mapping[str, Any] | None = None,
    license: str | None = None,
    tags: tuple[str, ...] = (),
    provenance: Mapping[str, Any] | None = None,
) -> str:
    """
    The text of `README.md`, with the Hub's metadata block.

    Args:
        config ([`Eagle3DraftConfig`]):
            The draft's configuration.
        repo_id (`str`, *optional*):
            Future repository of the draft; stands in the commands.
        path (`str`, *optional*):
            Folder of a draft without a repository of its own; stands in the commands.
        base_model (`str`, *optional*):
            Repository id of the policy. A local path is shown in the commands but kept out of the metadata, which
            takes repository ids only.
        adapter_of (`str`, *optional*):
            The base model, if `base_model` is a LoRA adapter. The card then serves the two merged.
        policy_class (`str`, *optional*, defaults to `"AutoModelForCausalLM"`):
            Class of Transformers that merges an adapter.
        in_policy_repo (`bool`, *optional*, defaults to `False`):
            Whether the draft is pushed as the folder `draft` of the policy's repository.
        scores (`Mapping[str, Any]`, *optional*):
            Results of [`score_draft`] on held-out prompts; at least [`SCORE_KEYS`].
        license (`str`, *optional*):
            Licence identifier of the Hub.
        tags (`tuple[str, ...]`, *optional*, defaults to `()`):
            Added to `eagle3`, `speculative-decoding`, `trl-codraft`.
        provenance (`Mapping[str, Any]`, *optional*):
            How the draft was made, a line each: steps, settings, data.

    Returns:
        `str`
    """
    is_repo = base_model is not None and not os.path.exists(base_model) and base_model.count("/") <= 1
    data = ModelCardData(
        base_model=base_model if is_repo else None,
        license=license,
        pipeline_tag="text-generation",
        tags=["eagle3", "speculative-decoding", "trl-codraft", *tags],
    )
    policy = base_model or "PATH_OF_THE_POLICY"
    draft, served, before = repo_id or path or "PATH_OF_THIS_DRAFT", policy, []
    if in_policy_repo and is_repo:
        draft = f"{base_model.split('/')[-1]}/draft"
        before.append(
            f"The draft lies in the policy's repository:\n\n```bash\n{download_command(base_model)}\n```\n\n"
        )
    if adapter_of is not None:
        served = merged_name(policy)
        before.append(f"{ADAPTER_HINT}\n\n```bash\n{merge_command(policy, adapter_of, policy_class)}\n```\n\n")
    commands = serve_commands(draft, served, (scores or {}).get("num_draft_tokens", 3))
    parts = [
        f"---\n{data.to_yaml()}\n---",
        f"# {repo_id.split('/')[-1] if repo_id else 'EAGLE-3 draft'}",
        f"An EAGLE-3 draft for speculative decoding with `{policy}`, written by `trl-codraft`. It proposes tokens; "
        "the policy verifies them, so its output distribution does not change.",
        f"## Accept length\n\n{_score_table(scores)}",
        f"## Serve\n\n{''.join(before)}vLLM:\n\n```bash\n{commands['vllm']}\n```\n\n{SAMPLING_HINT}\n\n"
        f"SGLang:\n\n```bash\n{commands['sglang']}\n```",
    ]
    if limits(config):
        parts.append("Limits of this draft:\n\n" + "\n".join(f"- {sentence}" for sentence in limits(config)))
    if provenance:
        parts.append("## Provenance\n\n" + "\n".join(f"- {name}: {value}" for name, value in provenance.items()))
    parts += [
        f"## Format\n\n{_format_text(config)}",
        "## Versions\n\n" + "\n".join(f"- {name}: {number}" for name, number in _versions().items()),
        f"## Citations\n\n{CITATIONS}",
    ]
    return str(ModelCard("\n\n".join(parts) + "\n"))


def _score_table(scores: Mapping[str, Any] | None) -> str:
    """The measurement, or a sentence that there is none."""
    if scores is None:
        return "Not measured. `trl-codraft score` measures it."
    rows = {
        "accept length (1 + accepted / verifications)": f"{scores['accept_length']:.3f}",
        "accept rate (accepted / drafted)": f"{scores['accept_rate']:.3f}",
        "accept rate by position": ", ".join(f"{rate:.3f}" for rate in scores["accept_rate_per_position"]),
        "draft tokens per verification": str(scores["num_draft_tokens"]),
        "held-out prompts": str(scores["num_prompts"]),
        "new tokens": str(scores["committed"]),
        "temperature": str(scores["temperature"]),
    }
    return "| measured on held-out prompts | |\n|---|---|\n" + "\n".join(f"| {key} | {rows[key]} |" for key in rows)


def _format_text(config: Eagle3DraftConfig) -> str:
    """Sizes and taps in one paragraph."""
    flags = [
        flag for flag in ("fc_norm", "norm_output", "norm_before_residual", "norm_before_fc") if getattr(config, flag)
    ]
    taps = "the servers' default layers"
    if list(config.tap_layers) != server_default_tap_layers(config.num_policy_layers):
        taps = "numbered for vLLM at top level, and one less for SGLang inside `eagle_config`"
    return (
        f"One folder for vLLM, SGLang and speculators. {config.num_hidden_layers} decoder layer(s) of width "
        f"{config.hidden_size}; head over {config.draft_vocab_size} of {config.vocab_size} tokens; reads the hidden "
        f"states {list(config.tap_layers)} of the policy ({taps}); flags: {', '.join(flags) or 'none'}. The token "
        "embedding is the policy's and is not stored."
    )


def _versions() -> dict[str, str]:
    """Versions of what trained and wrote the draft."""
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    for package in ("trl", "trl-codraft"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "source checkout"
    return versions
