"""A fresh draft: what it takes from its policy, and where it starts."""

import pytest
import torch
from tiny import tiny_policy

from trl_codraft.modeling.configuration_eagle3 import Eagle3DraftConfig
from trl_codraft.modeling.initialization import effective_norm_weight, tap_log_scales
from trl_codraft.modeling.modeling_eagle3 import Eagle3DraftModel
from trl_codraft.modeling.packing import PackedLayout
from trl_codraft.modeling.teacher import PolicyHead


@pytest.mark.parametrize("model_type", ["llama", "gemma2", "qwen3"])
def test_fresh_draft_reads_policy_head_and_norm(model_type):
    policy = tiny_policy(model_type)
    norm = policy.model.norm
    with torch.no_grad():
        norm.weight.copy_(torch.linspace(-0.5, 2.0, 32))
    weight = effective_norm_weight(norm)
    hidden = torch.randn(5, 32, generator=torch.Generator().manual_seed(0))
    by_hand = hidden * (hidden.pow(2).mean(-1, keepdim=True) + 1e-6) ** -0.5 * weight
    torch.testing.assert_close(norm(hidden), by_hand, atol=1e-4, rtol=1e-4)

    draft = Eagle3DraftModel(Eagle3DraftConfig.from_policy(policy.config, draft_vocab_size=40))
    draft.set_vocab(torch.arange(40) * 2)
    head = PolicyHead(policy)
    head.logit_scale = 0.5
    state = torch.get_rng_state()
    draft.initialize_from_policy(head, final_norm_weight=weight, tap_scales=[0.01, 1.0, 30.0])
    assert torch.equal(torch.get_rng_state(), state)
    expected = policy.get_output_embeddings().weight[::2][:40] * 0.5
    assert torch.equal(draft.lm_head.weight, expected)
    # Small head rows: the norm is taken as it is, also when it is read off the policy.
    assert torch.equal(draft.norm.weight, weight)
    draft.initialize_from_policy(head)
    assert torch.equal(draft.norm.weight, weight)
    draft.initialize_from_policy(head, final_norm_weight=weight + 1)
    assert torch.equal(draft.norm.weight, weight + 1)


def test_fresh_draft_of_a_peaked_policy_starts_unsure():
    policy = tiny_policy(scale=20.0)
    draft = Eagle3DraftModel(Eagle3DraftConfig.from_policy(policy.config))
    draft.initialize_from_policy(PolicyHead(policy))
    states = torch.randn(500, 32, generator=torch.Generator().manual_seed(0))
    assert policy.lm_head(policy.model.norm(states)).std() > 2
    assert draft.compute_logits(states).std().item() == pytest.approx(1.6, rel=0.1)
    assert (draft.norm.weight / draft.norm.weight[0] - 1).abs().max() < 1e-6


def test_fresh_draft_brings_taps_to_one_scale_and_passes_them_on():
    draft = Eagle3DraftModel(Eagle3DraftConfig.from_policy(tiny_policy().config))
    draft.initialize_from_policy(PolicyHead(tiny_policy()), tap_scales=torch.tensor([0.01, 1.0, 30.0]))
    generator = torch.Generator().manual_seed(0)
    taps = [torch.randn(400, 32, generator=generator) * scale for scale in (0.01, 1.0, 30.0)]
    shares = []
    for index in range(3):
        alone = [tap if position == index else torch.zeros_like(tap) for position, tap in enumerate(taps)]
        shares.append(draft.fuse_taps(torch.cat(alone, dim=-1)).pow(2).mean().sqrt())
    assert shares[0].item() == pytest.approx(shares[1].item(), rel=0.15)
    fused = draft.fuse_taps(torch.cat(taps, dim=-1))
    assert 0.8 < fused.pow(2).mean().sqrt() < 1.5
    assert torch.cosine_similarity(fused, taps[2]).min() > 0.7
    embeds = torch.randn(400, 32, generator=generator)
    outputs = draft.unroll(torch.cat(taps, dim=-1), embeds, PackedLayout([400]), 2)
    torch.testing.assert_close(outputs[0], fused)
    torch.testing.assert_close(outputs[1], fused)


def test_tap_scale_is_that_of_a_typical_token():
    generator = torch.Generator().manual_seed(0)
    taps = torch.cat([torch.randn(200, 64, generator=generator) * scale for scale in (0.01, 20.0)], dim=-1)
    taps[0] *= 100
    scales = (tap_log_scales(taps, 2) / 200).exp()
    torch.testing.assert_close(scales, torch.tensor([0.01, 20.0]).double(), rtol=0.05, atol=0)
    halves = tap_log_scales(taps[:90], 2) + tap_log_scales(taps[90:], 2)
    torch.testing.assert_close(halves, tap_log_scales(taps, 2))
    assert torch.isfinite(tap_log_scales(torch.zeros(3, 4), 2)).all()


def test_equal_seeds_make_equal_drafts_and_building_one_leaves_the_rng_alone():
    policy = tiny_policy()
    state = torch.get_rng_state()
    drafts = [Eagle3DraftModel(Eagle3DraftConfig.from_policy(policy.config)) for _ in range(3)]
    for draft, seed in zip(drafts, (0, 0, 1), strict=True):
        draft.initialize_from_policy(PolicyHead(policy), seed=seed)
    assert torch.equal(torch.get_rng_state(), state)
    first, second, other = (draft.state_dict() for draft in drafts)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["fc.weight"], other["fc.weight"])
