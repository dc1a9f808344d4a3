"""Plans: they tile, they balance, and each step of the ring is at most one rectangle per document."""

import random

import pytest
import torch

from trl_codraft.cp.layout import ContextLayout
from trl_codraft.cp.planner import Segment, imbalance, plan_document, plan_hybrid


PLANS = {"document": plan_document, "hybrid": plan_hybrid}


def lognormal_pack(rng, total, mean, sigma):
    """Document lengths around `mean` that add up to `total`."""
    lengths = []
    while sum(lengths) < total:
        lengths.append(max(1, round(rng.lognormvariate(0, sigma) * mean)))
    lengths[-1] -= sum(lengths) - total
    return lengths


def pack_mixes(seed):
    """32K tokens: one document, equal ones, around 2K, heavy-tailed, many short ones."""
    rng = random.Random(seed)
    return {
        "one": [32768],
        "four equal": [8192] * 4,
        "around 2K": lognormal_pack(rng, 32768, 1700, 0.6),
        "heavy tail": lognormal_pack(rng, 32768, 600, 1.3),
        "around 300": lognormal_pack(rng, 32768, 300, 0.4),
    }


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize("cp_size", [2, 4, 8, 16])
def test_work_and_tokens_are_balanced_on_every_mix_of_documents(plan, cp_size):
    for seed in range(3):
        for name, doc_lens in pack_mixes(seed).items():
            # At the default of the plan, and where attention is nearly all or nearly nothing.
            for balance_length in (16384, 1e3, 1e6):
                arguments = () if plan is plan_document else (balance_length,)
                cost, tokens = imbalance(plan(doc_lens, cp_size, *arguments), balance_length)
                assert cost <= 1.10, (name, seed, balance_length)
                assert tokens <= 1.15, (name, seed, balance_length)


def test_hybrid_leaves_short_documents_whole():
    """Most of the tokens of many short documents need no message at all."""
    for seed in range(10):
        doc_lens = pack_mixes(seed)["around 300"]
        cut = {segment.doc for segments in plan_hybrid(doc_lens, 8) for segment in segments if segment.start > 0}
        assert len(cut) <= len(doc_lens) / 10


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_random_plans_tile_their_documents(plan):
    rng = random.Random(0)
    for _ in range(200):
        doc_lens = [rng.choice([0, 1, 2, 3, 7, 40, 333]) for _ in range(rng.randint(0, 12))]
        cp_size = rng.randint(1, 9)
        shards = plan(doc_lens, cp_size)
        covered = sorted(
            (s.doc, position) for segments in shards for s in segments for position in range(s.start, s.end)
        )
        assert covered == [(doc, position) for doc, length in enumerate(doc_lens) for position in range(length)]
        assert len(shards) == cp_size
        assert all(segment.num_rows > 0 for segments in shards for segment in segments)


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_every_key_is_seen_once_and_in_one_rectangle_per_document_and_step(plan):
    """Counted from the blocks themselves: row `r` sees the keys up to `r`, each exactly once over all steps."""
    rng = random.Random(1)
    for _ in range(30):
        doc_lens = [rng.choice([0, 1, 2, 3, 7, 40]) for _ in range(rng.randint(1, 6))]
        roots = [rng.randint(0, length) for length in doc_lens]
        cp_size = rng.randint(1, 5)
        layouts = [
            ContextLayout(doc_lens, plan(doc_lens, cp_size), rank=rank, first_valid_root=roots)
            for rank in range(cp_size)
        ]
        for num_pass in (0, 1):
            for layout in layouts:
                check_visibility(layouts, layout, num_pass)


def check_visibility(layouts, layout, num_pass):
    queries = layout.rows[layout.query_rows(num_pass)].tolist()
    seen = {row: [] for row in queries}
    position = dict(zip(layout.rows.tolist(), layout.position_ids.tolist(), strict=True))
    q_lens, k_lens = layout.local_lens(num_pass)
    q_start = k_start = 0
    for q_len, k_len in zip(q_lens, k_lens, strict=True):
        for index in range(q_len):
            stop = k_start + k_len - q_len + index + 1
            seen[queries[q_start + index]] += layout.rows[k_start:stop].tolist()
        q_start, k_start = q_start + q_len, k_start + k_len
    for source in range(layout.cp_size):
        block = None if source == layout.rank else layout.remote_block(source, num_pass)
        if block is None:
            continue
        travelling = layouts[source].rows[: layout.split_rows[source]]
        block_queries, keys = [queries[i] for i in range(len(queries))], travelling[block.k_rows].tolist()
        block_queries = (
            [block_queries[i] for i in range(*block.q_rows.indices(len(queries)))]
            if isinstance(block.q_rows, slice)
            else [block_queries[i] for i in block.q_rows]
        )
        assert len(set(block_queries)) == len(block_queries)
        assert len(set(keys)) == len(keys)
        q_start = k_start = 0
        for q_len, k_len in zip(block.q_lens, block.k_lens, strict=True):
            for row in block_queries[q_start : q_start + q_len]:
                seen[row] += keys[k_start : k_start + k_len]
            q_start, k_start = q_start + q_len, k_start + k_len
    for row, keys in seen.items():
        assert sorted(keys) == list(range(row - position[row], row + 1))


def test_shards_that_do_not_fit_are_refused():
    whole = [[Segment(0, 0, 4)], [Segment(1, 0, 2)]]
    with pytest.raises(ValueError, match="tile the documents"):
        ContextLayout([4, 2], [[Segment(0, 0, 3)], [Segment(0, 2, 4), Segment(1, 0, 2)]])
    with pytest.raises(ValueError, match="cover"):
        ContextLayout([4, 3], whole)
    with pytest.raises(ValueError, match="between 0 and its length"):
        ContextLayout([4, 2], whole, first_valid_root=[5, 0])
    with pytest.raises(ValueError, match="'document' or 'hybrid'"):
        ContextLayout.plan([4], mode="zigzag")


def test_shifted_shards_never_cross_a_document():
    doc_lens, values = [5, 1, 3], torch.arange(9)
    for rank in range(2):
        layout = ContextLayout(doc_lens, plan_document(doc_lens, 2), rank=rank)
        ends = torch.tensor([4] * 5 + [5] + [8] * 3)[layout.rows]
        assert torch.equal(layout.shard(values), layout.rows)
        assert torch.equal(layout.shard(values, offset=2), torch.minimum(layout.rows + 2, ends))
        expected = torch.where(layout.rows + 2 > ends, -100, layout.rows + 2)
        assert torch.equal(layout.shard(values, offset=2, fill=-100), expected)
