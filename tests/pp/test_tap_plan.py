"""Plans and messages of the tap channel: what they refuse, and where things lie."""

from dataclasses import replace

import pytest
import torch
from channel_cases import mixed_plan

from trl_codraft.pp.order import Action
from trl_codraft.pp.shape import PipelineShape
from trl_codraft.pp.taps.message import HEADER_BYTES, Kind, TapHeader, TapMismatch
from trl_codraft.pp.taps.plan import Tap, TapPlan


FP32 = torch.float32


def layers_plan(tap_layers=(2, 4, 6), layers_per_stage=(3, 3, 2), **overrides):
    slots = overrides.pop("slots", None)
    sizes = {"num_ranks": len(layers_per_stage), "num_microbatches": 8, **overrides}
    return TapPlan.for_layers(tap_layers, PipelineShape(layers_per_stage, **sizes), 16, FP32, slots=slots)


def test_a_tap_belongs_to_the_stage_whose_layer_reads_it():
    # Layers 0-2, 3-5, 6-7. Tap 3 is the input of stage 1, tap 6 that of stage 2, tap 8 the output of the last layer.
    plan = layers_plan((0, 2, 3, 5, 6, 8))
    assert [tap.stage for tap in plan.taps] == [0, 0, 1, 1, 2, 2]
    assert plan.source_stages == (0, 1)


def test_stages_on_the_rank_of_the_draft_need_no_lane():
    plan = layers_plan((1, 3, 5, 7), (2, 2, 2, 2), num_ranks=2, schedule="Interleaved1F1B")
    assert plan.stage_ranks == (0, 1, 0, 1)
    assert [(lane.stage, lane.source, lane.sink) for lane in plan.lanes] == [(0, 0, 1), (2, 0, 1)]


def test_slots_are_what_a_source_fills_and_one_more_unless_given():
    assert [lane.slots for lane in layers_plan().lanes] == [3, 2]
    assert [lane.slots for lane in layers_plan(slots=1).lanes] == [1, 1]


def test_too_few_slots_are_refused_and_the_number_needed_is_named():
    interleaved = {"layers_per_stage": (1,) * 8, "num_ranks": 4, "schedule": "Interleaved1F1B"}
    assert layers_plan(slots=4, **interleaved).required_slots(8) == 4
    with pytest.raises(ValueError, match="3 landing slots deadlock.*to 4 or more"):
        layers_plan(slots=3, **interleaved)
    with pytest.raises(ValueError, match="at least one landing slot"):
        layers_plan(slots=0)
    # A step with more microbatches per round needs more.
    plan = layers_plan(slots=4, **interleaved)
    with pytest.raises(ValueError, match="with 10 microbatches on 8 stages.*to 5 or more"):
        plan.require_slots(10)


def test_a_forward_only_step_may_have_fewer_microbatches_than_stages():
    assert layers_plan().required_slots(1) == 1


def test_own_orders_are_checked():
    def forward_first(num_microbatches):
        return tuple(tuple(Action(stage, k) for k in range(num_microbatches)) for stage in range(2))

    plan = TapPlan((Tap(1, 0, 4, FP32),), (1, 0), 4, forward_first)
    assert plan.lanes[0][:3] == (0, 1, 0)
    with pytest.raises(ValueError, match="cannot run"):
        TapPlan((Tap(1, 0, 4, FP32),), (0, 1), 4, lambda n: ((Action(0, 0, backward=True),), ()))
    with pytest.raises(ValueError, match=r"stage s on rank s % 2"):
        TapPlan((Tap(1, 0, 4, FP32),), (1, 0), 4)


@pytest.mark.parametrize(
    ("taps", "message"),
    [
        ((), "at least one"),
        ((Tap(3, 0, 4, FP32), Tap(2, 0, 4, FP32)), "strictly ascending"),
        ((Tap(3, 5, 4, FP32),), "not among the 2"),
    ],
)
def test_taps_that_do_not_fit_are_refused(taps, message):
    with pytest.raises(ValueError, match=message):
        TapPlan(taps, (0, 1), 4)
    with pytest.raises(ValueError, match="ids run from 0 to 8"):
        layers_plan((2, 9))


def test_views_of_a_message_are_aligned_and_apart():
    plan = mixed_plan(2, taps_per_stage=5)
    rows = (2, 3)
    payload = torch.zeros(plan.message_bytes(0, rows), dtype=torch.uint8)
    for number, (tap, view) in enumerate(zip(plan.taps_of(0), plan.views(0, rows, payload).values(), strict=True)):
        assert view.shape == (2, 3, tap.width)
        assert view.dtype == tap.dtype
        assert (view.data_ptr() - payload.data_ptr()) % 64 == 0
        assert not view.any()
        view.fill_(number + 1)
    for number, view in enumerate(plan.views(0, rows, payload).values()):
        assert (view == number + 1).all()
    # Content and at most 63 bytes of padding per tap.
    content = sum(tap.num_bytes(rows) for tap in plan.taps_of(0))
    assert content <= payload.numel() < content + 5 * 64


def test_fingerprints_tell_plans_apart():
    plan = layers_plan()
    others = [
        layers_plan((2, 4, 7)),
        layers_plan(layers_per_stage=(2, 3, 3)),
        layers_plan(schedule="GPipe"),
        layers_plan(slots=5),
        layers_plan(num_microbatches=9),
        replace(plan, taps=tuple(Tap(*tap[:3], torch.bfloat16) for tap in plan.taps)),
    ]
    assert layers_plan().fingerprint == plan.fingerprint
    assert len({plan.fingerprint, *(other.fingerprint for other in others)}) == 7


HEADER = TapHeader(Kind.TAPS, epoch=2**40, sequence=2**33, microbatch=7, stage=3, num_bytes=2**35, plan=2**63)


def test_a_header_is_64_bytes_and_comes_back_whole():
    assert len(HEADER.pack()) == HEADER_BYTES == 64
    assert TapHeader.unpack(HEADER.pack()) == HEADER


@pytest.mark.parametrize(
    ("content", "message"),
    [(HEADER.pack()[:63], "63 bytes"), (bytes(64), "checksum"), (b"X" + HEADER.pack()[1:], "checksum")],
)
def test_what_is_no_header_is_refused(content, message):
    with pytest.raises(TapMismatch, match=message):
        TapHeader.unpack(content)


@pytest.mark.parametrize("name", ["epoch", "sequence", "microbatch", "stage", "num_bytes", "plan", "num_taps"])
def test_every_field_of_a_header_is_checked(name):
    HEADER.require(HEADER)
    with pytest.raises(TapMismatch, match=f"{name} {getattr(HEADER, name) + 1} instead of {getattr(HEADER, name)}"):
        replace(HEADER, **{name: getattr(HEADER, name) + 1}).require(HEADER)
