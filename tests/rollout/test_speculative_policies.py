"""Rollouts over policy families, adapters, modes and dtypes."""

import pytest
import torch
from rollout.drafts import OracleDraft, ragged_prompts, random_draft
from tiny import tiny_policy

from trl_codraft.rollout.speculative import SpeculativeDecoder, speculative_generate


FAMILIES = {
    "multi_head": ("llama", {"num_key_value_heads": 4}),
    "multi_query": ("llama", {"num_key_value_heads": 1}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 12}),
    "sliding_window_everywhere": ("mistral", {"sliding_window": 5}),
    "sliding_and_full_layers": ("gemma3_text", {"sliding_window": 5}),
    "attention_sinks": (
        "gpt_oss",
        {"sliding_window": 5, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    ),
    # The last layers read the keys of earlier ones, and run only where logits are wanted; heads differ between layers.
    "shared_keys": ("gemma4_text", {}),
    "mixture_of_experts": ("mixtral", {}),
    "many_experts": ("qwen3_moe", {}),
}


def wrong_on_thirds(ids, length):
    return int(ids[:length].sum()) % 3 == 0


def family_policy(name, dtype=torch.float64, **extra):
    model_type, overrides = FAMILIES[name]
    policy = tiny_policy(model_type, dtype=dtype, scale=3.0, **{**overrides, **extra})
    policy.generation_config.eos_token_id = None
    if hasattr(policy.config, "num_experts_per_tok"):
        policy.set_experts_implementation("eager")  # the grouped kernels do not take fp64
    return policy


@pytest.mark.parametrize("name", FAMILIES)
def test_family_returns_what_generate_returns(name):
    policy = family_policy(name)
    ids, mask = ragged_prompts([9, 2, 6], seed=1)
    plain = policy.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=14)
    output = speculative_generate(
        policy, random_draft(policy), ids, mask, num_draft_tokens=3, do_sample=False, max_new_tokens=14
    )
    assert torch.equal(output.sequences, plain)


@pytest.mark.parametrize("name", ["mixture_of_experts", "many_experts"])
def test_experts_whose_configuration_asks_for_the_balancing_loss(name):
    policy = family_policy(name)
    ids, mask = ragged_prompts([9, 2, 6], seed=1)
    plain = policy.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=6)
    policy.config.output_router_logits = True
    output = speculative_generate(
        policy, random_draft(policy), ids, mask, num_draft_tokens=3, do_sample=False, max_new_tokens=6
    )
    assert torch.equal(output.sequences, plain)


@pytest.mark.parametrize("name", ["sliding_window_everywhere", "multi_query"])
def test_family_with_ragged_acceptance(name):
    policy = family_policy(name, num_hidden_layers=2)
    ids, mask = ragged_prompts([9, 2, 6], seed=1)
    plain = policy.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=14)
    draft = OracleDraft(policy, wrong_on_thirds)
    output = speculative_generate(policy, draft, ids, mask, num_draft_tokens=4, do_sample=False, max_new_tokens=14)
    assert torch.equal(output.sequences, plain)
    assert 0 < output.stats.accepted < output.stats.drafted


def test_softcapped_eager_attention():
    # Transformers' own eager fp64 path returns NaN for left-padded gemma2 rows; rows alone are the reference.
    policy = tiny_policy("gemma2", dtype=torch.float64, scale=3.0, sliding_window=5)
    policy.generation_config.eos_token_id = None
    ids, mask = ragged_prompts([9, 2, 6], seed=1)
    output = speculative_generate(
        policy, random_draft(policy), ids, mask, num_draft_tokens=3, do_sample=False, max_new_tokens=14
    )
    for row, sequence in enumerate(output.sequences):
        alone = policy.generate(ids[row][mask[row] != 0][None], do_sample=False, max_new_tokens=14)[0]
        assert torch.equal(sequence[-14:], alone[-14:])


def test_eager_and_sdpa_agree():
    ids, mask = ragged_prompts([9, 2, 6], seed=1)
    outputs = []
    for implementation in ("eager", "sdpa"):
        policy = family_policy("sliding_window_everywhere")
        policy.set_attn_implementation(implementation)
        output = speculative_generate(
            policy, random_draft(policy), ids, mask, num_draft_tokens=2, do_sample=False, max_new_tokens=9
        )
        outputs.append(output.sequences)
    # Eager attention takes its softmax in fp32 even for fp64 models, which is far below these policies' top-2 gaps.
    assert torch.equal(*outputs)


def test_lora_policy_rolls_out_with_its_adapter():
    peft = pytest.importorskip("peft")
    policy = family_policy("qwen3", num_hidden_layers=2)
    ids, mask = ragged_prompts([7, 3], seed=2)
    kwargs = {"attention_mask": mask, "do_sample": False, "max_new_tokens": 12}
    bare = policy.generate(ids, **kwargs)
    model = peft.get_peft_model(policy, peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=4))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.7, generator=torch.Generator().manual_seed(0))
    base = model.get_base_model()
    plain = model.generate(input_ids=ids, **kwargs)
    assert not torch.equal(plain, bare)
    for generate in (model.generate, base.generate):
        decoder = SpeculativeDecoder(base, OracleDraft(base, wrong_on_thirds), num_draft_tokens=3)
        assert torch.equal(decoder.bind(generate)(input_ids=ids, **kwargs), plain)
        assert 0 < decoder.stats.accepted < decoder.stats.drafted
        decoder.close()


@pytest.mark.parametrize("checkpointing", [False, True])
def test_training_mode_is_kept(checkpointing):
    policy = family_policy("qwen3", num_hidden_layers=2).train()
    if checkpointing:
        policy.gradient_checkpointing_enable()
    ids, mask = ragged_prompts([7, 3], seed=2)
    plain = policy.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=8)
    draft = OracleDraft(policy, wrong_on_thirds)
    output = speculative_generate(policy, draft, ids, mask, num_draft_tokens=3, do_sample=False, max_new_tokens=8)
    assert torch.equal(output.sequences, plain)
    assert policy.training


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_low_precision_differs_only_at_ties(dtype, capsys):
    """
    A token may differ from plain decoding only where the two most likely tokens are closer than rounding: than twice
    the largest difference of logits between forwards of one and of several columns, measured at that very position.
    """
    policy = family_policy("qwen3", dtype=dtype, num_hidden_layers=2)
    ids, mask = ragged_prompts([11, 2, 6, 4, 8, 3, 10, 5], seed=3)
    plain = policy.generate(
        ids, attention_mask=mask, do_sample=False, max_new_tokens=40, output_logits=True, return_dict_in_generate=True
    )
    draft = OracleDraft(policy, wrong_on_thirds)
    output = speculative_generate(policy, draft, ids, mask, num_draft_tokens=4, do_sample=False, max_new_tokens=40)
    assert output.stats.accepted > 0
    mismatches = 0
    for row in range(len(ids)):
        differing = (plain.sequences[row] != output.sequences[row]).nonzero().flatten()
        if len(differing) == 0:
            continue
        mismatches += 1
        column = int(differing[0])
        narrow = plain.logits[column - ids.shape[1]][row].float()
        prefix = plain.sequences[row, :column][None, int((mask[row] == 0).sum()) :]
        wide = policy(prefix).logits[0, -1].float()
        gap = narrow.topk(2).values.diff().abs()
        assert gap <= 2 * (narrow - wide).abs().max()
    with capsys.disabled():
        print(f"\n{dtype}: {mismatches} of {len(ids)} rows part from plain decoding at a tie")


def test_draft_in_bf16_under_a_bf16_policy_samples():
    policy = family_policy("qwen3", dtype=torch.bfloat16)
    draft = random_draft(policy)
    assert draft.compute_dtype == torch.bfloat16
    ids, mask = ragged_prompts([5, 2, 7], seed=4)
    output = speculative_generate(policy, draft, ids, mask, num_draft_tokens=2, do_sample=True, max_new_tokens=12)
    assert output.sequences.shape == (3, 19)
    assert output.stats.drafted > 0
