"""
Breaks the code on purpose and asserts that a named check notices: evidence that the checks can fail.

`mutations.py` replaces one piece of a function's source.
"""

import pytest
import test_training
import torch
from modeling import test_draft_model, test_losses, test_packing, test_taps
from mutations import rewritten
from peft.tuners.tuners_utils import BaseTunerLayer
from rollout import test_speculative_sampling as sampled
from trainer import test_trained_tokens

from trl_codraft.grpo.learner import DraftLearner
from trl_codraft.modeling import losses, modeling_eagle3, packing, taps, teacher
from trl_codraft.rollout import accept as sampling
from trl_codraft.training.draft_trainer import DraftTrainer


@pytest.fixture
def mutate(monkeypatch):
    """`mutate(owner, name, old, new)` replaces `old` by `new` in `owner.name`, and in modules that imported it."""

    def apply(owner, name, old, new, also=()):
        broken = rewritten(owner, name, old, new)
        for holder in (owner, *also):
            monkeypatch.setattr(holder, name, broken)

    return apply


def fails(check, *args, **kwargs):
    """Whether a check notices."""
    try:
        check(*args, **kwargs)
    except AssertionError:
        return True
    return False


def test_rope_offset_dropped(mutate):
    mutate(
        modeling_eagle3.Eagle3DraftModel, "unroll", "layout.position_ids[rows] + num_pass", "layout.position_ids[rows]"
    )
    assert fails(test_draft_model.test_unroll_equals_dense_reference_with_all_gradients, {})
    assert fails(test_draft_model.test_unroll_equals_step_by_step_decoding, {}, torch.float64)


def test_mask_not_shifted(mutate):
    mutate(packing.DraftBatch, "valid", "offset = 2 + num_pass", "offset = 1 + num_pass")
    assert fails(test_packing.test_pack_equals_a_loop_over_rows, 0, 4)
    assert fails(test_losses.test_loss_gradients_and_counters_equal_dense_reference_in_fp64, 7, False)


def test_teacher_off_by_one(mutate):
    mutate(teacher, "teacher_positions", "roots + 1 + num_pass", "roots + num_pass", also=[losses])
    assert fails(test_losses.test_loss_gradients_and_counters_equal_dense_reference_in_fp64, 7, False)


def test_tokens_not_shifted_further_in_later_passes(mutate):
    mutate(
        modeling_eagle3.Eagle3DraftModel, "unroll", "layout.shifted(token_embeds, 1 + num_pass, num_pass)",
        "layout.shifted(token_embeds, 1, num_pass)",
    )  # fmt: skip
    assert fails(test_draft_model.test_unroll_equals_dense_reference_with_all_gradients, {})


def test_vocabulary_map_is_the_identity(mutate):
    mutate(modeling_eagle3.Eagle3DraftModel, "target_ids", "draft_ids + self.d2t", "draft_ids")
    assert fails(test_draft_model.test_target_ids_follow_the_vocabulary)
    assert fails(test_losses.test_loss_gradients_and_counters_equal_dense_reference_in_fp64, 7, True)


def test_taps_off_by_one_layer(mutate):
    mutate(taps.TapRecorder, "__init__", "decoder.layers[layer].register", "decoder.layers[layer - 1].register")
    assert fails(test_taps.test_taps_are_the_hidden_states_before_the_final_norm, "llama")


def test_taps_from_the_adapter_off_policy(monkeypatch):
    """The record's forward runs with every LoRA layer disabled."""
    enter = taps.TapRecorder.__init__

    def init(self, policy, tap_layers):
        enter(self, policy, tap_layers)

        def switch(module, args, kwargs):
            for layer in policy.modules():
                if isinstance(layer, BaseTunerLayer):
                    layer.enable_adapters(False)

        policy.get_decoder().register_forward_pre_hook(switch, with_kwargs=True)

    monkeypatch.setattr(taps.TapRecorder, "__init__", init)
    monkeypatch.setattr(test_taps, "TapRecorder", taps.TapRecorder)
    assert fails(test_taps.test_lora_taps_come_from_the_adapter_on_forward)


def test_pads_inside_a_document(mutate):
    everything = "keep = torch.ones_like(attention_mask).bool()"
    mutate(packing, "pack_rows", "keep = attention_mask.bool()", everything, also=[test_packing])
    assert fails(test_packing.test_padding_is_never_a_document_nor_trained)


def test_tool_tokens_trained(mutate, tmp_path):
    mutate(
        DraftLearner, "pack",
        'completion_mask * rows["tool_mask"] if "tool_mask" in rows else completion_mask', "completion_mask",
    )  # fmt: skip
    check = test_trained_tokens.test_completion_tokens_of_the_policy_are_trained_and_tool_tokens_are_context
    assert fails(check, False, tmp_path)


def test_stale_draft_after_an_update(monkeypatch, tmp_path):
    monkeypatch.setattr(DraftTrainer, "refresh_rollout_draft", lambda self: None)
    assert fails(test_trained_tokens.test_rollouts_use_the_updated_draft, tmp_path)


def test_draft_stepped_on_rank_local_counts(mutate):
    mutate(DraftTrainer, "_reduce", "values = self._flat[start:].tolist()", "values = own.tolist()")
    assert fails(test_training.test_reduction_is_one_call_and_skips_only_on_the_reduced_count)


@pytest.fixture(scope="module")
def policy():
    return sampled.policy.__wrapped__()


@pytest.fixture(scope="module")
def prompts():
    return sampled.prompts.__wrapped__()


@pytest.fixture(scope="module")
def exact(policy, prompts):
    return sampled.exact.__wrapped__(policy, prompts)


@pytest.mark.parametrize(
    ("name", "mutant"),
    [
        ("accepts", lambda uniform, p, q: p > q),
        ("residual", lambda p, q: p),
    ],
    ids=["acceptance-rule", "residual"],
)
def test_sampling_rule(policy, prompts, exact, monkeypatch, name, mutant):
    monkeypatch.setattr(sampling, name, mutant)
    assert sampled.worst_p_value_unchecked(policy, prompts, exact, 2) < 1e-6
