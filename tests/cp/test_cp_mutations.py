"""Breaks sharded attention and the draft on shards on purpose and asserts that the comparisons notice."""

from functools import partial

import pytest
import torch
from cp.attention_cases import MIXED, Case, assemble, attend, dense
from cp.draft_shard_cases import DraftCase, on_shard, whole
from cp.threads import run_in_threads

from trl_codraft.cp import draft, gathered, layout, messages, ring
from trl_codraft.modeling import attention as branch_attention
from trl_codraft.modeling import branch


BRANCH = Case(MIXED, "document", 3)
WINDOW = Case(MIXED, "document", 3, window=7)
GATHERED = Case(MIXED, "hybrid", 3, trunk="gather_once")


def largest_error(monkeypatch, case, size=4):
    expected = dense(case)
    total = assemble(case, run_in_threads(monkeypatch, partial(attend, case), size))
    return max((value - expected[name]).abs().max() for name, value in total.items())


@pytest.mark.parametrize("case", [BRANCH, WINDOW, GATHERED], ids=str)
def test_threads_as_ranks_equal_the_dense_softmax(monkeypatch, case):
    assert largest_error(monkeypatch, case) <= 1e-12


def key_of_another_row(patch):
    original = branch._key_row
    patch.setattr(branch, "_key_row", lambda rows, dtype: original(rows.roll(1, 0), dtype))


def log_sum_exp_of_the_trunk_alone(patch):
    original = branch_attention.merge_branch
    patch.setattr(
        branch_attention, "merge_branch", lambda trunk, *rest: original(trunk, *rest)._replace(lse=trunk.lse)
    )


def gradients_that_stay_away(patch):
    for module in (gathered, ring):
        patch.setattr(module, "add_home", lambda *arguments: None)


def gradients_of_the_last_rank_alone(patch):
    """Of what several ranks find for a block, only the last hop's part comes home."""
    original = messages.Ring.send_home

    def send_home(self, parts):
        hop = self._hop

        def forgetful(sent, received, what, tag):
            pending = hop(sent, received, what, tag)
            wait = pending.wait
            pending.wait = lambda: (wait(), received.zero_() if forgetful.count < self.size - 1 else None)
            forgetful.count += 1
            return pending

        forgetful.count = 0
        self._hop = forgetful
        return original(self, parts)

    patch.setattr(messages.Ring, "send_home", send_home)


def window_short_by_one_at_segment_borders(patch):
    patch.setattr(layout, "_first_seen", lambda position, left: max(0, position - left + 1))


def keys_of_the_first_visitor_in_every_step(patch):
    original = ring.RingTrunk._visits

    def visits(self, k, v):
        blocks = [(source, block.clone()) for source, block in original(self, k, v)]
        first = blocks[0][1]
        for source, block in blocks:
            yield source, torch.cat([first, first])[: block.numel()]

    patch.setattr(ring.RingTrunk, "_visits", visits)


def unweighted_merge(patch):
    patch.setattr(ring, "merge_partials", lambda a, b: ((a.out + b.out) / 2, torch.logaddexp(a.lse, b.lse)))


@pytest.mark.parametrize(
    ("case", "mutation"),
    [
        (BRANCH, key_of_another_row),
        (BRANCH, log_sum_exp_of_the_trunk_alone),
        (BRANCH, gradients_that_stay_away),
        (BRANCH, gradients_of_the_last_rank_alone),
        (BRANCH, keys_of_the_first_visitor_in_every_step),
        (BRANCH, unweighted_merge),
        (GATHERED, gradients_that_stay_away),
        (WINDOW, window_short_by_one_at_segment_borders),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_broken_code_is_noticed(monkeypatch, case, mutation):
    mutation(monkeypatch)
    assert largest_error(monkeypatch, case) > 1e-3


# The draft


def draft_errors(monkeypatch, case):
    """Names of what differs from the whole pack."""
    built = [case.build() for _ in range(3)]
    parts = run_in_threads(monkeypatch, lambda group: on_shard(case, group, built[group[0]]), 3)
    totals = {name: sum(part[name] for part in parts) for name in parts[0]}
    return {name for name, value in whole(case).items() if (totals[name] - value).abs().max() > 1e-9}


def nothing(patch):
    pass


def embeddings_that_stop_at_the_segment(patch):
    patch.setattr(
        draft.RowsAhead,
        "look",
        lambda self, values, halo, rows, steps: values[(rows + steps).clamp(max=len(values) - 1)],
    )


def teacher_rows_of_no_one(patch):
    original = draft.RowsAhead.interleave
    patch.setattr(draft.RowsAhead, "interleave", lambda self, values, halo: original(self, values, halo.roll(1, 0)))


def shared_teacher_positions_counted_by_all(patch):
    everywhere = property(lambda self: torch.ones_like(self._stored, dtype=torch.bool))
    patch.setattr(draft.RowsAhead, "follows_own_row", everywhere)


@pytest.mark.parametrize(
    ("mutation", "noticed"),
    [
        (nothing, set()),
        (embeddings_that_stop_at_the_segment, {"loss_sum", "fc.weight"}),
        (teacher_rows_of_no_one, {"loss_sum", "lm_head.weight"}),
        (shared_teacher_positions_counted_by_all, {"coverage", "positions"}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_broken_draft_shards_are_noticed(monkeypatch, mutation, noticed):
    mutation(monkeypatch)
    errors = draft_errors(monkeypatch, DraftCase(reduced=True))
    assert errors >= noticed
    assert bool(errors) == bool(noticed)
