"""
Policies of every kind that Transformers has: a run works, rolls out plainly and says why, or is refused by a message
that names the policy and what to set. Where TRL's own trainer fails, ours may fail alike.
"""

import re
from collections import Counter

import pytest
import torch
from grpo_runs import assert_same_run, codraft_trainer, plain_trainer
from trainer.registry import language_models, tiny_model
from transformers.utils import logging

from trl_codraft import CoDraftGRPOConfig
from trl_codraft.grpo.building import build_draft
from trl_codraft.grpo.support import refuse_balancing, refuse_policy
from trl_codraft.modeling.taps import TapRecorder
from trl_codraft.modeling.teacher import PolicyHead
from trl_codraft.rollout.support import unsupported_reason


WORKS, NO_STACK, IMAGES = None, "no decoder with a list of `layers`", "takes images (vision-language model)"
RECURRENT = "cannot roll back rejected tokens"
SEVERAL = "several hidden states of each token"
# What the parts of a run say of a policy at construction and in its first forward: refusals, and reasons for plain
# rollouts.
FAMILIES = {
    ("llama", "LlamaForCausalLM"): WORKS,
    ("gemma3_text", "Gemma3ForCausalLM"): WORKS,
    ("qwen3_moe", "Qwen3MoeForCausalLM"): WORKS,
    ("longcat_flash", "LongcatFlashForCausalLM"): WORKS,
    ("mamba", "MambaForCausalLM"): RECURRENT,
    ("mamba2", "Mamba2ForCausalLM"): RECURRENT,
    ("falcon_mamba", "FalconMambaForCausalLM"): RECURRENT,
    ("jamba", "JambaForCausalLM"): RECURRENT,
    ("gpt2", "GPT2LMHeadModel"): NO_STACK,
    ("bert", "BertLMHeadModel"): NO_STACK,
    ("rwkv", "RwkvForCausalLM"): NO_STACK,
    ("t5", "T5ForConditionalGeneration"): NO_STACK,
    ("bart", "BartForConditionalGeneration"): NO_STACK,
    ("llava", "LlavaForConditionalGeneration"): IMAGES,
    ("gemma3", "Gemma3ForConditionalGeneration"): IMAGES,
    ("qwen2_vl", "Qwen2VLForConditionalGeneration"): IMAGES,
    ("qwen3_5", "Qwen3_5ForConditionalGeneration"): IMAGES,
    ("idefics", "IdeficsForVisionText2Text"): IMAGES,
    ("fuyu", "FuyuForCausalLM"): IMAGES,
    ("hy_v4", "HYV4ForCausalLM"): SEVERAL,
    ("prophetnet", "ProphetNetForCausalLM"): SEVERAL,
}


def said_of(policy):
    """The refusal of a policy, or why its rollouts are plain, or `None`."""
    try:
        refuse_policy(policy)
        PolicyHead(policy)
        draft = build_draft(CoDraftGRPOConfig(use_cpu=True, bf16=False), policy, None)
        recorder = TapRecorder(policy, draft.config.tap_layers)
        with recorder.record() as record, torch.no_grad():
            policy(input_ids=torch.arange(8, 20)[None], attention_mask=torch.ones(1, 12, dtype=torch.long))
        assert len(record.taps) == len(draft.config.tap_layers)
        assert all(tap.shape == record.last_hidden.shape for tap in record.taps)
    except ValueError as error:
        return str(error)
    return unsupported_reason(policy)


@pytest.mark.parametrize(("family", "said"), FAMILIES.items(), ids=[model_type for model_type, _ in FAMILIES])
def test_policies_are_judged_by_their_own_structure(family, said):
    found = said_of(tiny_model(*family))
    if said is WORKS:
        assert found is None
    else:
        assert said in found
        assert family[1] in found
        if said is not RECURRENT:
            assert f"model type `{family[0]}`" in found
            assert "`use_draft=False`" in found


def test_hybrids_without_any_attention_are_refused():
    policy = tiny_model("qwen3_next", "Qwen3NextForCausalLM")
    refuse_policy(policy)
    policy.config.layer_types = ["linear_attention"] * len(policy.config.layer_types)
    with pytest.raises(
        ValueError, match=r"model type `qwen3_next`.*state-space layers alone.*Give it an attention layer"
    ):
        refuse_policy(policy)


def test_heads_of_another_width_than_the_layers_are_refused():
    policy = tiny_model("opt", "OPTForCausalLM")
    refuse_policy(policy)
    policy.lm_head = torch.nn.Linear(16, 104, bias=False)
    with pytest.raises(
        ValueError, match="model type `opt`.*reads vectors of 16 numbers, its layers have 32.*use_draft=False"
    ):
        refuse_policy(policy)


@pytest.mark.parametrize("family", [("granitemoe", "GraniteMoeForCausalLM"), ("doge", "DogeForCausalLM")])
def test_experts_that_the_loss_of_trl_cannot_balance_are_refused_with_what_to_set(tmp_path, family):
    with pytest.raises(ValueError, match=f"model type `{family[0]}`.*`router_aux_loss_coef=0.0`"):
        codraft_trainer(tmp_path, tiny_model(*family))
    codraft_trainer(tmp_path, tiny_model(*family), router_aux_loss_coef=0.0, max_steps=1).train()
    refuse_balancing(tiny_model("qwen3_moe", "Qwen3MoeForCausalLM"))


@pytest.mark.parametrize("family", [("mamba", "MambaForCausalLM"), ("mamba2", "Mamba2ForCausalLM")])
def test_a_state_space_policy_trains_a_draft_that_it_does_not_feel(tmp_path, family):
    ours = codraft_trainer(tmp_path, tiny_model(*family))
    ours.train()
    plain = plain_trainer(tmp_path, tiny_model(*family))
    plain.train()
    assert not ours.rollouts.speculates
    assert [entry["draft/loss"] > 0 for entry in ours.state.log_history if "draft/loss" in entry] == [True] * 3
    assert any(layer.mlp.down_proj.weight.any() for layer in ours.draft_model.layers)  # zero in a fresh draft
    assert_same_run(ours, plain)


@pytest.mark.parametrize(
    "family", [("gemma3", "Gemma3ForConditionalGeneration"), ("llava", "LlavaForConditionalGeneration")]
)
def test_vision_language_policies_with_a_plain_tokenizer_are_refused_at_construction(tmp_path, family):
    with pytest.raises(ValueError, match=f"model type `{family[0]}`.*use_draft=False"):
        codraft_trainer(tmp_path, tiny_model(*family))


def error_of(build, tmp_path, policy, **config):
    """What a run of one small step ends with."""
    small = {"max_steps": 1, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 1, "num_generations": 2}
    try:
        build(tmp_path, policy, max_completion_length=4, disable_dropout=True, **small, **config).train()
    except Exception as error:  # of any model's own code: any
        return error


def kind_of_run(tmp_path, model_type, class_name):
    """How a run on a policy ends, in a word; anything else than those is a fault."""
    try:
        policy, other = (tiny_model(model_type, class_name) for _ in range(2))
    except ImportError:
        return "needs another package"
    except Exception:  # of any model's own code: any
        return "not built by our rules for small ones"
    error = error_of(codraft_trainer, tmp_path, policy, draft_tap_layers=None)
    if error is None:
        return "works"
    if isinstance(error, ValueError) and re.search(rf"model type `{model_type}`|{class_name}", str(error)):
        return "refused"
    theirs = error_of(plain_trainer, tmp_path, other)
    if type(theirs) is type(error):
        return "fails in TRL too"
    return f"{type(error).__name__}: {error}"


@pytest.mark.slow
@pytest.mark.timeout(5000)
def test_no_kind_of_policy_ends_in_an_error_that_does_not_name_it(tmp_path):
    kinds = {}
    for model_type, class_name in language_models():
        logging.warning_once.cache_clear()
        kinds[model_type, class_name] = kind_of_run(tmp_path, model_type, class_name)
    counts = Counter(kinds.values())
    print(counts)
    known = {"works", "refused", "fails in TRL too", "needs another package", "not built by our rules for small ones"}
    assert {family: kind for family, kind in kinds.items() if kind not in known} == {}
    assert counts["works"] > 80
    assert counts["works"] + counts["refused"] > 0.8 * len(kinds)
