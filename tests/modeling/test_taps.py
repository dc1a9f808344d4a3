"""Taps: the right hidden states, once each, and only where they are asked for."""

import copy
import pickle

import pytest
import torch
from tiny import tiny_policy
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

from trl_codraft.modeling.policy import decoder_of
from trl_codraft.modeling.taps import TapRecorder


IDS = torch.arange(3, 23).view(2, 10)
TAPS = [0, 1, 3, 4]


def recorded(policy, recorder, **kwargs):
    with recorder.record() as record:
        output = policy(input_ids=IDS, output_hidden_states=True, **kwargs)
    return record, output


@pytest.mark.parametrize("model_type", ["llama", "gemma2", "qwen3_moe"])
def test_taps_are_the_hidden_states_before_the_final_norm(model_type):
    policy = tiny_policy(model_type, scale=4.0)
    record, output = recorded(policy, TapRecorder(policy, TAPS))
    assert len(record.taps) == len(TAPS)
    for tap, layer in zip(record.taps[:-1], TAPS[:-1], strict=True):
        assert torch.equal(tap, output.hidden_states[layer])
        assert not tap.requires_grad
    last = record.taps[-1]
    assert not torch.allclose(last, output.hidden_states[4])
    assert torch.equal(policy.model.norm(last), output.hidden_states[4])
    assert torch.equal(record.last_hidden, output.hidden_states[4])
    assert not record.last_hidden.requires_grad


def test_layers_that_need_not_run_everywhere_do_while_they_are_recorded():
    """Those of Gemma 4 that read the keys of earlier layers skip the tokens whose logits nobody wants."""
    policy = tiny_policy("gemma4_text")
    recorder = TapRecorder(policy, TAPS)
    whole, _ = recorded(policy, recorder)
    with recorder.record() as record:
        logits = policy(input_ids=IDS, use_cache=False, logits_to_keep=1).logits
    assert logits.shape[1] == 1
    for tap, expected in zip((*record.taps, record.last_hidden), (*whole.taps, whole.last_hidden), strict=True):
        torch.testing.assert_close(tap, expected)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_gradient_checkpointing_records_each_tap_once(use_reentrant):
    policy = tiny_policy(scale=4.0)
    plain, _ = recorded(policy, TapRecorder(policy, TAPS))
    policy.train()
    policy.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    policy.enable_input_require_grads()
    recorder = TapRecorder(policy, TAPS)
    with recorder.record() as record:
        logits = policy(input_ids=IDS).logits
        taps = list(record.taps)
        logits.sum().backward()  # recomputes every layer with the record still open
    assert all(tap is kept for tap, kept in zip(taps, record.taps, strict=True))
    for tap, expected in zip(record.taps, plain.taps, strict=True):
        torch.testing.assert_close(tap, expected)
    assert policy.model.layers[0].mlp.up_proj.weight.grad is not None


def test_forwards_outside_a_record_leave_nothing():
    policy = tiny_policy()
    recorder = TapRecorder(policy, TAPS)
    policy(input_ids=IDS)
    policy.generate(IDS, max_new_tokens=3, do_sample=False)
    record, _ = recorded(policy, recorder)
    before = [tap.clone() for tap in record.taps]
    policy(input_ids=IDS + 1)
    policy.generate(IDS + 1, max_new_tokens=3, do_sample=False)
    assert recorder._record is None
    assert all(torch.equal(tap, kept) for tap, kept in zip(record.taps, before, strict=True))
    with pytest.raises(RuntimeError, match="boom"), recorder.record():
        raise RuntimeError("boom")
    recorded(policy, recorder)  # the failed record did not stay open


def test_missing_double_and_nested_records_are_errors():
    policy = tiny_policy()
    recorder = TapRecorder(policy, TAPS)
    with recorder.record() as record:
        pass
    with pytest.raises(RuntimeError, match=r"did not deliver the taps of layers \[0, 1, 3, 4\]"):
        _ = record.taps
    with pytest.raises(RuntimeError, match="did not run"):
        _ = record.last_hidden
    with recorder.record():
        policy(input_ids=IDS)
        with pytest.raises(RuntimeError, match="more than once"):
            policy(input_ids=IDS)
    with recorder.record(), pytest.raises(RuntimeError, match="do not nest"), recorder.record():
        pass
    recorder.close()
    with recorder.record() as record:
        policy(input_ids=IDS)
    with pytest.raises(RuntimeError, match="did not deliver"):
        _ = record.taps


def test_lora_taps_come_from_the_adapter_on_forward():
    peft = pytest.importorskip("peft")
    policy = tiny_policy(scale=4.0)
    base_taps = recorded(policy, TapRecorder(policy, TAPS))[0].taps
    config = peft.LoraConfig(target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    model = peft.get_peft_model(policy, config).eval()
    recorder = TapRecorder(model.get_base_model(), TAPS)
    on, output = recorded(model, recorder)
    for tap, layer in zip(on.taps[:-1], TAPS[:-1], strict=True):
        assert torch.equal(tap, output.hidden_states[layer])
    assert torch.equal(on.taps[0], base_taps[0])
    assert all(not torch.allclose(tap, base) for tap, base in zip(on.taps[1:], base_taps[1:], strict=True))
    # The reference forward of a LoRA policy runs the same modules with adapters off, outside any record.
    kept = [tap.clone() for tap in on.taps]
    with model.disable_adapter():
        off, _ = recorded(model, recorder)
        model(input_ids=IDS)
    torch.testing.assert_close(off.taps[-1], base_taps[-1])
    assert all(torch.equal(tap, copy) for tap, copy in zip(on.taps, kept, strict=True))


def pickled(value):
    return pickle.loads(pickle.dumps(value))


def taps_of(policy, recorder, ids=IDS):
    """Without `output_hidden_states`, for which Transformers hangs hooks of its own on the policy."""
    with recorder.record() as record:
        policy(input_ids=ids)
    return [*record.taps, record.last_hidden]


def same(taps, expected):
    return all(torch.equal(tap, kept) for tap, kept in zip(taps, expected, strict=True))


@pytest.mark.parametrize("duplicate", [copy.deepcopy, pickled], ids=["deepcopy", "pickle"])
def test_a_copied_policy_computes_the_same_and_leaves_the_record_alone(duplicate):
    policy = tiny_policy()
    recorder = TapRecorder(policy, TAPS)
    expected, logits = taps_of(policy, recorder), policy(input_ids=IDS).logits
    with recorder.record() as record:
        twin = duplicate(policy)
        assert torch.equal(twin(input_ids=IDS).logits, logits)
        with pytest.raises(RuntimeError, match="did not deliver"):
            _ = record.taps
        policy(input_ids=IDS)
        twin(input_ids=IDS + 1)
    assert same([*record.taps, record.last_hidden], expected)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, pickled], ids=["deepcopy", "pickle"])
@pytest.mark.parametrize("order", [1, -1], ids=["policy-first", "recorder-first"])
def test_policy_and_recorder_copied_together_are_a_pair_of_their_own(duplicate, order):
    policy = tiny_policy()
    recorder = TapRecorder(policy, TAPS)
    before = taps_of(policy, recorder)
    twin, its_recorder = duplicate((policy, recorder)[::order])[::order]
    assert same(taps_of(twin, its_recorder), before)
    with torch.no_grad():
        twin.model.embed_tokens.weight.add_(1.0)
    with recorder.record() as untouched:
        changed = taps_of(twin, its_recorder)
    assert not same(changed, before)
    with pytest.raises(RuntimeError, match="did not deliver"):
        _ = untouched.taps
    its_recorder.close()
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in twin.modules())
    assert same(taps_of(policy, recorder), before)


def test_a_copy_made_while_recording_holds_no_hidden_states():
    policy = tiny_policy()
    recorder = TapRecorder(policy, TAPS)
    before = len(pickle.dumps(policy))
    with recorder.record():
        policy(input_ids=IDS)
        assert len(pickle.dumps(policy)) == before
        assert copy.deepcopy(recorder)._record is None


@pytest.mark.parametrize(
    ("tap_layers", "message"),
    [([], "at least one"), ([1, 1], "strictly ascending"), ([2, 1], "strictly ascending"), ([-1], "0"), ([5], "to 4")],
)
def test_impossible_tap_layers_are_named(tap_layers, message):
    with pytest.raises(ValueError, match=message):
        TapRecorder(tiny_policy(), tap_layers)


def test_policies_without_decoder_layers_are_refused_with_the_way_out():
    config = AutoConfig.for_model(
        "t5", vocab_size=50, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, decoder_start_token_id=0
    )
    with pytest.raises(ValueError, match="use_draft=False"):
        decoder_of(AutoModelForSeq2SeqLM.from_config(config))
    with pytest.raises(ValueError, match="use_draft=False"):
        decoder_of(tiny_policy("gpt2", n_layer=1, n_head=2, n_embd=32, num_hidden_layers=1))


def test_policies_with_several_hidden_states_per_token_are_refused():
    policy = tiny_policy(
        "gemma3n_text", vocab_size_per_layer_input=104, hidden_size_per_layer_input=8, num_kv_shared_layers=0,
        layer_types=["full_attention"] * 4, laurel_rank=4, activation_sparsity_pattern=[0.0] * 4,
    )  # fmt: skip
    with pytest.raises(ValueError, match="several hidden states of each token.*use_draft=False"):
        TapRecorder(policy, TAPS)


def test_layers_that_run_in_a_loop_are_refused_before_any_forward():
    config = AutoConfig.for_model(
        "dory",
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
    )
    with pytest.raises(ValueError, match="model type `dory`.*`n_recurrent_loops=2`.*`use_draft=False`"):
        TapRecorder(AutoModelForCausalLM.from_config(config), [0, 1])
