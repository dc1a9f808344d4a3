"""
Policies with quantised weights, which bitsandbytes computes on CPUs too: `pip install bitsandbytes`, then
`pytest -m peers tests/rollout/test_quantized_policies.py`.
"""

import pytest
import torch
from grpo_runs import assert_same_run, codraft_trainer, plain_trainer
from peft import LoraConfig
from rollout.drafts import OracleDraft, ragged_prompts
from tiny import tiny_policy
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from trl_codraft import Eagle3DraftConfig, Eagle3DraftModel, speculative_generate
from trl_codraft.modeling.teacher import PolicyHead


pytestmark = pytest.mark.peers
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.float32}
QUANTIZATIONS = {"nf4": NF4, "nf4 twice": {**NF4, "bnb_4bit_use_double_quant": True}, "int8": {"load_in_8bit": True}}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    pytest.importorskip("bitsandbytes")
    folder = tmp_path_factory.mktemp("policy")
    tiny_policy(scale=3.0, **SIZES).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("quantization", QUANTIZATIONS.values(), ids=QUANTIZATIONS)
def test_greedy_rollouts_return_what_generate_returns(saved, quantization):
    policy = AutoModelForCausalLM.from_pretrained(
        saved, quantization_config=BitsAndBytesConfig(**quantization), dtype=torch.float32
    )
    assert policy.model.layers[0].self_attn.q_proj.weight.dtype in (torch.uint8, torch.int8)
    policy.generation_config.eos_token_id = None
    ids, mask = ragged_prompts([9, 2, 6], seed=1)
    plain = policy.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=14)
    accepted = []
    fresh = Eagle3DraftModel(Eagle3DraftConfig.from_policy(policy.config, tap_layers=[1, 2, 3]))
    fresh.initialize_from_policy(PolicyHead(policy))
    for draft in (OracleDraft(policy, lambda ids, length: length % 3 == 0), fresh):
        output = speculative_generate(policy, draft, ids, mask, num_draft_tokens=3, do_sample=False, max_new_tokens=14)
        assert torch.equal(output.sequences, plain)
        accepted.append(output.stats.accepted)
    assert accepted[0] > 0


def test_qlora_training_is_not_changed_by_the_draft_and_rolls_out_with_it(saved, tmp_path):
    def trained(build, name, **config):
        trainer = {"quantization_config": BitsAndBytesConfig(**NF4), "peft_config": LoraConfig(r=2)}
        run = build(tmp_path / name, str(saved), trainer, model_init_kwargs={"dtype": "float32"}, **config)
        run.train()
        return run

    plain = trained(plain_trainer, "plain")
    assert plain.model.get_base_model().model.layers[0].self_attn.q_proj.base_layer.weight.dtype == torch.uint8
    ours = trained(codraft_trainer, "ours", speculative_rollouts="false", draft_pretrain_steps=2)
    assert_same_run(ours, plain)
    rolled = trained(codraft_trainer, "rolled", draft_pretrain_steps=20, max_steps=4)
    logs = [entry for entry in rolled.state.log_history if "rollout/accept_length" in entry]
    assert max(entry["rollout/accept_length"] for entry in logs) > 1.0
    rolled.save_model(str(tmp_path / "rolled"))
    assert (tmp_path / "rolled" / "draft" / "model.safetensors").exists()
