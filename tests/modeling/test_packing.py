"""Packing against loops over rows and positions."""

import pytest
import torch

from trl_codraft.modeling.packing import PackedLayout, pack_rows


def make_microbatch(seed=0, num_rows=6, width=14):
    """Left- and right-padded rows with trained tokens anywhere; one row empty, one without trained tokens."""
    generator = torch.Generator().manual_seed(seed)
    keep = torch.zeros(num_rows, width, dtype=torch.long)
    for row in range(1, num_rows):
        start, stop = sorted(torch.randint(0, width + 1, (2,), generator=generator).tolist())
        keep[row, start:stop] = 1
    trained = torch.rand(num_rows, width, generator=generator) < 0.25
    trained[2] = False
    ids = torch.randint(0, 50, (num_rows, width), generator=generator)
    taps = [torch.randn(num_rows, width, 3, generator=generator, requires_grad=True) for _ in range(2)]
    last_hidden = torch.randn(num_rows, width, 3, generator=generator, requires_grad=True)
    return ids, keep, trained, taps, last_hidden


def documents_of(ids, keep, trained, taps, last_hidden):
    """Per row, the columns that are tokens and whether each is trained."""
    return [
        [(row, column, bool(trained[row, column])) for column in range(ids.shape[1]) if keep[row, column]]
        for row in range(ids.shape[0])
    ]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("num_passes", [1, 2, 4, 20])
def test_pack_equals_a_loop_over_rows(seed, num_passes):
    ids, keep, trained, taps, last_hidden = make_microbatch(seed)
    documents = documents_of(ids, keep, trained, taps, last_hidden)
    batch = pack_rows(ids, keep, trained, taps, last_hidden, num_passes)
    cells = [cell for document in documents for cell in document]
    rows, columns = ([cell[axis] for cell in cells] for axis in (0, 1))
    assert torch.equal(batch.input_ids, ids[rows, columns])
    assert torch.equal(batch.taps, torch.cat([taps[0][rows, columns], taps[1][rows, columns]], dim=-1))
    assert torch.equal(batch.last_hidden, last_hidden[rows, columns])
    assert not batch.taps.requires_grad
    assert not batch.last_hidden.requires_grad
    assert batch.trained.tolist() == [cell[2] for cell in cells]
    assert batch.layout.doc_lens == [len(document) for document in documents]
    assert batch.layout.position_ids.tolist() == [i for document in documents for i in range(len(document))]

    for num_pass in range(num_passes):
        expected = [
            root + 2 + num_pass < len(document) and document[root + 2 + num_pass][2]
            for document in documents
            for root in range(len(document))
        ]
        assert batch.valid(num_pass).tolist() == expected

    start, expected_rows = 0, []
    for document in documents:
        needed = [
            root
            for root in range(len(document))
            if any(
                root + 2 + num_pass < len(document) and document[root + 2 + num_pass][2]
                for num_pass in range(1, num_passes)
            )
        ]
        first = min(needed, default=len(document))
        expected_rows += range(start + first, start + len(document))
        start += len(document)
    for num_pass in range(1, num_passes):
        assert batch.layout.query_rows(num_pass).tolist() == expected_rows
        assert sum(batch.layout.query_lens(num_pass)) == len(expected_rows)
        assert set(batch.valid(num_pass).nonzero().squeeze(-1).tolist()) <= set(expected_rows)
    assert batch.layout.query_rows(0).tolist() == list(range(start))


def test_padding_is_never_a_document_nor_trained():
    ids, keep, trained, taps, last_hidden = make_microbatch()
    batch = pack_rows(ids, keep, torch.ones_like(trained), taps, last_hidden, 4)
    assert batch.trained.all()
    assert len(batch.input_ids) == keep.sum()
    only_padding = pack_rows(ids, keep, keep == 0, taps, last_hidden, 4)
    assert not only_padding.trained.any()
    assert only_padding.layout.query_lens(1) == [0] * len(keep)
    ids[keep == 0] = 999
    assert torch.equal(pack_rows(ids, keep, trained, taps, last_hidden, 4).input_ids, batch.input_ids)


def test_nothing_to_pack_is_none():
    ids, keep, trained, taps, last_hidden = make_microbatch()
    assert pack_rows(ids, torch.zeros_like(keep), trained, taps, last_hidden, 4) is None
    empty = [tensor[:, :0] for tensor in (ids, keep, trained)]
    assert pack_rows(*empty, [tap[:, :0] for tap in taps], last_hidden[:, :0], 4) is None


def test_shifted_stays_in_the_document():
    layout = PackedLayout([4, 0, 1, 3], [2, 0, 1, 0])
    values = torch.arange(8) * 10
    assert layout.doc_starts == [0, 4, 4, 5]
    assert layout.shifted(values, 1, 0).tolist() == [10, 20, 30, 30, 40, 60, 70, 70]
    assert layout.shifted(values, 2, 1).tolist() == [30, 30, 70, 70, 70]
    assert layout.within(1).tolist() == [True, True, True, False, False, True, True, False]
    assert layout.query_rows(1).tolist() == [2, 3, 5, 6, 7]
    assert layout.query_lens(1) == [2, 0, 0, 3]


def test_wrong_arguments_are_refused():
    ids, keep, trained, taps, last_hidden = make_microbatch()
    with pytest.raises(ValueError, match="at least one TTT pass"):
        pack_rows(ids, keep, trained, taps, last_hidden, 0)
    with pytest.raises(ValueError, match=r"`taps\[1\]` covers \(6, 13\) tokens but `input_ids` \(6, 14\)"):
        pack_rows(ids, keep, trained, [taps[0], taps[1][:, 1:]], last_hidden, 4)
    with pytest.raises(ValueError, match="between 0 and its length"):
        PackedLayout([3, 2], [4, 0])
    with pytest.raises(ValueError, match="between 0 and its length"):
        PackedLayout([3, 2], [0])
