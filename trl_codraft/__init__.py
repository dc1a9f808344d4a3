"""GRPO with a speculative-decoding draft trained inside the GRPO step."""

import importlib

from .versions import require_tested_versions
from .vllm.versions import transformers_needed_by_vllm


__version__ = "0.1.0.dev0"

# Public name -> module. Loaded on first use, so that drafts and rollouts work without importing TRL.
_PUBLIC_NAMES = {
    "CoDraftGRPOConfig": "config",
    "CoDraftGRPOTrainer": "trainer",
    "Eagle3DraftConfig": "modeling.configuration_eagle3",
    "Eagle3DraftModel": "modeling.modeling_eagle3",
    "SpeculativeOutput": "rollout.speculative",
    "export_draft": "serving.export",
    "score_draft": "serving.export",
    "speculative_generate": "rollout.speculative",
    "validate_draft": "serving.export",
}

__all__ = list(_PUBLIC_NAMES)


require_tested_versions(remedies={"transformers": transformers_needed_by_vllm()})


def __getattr__(name: str):
    if name not in _PUBLIC_NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_PUBLIC_NAMES[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_PUBLIC_NAMES])
