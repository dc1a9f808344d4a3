"""What the wrapper around `generate` passes on, and what it refuses, by message."""

import pytest
import torch
from rollout.drafts import OracleDraft, ragged_prompts, random_draft
from tiny import tiny_policy
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    DynamicCache,
    GenerationConfig,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
    TextStreamer,
    TopKLogitsWarper,
)

from trl_codraft.modeling.taps import TapRecorder
from trl_codraft.rollout.speculative import SpeculativeDecoder, speculative_generate
from trl_codraft.rollout.support import refused_reason, unsupported_reason


@pytest.fixture(scope="module")
def policy():
    policy = tiny_policy("llama", dtype=torch.float64, scale=3.0, num_hidden_layers=2)
    policy.generation_config.eos_token_id = None
    return policy


@pytest.fixture
def generate(policy):
    decoder = SpeculativeDecoder(policy, OracleDraft(policy), num_draft_tokens=2)
    yield decoder.bind(policy.generate)
    decoder.close()


def test_calls_of_every_form_reach_the_loop(policy, generate):
    ids, mask = ragged_prompts([5, 3])
    config = GenerationConfig(do_sample=False, max_new_tokens=7, eos_token_id=2, pad_token_id=0)
    plain = policy.generate(ids, generation_config=config, attention_mask=mask)
    assert torch.equal(generate(ids, config, attention_mask=mask), plain)
    assert torch.equal(generate(inputs=ids, generation_config=config, attention_mask=mask), plain)
    assert torch.equal(
        generate(input_ids=ids, generation_config=config, attention_mask=mask, disable_compile=True), plain
    )
    result = generate(ids, config, attention_mask=mask, return_dict_in_generate=True)
    assert torch.equal(result.sequences, plain)


def test_users_processors_join_generates_own(policy, generate):
    ids, mask = ragged_prompts([5, 3])
    kwargs = {"attention_mask": mask, "do_sample": False, "max_new_tokens": 7, "repetition_penalty": 1.4}
    plain = policy.generate(ids, logits_processor=LogitsProcessorList([TopKLogitsWarper(2)]), **kwargs)
    assert torch.equal(generate(ids, logits_processor=LogitsProcessorList([TopKLogitsWarper(2)]), **kwargs), plain)


REFUSED = {
    "num_beams": ({"num_beams": 2}, "num_beams=2"),
    "returned": ({"num_return_sequences": 3, "do_sample": True}, "num_return_sequences=3"),
    "assistant": ({"assistant_model": nn.Linear(1, 1)}, "assistant_model"),
    "lookup": ({"prompt_lookup_num_tokens": 3}, "prompt_lookup_num_tokens"),
    "static": ({"cache_implementation": "static"}, "'static'"),
    "quantized": ({"cache_implementation": "quantized"}, "'quantized'"),
    "offloaded": ({"cache_implementation": "offloaded"}, "'offloaded'"),
    "guidance": ({"guidance_scale": 1.5}, "guidance_scale=1.5"),
    "scores": ({"output_scores": True, "return_dict_in_generate": True}, "output_scores=True"),
    "hidden": ({"output_hidden_states": True, "return_dict_in_generate": True}, "output_hidden_states=True"),
    "custom": ({"custom_generate": lambda *args, **kwargs: None}, "custom_generate"),
    "chunks": ({"prefill_chunk_size": 2}, "prefill_chunk_size=2"),
    "token_types": ({"token_type_ids": torch.zeros(2, 5, dtype=torch.long)}, "token_type_ids"),
    "stop_strings": ({"stop_strings": ["a"]}, "tokenizer"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_honoured_is_refused_by_name(generate, name):
    kwargs, message = REFUSED[name]
    ids, mask = ragged_prompts([5, 3])
    with pytest.raises(ValueError, match=message):
        generate(ids, attention_mask=mask, max_new_tokens=4, **kwargs)
    if name in ("num_beams", "returned", "static", "guidance", "scores", "chunks"):
        with pytest.raises(ValueError, match=message):  # the same settings in a configuration
            generate(ids, GenerationConfig(max_new_tokens=4, **kwargs), attention_mask=mask)


def test_streamer_filled_cache_and_pads_that_are_not_on_the_left_are_refused(policy, generate):
    ids, mask = ragged_prompts([5, 3])
    with pytest.raises(ValueError, match="streamer"):
        generate(ids, attention_mask=mask, max_new_tokens=4, streamer=TextStreamer(None))
    filled = DynamicCache()
    policy(ids[:, :2], cache=filled, use_cache=True)
    with pytest.raises(ValueError, match="filled cache"):
        generate(ids, attention_mask=mask, max_new_tokens=4, cache=filled)
    with pytest.raises(ValueError, match="left"):
        generate(ids.flip(1), attention_mask=mask.flip(1), max_new_tokens=4)
    with pytest.raises(ValueError, match="Prompt 1 of this batch of 2 is empty"):
        generate(ids, attention_mask=mask * torch.tensor([[1], [0]]), max_new_tokens=4)
    for holes in ([0, 1, 0, 1, 1], [1, 1, 1, 0, 1]):
        with pytest.raises(ValueError, match="pads behind or between"):
            generate(ids[:1], attention_mask=torch.tensor([holes]), max_new_tokens=4)
    with pytest.raises(ValueError, match="position_ids"):
        generate(ids, attention_mask=mask, max_new_tokens=4, position_ids=torch.arange(5).expand(2, 5) + 1)


def test_synced_gpus_is_what_generate_computes_or_was_told(policy, monkeypatch):
    seen = []
    decoder = SpeculativeDecoder(policy, OracleDraft(policy), num_draft_tokens=2)
    ids, mask = ragged_prompts([5, 3])

    def loop(self, model, input_ids, synced_gpus, **arguments):
        seen.append(synced_gpus)
        return input_ids

    monkeypatch.setattr(SpeculativeDecoder, "__call__", loop)
    generate = decoder.bind(policy.generate)
    generate(ids)
    generate(ids, synced_gpus=True)
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 2)
    generate(ids)
    monkeypatch.setattr("trl_codraft.rollout.speculative.is_fsdp_managed_module", lambda module: True)
    generate(ids)
    generate(ids, synced_gpus=False)
    decoder.close()
    assert seen == [False, True, False, True, False]


def test_foreign_models_and_drafts_are_refused(policy):
    other = tiny_policy("llama", dtype=torch.float64, num_hidden_layers=2)
    decoder = SpeculativeDecoder(policy, OracleDraft(policy), num_draft_tokens=2)
    ids, _ = ragged_prompts([5])
    with pytest.raises(ValueError, match="another policy's"):
        decoder.bind(other.generate)(ids, max_new_tokens=3)
    decoder.close()
    with pytest.raises(ValueError, match="vocabulary of 90 tokens, the policy has 104"):
        SpeculativeDecoder(policy, random_draft(tiny_policy("llama", vocab_size=90)))
    with pytest.raises(ValueError, match="draft.config.tap_layers"):
        SpeculativeDecoder(policy, OracleDraft(policy), recorder=TapRecorder(policy, [1]))
    for value in (-1, 17, "3", 2.0):
        with pytest.raises(ValueError, match="num_draft_tokens"):
            SpeculativeDecoder(policy, OracleDraft(policy), num_draft_tokens=value)


def test_shared_recorder_is_left_on_the_policy(policy):
    draft = OracleDraft(policy)
    recorder = TapRecorder(policy, draft.config.tap_layers)
    decoder = SpeculativeDecoder(policy, draft, num_draft_tokens=2, recorder=recorder)
    decoder.close()
    with recorder.record() as record:
        policy(torch.tensor([[3, 4]]))
    assert record.taps[0].shape == (1, 2, 32)
    recorder.close()


def test_supported_policies_have_no_reason(policy):
    assert unsupported_reason(policy) is None
    assert refused_reason(GenerationConfig(do_sample=True, top_k=5)) is None
    for model_type in (
        "qwen3",
        "mistral",
        "gemma2",
        "gemma3_text",
        "mixtral",
        "gpt_oss",
        "phi3",
        "starcoder2",
        "qwen3_moe",
    ):
        assert unsupported_reason(tiny_policy(model_type, sliding_window=8), training=True) is None


def recurrent(model_type, **extra):
    sizes = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, "state_size": 4, **extra}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **sizes))


PLAIN = {
    "state_space": (lambda: recurrent("mamba"), "cannot roll back"),
    "linear_attention": (
        lambda: tiny_policy("qwen3_5_text", layer_types=["linear_attention", "full_attention"] * 2),
        "linear_attention",
    ),
    "encoder_decoder": (
        lambda: AutoModelForSeq2SeqLM.from_config(
            AutoConfig.for_model("t5", d_model=16, d_ff=16, d_kv=8, num_layers=1, num_heads=2, vocab_size=40)
        ),
        "encoder-decoder",
    ),
    # Llama ignores what another family's configuration has left there.
    "foreign_window": (lambda: tiny_policy("llama", sliding_window=5), "sliding_window=5"),
    "attention_dropout": (lambda: tiny_policy("llama", attention_dropout=0.1).train(), "attention_dropout=0.0"),
}


@pytest.mark.parametrize("name", PLAIN)
def test_policies_that_cannot_be_verified_fall_back_with_a_reason(name):
    make, message = PLAIN[name]
    assert message in unsupported_reason(make())


@pytest.mark.parametrize(("model_type", "reason"), [("mistral", None), ("llama", "sliding_window=5")])
def test_code_that_is_no_module_builds_the_masks_of_what_it_derives_from(model_type, reason):
    policy = tiny_policy(model_type, sliding_window=5)
    decoder = type(policy.model)
    policy.model.__class__ = type(decoder.__name__, (decoder,), {"__module__": "executed"})
    found = unsupported_reason(policy)
    assert found is None if reason is None else reason in found


@pytest.mark.parametrize("implementation", ["flash_attention_2", "flash_attention_3", "flex_attention", "paged|sdpa"])
def test_attention_without_ragged_masks_falls_back_with_a_reason(implementation):
    policy = tiny_policy("llama", num_hidden_layers=1)
    policy.config._attn_implementation_internal = implementation
    assert f"{implementation!r} cannot take the 4D mask" in unsupported_reason(policy)
    assert "attn_implementation='sdpa'" in unsupported_reason(policy)


def test_dropout_counts_only_in_training_mode():
    policy = tiny_policy("llama", num_hidden_layers=1)
    policy.model.layers[0].mlp.dropout = nn.Dropout(0.1)  # where LoRA would put its own
    assert unsupported_reason(policy.eval()) is None
    assert "disable_dropout=True" in unsupported_reason(policy, training=True)
    with pytest.raises(ValueError, match="disable_dropout=True"):
        speculative_generate(policy.train(), random_draft(policy), torch.tensor([[3]]), max_new_tokens=2)


def test_peft_model_generates_with_its_adapter_on():
    peft = pytest.importorskip("peft")
    policy = tiny_policy("llama", dtype=torch.float64, scale=4.0)
    plain = policy.generate(ragged_prompts([5, 3])[0], do_sample=False, max_new_tokens=8)
    lora = peft.LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    wrapped = peft.get_peft_model(policy, lora).eval()
    ids, mask = ragged_prompts([5, 3])
    expected = wrapped.generate(input_ids=ids, attention_mask=mask, do_sample=False, max_new_tokens=8)
    assert not torch.equal(expected, plain)
    draft = random_draft(policy)
    output = speculative_generate(wrapped, draft, ids, mask, num_draft_tokens=2, do_sample=False, max_new_tokens=8)
    assert torch.equal(output.sequences, expected)


def test_prompt_learning_is_refused():
    peft = pytest.importorskip("peft")
    policy = tiny_policy("llama")
    config = peft.PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM")
    with pytest.raises(ValueError, match="PROMPT_TUNING prepends virtual tokens"):
        speculative_generate(peft.get_peft_model(policy, config), random_draft(policy), ragged_prompts([5])[0])


def test_users_criterion_with_end_tokens_of_its_own_is_called_not_taken_apart():
    class Three(StoppingCriteria):
        eos_token_id = (3,)

        def __call__(self, input_ids, scores, **kwargs):
            return torch.full((len(input_ids),), input_ids.shape[1] >= 8)

    policy = tiny_policy("llama", dtype=torch.float64, scale=4.0)
    ids, mask = ragged_prompts([5, 3])
    call = {"do_sample": False, "max_new_tokens": 9, "stopping_criteria": StoppingCriteriaList([Three()])}
    expected = policy.generate(ids, attention_mask=mask, **call)
    output = speculative_generate(policy, random_draft(policy), ids, mask, num_draft_tokens=2, **call)
    assert expected.shape[1] == 8
    assert torch.equal(output.sequences, expected)
