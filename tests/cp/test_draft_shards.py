"""The draft on shards against the draft on the whole pack: loss, every counter, every gradient, in float64."""

import pytest
import torch
from cp.draft_shard_cases import CASES, on_shard, run_cases, whole
from cp.groups import run_in_groups


@pytest.fixture(scope="module")
def results():
    return run_in_groups(run_cases, ranks={3: [0, 1, 2]})


def assert_sum_is_whole(case, parts):
    expected = whole(case)
    assert all(part.keys() == expected.keys() for part in parts)
    for name, value in expected.items():
        total = sum(part[name] for part in parts)
        assert (total - value).abs().max() <= 1e-11 * max(1.0, value.abs().max()), (case, name)


def test_sum_over_shards_equals_the_whole_pack(results):
    for parts in results.values():
        for index, case in enumerate(CASES):
            assert_sum_is_whole(case, [part[index] for part in parts])


def test_one_rank_without_a_group_equals_the_whole_pack():
    for case in CASES:
        assert_sum_is_whole(case, [on_shard(case, None)])


def test_a_rank_without_rows_takes_part(results):
    """Its gradients are zero, not missing: a sum over ranks needs them everywhere."""
    index = next(i for i, case in enumerate(CASES) if case.mode == "uneven")
    last = results[3][-1][index]
    assert last.keys() == whole(CASES[index]).keys()
    assert all(torch.count_nonzero(value) == 0 for value in last.values())
