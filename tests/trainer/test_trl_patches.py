"""Names of TRL that a run replaces: they are where they are looked up, and back in their place afterwards."""

import ast
import inspect
import os
from contextlib import suppress

import pytest
from trl.generation import vllm_generation

from trl_codraft.grpo import trl_patches


@pytest.mark.parametrize(("module", "name"), trl_patches.REPLACED, ids=lambda value: getattr(value, "__name__", value))
def test_installed_trl_calls_what_is_replaced_by_its_name(module, name):
    calls = [node.func for node in ast.walk(ast.parse(inspect.getsource(module))) if isinstance(node, ast.Call)]
    assert any(isinstance(function, ast.Name) and function.id == name for function in calls)


def test_replaced_names_are_back_after_an_error():
    before = [vars(module).get(name) for module, name in trl_patches.REPLACED]
    for patch in (
        trl_patches.generation_made_by(print),
        trl_patches.models_loaded_by(print),
        trl_patches.rewards_gathered_by(lambda gather: print),
    ):
        with suppress(ZeroDivisionError), patch:
            assert [vars(module).get(name) for module, name in trl_patches.REPLACED] != before
            raise ZeroDivisionError
    assert [vars(module).get(name) for module, name in trl_patches.REPLACED] == before


def test_the_engine_gets_our_arguments_beside_those_of_trl(monkeypatch):
    seen = {}
    monkeypatch.setattr(vllm_generation, "LLM", lambda **arguments: seen.update(arguments), raising=False)
    with trl_patches.engine_arguments(speculative_config={"method": "eagle3"}):
        vllm_generation.LLM(model="policy")
    assert seen == {"model": "policy", "speculative_config": {"method": "eagle3"}}


@pytest.mark.parametrize(("size", "within"), [(1, "true"), (2, "false")])
def test_accelerate_shards_nothing_where_we_do(monkeypatch, size, within):
    monkeypatch.setenv("ACCELERATE_USE_PARALLELISM_CONFIG", "true")
    with trl_patches.not_sharded_by_accelerate(size):
        assert os.environ["ACCELERATE_USE_PARALLELISM_CONFIG"] == within
    assert os.environ["ACCELERATE_USE_PARALLELISM_CONFIG"] == "true"
