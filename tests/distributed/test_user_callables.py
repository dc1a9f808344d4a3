"""What users pass to be called reaches TRL as it is: over two processes too, where the trainer notes who is late."""

import pytest
import torch
from distributed.callables_worker import CASES
from forked_ranks import run_script


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return run_script("callables_worker.py", tmp_path_factory.mktemp("callables"), timeout=240, folder="distributed")


@pytest.mark.parametrize("case", CASES)
def test_a_run_with_user_callables_is_the_one_of_trl(ranks, case):
    assert len(ranks) == 2
    for rank in ranks:
        plain, ours = rank[case]["plain"], rank[case]["ours"]
        assert [
            name for name in plain["weights"] if not torch.equal(plain["weights"][name], ours["weights"][name])
        ] == []
        assert ours["logs"] == plain["logs"]
        assert len([entry for entry in ours["logs"] if "reward" in entry]) == 2


@pytest.mark.parametrize("case", CASES)
def test_trl_holds_the_objects_that_users_passed_while_it_calls_them(ranks, case):
    assert [rank[case]["ours"]["unchanged"] for rank in ranks] == [True, True]
