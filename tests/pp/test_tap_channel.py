"""The tap channel between processes, over all transports: what arrives, when, and what it refuses."""

import copy
import pickle
import sys
import tempfile
from contextlib import nullcontext
from types import SimpleNamespace
from unittest import mock

import channel_worker
import pytest
import torch
from channel_cases import TRANSPORTS, require_one_crossing
from forked_ranks import TESTS, run_script, succeeded
from prepared import run_prepared

from trl_codraft.pp import GlooTransport
from trl_codraft.pp.taps.capture import Capture
from trl_codraft.pp.taps.symmetric import SymmetricTransport, symmetric_memory


def over(*cases):
    """`(transport, case)` of every run of some cases."""
    return [(transport, case) for case in cases for transport in channel_worker.CASES[case][2]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("channel")


@pytest.fixture(scope="module")
def outcomes(folder):
    return run_script("channel_worker.py", folder, folder="pp")


@pytest.mark.parametrize(
    ("transport", "case"),
    over(
        "changing shapes, 2 ranks",
        "changing shapes, 4 ranks",
        "many open files",
        "interleaved",
        "interleaved, fewest slots",
        "one slot, GPipe",
    ),
)
def test_every_tap_arrives_to_the_bit_and_crosses_once(outcomes, transport, case):
    # The ranks themselves compare every tap with its known value.
    require_one_crossing(succeeded(outcomes[transport, case]))


@pytest.mark.parametrize(("transport", "case"), over("many slots"))
def test_a_source_may_fill_many_slots_before_the_first_is_read(outcomes, transport, case):
    assert succeeded(outcomes[transport, case]) == [0, 300]


def test_ranks_know_whether_they_run_on_one_host(outcomes):
    assert succeeded(outcomes["gloo", "one host"]) == [(True, False)] * 2


def test_send_of_gloo_is_complete_when_its_receive_was_posted(outcomes):
    # The landing slots of symmetric memory are given back by this alone.
    waited, late = succeeded(outcomes["gloo", "late receive"])
    assert waited > 0.8 * late


@pytest.mark.parametrize(("transport", "case"), over("recomputation"))
def test_recomputed_forwards_and_evaluations_send_nothing(outcomes, transport, case):
    results = succeeded(outcomes[transport, case])
    assert [epoch for epoch, _ in results] == [3, 3]
    assert results[1][1] == [True] * 6


REFUSALS = {
    "other device": "Tap 0 is on meta, but the channel was made for cpu",
    "no tap": "did not run layers [0, 1]",
    "other width": "shape (1, 1, 4), but torch.float32 of shape (1, 1, 3) was planned",
    "one tap of two": "did not run layers [1]",
    "forward twice": "microbatch 0 runs twice",
    "captured twice": "captured twice in one forward",
    "taken elsewhere": "Taps arrive on the rank of stage 1, not here",
    "no forward": "Stage 0 did not run microbatch 0",
    "no step": "`end_step` without `begin_step`",
    "no microbatch": "at least one microbatch",
}


@pytest.mark.parametrize("misuse", channel_worker.MISUSES)
def test_wrong_use_is_named_and_ends_the_channel(outcomes, misuse):
    messages, others = succeeded(outcomes["gloo", misuse])
    assert REFUSALS[misuse] in messages[0]
    # The other rank waits for taps: it is told what happened, or that they do not come.
    assert "rank 0" in others[0]
    for told in (messages, others):
        assert len(told) == 2
    assert "cannot be used any more: rank 0" in messages[1]


@pytest.mark.parametrize(("transport", "case"), over("leftovers"))
def test_taps_that_nobody_took_stop_the_next_step(outcomes, transport, case):
    (queued, _, _), (queued_sink, after_close, message) = succeeded(outcomes[transport, case])
    assert queued == 0
    # 2 microbatches of (1, 2): fp32 x 3, bf16 x 4, fp64 x 5, fp16 x 6 wide.
    assert queued_sink == 2 * 2 * (3 * 4 + 4 * 2 + 5 * 8 + 6 * 2)
    assert after_close == 0
    assert "the taps of microbatches [0, 1] were not taken" in message


def test_nothing_is_left_in_file_systems_after_a_kill(outcomes, folder):
    assert [rank.exitcode for rank in outcomes["gloo", "killed"]] == [-9, -9]
    for number in range(2):
        files = torch.load(folder / "gloo" / "killed" / f"files{number}.pt", weights_only=False)
        named = [name for name in files if name.startswith(("/dev/shm", tempfile.gettempdir()))]
        # The test's own store and error file, and a Python that may be installed there.
        own = (str(folder), sys.prefix, sys.base_prefix)
        assert [name for name in named if not name.startswith(own)] == []


@pytest.mark.parametrize(("transport", "case"), over("slow copies"))
def test_forwards_do_not_wait_for_copies(outcomes, transport, case):
    (source, step), _ = succeeded(outcomes[transport, case])
    # Three copies: the host waits at the end of the step.
    assert source < 0.5 * channel_worker.SLOW_COPY
    assert step > 2 * channel_worker.SLOW_COPY


@pytest.mark.parametrize(
    ("transport", "case", "culprit"),
    [(*run, 0) for run in over("a source's device stops")] + [(*run, 2) for run in over("the draft's device stops")],
)
def test_device_that_stops_is_a_timeout_that_names_its_taps(outcomes, transport, case, culprit):
    results = succeeded(outcomes[transport, case])
    for rank, (message, gave_up, closed) in enumerate(results):
        assert gave_up < 2 + 10
        assert closed < 1
        if not message.startswith("TapTimeout"):
            assert "gave up" in message
        assert f"rank {culprit}" in message
        if rank in (culprit, 2):
            assert "stage 0, microbatch 1" in message or "stage 0, rank 0, microbatch 1" in message
    assert results[2][0].startswith("TapTimeout")
    assert "for cpu to copy the taps of stage 0, microbatch 1" in results[culprit][0]


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        ("nothing", None),
        ("no mapping (rank 1)", "rank 1: RuntimeError: CUDA error: invalid device pointer"),
        ("no mapping (rank 2)", "rank 2: RuntimeError: CUDA error: invalid device pointer"),
        ("no reach (rank 0)", "rank 0: RuntimeError: this GPU does not reach the memory of another"),
        ("other memory (rank 0)", "bytes that rank 0 wrote into slot 0 of stage 0 are wrong"),
    ],
)
def test_all_ranks_fall_back_together_and_say_why(outcomes, case, reason):
    # The ranks themselves compare the taps of two steps of the channel that they got instead.
    results = succeeded(outcomes["symmetric", case])
    assert {name for name, _ in results} == {"PinnedTransport" if reason else "FileMappedTransport"}
    assert [records for _, records in results[1:]] == [[], []]
    *warnings, choice = results[0][1]
    assert choice == ("INFO", "Taps travel through pinned memory." if reason else "Taps travel from GPU to GPU.")
    assert [level for level, _ in warnings] == ["WARNING"] * bool(reason)
    if reason:
        assert warnings[0][1].startswith("Taps do not travel from GPU to GPU: ")
        assert reason in warnings[0][1]


def test_calls_that_only_gpus_run_fit_the_signatures_of_torch(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    transport = SimpleNamespace(device=torch.device("cuda", 0), inner=SimpleNamespace(group=mock.Mock(group_name="7")))
    with mock.patch.object(symmetric_memory, "get_symm_mem_workspace", autospec=True) as workspace:
        workspace.return_value = SimpleNamespace(world_size=2, get_buffer=lambda rank, sizes, dtype: (rank, *sizes))
        assert SymmetricTransport._map(transport, 512) == [(0, 512), (1, 512)]
    workspace.assert_called_once_with("7", 512)
    handle = symmetric_memory._SymmetricMemory
    assert handle.get_buffer.__doc__.startswith("get_buffer(self: ")
    assert [text in handle.get_buffer.__doc__ for text in (", rank: ", ", sizes: ", ", dtype: ")] == [True] * 3
    assert isinstance(handle.world_size, property)


@pytest.mark.parametrize(
    ("backend", "indices", "reaches", "message"),
    [
        ("NVSHMEM", [0, 1], True, "of the backend NVSHMEM"),
        ("CUDA", [0, 0], True, r"numbers \[0, 0\]: symmetric memory wants one for each"),
        ("CUDA", [0, 1], False, "cuda:0 does not reach the memory of cuda:1"),
        ("CUDA", [0, 1], True, None),
    ],
)
def test_gpus_that_cannot_map_their_memories_are_told_beforehand(monkeypatch, backend, indices, reaches, message):
    monkeypatch.setattr(symmetric_memory, "get_backend", lambda device: backend)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda device, peer: reaches)
    transport = SimpleNamespace(device=torch.device("cuda", 0))
    with nullcontext() if message is None else pytest.raises(RuntimeError, match=message):
        SymmetricTransport._require_reach(transport, indices)


@pytest.mark.parametrize("output", [False, True], ids=["input", "output"])
@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))])
def test_copies_of_a_hooked_layer_hand_nothing_to_the_channel(duplicate, output):
    received = []
    capture = Capture(lambda *tap: received.append(tap), 3)
    layer, hidden = torch.nn.Linear(2, 2), torch.ones(1, 2)
    if output:
        layer.register_forward_hook(capture.from_output)
    else:
        layer.register_forward_pre_hook(capture.from_input, with_kwargs=True)
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


def test_check_of_the_channel_on_gpus_runs_on_a_cpu():
    script = TESTS.parent / "benchmarks" / "gpu_tap_check.py"
    done = run_prepared(script, paths=[TESTS.parent], timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("every tap right") == 6
    assert done.stdout.count("forwards ") == 8


# Four pipelines over each transport: random sleeps, changing shapes, evaluations in between.
@pytest.mark.parametrize(
    ("steps", "transports"),
    [
        (40, ["gloo"]),
        pytest.param(200, list(TRANSPORTS), marks=(pytest.mark.slow, pytest.mark.timeout(600))),
    ],
)
def test_many_steps_neither_hang_nor_grow(steps, transports):
    script = TESTS.parent / "benchmarks" / "tap_soak.py"
    arguments = ("--steps", steps, "--transports", *transports)
    done = run_prepared(script, *arguments, paths=[TESTS.parent], timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("every tap right") == 4 * len(transports)
