"""The tap channel between processes, over both transports: what arrives, when, and what it refuses."""

import copy
import pickle
import sys
import tempfile
from types import SimpleNamespace

import pytest
import torch
from channel_cases import require_one_crossing
from forked import TESTS, run_script, succeeded
from prepared import run_prepared

from trl_codraft.pp import TapChannel
from trl_codraft.pp.taps.gloo import GlooTransport


TRANSPORTS = ("shared memory", "gloo")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("channel")


@pytest.fixture(scope="module")
def outcomes(folder):
    return run_script("channel_worker.py", folder)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(
    "case",
    [
        "changing shapes, 2 ranks",
        "changing shapes, 4 ranks",
        "many open files",
        "interleaved",
        "interleaved, fewest slots",
        "one slot, GPipe",
    ],
)
def test_every_tap_arrives_to_the_bit_and_crosses_once(outcomes, transport, case):
    # The ranks themselves compare every tap with its known value.
    require_one_crossing(succeeded(outcomes[transport, case]))


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_source_may_fill_many_slots_before_the_first_is_read(outcomes, transport):
    assert succeeded(outcomes[transport, "many slots"]) == [0, 300]


def test_more_slots_than_a_socket_holds_headers_of_are_refused_on_all_ranks(outcomes):
    messages = succeeded(outcomes["shared memory", "too many slots"])
    assert messages[0] == messages[1]
    assert "have 1000000 landing slots together" in messages[0]
    assert "in the trainer: `tap_channel_slots`" in messages[0]
    assert succeeded(outcomes["gloo", "too many slots"]) == ["", ""]


def test_taps_between_hosts_travel_over_gloo(outcomes):
    for message, transport in succeeded(outcomes["shared memory", "two hosts"]):
        assert "the ranks run on ['host 0', 'host 1']. Use `GlooTransport`" in message
        assert transport == "GlooTransport"


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_recomputed_forwards_and_evaluations_send_nothing(outcomes, transport):
    results = succeeded(outcomes[transport, "recomputation"])
    assert [epoch for epoch, _ in results] == [3, 3]
    assert results[1][1] == [True] * 6


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_wrong_use_is_named_and_ends_the_channel(outcomes, transport):
    messages, others = succeeded(outcomes[transport, "refusals"])
    expected = [
        "Tap 0 is on meta, but the channel was made for cpu",
        "did not run layers [0, 1]",
        "shape (1, 1, 4), but torch.float32 of shape (1, 1, 3) was planned",
        "did not run layers [1]",
        "microbatch 0 runs twice",
        "captured twice in one forward",
        "Taps arrive on the rank of stage 1, not here",
        "Stage 0 did not run microbatch 0",
        "`end_step` without `begin_step`",
        "at least one microbatch",
    ]
    for index, text in enumerate(expected):
        assert text in messages[2 * index]
        assert "cannot be used any more: rank 0" in messages[2 * index + 1]
        # The other rank waits for taps: it is told what happened, or that they do not come.
        assert "rank 0" in others[2 * index]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_taps_that_nobody_took_stop_the_next_step(outcomes, transport):
    (queued, _, _), (queued_sink, after_close, message) = succeeded(outcomes[transport, "leftovers"])
    assert queued == 0
    # 2 microbatches of (1, 2): fp32 x 3, bf16 x 4, fp64 x 5, fp16 x 6 wide.
    assert queued_sink == 2 * 2 * (3 * 4 + 4 * 2 + 5 * 8 + 6 * 2)
    assert after_close == 0
    assert "the taps of microbatches [0, 1] were not taken" in message


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_nothing_is_left_in_file_systems_after_a_kill(outcomes, folder, transport):
    ranks = outcomes[transport, "killed"]
    assert [rank.exitcode for rank in ranks] == [-9, -9]
    for number in range(2):
        files = torch.load(folder / transport / "killed" / f"files{number}.pt", weights_only=False)
        named = [name for name in files if name.startswith(("/dev/shm", tempfile.gettempdir()))]
        # The test's own store and error file, and a Python that may be installed there.
        own = (str(folder), sys.prefix, sys.base_prefix)
        assert [name for name in named if not name.startswith(own)] == []
        assert any("memfd:taps (deleted)" in name for name in files) == (transport == "shared memory")
        # The draft's rank is the one that is connected to.
        assert any(name.startswith("@") for name in files) == (transport == "shared memory" and number == 1)


@pytest.mark.parametrize("output", [False, True], ids=["input", "output"])
@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))])
def test_copies_of_a_hooked_layer_hand_nothing_to_the_channel(duplicate, output):
    received = []
    channel = SimpleNamespace(captures=True, capture=lambda *tap: received.append(tap), _handles=[])
    layer, hidden = torch.nn.Linear(2, 2), torch.ones(1, 2)
    TapChannel.hook(channel, 3, layer, output=output)
    twin = duplicate(layer)
    twin(hidden)
    assert received == []
    result = layer(hidden)
    assert [tap for tap, _ in received] == [3]
    assert torch.equal(received[0][1], result if output else hidden)


def test_gloo_transport_refuses_other_backends(monkeypatch):
    monkeypatch.setattr("torch.distributed.get_backend", lambda group: "nccl")
    with pytest.raises(ValueError, match="gloo.*nccl.*through host memory"):
        GlooTransport(None)


# All pipelines and transports of the script: random sleeps, changing shapes, evaluations in between.
def test_soak_of_200_steps():
    script = TESTS.parent / "benchmarks" / "tap_soak.py"
    done = run_prepared(script, "--steps", "200", paths=[TESTS.parent], timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("every tap right") == 8
