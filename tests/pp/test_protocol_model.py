"""
The tap channel's protocol, explored exhaustively in small pipelines: every interleaving of every rank and delivery.
"""

import pytest
from protocol_model import GlooModel, Model, Violation

from trl_codraft.pp.order import Action, required_slots, schedule_order
from trl_codraft.pp.taps.lane import SinkEnd, SourceEnd


# Schedule, ranks, stages, microbatches.
PIPELINES = [
    ("GPipe", 2, 2, 5),
    ("GPipe", 3, 3, 4),
    ("1F1B", 2, 2, 5),
    ("1F1B", 3, 3, 5),
    ("1F1B", 4, 4, 4),
    ("Interleaved1F1B", 2, 4, 4),
    ("Interleaved1F1B", 2, 4, 6),
    ("Interleaved1F1B", 3, 6, 3),
    ("Interleaved1F1B", 2, 6, 4),
]


def breadth_first(num_ranks, num_stages, num_microbatches):
    """All microbatches through a stage before the next stage of the rank: no schedule of ours, the hardest case."""
    return tuple(
        tuple(Action(s, k) for s in range(rank, num_stages, num_ranks) for k in range(num_microbatches))
        for rank in range(num_ranks)
    )


def sources_of(num_ranks, num_stages):
    return [stage for stage in range(num_stages) if stage % num_ranks != (num_stages - 1) % num_ranks]


def case(schedule, num_ranks, num_stages, num_microbatches):
    order = schedule_order(schedule, num_ranks, num_stages, num_microbatches)
    sources = sources_of(num_ranks, num_stages)
    return order, num_stages, sources, required_slots(order, num_stages, sources, num_stages - 1)


@pytest.mark.parametrize("pipeline", PIPELINES)
def test_no_interleaving_deadlocks_or_overwrites_a_slot_at_the_required_depth(pipeline):
    order, num_stages, sources, required = case(*pipeline)
    for slots in (required, required + 1):
        states, deadlocks = Model(order, num_stages, sources, slots).explore()
        assert states > 50
        assert not deadlocks


@pytest.mark.parametrize("pipeline", PIPELINES)
def test_one_slot_fewer_deadlocks(pipeline):
    order, num_stages, sources, required = case(*pipeline)
    _, deadlocks = Model(order, num_stages, sources, required - 1).explore()
    assert deadlocks


@pytest.mark.parametrize("pipeline", PIPELINES)
@pytest.mark.parametrize("more", [0, 1])
def test_landing_slots_of_symmetric_memory_are_never_overwritten(pipeline, more):
    order, num_stages, sources, required = case(*pipeline)
    receives = (required + more + 1) // 2
    states, deadlocks = GlooModel(order, num_stages, sources, receives, landing=2 * receives).explore()
    assert states > 50
    assert not deadlocks


def test_fewer_landing_slots_of_symmetric_memory_would_be_overwritten():
    order, num_stages, sources, _ = case("1F1B", 4, 4, 4)
    for receives in (1, 2):
        with pytest.raises(Violation, match="still in it"):
            GlooModel(order, num_stages, sources, receives, landing=2 * receives - 1).explore()


def test_a_breadth_first_pipeline_needs_a_slot_per_microbatch():
    order, sources = breadth_first(2, 4, 4), sources_of(2, 4)
    assert required_slots(order, 4, sources, 3) == 4
    for slots, deadlocks in ((4, False), (3, True), (1, True)):
        assert bool(Model(order, 4, sources, slots).explore()[1]) is deadlocks


class ForgetfulSource(SourceEnd):
    """Counts one slot more than there are."""

    @property
    def has_free_slot(self):
        return self.sent - self.released <= self.slots


class HastySink(SinkEnd):
    """Gives back a slot further on than the one it has read."""

    def release(self):
        self.released += 1
        return self.released


class StuckSource(SourceEnd):
    """Fills the same slot again."""

    @property
    def slot(self):
        return 0


@pytest.mark.parametrize(
    ("ends", "error", "message"),
    [
        ({"source_end": ForgetfulSource}, Violation, "still in it"),
        ({"source_end": StuckSource}, Violation, "slot 0 is filled with|slot 1 holds"),
        ({"sink_end": HastySink}, RuntimeError, "was given back when"),
    ],
)
def test_a_broken_protocol_is_noticed(ends, error, message):
    order, num_stages, sources, _ = case("1F1B", 3, 3, 5)
    with pytest.raises(error, match=message):
        Model(order, num_stages, sources, 2, **ends).explore()
