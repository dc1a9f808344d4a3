"""GRPO with a speculative-decoding draft trained inside the GRPO step."""

import importlib
from importlib.metadata import version

from packaging.specifiers import SpecifierSet

from .vllm.versions import transformers_needed_by_vllm


__version__ = "0.1.0.dev0"

# The trainer overrides private methods of these two, so only the minor versions it was tested with are accepted.
_TESTED_VERSIONS = {"transformers": ">=5.24,<5.25", "trl": ">=1.16,<1.17"}

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


def _check_versions() -> None:
    """Refuses versions whose private methods may differ, and names the command that fixes it."""
    for package, accepted in _TESTED_VERSIONS.items():
        installed = version(package)
        if not SpecifierSet(accepted).contains(installed, prereleases=True):
            remedy = transformers_needed_by_vllm() if package == "transformers" else None
            raise ImportError(
                f"trl_codraft {__version__} works with {package}{accepted}, but {package} {installed} is installed. "
                + (remedy or f'Run `pip install "{package}{accepted}"`.')
            )


_check_versions()


def __getattr__(name: str):
    if name not in _PUBLIC_NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_PUBLIC_NAMES[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_PUBLIC_NAMES])
