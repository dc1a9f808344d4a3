"""The teacher against the policy's own logits."""

import pytest
import torch
from tiny import tiny_policy

from trl_codraft.modeling.teacher import PolicyHead


IDS = torch.arange(3, 19).view(2, 8)

FAMILIES = {
    "llama": ("llama", {}),
    "tied llama": ("llama", {"tie_word_embeddings": True}),
    "gemma2 softcap": ("gemma2", {"final_logit_softcapping": 5.0}),
    "cohere logit_scale": ("cohere", {"logit_scale": 0.25}),
    "granite logits_scaling": ("granite", {"logits_scaling": 3.0}),
    "falcon_h1 lm_head_multiplier": ("falcon_h1", {"lm_head_multiplier": 0.3, "mamba_d_ssm": 64, "mamba_n_heads": 4}),
    "phi bias": ("phi", {}),
}


def policy_of(family, dtype=torch.float32):
    model_type, overrides = FAMILIES[family]
    policy = tiny_policy(model_type, dtype=dtype, scale=4.0, **overrides)
    if policy.get_output_embeddings().bias is not None:
        torch.nn.init.normal_(policy.get_output_embeddings().bias, generator=torch.Generator().manual_seed(0))
    return policy


def teacher_and_own_logits(policy, head):
    with torch.no_grad():
        hidden = policy.base_model(input_ids=IDS).last_hidden_state
        return head.logits(hidden.flatten(0, 1)), policy(input_ids=IDS).logits.flatten(0, 1)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_the_policys_own(family):
    policy = policy_of(family)
    logits, own = teacher_and_own_logits(policy, PolicyHead(policy))
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, own, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", ["gemma2 softcap", "granite logits_scaling", "cohere logit_scale"])
def test_scale_and_softcap_matter(family):
    policy = policy_of(family)
    head = PolicyHead(policy)
    head.logit_scale, head.logit_softcap = 1.0, None
    logits, own = teacher_and_own_logits(policy, head)
    assert float((logits - own).abs().max()) > 1e-2


def test_bf16_logits_are_the_policys_up_to_its_rounding():
    policy = policy_of("gemma2 softcap", dtype=torch.bfloat16)
    logits, own = teacher_and_own_logits(policy, PolicyHead(policy))
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, own.float(), rtol=2**-6, atol=2**-6)


def test_fp32_cast_and_compute_dtype_choose_the_matmul():
    policy = policy_of("llama", dtype=torch.bfloat16)
    hidden = torch.randn(5, 32, generator=torch.Generator().manual_seed(0))
    weight = policy.lm_head.weight.detach()
    exact = hidden @ weight.float().T
    torch.testing.assert_close(PolicyHead(policy, cast_to_fp32=True).logits(hidden), exact, rtol=1e-6, atol=1e-6)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = PolicyHead(policy, cast_to_fp32=True)
        torch.testing.assert_close(cast.logits(hidden), exact, rtol=1e-6, atol=1e-6)
    policy = policy.float()
    rounded = (hidden.bfloat16() @ policy.lm_head.weight.detach().bfloat16().T).float()
    assert torch.equal(PolicyHead(policy, compute_dtype=torch.bfloat16).logits(hidden), rounded)
    with pytest.raises(ValueError, match="contradicts"):
        PolicyHead(policy, cast_to_fp32=True, compute_dtype=torch.bfloat16)


def test_float64_policies_stay_in_float64():
    policy = policy_of("llama", dtype=torch.float64)
    logits, own = teacher_and_own_logits(policy, PolicyHead(policy))
    assert logits.dtype == torch.float64
    torch.testing.assert_close(logits, own, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("gathered", [False, True])
def test_head_reads_the_live_weight_and_returns_nothing_that_needs_gradients(gathered):
    policy = policy_of("tied llama")
    head = PolicyHead(policy)
    hidden = torch.randn(3, 32)
    before, rows = head.logits(hidden), head.embed(IDS)
    with torch.no_grad():
        policy.lm_head.weight.mul_(2)
    if gathered:
        with head.gathered(), head.gathered():
            after, new_rows = head.logits(hidden), head.embed(IDS)
    else:
        after, new_rows = head.logits(hidden), head.embed(IDS)
    torch.testing.assert_close(after, 2 * before)
    torch.testing.assert_close(new_rows, 2 * rows)
    assert not after.requires_grad
    assert not new_rows.requires_grad
    policy.lm_head = torch.nn.Linear(32, 104)  # a replaced module, as PEFT and FSDP do
    torch.testing.assert_close(head.logits(hidden), policy.lm_head(hidden).detach())


def test_embed_leaves_the_policys_embedding_scale_out():
    policy = policy_of("gemma2 softcap")
    rows = PolicyHead(policy).embed(IDS)
    assert torch.equal(rows, policy.model.embed_tokens.weight.detach()[IDS])
    assert not torch.allclose(rows, policy.model.embed_tokens(IDS))


def test_logits_follow_lora_and_replaced_heads_but_refuse_head_adapters():
    peft = pytest.importorskip("peft")
    for kwargs in (
        {"target_modules": ["q_proj", "down_proj"]},
        {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    ):
        policy = policy_of("llama")
        wrapped = peft.get_peft_model(policy, peft.LoraConfig(init_lora_weights=False, **kwargs))
        base = wrapped.get_base_model()
        head = PolicyHead(base)
        if "modules_to_save" in kwargs:
            with torch.no_grad():
                base.lm_head.modules_to_save["default"].weight.add_(0.5)
        logits, own = teacher_and_own_logits(base, head)
        torch.testing.assert_close(logits, own, rtol=1e-5, atol=1e-5)
    for module, role in (("lm_head", "output"), ("embed_tokens", "input")):
        wrapped = peft.get_peft_model(policy_of("llama"), peft.LoraConfig(target_modules=["q_proj", module]))
        with pytest.raises(ValueError, match=f"{role} embeddings.*PEFT adapter"):
            PolicyHead(wrapped.get_base_model())


@pytest.mark.parametrize("family", ["llama", "tied llama"])
def test_trained_rows_of_the_embedding_are_refused(family):
    """PEFT keeps them beside the weight: `.weight` would read the rows as they were."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["q_proj"], trainable_token_indices=[5, 6])
    with pytest.raises(ValueError, match=r"embeddings.*PEFT adapter.*trainable_token_indices"):
        PolicyHead(peft.get_peft_model(policy_of(family), config).get_base_model())


def test_a_head_without_a_row_for_each_token_is_refused_and_a_padded_one_is_not():
    policy = tiny_policy()
    policy.lm_head = torch.nn.Linear(32, 120, bias=False)
    PolicyHead(policy)
    policy.lm_head = torch.nn.Linear(32, 100, bias=False)
    with pytest.raises(ValueError, match="has 100 rows, its config says `vocab_size=104`"):
        PolicyHead(policy)
