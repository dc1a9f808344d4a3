"""Sharded attention on gloo processes: against one dense float64 softmax, and what it sends and keeps."""

from functools import partial

import pytest
import torch
from cp.attention_cases import (
    ALL_CASES,
    BF16_CASES,
    DEFAULT_CASES,
    MIXED,
    assemble,
    attend,
    dense,
    random_cases,
    run_cases,
    uneven_shards,
)
from cp.chain_cases import (
    DIM,
    DOC_LENS,
    LENGTH,
    NUM_KV_HEADS,
    PASSES,
    WINDOW,
    chain_costs,
    one_row_gradients,
    stalled_rank,
    unsharded,
)
from cp.groups import run_in_groups
from cp.threads import run_in_threads

from trl_codraft.cp.layout import ContextLayout
from trl_codraft.cp.planner import plan_document, plan_hybrid


TOLERANCES = {torch.float64: 1e-12, torch.float32: 2e-6}
SIZES = (2, 3, 4)
RANDOM_CASES = random_cases(200)


def work(group):
    """Everything that the tests of this module want from the ranks."""
    return {
        "cases": run_cases(group, [*DEFAULT_CASES, *BF16_CASES]),
        "costs": chain_costs(group),
        "one row": one_row_gradients(group),
        "unsharded": unsharded(group),
        "stalled": stalled_rank(group),
    }


@pytest.fixture(scope="module")
def results():
    return run_in_groups(work)


@pytest.fixture(scope="module")
def random_results():
    return run_in_groups(partial(run_cases, cases=RANDOM_CASES), timeout=240)


def assert_dense(case, results):
    """Absolute errors against the size of the whole tensor: rows with a single key have gradients of exactly zero."""
    expected, total = dense(case), assemble(case, results)
    for name, value in total.items():
        assert name == "dsinks" or value.dtype == case.dtype
        scale = max(1.0, expected[name].abs().max())
        assert (value.double() - expected[name]).abs().max() <= TOLERANCES[case.dtype] * scale, (case, name)


def test_one_rank_without_a_group_equals_one_dense_softmax():
    for case in DEFAULT_CASES:
        assert_dense(case, [attend(case, None)])


def test_shards_equal_one_dense_softmax(results):
    for case in DEFAULT_CASES:
        for size in SIZES:
            assert_dense(case, [result["cases"][case] for result in results[size]])


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_200_random_steps_equal_one_dense_softmax(random_results):
    for case in RANDOM_CASES:
        for size in SIZES:
            assert_dense(case, [result[case] for result in random_results[size]])


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("size", [1, *SIZES])
def test_every_combination_of_settings_equals_one_dense_softmax(monkeypatch, size):
    """Ranks are threads here: thousands of cases, no processes."""
    for case in ALL_CASES:
        assert_dense(case, run_in_threads(monkeypatch, partial(attend, case), size))


def test_bf16_errors_do_not_grow_with_ranks(results):
    for case in BF16_CASES:
        expected = dense(case)
        alone = bf16_errors(case, expected, [attend(case, None)])
        for size in SIZES:
            parts = [result["cases"][case] for result in results[size]]
            for name, error in bf16_errors(case, expected, parts).items():
                assert error <= 1.5 * alone[name], (case, size, name, error / alone[name])


def bf16_errors(case, expected, parts):
    return {name: (value.double() - expected[name]).norm() for name, value in assemble(case, parts).items()}


def test_a_row_reaches_every_key_of_its_document_on_any_rank_and_no_other_document(results):
    doc_lens = MIXED[0]
    docs = torch.arange(len(doc_lens)).repeat_interleave(torch.tensor(doc_lens))
    for size in SIZES:
        for doc, grads in enumerate(zip(*(result["one row"] for result in results[size]), strict=True)):
            owners = torch.empty(sum(doc_lens), dtype=torch.int64)
            dv = torch.empty(sum(doc_lens), dtype=torch.float64)
            for rank, (rows, values) in enumerate(grads):
                owners[rows], dv[rows] = rank, values.abs().sum(dim=(1, 2))
            assert torch.equal(dv > 0, docs == doc)
            if doc_lens[doc] >= 2 * size:
                assert len(owners[docs == doc].unique()) == size


def test_every_rank_gets_the_whole_pack_and_its_own_rows_of_the_gradient(results):
    """Not the sum over ranks, as a differentiable all-gather would have it."""
    pack_rows = torch.arange(sum(MIXED[0])).double()
    for size in SIZES:
        for rows, whole, grad in (result["unsharded"] for result in results[size]):
            assert torch.equal(whole, torch.stack([pack_rows, -pack_rows], dim=1))
            assert torch.equal(grad, rows.double()[:, None].expand(-1, 2))


# What travels: the formulas of docs/parallelism.md


def test_bytes_on_the_wire_equal_the_formulas(results):
    row_size, width = NUM_KV_HEADS * 2 * DIM, 4
    for size in SIZES:
        for mode, shards in (
            ("document", plan_document(DOC_LENS, size)),
            ("hybrid", plan_hybrid(DOC_LENS, size)),
            ("uneven", uneven_shards(DOC_LENS, size)),
        ):
            for rank in range(size):
                layout = ContextLayout(DOC_LENS, shards, rank=rank)
                costs, n = results[size][rank]["costs"], layout.split_rows
                keys = row_size * width * (sum(n) - n[(rank + 1) % size])
                home = row_size * 4 * (sum(n) - n[rank])
                assert costs[mode, "ring"]["sent"] == (PASSES * keys, PASSES * (keys + home))
                assert costs[mode, "gather_once"]["sent"] == (keys, home)
                halos = [halo_rows(layout, reader) for reader in range(size)]
                fetched = row_size * width * sum(halos[reader][rank] for reader in range(size) if reader != rank)
                returned = row_size * 4 * sum(halos[rank][owner] for owner in range(size) if owner != rank)
                assert costs[mode, "window"]["sent"] == (fetched, fetched + returned)


def halo_rows(layout, reader):
    """Rows of each owner among the `WINDOW - 1` rows before the segments of a reader, counted one by one."""
    owner = {
        (segment.doc, position): rank
        for rank, segments in enumerate(layout.segments)
        for segment in segments
        for position in range(segment.start, segment.end)
    }
    counts = [0] * layout.cp_size
    for segment in layout.segments[reader]:
        for position in range(max(0, segment.start - WINDOW + 1), segment.start):
            counts[owner[segment.doc, position]] += 1
    return counts


def test_hybrid_sends_nothing_of_whole_documents(results):
    layouts = [ContextLayout(DOC_LENS, plan_hybrid(DOC_LENS, 4), rank=rank) for rank in range(4)]
    assert sum(layouts[0].split_rows) == LENGTH
    sent = sum(result["costs"]["hybrid", "gather_once"]["sent"][0] for result in results[4])
    assert sent == 3 * LENGTH * NUM_KV_HEADS * 2 * DIM * 4


# What is kept


def test_saved_memory_is_linear_in_passes_and_falls_with_ranks(results):
    alone = chain_costs(None)["document", "ring"]
    for size in SIZES:
        for result in results[size]:
            saved = result["costs"]["document", "ring"]["saved"]
            assert saved[6] - saved[4] == saved[4] - saved[2]
            assert saved[6] <= 1.1 * alone["saved"][6] / size


def test_no_tensor_of_the_ring_holds_the_whole_pack_or_grows_with_passes(results):
    alone = chain_costs(None)["document", "ring"]["largest"]
    for size in SIZES:
        for result in results[size]:
            largest = result["costs"]["document", "ring"]["largest"]
            assert largest[6] == largest[2]
            assert largest[6] <= 1.1 * alone[6] / size


def test_gathered_and_ringed_trunks_give_the_same_output_to_the_bit(results):
    for size in SIZES:
        for result in results[size]:
            for mode in ("document", "hybrid", "uneven"):
                ring, gathered = (result["costs"][mode, trunk]["out"] for trunk in ("ring", "gather_once"))
                assert torch.equal(ring, gathered)


def test_a_rank_that_does_not_answer_is_named(results):
    message = results[4][2]["stalled"]
    assert "no answer from rank 1 while exchanging trunk keys and values" in message
