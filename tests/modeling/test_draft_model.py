"""The draft against a dense reference and against its own cached decoding; shapes as in `reference.py`."""

import copy
import itertools
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from modeling.allocations import SavedBytes
from modeling.reference import ReferenceDraft
from tiny import tiny_policy
from transformers import DynamicCache

from trl_codraft.modeling.configuration_eagle3 import Eagle3DraftConfig
from trl_codraft.modeling.modeling_eagle3 import Eagle3DraftModel
from trl_codraft.modeling.packing import PackedLayout
from trl_codraft.modeling.teacher import PolicyHead


PACK = [37, 3, 64, 1, 19]
NUM_PASSES = 4
SIZES = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "vocab_size": 30,
    "target_hidden_size": 12,
    "tap_layers": [1, 2, 4],
    "max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
FLAGS = {
    "-".join(str(value) for value in values): dict(
        zip(
            ("fc_norm", "norm_before_fc", "norm_output", "norm_before_residual", "num_hidden_layers"),
            values,
            strict=True,
        )
    )
    for values in itertools.product((False, True), (False, True), (False, True), (False, True), (1, 2))
    if not (values[0] and values[1])
}
SHAPES = {
    "mha": {"num_key_value_heads": 4},
    "mqa": {"num_key_value_heads": 1},
    "odd_heads": {"num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 10},
    "one_tap": {"tap_layers": [0]},
    "reduced_vocabulary": {"draft_vocab_size": 11},
    "yarn": {"rope_parameters": YARN},
    "llama3": {"rope_parameters": LLAMA3},
    "linear": {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}},
    "everything": {
        "rope_parameters": YARN,
        "draft_vocab_size": 11,
        "num_hidden_layers": 2,
        "fc_norm": True,
        "norm_output": True,
        "norm_before_residual": True,
    },
}


def make_draft(dtype=torch.float64, **overrides):
    draft = Eagle3DraftModel(Eagle3DraftConfig(**{**SIZES, **overrides})).to(dtype)
    generator = torch.Generator().manual_seed(1)
    for parameter in draft.parameters():
        # Gentle: four passes through two layers must not amplify rounding beyond the tolerances.
        spread = 0.6 * parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 0.2
        values = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * spread
        parameter.data.copy_(values + (1.0 if parameter.dim() == 1 else 0.0))
    return draft


def make_inputs(config, num_rows, dtype=torch.float64, seed=2):
    generator = torch.Generator().manual_seed(seed)
    taps_width = len(config.tap_layers) * config.target_hidden_size
    taps, embeds = (
        torch.randn(num_rows, width, generator=generator, dtype=torch.float64).to(dtype)
        for width in (taps_width, config.hidden_size)
    )
    return taps.requires_grad_(), embeds.requires_grad_()


def meaningful_rows(layout, num_pass):
    """Rows of a pass whose target lies in the document, as positions in the pass's output, and as rows of the pack."""
    rows = layout.query_rows(num_pass)
    last = torch.tensor([layout.doc_starts[d] + n - 1 for d, n in enumerate(layout.doc_lens) for _ in range(n)])
    keep = rows + 2 + num_pass <= last[rows] if len(rows) else torch.zeros(0, dtype=torch.bool)
    return keep, rows[keep]


def probe(logits, rows):
    """A scalar whose gradient reaches every logit with a different weight; nonlinear."""
    weights = torch.cos(torch.arange(logits.shape[-1]) * 1.7 + rows[:, None] * 0.3).to(logits.dtype)
    return (weights * logits.square()).sum()


def run_draft(draft, taps, embeds, layout, detach_passes=False, forward_context=nullcontext):
    """Outputs and logits of all passes at meaningful rows, and the gradients of a scalar of them."""
    kept, total = [], 0.0
    with forward_context():
        for num_pass, hidden in enumerate(draft.unroll(taps, embeds, layout, NUM_PASSES, detach_passes)):
            keep, rows = meaningful_rows(layout, num_pass)
            logits = draft.compute_logits(hidden[keep])
            total = total + probe(logits, rows)
            kept += [hidden[keep], logits]
    leaves = {**dict(draft.named_parameters()), "taps": taps, "embeds": embeds}
    grads = torch.autograd.grad(total, list(leaves.values()))
    return kept, dict(zip(leaves, grads, strict=True))


def run_reference(draft, taps, embeds, layout, detach_passes=False):
    """The same from the dense reference, document by document."""
    weights = {name: parameter.detach().requires_grad_() for name, parameter in draft.named_parameters()}
    reference = ReferenceDraft(draft.config, weights)
    spans = [slice(start, start + n) for start, n in zip(layout.doc_starts, layout.doc_lens, strict=True) if n]
    documents = [reference.unroll(taps[span], embeds[span], NUM_PASSES, detach_passes) for span in spans]
    kept, total = [], 0.0
    for num_pass, hidden in enumerate(torch.cat(parts) for parts in zip(*documents, strict=True)):
        _, rows = meaningful_rows(layout, num_pass)
        logits = reference.logits(hidden[rows])
        total = total + probe(logits, rows)
        kept += [hidden[rows], logits]
    leaves = {**weights, "taps": taps, "embeds": embeds}
    grads = torch.autograd.grad(total, list(leaves.values()))
    return kept, dict(zip(leaves, grads, strict=True))


def assert_same(actual, expected, tolerance):
    (kept, grads), (expected_kept, expected_grads) = actual, expected
    for ours, theirs in zip(kept, expected_kept, strict=True):
        torch.testing.assert_close(ours, theirs, atol=tolerance, rtol=tolerance)
    assert grads.keys() == expected_grads.keys()
    for name, grad in grads.items():
        size = expected_grads[name].abs().max()
        assert size > 0, name
        error = (grad - expected_grads[name]).abs().max() / size
        assert error < tolerance, f"gradient of {name}: {error:.1e}"


@pytest.mark.parametrize("overrides", [*FLAGS.values(), *SHAPES.values()], ids=[*FLAGS, *SHAPES])
def test_unroll_equals_dense_reference_with_all_gradients(overrides):
    draft = make_draft(**overrides)
    taps, embeds = make_inputs(draft.config, sum(PACK))
    layout = PackedLayout(PACK, [20, 0, 40, 1, 18])
    assert_same(run_draft(draft, taps, embeds, layout), run_reference(draft, taps, embeds, layout), 1e-12)


@pytest.mark.parametrize("overrides", [{}, SHAPES["everything"]], ids=["plain", "everything"])
def test_unroll_equals_dense_reference_in_float32(overrides):
    draft = make_draft(torch.float32, **overrides)
    taps, embeds = make_inputs(draft.config, sum(PACK), torch.float32)
    layout = PackedLayout(PACK, [20, 0, 40, 1, 18])
    assert_same(run_draft(draft, taps, embeds, layout), run_reference(draft, taps, embeds, layout), 1e-5)


@pytest.mark.parametrize("pack", [[37, 3, 64, 1, 19], [5, 5], [0, 7, 0], [2, 1, 9]], ids=str)
def test_unroll_equals_dense_reference_on_packs(pack):
    draft = make_draft()
    taps, embeds = make_inputs(draft.config, sum(pack))
    layout = PackedLayout(pack)
    assert_same(run_draft(draft, taps, embeds, layout), run_reference(draft, taps, embeds, layout), 1e-12)


def test_detached_passes_equal_dense_reference():
    draft = make_draft(num_hidden_layers=2, norm_output=True)
    taps, embeds = make_inputs(draft.config, sum(PACK))
    layout = PackedLayout(PACK)
    actual = run_draft(draft, taps, embeds, layout, detach_passes=True)
    assert_same(actual, run_reference(draft, taps, embeds, layout, detach_passes=True), 1e-12)
    attached = run_draft(draft, taps, embeds, layout)[1]
    assert (actual[1]["fc.weight"] - attached["fc.weight"]).abs().max() > 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(
    "overrides",
    [{}, {"fc_norm": True, "norm_output": True}, {"norm_before_residual": True}, *SHAPES.values()],
    ids=["plain", "fc_norm-norm_output", "norm_before_residual", *SHAPES],
)
def test_unroll_equals_step_by_step_decoding(overrides, dtype):
    draft = make_draft(dtype, **overrides)
    num_tokens = 12
    taps, embeds = make_inputs(draft.config, num_tokens, dtype)
    outputs = draft.unroll(taps, embeds, PackedLayout([num_tokens]), NUM_PASSES)
    tolerance = {"atol": 1e-12, "rtol": 1e-12} if dtype == torch.float64 else {"atol": 1e-5, "rtol": 1e-5}
    compared = 0
    with torch.no_grad():
        for root in range(num_tokens - 2):
            cache, positions = DynamicCache(), torch.arange(root + 1)[None]
            hidden = draft.step(draft.fuse_taps(taps[None, : root + 1]), embeds[None, 1 : root + 2], positions, cache)
            for num_pass in range(min(NUM_PASSES, num_tokens - root - 2)):
                torch.testing.assert_close(hidden[0, -1], outputs[num_pass][root], **tolerance)
                compared += 1
                next_embed = embeds[None, root + 2 + num_pass, None]
                position = torch.tensor([[root + 1 + num_pass]])
                hidden = draft.step(draft.feedback(hidden[:, -1:]), next_embed, position, cache)
    assert compared == sum(min(NUM_PASSES, num_tokens - root - 2) for root in range(num_tokens - 2))


def test_step_of_padded_batch_equals_each_row_alone():
    draft = make_draft(num_hidden_layers=2)
    taps, embeds = make_inputs(draft.config, 20)
    lens, width = [3, 8, 6], 8
    spans = [slice(0, 3), slice(3, 11), slice(11, 17)]
    padded_taps, padded_embeds = (torch.full((3, width, part.shape[1]), 7.0).double() for part in (taps, embeds))
    keep = torch.zeros(3, width, dtype=torch.bool)
    for row, span in enumerate(spans):
        padded_taps[row, -lens[row] :], padded_embeds[row, -lens[row] :] = taps[span], embeds[span]
        keep[row, -lens[row] :] = True
    positions = (keep.cumsum(1) - 1).clamp(min=0)
    mask = (torch.ones(width, width, dtype=torch.bool).tril() & keep[:, None, :])[:, None]
    with torch.no_grad():
        batched = draft.step(draft.fuse_taps(padded_taps), padded_embeds, positions, DynamicCache(), mask)
        for row, span in enumerate(spans):
            hidden = draft.fuse_taps(taps[None, span])
            alone = draft.step(hidden, embeds[None, span], torch.arange(lens[row])[None], DynamicCache())
            torch.testing.assert_close(batched[row, -lens[row] :], alone[0], atol=1e-12, rtol=1e-12)


def test_packed_equals_one_document_at_a_time():
    draft = make_draft(num_hidden_layers=2)
    taps, embeds = make_inputs(draft.config, sum(PACK))
    packed = draft.unroll(taps, embeds, PackedLayout(PACK), NUM_PASSES)
    start = 0
    for length in PACK:
        span = slice(start, start + length)
        alone = draft.unroll(taps[span], embeds[span], PackedLayout([length]), NUM_PASSES)
        for together, single in zip(packed, alone, strict=True):
            torch.testing.assert_close(together[span], single, atol=1e-13, rtol=1e-13)
        start += length


def test_one_document_does_not_change_another():
    draft = make_draft()
    taps, embeds = make_inputs(draft.config, sum(PACK))
    layout, changed = PackedLayout(PACK), slice(40, 104)
    before = draft.unroll(taps, embeds, layout, NUM_PASSES)
    with torch.no_grad():
        taps[changed] += 1.0
        embeds[changed] -= 1.0
    after = draft.unroll(taps, embeds, layout, NUM_PASSES)
    outside = torch.ones(sum(PACK), dtype=torch.bool)
    outside[changed] = False
    for old, new in zip(before, after, strict=True):
        assert torch.equal(old[outside], new[outside])
        assert not torch.equal(old[changed], new[changed])


def test_skipped_prefixes_change_nothing_at_the_roots_that_remain():
    draft = make_draft(num_hidden_layers=2, norm_output=True)
    taps, embeds = make_inputs(draft.config, sum(PACK))
    skipping, dense = PackedLayout(PACK, [30, 3, 0, 1, 7]), PackedLayout(PACK)
    suffixes = draft.unroll(taps, embeds, skipping, NUM_PASSES)
    whole = draft.unroll(taps, embeds, dense, NUM_PASSES)
    assert [len(hidden) for hidden in suffixes] == [124, 83, 83, 83]
    for num_pass in range(NUM_PASSES):
        rows = skipping.query_rows(num_pass)
        torch.testing.assert_close(suffixes[num_pass], whole[num_pass][rows], atol=1e-13, rtol=1e-13)


def test_pack_without_any_later_root_keeps_its_graph():
    draft = make_draft()
    taps, embeds = make_inputs(draft.config, 6)
    outputs = draft.unroll(taps, embeds, PackedLayout([4, 2], [4, 2]), NUM_PASSES)
    assert [len(hidden) for hidden in outputs] == [6, 0, 0, 0]
    sum(draft.compute_logits(hidden).sum() for hidden in outputs).backward()
    assert draft.fc.weight.grad.abs().max() > 0


def test_gradient_reaches_the_trunk_keys_from_later_passes():
    draft = make_draft()
    taps, embeds = make_inputs(draft.config, 9)
    last = draft.unroll(taps, embeds, PackedLayout([9]), NUM_PASSES)[-1]
    # Row 4 of the last pass reads row 0 only through the trunk keys of pass 0.
    (grad,) = torch.autograd.grad(last[4].sum(), taps)
    assert grad[0].abs().max() > 0
    assert grad[5:].abs().max() == 0


# Precision


def test_bfloat16_stays_near_float32_and_masters_keep_float32_gradients():
    draft = make_draft(torch.float32)
    taps, embeds = make_inputs(draft.config, sum(PACK), torch.float32)
    layout = PackedLayout(PACK, [20, 0, 40, 1, 18])
    exact_kept, exact = run_draft(draft, taps, embeds, layout)
    draft.compute_dtype = torch.bfloat16
    assert draft.unroll(taps, embeds, layout, 1)[0].dtype == torch.bfloat16
    kept, grads = run_draft(draft, taps, embeds, layout)
    for ours, theirs in zip(kept, exact_kept, strict=True):
        assert (ours.float() - theirs).norm() / theirs.norm() < 0.02
    for name, grad in grads.items():
        assert grad.dtype == torch.float32
        assert (grad - exact[name]).norm() / exact[name].norm() < 0.05, name


def test_ambient_autocast_changes_nothing():
    draft = make_draft(torch.float32)
    taps, embeds = make_inputs(draft.config, sum(PACK), torch.float32)
    plain = run_draft(draft, taps, embeds, PackedLayout(PACK))
    ambient = partial(torch.autocast, "cpu", torch.bfloat16)
    inside = run_draft(draft, taps, embeds, PackedLayout(PACK), forward_context=ambient)
    with ambient():
        step = draft.step(draft.fuse_taps(taps[None]), embeds[None], torch.arange(sum(PACK))[None], DynamicCache())
    assert step.dtype == torch.float32
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(inside[0], plain[0], strict=True))
    assert all(torch.equal(inside[1][name], plain[1][name]) for name in plain[1])


def test_cast_copy_keeps_float32_rope_frequencies():
    draft = make_draft(torch.float32)
    copied = copy.deepcopy(draft).to(torch.bfloat16)
    assert copied.fc.weight.dtype == copied.compute_dtype == torch.bfloat16
    assert copied.rotary.inv_freq.dtype == torch.float32
    assert torch.equal(copied.rotary.inv_freq, draft.rotary.inv_freq)
    taps, embeds = make_inputs(draft.config, 40, torch.float32)
    draft.compute_dtype = torch.bfloat16
    positions = torch.arange(40)[None]
    with torch.no_grad():
        ours = copied.step(copied.fuse_taps(taps[None]), embeds[None], positions, DynamicCache())
        masters = draft.step(draft.fuse_taps(taps[None]), embeds[None], positions, DynamicCache())
    assert (ours.float() - masters.float()).abs().max() < 0.05


# Memory


def saved_bytes(draft, num_tokens, num_passes):
    """Bytes of the distinct storages that autograd keeps for the backward of the unroll, parameters excluded."""
    taps, embeds = make_inputs(draft.config, num_tokens, torch.float32)
    with SavedBytes(own=draft.parameters()) as saved:
        outputs = draft.unroll(taps, embeds, PackedLayout([num_tokens]), num_passes)
    assert len(outputs) == num_passes
    return saved.total


def test_saved_memory_is_linear_in_tokens_and_passes():
    draft = make_draft(torch.float32)
    at = {num_tokens: saved_bytes(draft, num_tokens, 4) for num_tokens in (512, 1024, 2048)}
    assert abs(at[1024] / at[512] - 2) < 0.1
    assert abs(at[2048] / at[1024] - 2) < 0.1
    # Equal steps from pass to pass: keys of earlier passes are not kept again.
    two, four, six = (saved_bytes(draft, 512, num_passes) for num_passes in (2, 4, 6))
    assert abs((six - four) / (four - two) - 1) < 0.02


def test_compute_dtype_keeps_no_copies_of_the_weights():
    draft = make_draft(torch.float32, hidden_size=256, intermediate_size=512)
    draft.compute_dtype = torch.bfloat16
    weights = 2 * sum(parameter.numel() for parameter in draft.parameters())
    assert saved_bytes(draft, 3, 4) < weights / 4


# Vocabulary, names, errors


def test_target_ids_follow_the_vocabulary():
    full = make_draft()
    assert torch.equal(full.target_ids, torch.arange(30))
    assert not hasattr(full, "d2t")
    draft = make_draft(draft_vocab_size=5)
    ids = torch.tensor([0, 3, 4, 17, 29])
    draft.set_vocab(ids)
    assert torch.equal(draft.target_ids, ids)
    assert torch.equal(draft.d2t, ids - torch.arange(5))
    assert torch.equal(draft.t2d.nonzero().squeeze(-1), ids)
    for wrong in ([0, 3, 3, 17, 29], [3, 0, 4, 17, 29], [0, 3, 4, 17, 30], [0, 1], [-1, 3, 4, 17, 29]):
        with pytest.raises(ValueError, match="5 strictly ascending ids in 0..29"):
            draft.set_vocab(torch.tensor(wrong))
    with pytest.raises(ValueError, match="full vocabulary"):
        full.set_vocab(ids)


def test_modules_are_named_as_checkpoint_tensors():
    draft = make_draft(fc_norm=True, draft_vocab_size=11)
    block = [f"self_attn.{part}_proj.weight" for part in "qkvo"] + [
        f"mlp.{p}_proj.weight" for p in ("gate", "up", "down")
    ]
    block += [f"{norm}.weight" for norm in ("hidden_norm", "input_layernorm", "post_attention_layernorm")]
    expected = {f"layers.0.{name}" for name in block} | {f"fc_norm.{index}.weight" for index in range(3)}
    expected |= {"fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d"}
    assert set(draft.state_dict()) == expected


def test_wrong_rows_and_sizes_are_refused():
    draft = make_draft()
    taps, embeds = make_inputs(draft.config, 6)
    with pytest.raises(ValueError, match="layout has 5 rows, but there are 6 rows of taps"):
        draft.unroll(taps, embeds, PackedLayout([5]), 2)
    with pytest.raises(ValueError, match="at least one TTT pass"):
        draft.unroll(taps, embeds, PackedLayout([6]), 0)
    policy = tiny_policy()
    with pytest.raises(ValueError, match="policy's head is"):
        draft.initialize_from_policy(PolicyHead(policy))
    fitting = Eagle3DraftModel(Eagle3DraftConfig.from_policy(policy.config))
    with pytest.raises(ValueError, match="one positive scale for each of 3 taps"):
        fitting.initialize_from_policy(PolicyHead(policy), tap_scales=[1.0, 2.0])
    with pytest.raises(ValueError, match="final norm has"):
        fitting.initialize_from_policy(PolicyHead(policy), final_norm_weight=torch.ones(31))
