"""Drafts that are built without memory and filled later."""

import copy
from functools import partial

import pytest
import torch
from accelerate import init_empty_weights
from modeling.test_draft_model import PACK, SHAPES, make_draft, make_inputs

from trl_codraft.modeling.modeling_eagle3 import Eagle3DraftModel
from trl_codraft.modeling.packing import PackedLayout


def outputs(draft):
    taps, embeds = make_inputs(draft.config, sum(PACK), torch.float32)
    with torch.no_grad():
        return torch.cat(
            [draft.compute_logits(hidden) for hidden in draft.unroll(taps, embeds, PackedLayout(PACK), 3)]
        )


def spoil(draft):
    """Fills what `to_empty` left with what nobody wants."""
    draft.to_empty(device="cpu")
    with torch.no_grad():
        for tensor in (*draft.parameters(), *draft.buffers()):
            tensor.fill_(torch.nan if tensor.is_floating_point() else 1)


@pytest.mark.parametrize("shape", ["mha", "yarn", "llama3", "everything"])
@pytest.mark.parametrize(
    "without_memory",
    [partial(torch.device, "meta"), init_empty_weights, partial(init_empty_weights, include_buffers=True)],
    ids=["meta", "empty weights", "empty weights and buffers"],
)
@pytest.mark.parametrize("assign", [False, True])
def test_a_draft_built_without_memory_and_then_loaded_is_the_one_that_was_saved(shape, without_memory, assign):
    saved = make_draft(torch.float32, **SHAPES[shape])
    if "draft_vocab_size" in SHAPES[shape]:
        saved.set_vocab(torch.arange(11) * 2)
    with without_memory():
        draft = Eagle3DraftModel(saved.config)
    assert all(parameter.is_meta for parameter in draft.parameters())
    if not assign:
        spoil(draft)
    draft.load_state_dict(saved.state_dict(), assign=assign)
    assert torch.equal(outputs(draft), outputs(saved))
    assert torch.equal(draft.target_ids, saved.target_ids)


def test_emptying_a_draft_leaves_nothing_that_its_state_dict_does_not_bring_back():
    draft = make_draft(torch.float32, **SHAPES["everything"])
    expected, state = outputs(draft), copy.deepcopy(draft.state_dict())
    for emptied in (draft, draft.to("meta")):
        spoil(emptied)
        emptied.load_state_dict(state)
        assert torch.equal(outputs(emptied), expected)


def test_a_default_device_without_memory_is_refused_where_weights_are_read(tmp_path):
    make_draft(torch.float32).save_pretrained(tmp_path)
    with torch.device("meta"), pytest.raises(ValueError, match="`from_pretrained` inside `torch.device"):
        Eagle3DraftModel.from_pretrained(tmp_path)
