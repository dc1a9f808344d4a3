"""The transports of GPUs between processes, on GPUs that are emulated: late streams, events and memory of other processes."""

import inspect
from itertools import product

import emulated_worker
import pytest
import tap_fault_worker
import torch
from channel_cases import require_one_crossing
from emulated_device import CPU, EmulatedCalls
from forked import TESTS, run_script, succeeded
from prepared import run_prepared

from benchmarks.cuda_calls_check import CallsCheck
from trl_codraft.pp.taps.cuda_calls import CudaCalls
from trl_codraft.pp.taps.side_copies import Staging


TRANSPORTS = tuple(emulated_worker.EMULATED)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("emulated")


@pytest.fixture(scope="module")
def outcomes(folder):
    return run_script("emulated_worker.py", folder)


@pytest.mark.parametrize(
    ("transport", "case"),
    [
        *product(TRANSPORTS, ["changing shapes, 2 ranks", "interleaved, fewest slots", "one slot, GPipe"]),
        ("CUDA", "changing shapes, 4 ranks"),
        ("CUDA", "interleaved"),
    ],
)
def test_every_tap_arrives_to_the_bit_and_crosses_once(outcomes, transport, case):
    require_one_crossing(succeeded(outcomes[transport, case]))


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("case", ["taken at once", "the draft's GPU is late"])
def test_taps_can_be_taken_while_their_copies_are_late(outcomes, transport, case):
    # The ranks themselves compare what the stream of the taker reads, after it has dropped the taps.
    left = succeeded(outcomes[transport, case])
    assert set(left) == {0}  # and when all have closed, no slot is left in a GPU's memory


def test_recomputed_forwards_and_evaluations_send_nothing(outcomes):
    results = succeeded(outcomes["CUDA", "recomputation"])
    assert [epoch for epoch, _ in results] == [3, 3]
    assert results[1][1] == [True] * 6


def test_step_does_not_begin_over_taps_that_nobody_took(outcomes):
    _, (queued, after, message) = succeeded(outcomes["CUDA", "leftovers"])
    assert queued > 0
    assert after == 0
    assert "the taps of microbatches [0, 1] were not taken" in message


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(("case", "culprit"), [("a source is killed", 0), ("the draft's rank is killed", 2)])
def test_rank_that_is_killed_ends_all_soon_and_is_named(outcomes, transport, case, culprit):
    for rank, outcome in enumerate(outcomes[transport, case]):
        if rank == culprit:
            assert outcome.exitcode == -9
            continue
        assert outcome.exitcode == 1, outcome
        assert outcome.seconds < tap_fault_worker.TIMEOUT + 10
        assert f"rank {culprit}" in outcome.errors.strip().splitlines()[-1]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_forwards_wait_neither_for_copies_nor_for_the_gpu(outcomes, transport):
    (source, step), (sink, _) = succeeded(outcomes[transport, "slow copies"])
    # Three copies: the host waits at the end of the step.
    assert source < 0.5 * emulated_worker.SLOW_COPY
    assert step > 2 * emulated_worker.SLOW_COPY
    if transport == "CUDA":
        assert sink < 0.5 * emulated_worker.SLOW_COPY


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(("case", "culprit"), [("a source's GPU stops", 0), ("the draft's GPU stops", 2)])
def test_device_that_stops_is_a_timeout_that_names_its_taps(outcomes, transport, case, culprit):
    results = succeeded(outcomes[transport, case])
    for rank, (message, gave_up, closed, kept) in enumerate(results):
        if transport != "CUDA" and culprit == 2 and rank < 2:
            continue  # what they sent has left their hands
        assert gave_up < 2 + 10
        assert closed < 5
        if not message.startswith("TapTimeout"):
            assert "gave up" in message
        assert f"rank {culprit}" in message
        assert "stage 0" in message
        assert "microbatch 1" in message or (rank == culprit == 0 and "microbatch 3" in message)
        if transport == "CUDA" and rank in (culprit, 2):
            assert kept > 0  # memory that a copy may still touch is not freed
    assert results[2][0].startswith("TapTimeout")


@pytest.mark.parametrize(
    ("case", "stuck"), [("the source closes over a copy", 0), ("the draft's rank closes over a forward", 1)]
)
def test_memory_that_a_stuck_gpu_may_touch_is_kept_and_closing_ends(outcomes, case, stuck):
    results = succeeded(outcomes["CUDA", case])
    assert all(seconds < 5 for seconds, _ in results)
    assert results[1][1] > 0  # the ring itself
    assert results[0][1] == (1 if stuck == 0 else 0)  # its mapping


def fallback_of(outcomes, case):
    """What `open_channel` chose, alike on all ranks, and what the first rank logged."""
    results = succeeded(outcomes["CUDA", case])
    chosen = {name for name, _ in results}
    assert len(chosen) == 1
    assert [records for _, records in results[1:]] == [[], []]
    return chosen.pop(), results[0][1]


def test_channel_between_gpus_is_opened_where_the_probe_passes(outcomes):
    assert fallback_of(outcomes, "nothing") == ("CudaTransport", [("INFO", "Taps travel from GPU to GPU.")])


REASONS = {
    "no memory (rank 2)": "rank 2: CudaError: cudaMalloc failed on emulated: cudaErrorMemoryAllocation",
    "no mapping (rank 1)": "rank 1: CudaError: cudaIpcOpenMemHandle failed on emulated: cudaErrorInvalidValue",
    "other bindings (rank 1)": "rank 1: TypeError: cudaIpcOpenMemHandle() takes exactly 1 positional argument",
    "wrong bytes (rank 0)": "rank 2: TapMismatch: 1 of 4096 bytes that rank 0 sent through slot 0 of stage 0 arrived",
    "no events (rank 0)": "bytes that rank 0 sent through slot",
    "no events (rank 2)": "bytes that rank 0 sent through slot",
}


@pytest.mark.parametrize("case", [case for case in emulated_worker.BROKEN if case != "nothing"])
def test_all_ranks_fall_back_together_and_say_why(outcomes, case):
    # The ranks themselves compare the taps of two steps of the channel that they got instead.
    chosen, records = fallback_of(outcomes, case)
    assert chosen == "PinnedTransport"
    (level, warning), (_, choice) = records
    assert level == "WARNING"
    assert REASONS[case] in warning
    assert choice == "Taps travel over shared memory."


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("EmulatedCalls", []),
        ("OutOfMemory", ["allocate: memory with a handle", "move: into that memory"]),
        ("Unopenable", ["open: the other rank's memory"]),
        ("WrongBytes", ["move: into that memory", "open: the other rank's memory"]),
        ("DeafToEvents", ["open_event: a stream waits for what", "move: into the other rank's memory"]),
        ("Overcautious", ["open_event: a wait is for the record before it"]),
        ("Forgetful", ["hand_over"]),
    ],
)
def test_check_of_single_calls_finds_what_a_gpu_does_not_do(outcomes, kind, names):
    failed, others = succeeded(outcomes["CUDA", f"calls: {kind}"])
    assert failed == others
    assert bool(failed) == bool(names)
    for name in names:
        assert any(line.startswith(name) for line in failed), failed


def test_check_of_single_calls_leaves_none_out():
    source = inspect.getsource(CallsCheck.run)
    for name in set(vars(CudaCalls)) - {"runtime"}:
        assert name.startswith("_") or f'"{name}' in source or f", {name}:" in source, name


def test_staging_that_is_dropped_is_kept_for_copies_under_way():
    calls = EmulatedCalls(CPU)
    staging, content = Staging(calls, [calls.event()], 64), torch.arange(64, dtype=torch.uint8)
    target = calls.empty(64, calls.side)
    calls.copy(staging.room(0), content, calls.current())
    staging.leave(0)
    calls.delay(calls.side)
    calls.move(target.data_ptr(), staging.address(0), 64, calls.side)
    del staging
    calls.side.synchronize()
    assert torch.equal(target, content)


def test_emulated_gpu_has_the_interface_of_the_real_one():
    def public(kind):
        return {name for name in vars(kind) if not name.startswith("_")}

    assert public(CudaCalls) - {"runtime"} <= public(EmulatedCalls)


@pytest.mark.slow
def test_soak_on_emulated_gpus(tmp_path):
    outcomes = run_script("emulated_worker.py", tmp_path, "soak", timeout=280)
    assert len(outcomes) == len(TRANSPORTS)
    for ranks in outcomes.values():
        for grown, files in succeeded(ranks):
            assert grown < 12 * 2**20
            assert files <= 0


def test_check_of_the_channel_on_gpus_runs_on_emulated_ones():
    script = TESTS.parent / "benchmarks" / "gpu_tap_check.py"
    done = run_prepared(script, "--emulate", paths=[TESTS.parent], timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "FAILED" not in done.stdout
    assert done.stdout.count("ok     ") == 19
    assert done.stdout.count("every tap right") == 8
    assert "a channel opens with CudaTransport" in done.stdout
    assert done.stdout.count("forwards ") == 8
