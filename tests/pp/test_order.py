"""The order of the schedules, and the landing slots that follow from it."""

import pytest
from torch.distributed.pipelining import schedules

from trl_codraft.pp.order import Action, forwards_only, required_slots, schedule_order, slots_ahead


class FakeStage:
    """As much of a pipeline stage as torch's schedules need to plan."""

    def __init__(self, index, num_stages, num_ranks):
        self.stage_index, self.num_stages, self.group_size = index, num_stages, num_ranks
        self.group_rank, self.is_first, self.is_last = 0, index == 0, index == num_stages - 1


def order_of(schedule):
    """By rank, the actions of a schedule of torch."""
    return tuple(
        tuple(
            Action(action.stage_index, action.microbatch_index, action.computation_type != schedules.FORWARD)
            for action in schedule.pipeline_order[rank]
            if action is not None and action.computation_type != schedules.REDUCE_GRAD
        )
        for rank in sorted(schedule.pipeline_order)
    )


@pytest.mark.parametrize(
    ("num_ranks", "per_rank", "num_microbatches"), [(2, 2, 4), (2, 2, 6), (4, 2, 8), (4, 2, 10), (4, 2, 3), (3, 4, 6)]
)
def test_interleaved_order_is_that_of_torch(num_ranks, per_rank, num_microbatches):
    num_stages = num_ranks * per_rank
    stages = [FakeStage(index, num_stages, num_ranks) for index in range(0, num_stages, num_ranks)]
    theirs = order_of(schedules.ScheduleInterleaved1F1B(stages, num_microbatches))
    assert theirs == schedule_order("Interleaved1F1B", num_ranks, num_stages, num_microbatches)


def test_orders_of_one_stage_per_rank_are_those_of_torch_but_for_its_numbers_on_the_last():
    stage = FakeStage(0, 3, 3)
    assert order_of(schedules.ScheduleGPipe(stage, 4)) == schedule_order("GPipe", 3, 3, 4)
    *theirs, last = order_of(schedules.Schedule1F1B(stage, 4))
    *ours, own = schedule_order("1F1B", 3, 3, 4)
    assert theirs == ours
    # The last stage of torch's order runs microbatches that there are not: why `schedule_order` is our own.
    assert text(last) == "F1 B0 F2 B1 F3 B2 F4 B3"
    assert text(own) == "F0 B0 F1 B1 F2 B2 F3 B3"


def text(actions):
    return " ".join(f"{'B' if action.backward else 'F'}{action.microbatch}" for action in actions)


def test_orders_of_one_stage_per_rank():
    gpipe, one = (schedule_order(name, 3, 3, 4) for name in ("GPipe", "1F1B"))
    assert [text(actions) for actions in gpipe] == ["F0 F1 F2 F3 B0 B1 B2 B3"] * 3
    assert [text(actions) for actions in one] == [
        "F0 F1 F2 B0 F3 B1 B2 B3",
        "F0 F1 B0 F2 B1 F3 B2 B3",
        "F0 B0 F1 B1 F2 B2 F3 B3",
    ]
    assert [text(actions) for actions in forwards_only(one)] == ["F0 F1 F2 F3"] * 3


@pytest.mark.parametrize(
    ("schedule", "num_ranks", "num_stages", "num_microbatches", "required", "ahead"),
    [
        ("GPipe", 4, 4, 8, 1, [3, 2, 1]),
        ("1F1B", 2, 2, 8, 1, [1]),
        ("1F1B", 4, 4, 8, 1, [3, 2, 1]),
        ("Interleaved1F1B", 2, 4, 16, 2, [2, 2]),
        ("Interleaved1F1B", 4, 8, 16, 4, [5, 4, 4, 4, 3, 2]),
        ("Interleaved1F1B", 4, 8, 10, 5, [5, 5, 5, 4, 4, 2]),
    ],
)
def test_slots_of_schedules(schedule, num_ranks, num_stages, num_microbatches, required, ahead):
    order = schedule_order(schedule, num_ranks, num_stages, num_microbatches)
    sources = [stage for stage in range(num_stages) if stage % num_ranks != num_ranks - 1]
    assert required_slots(order, num_stages, sources, num_stages - 1) == required
    assert [slots_ahead(order, num_stages, source, num_stages - 1) for source in sources] == ahead


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("ZBVZeroBubble", 2, 4, 4), "not supported: choose one of GPipe, 1F1B, Interleaved1F1B"),
        (("1F1B", 4, 4, 3), "at least as many microbatches as stages, got 3 for 4"),
        (("1F1B", 2, 4, 4), "one stage per rank, got 4 stages on 2 ranks"),
        (("Interleaved1F1B", 2, 2, 4), "at least twice as many"),
        (("Interleaved1F1B", 3, 6, 7), "7 do not split into 2 rounds"),
        (("GPipe", 2, 2, 0), "at least one microbatch"),
    ],
)
def test_what_cannot_run_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        schedule_order(*arguments)
