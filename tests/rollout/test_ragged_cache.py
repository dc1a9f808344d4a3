"""The ragged cache keeps every row's keys at its own positions, through padding, rollback, growth and compaction."""

import pytest
import torch

from trl_codraft.rollout.cache import RaggedCache, causal_mask, compaction_order


def states(value, rows, columns):
    """Keys whose entries say which row and column they came from."""
    base = torch.arange(rows)[:, None] * 1000 + torch.arange(columns) + value
    return base[:, None, :, None].expand(rows, 2, columns, 3).float()


def test_slots_are_positions_and_padding_goes_nowhere():
    cache = RaggedCache(2, max_slots=8)
    cache.begin(torch.tensor([[-1, -1, 0], [0, 1, 2]]), 3)
    keys, values = cache.update(states(1, 2, 3), states(1, 2, 3) + 0.5, 0)
    assert keys[:, 0, :, 0].tolist() == [[3, 0, 0], [1001, 1002, 1003]]
    assert torch.equal(values[1], keys[1] + 0.5)


def test_rejected_tokens_are_overwritten_in_place():
    cache = RaggedCache(2, max_slots=8)
    cache.begin(torch.tensor([[0, 1, 2], [0, 1, 2]]), 3)
    before, _ = cache.update(states(1, 2, 3), states(1, 2, 3), 0)
    cache.begin(torch.tensor([[1], [3]]), 4)  # row 0 rolled back two tokens, row 1 none
    keys, _ = cache.update(states(500, 2, 1), states(500, 2, 1), 0)
    assert keys.data_ptr() == before.data_ptr()  # nothing was copied elsewhere
    assert keys[0, 0, :2, 0].tolist() == [1, 500]
    assert keys[1, 0, :, 0].tolist() == [1001, 1002, 1003, 1500]
    assert causal_mask(torch.tensor([[1], [3]]), 4)[:, 0, 0].tolist() == [[True, True, False, False], [True] * 4]


def test_growth_keeps_what_was_written():
    cache = RaggedCache(2, max_slots=400, initial_slots=3)
    for start in range(0, 390, 3):
        slots = torch.arange(start, start + 3).expand(2, 3)
        cache.begin(slots, start + 3)
        keys, _ = cache.update(states(start, 2, 3), states(start, 2, 3), 0)
    assert keys[1, 1, :, 2].tolist() == list(range(1000, 1390))
    assert cache.capacity <= 400


def test_forward_beyond_the_announced_size_is_refused():
    with pytest.raises(ValueError, match="needs 9 cache slots"):
        RaggedCache(1, max_slots=8).begin(torch.tensor([[8]]), 9)


@pytest.mark.parametrize("keep", [[1, 1, 1, 1], [0, 1, 1, 1], [1, 0, 0, 1], [0, 0, 0, 1], [1, 1, 1, 0], [0, 1, 0, 1]])
def test_compaction_moves_whole_rows(keep):
    keep = [bool(flag) for flag in keep]
    cache = RaggedCache(4, max_slots=4)
    cache.begin(torch.arange(3).expand(4, 3), 3)
    for layer in range(2):
        cache.update(states(layer, 4, 3), states(layer, 4, 3), layer)
    order = cache.compact(keep)
    assert sorted(order) == [row for row in range(4) if keep[row]]
    assert order == compaction_order(keep)
    # Rows that need not move do not: only the holes are filled.
    assert all(old == new for new, old in enumerate(order) if keep[new])
    for layer in range(2):
        keys, values = cache.layer(layer)
        assert keys[:, 0, 0, 0].tolist() == [row * 1000 + layer for row in order]
        assert torch.equal(keys, values)


def test_rows_that_left_before_a_layer_first_writes_leave_room_for_padded_forwards():
    cache = RaggedCache(8, max_slots=4)
    cache.compact([True] * 5 + [False] * 3)
    cache.begin(torch.zeros(6, 1, dtype=torch.long), 1)  # as the draft of five rows reads in a recorded forward
    keys, _ = cache.update(states(0, 6, 1), states(0, 6, 1), 0)
    assert keys[:, 0, 0, 0].tolist() == [row * 1000 for row in range(6)]
    assert len(cache.layer(0)[0]) == 5


def test_window_counts_the_column_itself():
    mask = causal_mask(torch.tensor([[3, 4, -1]]), 6, window=2)[0, 0].long().tolist()
    assert mask == [[0, 0, 1, 1, 0, 0], [0, 0, 0, 1, 1, 0], [1, 0, 0, 0, 0, 0]]
