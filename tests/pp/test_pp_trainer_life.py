"""A trainer with a pipeline that is stopped, trains again, or writes where another run has written."""

import pytest
import torch
from forked_ranks import run_script
from group.comparison import assert_close


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return run_script("trainer_life_worker.py", tmp_path_factory.mktemp("life"), timeout=280, folder="pp")


def test_a_second_run_trains_on_nothing_that_a_stopped_one_left(ranks):
    for rank in ranks:
        assert rank["2"]["ended"] == rank["1"]["ended"] == 1
        for name, weight in rank["1"]["weights"].items():
            assert_close(rank["2"]["weights"][name], weight, (1e-5, 1e-7), name)


def test_nothing_of_a_window_is_kept_after_its_step(ranks):
    for rank in ranks:
        assert rank["2"]["kept"] == []
        assert set(rank["2"]["graphs"]) == set(rank["1"]["graphs"]) == {0}


@pytest.mark.parametrize("size", ["2", "2p"])
def test_the_draft_learns_after_its_ranks_last_backward_while_earlier_stages_run_theirs(ranks, size):
    first, last = (rank["drain"][size]["events"] for rank in ranks)
    assert first == ["backward"] * 3 + ["waited", "backward"]
    assert last == ["backward"] * 4 + ["draft"] * 4


@pytest.mark.parametrize("size", ["2", "2p"])
def test_the_logged_time_of_the_draft_is_that_of_the_rank_where_it_learns(ranks, size):
    # Which sleeps 0.05 s after each of 4 microbatches.
    assert 0.2 <= ranks[0]["drain"][size]["seconds"] < 20


@pytest.mark.parametrize("size", ["2", "2p"])
def test_what_waits_for_the_draft_is_what_was_planned(ranks, size):
    ((kept, planned),) = ranks[1]["drain"][size]["sizes"]
    assert kept == planned > 0


def test_what_is_trainable_does_not_depend_on_stages(ranks):
    assert ranks[0]["1"]["trainable"] == ranks[0]["2"]["trainable"] == ranks[1]["2"]["trainable"]


def test_a_checkpoint_replaces_the_other_kind_of_optimizer_files(ranks):
    stages = ["optimizer-00001-of-00002.pt", "optimizer-00002-of-00002.pt"]
    assert ranks[0]["files"] == [stages, ["optimizer.pt"], stages]


@pytest.mark.parametrize("size", ["2", "2p"])
def test_the_hub_gets_the_whole_policy_and_the_draft_from_the_first_rank(ranks, size):
    uploads, none = (rank["pushed"][size] for rank in ranks)
    assert none == []
    assert len(uploads) >= 2
    weights = {"2": {"model.safetensors"}, "2p": {"model.safetensors.index.json"}}[size]
    weights |= {f"model-0000{stage}-of-00002.safetensors" for stage in (1, 2)} if size == "2p" else set()
    for files, equal in uploads:
        assert weights | {"config.json", "draft/model.safetensors", "draft/config.json"} <= set(files)
        assert equal


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("shared", "alone"),
        ("shared from alone", "alone"),
        ("alone from shared", "shared"),
        ("shared in parts, resumed", "shared in parts"),
    ],
)
def test_shared_state_of_the_drafts_optimizer_changes_no_loss_and_no_draft(ranks, name, expected):
    for rank in ranks:
        ours, theirs = rank["draft"][name], rank["draft"][expected]
        assert len(theirs["logs"]) == 2
        for key in ("loss", "grad_norm", "draft/loss", "draft/grad_norm", "draft/learning_rate"):
            for mine, other in zip(ours["logs"], theirs["logs"], strict=True):
                assert_close(mine[key], other[key], (1e-6, 1e-7), key)
        for key, weight in theirs["weights"].items():
            assert_close(ours["weights"][key], weight, (1e-6, 1e-7), key)
            assert torch.equal(ours["weights"][key], ranks[0]["draft"][name]["weights"][key])


def test_each_rank_of_a_pipeline_has_the_moments_of_its_share(ranks):
    for name, run in ranks[0]["draft"].items():
        elements = [rank["draft"][name]["elements"] for rank in ranks]
        total = sum(weight.numel() for weight in run["weights"].values())
        if name.startswith("shared"):
            assert elements == [total // 2, total - total // 2]
        else:
            assert elements == [total, total]
