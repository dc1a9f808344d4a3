"""What an error of a collective says about ranks that are late."""

from types import SimpleNamespace

import pytest
import torch.distributed as dist

from trl_codraft.grpo.progress import NAMED_RANKS, STAGES, ProgressBoard, ProgressReports


def boards(world_size):
    store = dist.HashStore()
    return [ProgressBoard(store, rank, world_size) for rank in range(world_size)]


def test_ranks_that_have_come_least_far_are_named():
    ranks = boards(4)
    for rank, place in enumerate([(7, "rewards done"), (7, "rewards"), (7, "loss"), (7, "rewards")]):
        ranks[rank].note(6, "loss")
        ranks[rank].note(*place)
    said = ranks[0].explanation()
    assert "least far: rank 1: 'rewards' of micro-step 7" in said
    assert "rank 3: 'rewards' of micro-step 7" in said
    assert "This one, rank 0: 'rewards done' of micro-step 7" in said
    assert "rank 2" not in said
    ranks[2].note(6, "loss")
    assert "least far: rank 2: 'loss' of micro-step 6" in ranks[0].explanation()


def test_stages_of_a_micro_step_are_in_order():
    ranks = boards(2)
    for earlier, later in zip(STAGES, STAGES[1:], strict=False):
        ranks[0].note(3, later)
        ranks[1].note(3, earlier)
        assert f"least far: rank 1: '{earlier}'" in ranks[0].explanation()


def test_a_rank_that_has_said_nothing_is_late_and_nobody_having_said_anything_is_no_error():
    ranks = boards(3)
    assert "No rank has come less far than this one, rank 0: 'nothing yet'" in ranks[0].explanation()
    ranks[0].note(0, "rollouts")
    ranks[2].note(0, "rewards")
    assert "least far: rank 1: 'nothing yet' of micro-step 0" in ranks[0].explanation()


def test_a_rank_that_is_late_itself_says_so_and_many_are_counted():
    ranks = boards(NAMED_RANKS + 5)
    for board in ranks:
        board.note(1, "rewards")
    assert "No rank has come less far than this one, rank 2" in ranks[2].explanation()
    ranks[0].note(2, "rollouts")
    assert "; and 4 more" in ranks[0].explanation()


def test_a_store_that_is_gone_does_not_hide_the_error():
    class Gone:
        def check(self, keys):
            raise RuntimeError("Connection refused")

    board = boards(1)[0]
    board.store = Gone()
    assert "their store is gone (Connection refused)" in board.explanation()


def test_a_second_run_of_a_process_starts_anew(monkeypatch):
    store = dist.HashStore()
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)
    ProgressBoard(store, 1, 2).note(80, "loss")
    other = ProgressBoard(store, 0, 2)
    other.note(0, "rewards")

    ProgressReports(SimpleNamespace(_step=0)).start()
    assert "least far: rank 1: 'nothing yet' of micro-step 0" in other.explanation()


def test_a_draft_that_learns_belongs_to_the_micro_step_before_also_when_that_is_counted():
    ranks = boards(2)
    reports = [ProgressReports(SimpleNamespace(_step=4)) for _ in ranks]
    for report, board in zip(reports, ranks, strict=True):
        report.board = board
        report.note("loss")
        report.run._step += 1  # as TRL does after the backward
        report.note("draft")
    # The first rank goes on to the next micro-step, where it waits for the other.
    reports[0].note("draft done")
    reports[0].note("loss")
    said = ranks[0].explanation()
    assert "least far: rank 1: 'draft' of micro-step 4" in said
    assert "This one, rank 0: 'loss' of micro-step 5" in said


@pytest.mark.parametrize("text", ["Timed out waiting 10000ms for recv", "a tensor of the user"])
def test_only_errors_of_collectives_are_explained(text):
    reports = ProgressReports(SimpleNamespace(_step=1))
    reports.board = boards(2)[0]
    reports.board.note(1, "rewards")

    @reports.explained_errors()
    def fail():
        raise RuntimeError(text)

    with pytest.raises(RuntimeError) as raised:
        fail()
    assert ("least far: rank 1" in str(raised.value)) == (text != "a tensor of the user")
