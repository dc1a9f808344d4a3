"""Sharded attention on gloo processes against one dense float64 softmax: outputs and every gradient."""

from functools import partial

import pytest
import torch
from cp.attention_cases import ALL_CASES, BF16_CASES, DEFAULT_CASES, assemble, attend, dense, run_cases
from cp.groups import run_in_groups


TOLERANCES = {torch.float64: 1e-12, torch.float32: 2e-6}


@pytest.fixture(scope="module")
def results():
    return run_in_groups(partial(run_cases, cases=[*DEFAULT_CASES, *BF16_CASES]))


@pytest.fixture(scope="module")
def all_results():
    return run_in_groups(partial(run_cases, cases=ALL_CASES), timeout=240)


def assert_dense(case, results):
    """Absolute errors against the size of the whole tensor: rows with a single key have gradients of exactly zero."""
    expected, total = dense(case), assemble(case, results)
    for name, value in total.items():
        assert name == "dsinks" or value.dtype == case.dtype
        scale = max(1.0, expected[name].abs().max())
        assert (value.double() - expected[name]).abs().max() <= TOLERANCES[case.dtype] * scale, name


@pytest.mark.parametrize("case", DEFAULT_CASES, ids=str)
def test_shards_equal_one_dense_softmax(results, case):
    for size in (2, 3, 4):
        assert_dense(case, [result[case] for result in results[size]])


@pytest.mark.parametrize("case", DEFAULT_CASES, ids=str)
def test_one_rank_without_a_group_equals_one_dense_softmax(case):
    assert_dense(case, [attend(case, None)])


@pytest.mark.slow
def test_shards_equal_one_dense_softmax_in_every_combination(all_results):
    for case in ALL_CASES:
        assert_dense(case, [attend(case, None)])
        for size in (2, 3, 4):
            assert_dense(case, [result[case] for result in all_results[size]])


@pytest.mark.parametrize("case", BF16_CASES, ids=str)
def test_bf16_errors_do_not_grow_with_ranks(results, case):
    expected = dense(case)

    def errors(parts):
        return {name: (value.double() - expected[name]).norm() for name, value in assemble(case, parts).items()}

    alone = errors([attend(case, None)])
    for size in (2, 3, 4):
        for name, error in errors([result[case] for result in results[size]]).items():
            assert error <= 1.5 * alone[name], (size, name, error / alone[name])
