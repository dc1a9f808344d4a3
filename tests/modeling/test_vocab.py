"""Choice of the reduced draft vocabulary."""

import pytest
import torch

from trl_codraft.modeling.vocab import choose_draft_vocab


def test_special_ids_come_first_then_counts_then_lowest_ids():
    counts = torch.tensor([0, 5, 0, 7, 5, 0, 9, 0, 0, 0])
    assert choose_draft_vocab(counts, 3, [8]).tolist() == [3, 6, 8]
    assert choose_draft_vocab(counts, 4, [8]).tolist() == [1, 3, 6, 8]  # 1 and 4 tie
    assert choose_draft_vocab(counts, 5, [8, 8]).tolist() == [1, 3, 4, 6, 8]
    assert choose_draft_vocab(counts, 7, [8]).tolist() == [0, 1, 2, 3, 4, 6, 8]
    assert choose_draft_vocab(counts, 2, [6, 0]).tolist() == [0, 6]
    assert choose_draft_vocab(counts, 10).tolist() == list(range(10))


def test_choice_equals_a_plain_sort_on_random_counts():
    counts = torch.randint(0, 4, (500,), generator=torch.Generator().manual_seed(0))
    always = [499, 3, 250]
    order = sorted(range(500), key=lambda i: (i not in always, -int(counts[i]), i))
    for size in (3, 40, 499, 500):
        chosen = choose_draft_vocab(counts, size, always)
        assert chosen.dtype == torch.int64
        assert chosen.tolist() == sorted(order[:size])


@pytest.mark.parametrize(
    ("counts", "size", "always", "message"),
    [
        (torch.zeros(5), 0, [], "Choose between 1 and 5"),
        (torch.zeros(5), 6, [], "Choose between 1 and 5"),
        (torch.zeros(5), 2, [0, 1, 2], "Set it to at least 3"),
        (torch.zeros(5), 2, [5], r"0\.\.4"),
        (torch.zeros(5), 2, [-1], r"0\.\.4"),
        (torch.zeros(5, 2), 2, [], "one non-negative number per token"),
        (torch.tensor([1.0, -1.0]), 1, [], "one non-negative number per token"),
    ],
)
def test_impossible_choices_are_named(counts, size, always, message):
    with pytest.raises(ValueError, match=message):
        choose_draft_vocab(counts, size, always)
