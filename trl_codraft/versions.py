"""Releases of TRL and Transformers that the package is written for."""

from importlib.metadata import version

from packaging.specifiers import SpecifierSet


# The trainer overrides private methods of both, so only minor releases that it was tested with are accepted.
TESTED_VERSIONS = {"transformers": ">=5.24,<5.25", "trl": ">=1.16,<1.17"}


def require_tested_versions(remedies: dict[str, str | None] | None = None) -> None:
    """
    Refuses releases whose private methods may differ.

    Args:
        remedies (`dict[str, str]`, *optional*):
            By package, what to do where the usual command would not help.

    Raises:
        ImportError: naming the release that is installed, those that are accepted, and the command that fixes it.
    """
    for package, accepted in TESTED_VERSIONS.items():
        installed = version(package)
        if not SpecifierSet(accepted).contains(installed, prereleases=True):
            raise ImportError(
                f"trl_codraft works with {package}{accepted}, but {package} {installed} is installed. "
                + ((remedies or {}).get(package) or f'Run `pip install "{package}{accepted}"`.')
            )
