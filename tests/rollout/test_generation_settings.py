"""Every setting of `GenerationConfig`, set in every way: served exactly, or left to `generate` with a reason."""

import copy
import functools
import itertools
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from rollout.drafts import OracleDraft, ragged_prompts
from tiny import tiny_policy, tiny_tokenizer
from transformers import (
    CompileConfig,
    DynamicCache,
    GenerationConfig,
    LogitsProcessor,
    TextStreamer,
    WatermarkingConfig,
)

from trl_codraft.rollout.binding import CallRefused, reason_of_generate
from trl_codraft.rollout.speculative import SpeculativeDecoder


NEW_TOKENS = 7
# A value that is not the default, for each setting under which the loop returns what `generate` returns.
EXACT = {
    "max_length": 13,
    "max_new_tokens": 5,
    "min_length": 10,
    "min_new_tokens": 4,
    "early_stopping": True,
    "max_time": 60.0,
    "stop_strings": ["ab", "c"],
    "do_sample": False,
    "use_cache": False,
    "cache_config": {"backend": "hqq"},
    "max_cache_len": 64,
    "temperature": 0.7,
    "top_k": 3,
    "top_p": 0.8,
    "min_p": 0.1,
    "top_h": 0.4,
    "typical_p": 0.9,
    "epsilon_cutoff": 0.01,
    "eta_cutoff": 0.01,
    "repetition_penalty": 1.6,
    "length_penalty": 2.0,
    "no_repeat_ngram_size": 2,
    "bad_words_ids": [[7], [8, 9]],
    "renormalize_logits": True,
    "forced_eos_token_id": 2,
    "remove_invalid_values": True,
    "exponential_decay_length_penalty": (2, 1.4),
    "suppress_tokens": [7, 8],
    "begin_suppress_tokens": [20, 21],
    "sequence_bias": [[[7], -5.0], [[8, 9], 4.0]],
    "return_dict_in_generate": True,
    "pad_token_id": 3,
    "bos_token_id": 4,
    "eos_token_id": [2, 9, 30],
    "decoder_start_token_id": 4,
    # What other ways of drafting read, which none of these turns on.
    "num_assistant_tokens": 3,
    "num_assistant_tokens_schedule": "heuristic",
    "assistant_confidence_threshold": 0.7,
    "max_matching_ngram_size": 3,
    "assistant_lookbehind": 4,
    "target_lookbehind": 4,
    "assistant_ensemble_weight": 0.5,
    "speculation_type": "dflash",
    # What static caches, beams and contrastive search read.
    "compile_config": CompileConfig(),
    "disable_compile": True,
    "continuous_batching_config": None,
    "low_memory": True,
    "diversity_penalty": 0.5,
    "num_beam_groups": 2,
}
REFUSED = {
    "num_beams": 2,
    "use_mtp": True,
    "cache_implementation": "static",
    "token_healing": True,
    "guidance_scale": 1.5,
    "watermarking_config": WatermarkingConfig(),
    "num_return_sequences": 2,
    "output_attentions": True,
    "output_hidden_states": True,
    "output_scores": True,
    "output_logits": True,
    "is_assistant": True,
    "prompt_lookup_num_tokens": 3,
    "assistant_early_exit": 2,
    "penalty_alpha": 0.6,
    "dola_layers": "high",
    "constraints": [object()],
    "force_words_ids": [[5]],
    "prefill_chunk_size": 2,
    "encoder_repetition_penalty": 1.6,
    "encoder_no_repeat_ngram_size": 2,
    "forced_bos_token_id": 5,
}
# Plain generation raises as well: it wants models, permission to run code from the Hub, or samples.
FAIL_PLAINLY = {"use_mtp", "token_healing", "dola_layers", "constraints", "force_words_ids", "assistant_early_exit"}
FAIL_PLAINLY |= {"penalty_alpha", "prompt_lookup_num_tokens", "is_assistant"}
# Several samples are only to be had by sampling.
ALONG = {"num_return_sequences": {"do_sample": True}}
WAYS = ("argument", "configuration", "stored", "wrapped")


class OfItsOwn(LogitsProcessor):
    def __call__(self, input_ids, scores):
        return scores


def fresh_policy():
    policy = tiny_policy("llama", dtype=torch.float64, scale=3.0, num_hidden_layers=2)
    policy.generation_config = GenerationConfig(eos_token_id=2, pad_token_id=0)
    return policy


def call(policy, way, name, value):
    """A `generate` and its arguments, with a setting made in one of the ways."""
    ids, mask = ragged_prompts([5, 3])
    generate = policy.generate
    arguments = {"input_ids": ids, "attention_mask": mask, "tokenizer": tiny_tokenizer()}
    limit = {} if name in ("max_length", "max_new_tokens") else {"max_new_tokens": NEW_TOKENS}
    limit |= ALONG.get(name, {})
    if way == "argument":
        arguments |= {**limit, name: value}
    elif way == "configuration":
        arguments["generation_config"] = GenerationConfig(**{**limit, name: value})
    elif way == "stored":
        setattr(policy.generation_config, name, value)
        arguments["generation_config"] = GenerationConfig(**limit)
    else:
        generate = functools.partial(generate, **{name: value})
        arguments |= limit
    return generate, arguments


def sequences(result):
    return result if isinstance(result, torch.Tensor) else result.sequences


def test_every_setting_is_known_here():
    fields = {name for name in vars(GenerationConfig()) if not name.startswith("_")} - {"transformers_version"}
    assert fields == EXACT.keys() | REFUSED.keys()
    assert not EXACT.keys() & REFUSED.keys()


@pytest.mark.parametrize(("name", "way"), list(zip(EXACT, itertools.cycle(WAYS), strict=False)))
def test_setting_is_served_exactly(name, way):
    policy = fresh_policy()
    generate, arguments = call(policy, way, name, EXACT[name])
    expected = sequences(generate(**arguments))
    decoder = SpeculativeDecoder(policy, OracleDraft(policy), num_draft_tokens=2)
    result = sequences(decoder.bind(generate)(**arguments))
    decoder.close()
    assert torch.equal(result, expected)
    assert decoder.stats.policy_forwards > 0


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", REFUSED)
def test_setting_is_left_to_generate_with_a_reason_or_refused(name, way):
    policy = fresh_policy()
    generate, arguments = call(policy, way, name, REFUSED[name])
    decoder = SpeculativeDecoder(policy, OracleDraft(policy), num_draft_tokens=2)
    with pytest.raises(CallRefused, match=f"`{name}="):
        decoder.bind(generate)(**arguments)
    reasons = []
    if name not in FAIL_PLAINLY:
        torch.manual_seed(0)
        expected = sequences(generate(**arguments))
        torch.manual_seed(0)
        assert torch.equal(sequences(decoder.bind(generate, reasons.append)(**arguments)), expected)
        assert len(reasons) == 1
    config = arguments.get("generation_config", GenerationConfig(max_new_tokens=NEW_TOKENS, **ALONG.get(name, {})))
    if way != "argument":
        assert f"`{name}=" in reason_of_generate(policy, generate, config, training=False)
    decoder.close()
    assert decoder.stats.policy_forwards == 0


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("cache_implementation", kind)
        for kind in ("offloaded", "offloaded_static", "quantized", "paged", "sliding_window")
    ]
    + [("logits_processor", [OfItsOwn()])]
    + [("assistant_model", fresh_policy()), ("streamer", TextStreamer(tiny_tokenizer())), ("cache", "filled")],
)
def test_arguments_that_a_wrapper_adds_are_seen(name, value):
    policy = fresh_policy()
    ids, mask = ragged_prompts([5, 3])
    if value == "filled":
        value = DynamicCache(config=policy.config)
        policy(ids[:, :2], cache=value, use_cache=True)
    generate = functools.partial(policy.generate, **{name: value})
    config = GenerationConfig(max_new_tokens=4)
    shown = "OfItsOwn" if name == "logits_processor" else f"{name}"
    assert shown in reason_of_generate(policy, generate, config, training=False)
    decoder = SpeculativeDecoder(policy, OracleDraft(policy), num_draft_tokens=2)
    # One row, which is all that streamers and assistants take.
    with pytest.raises(CallRefused, match=shown):
        decoder.bind(generate)(input_ids=ids[:1], attention_mask=mask[:1], generation_config=config)
    decoder.close()


def test_generate_that_decodes_in_its_own_way_is_seen_and_its_result_kept():
    policy = fresh_policy()
    ids, mask = ragged_prompts([5, 3])
    own = functools.partial(policy.generate, custom_generate=lambda model, input_ids, **arguments: input_ids + 1)
    for generate in (own, lambda **arguments: arguments["input_ids"] + 1):
        reasons = []
        decoder = SpeculativeDecoder(policy, OracleDraft(policy), num_draft_tokens=2)
        result = decoder.bind(generate, reasons.append)(input_ids=ids, attention_mask=mask, max_new_tokens=4)
        decoder.close()
        assert torch.equal(result, ids + 1)
        assert len(reasons) == 1
        config = GenerationConfig(max_new_tokens=4)
        assert "replaced" in reason_of_generate(policy, generate, config, training=False)


def test_class_of_the_policy_is_its_own_in_forwards_and_afterwards():
    policy = fresh_policy()
    own, seen = type(policy), set()
    policy.model.register_forward_pre_hook(lambda *_: seen.add(type(policy)))
    ids, mask = ragged_prompts([5, 3])
    decoder = SpeculativeDecoder(policy, OracleDraft(policy), num_draft_tokens=2)
    decoder.bind(policy.generate)(ids, attention_mask=mask, max_new_tokens=4)
    with pytest.raises(CallRefused):
        decoder.bind(policy.generate)(ids, attention_mask=mask, max_new_tokens=4, num_beams=2)
    decoder.close()
    assert seen == {own}
    assert type(policy) is own


BROKEN = {
    "examine": "trl_codraft.rollout.speculative.refused_reason",
    "loop": "trl_codraft.rollout.loop.Rollout.run",
    "decoding": "transformers.GenerationMixin._get_stopping_criteria",
}


@pytest.mark.parametrize("broken", BROKEN.values(), ids=BROKEN)
def test_class_of_the_policy_is_its_own_after_an_error(broken, monkeypatch):
    policy = fresh_policy()
    own, (ids, mask) = type(policy), ragged_prompts([5, 3])
    decoder = SpeculativeDecoder(policy, OracleDraft(policy), num_draft_tokens=2)
    monkeypatch.setattr(broken, lambda *args, **kwargs: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        decoder.bind(policy.generate)(ids, attention_mask=mask, max_new_tokens=4)
    decoder.close()
    assert type(policy) is own


def test_another_policy_of_the_class_and_a_copy_decode_as_always():
    policy, other, copies = fresh_policy(), fresh_policy(), []
    arguments = dict(zip(("input_ids", "attention_mask"), ragged_prompts([5, 3]), strict=True))
    expected = other.generate(**arguments, max_new_tokens=6)

    def generate(**arguments):
        copies.append(copy.deepcopy(policy))
        assert torch.equal(other.generate(**arguments), expected)
        return policy.generate(**arguments)

    decoder = SpeculativeDecoder(policy, OracleDraft(policy), num_draft_tokens=2)
    assert torch.equal(decoder.bind(generate)(**arguments, max_new_tokens=6), expected)
    rounds = decoder.stats.row_forwards
    assert type(copies[0]) is type(policy)
    assert torch.equal(copies[0].generate(**arguments, max_new_tokens=6), expected)
    assert decoder.stats.row_forwards == rounds > 0
    decoder.close()


@pytest.mark.parametrize("decoding", [False, True])
def test_calls_from_another_thread_decode_as_always_and_are_not_served(decoding):
    """Before the loop runs, and while it does."""
    policy = fresh_policy()
    own, arguments = type(policy), dict(zip(("input_ids", "attention_mask"), ragged_prompts([5, 3]), strict=True))
    expected, served = policy.generate(**arguments, max_new_tokens=6), []
    decoder = SpeculativeDecoder(policy, OracleDraft(policy), num_draft_tokens=2)

    def elsewhere():
        if not decoding:
            served.append(policy.generate(**arguments, max_new_tokens=6))
            assert decoder.stats.policy_forwards == 0
        with pytest.raises(RuntimeError, match="Another thread is generating speculatively with this Llama"):
            decoder.bind(policy.generate)(**arguments, max_new_tokens=6)

    def in_a_thread(*_):
        hook.remove()
        with ThreadPoolExecutor(1) as pool:
            pool.submit(elsewhere).result()

    def generate(**arguments):
        if not decoding:
            in_a_thread()
        return policy.generate(**arguments)

    hook = policy.register_forward_pre_hook(in_a_thread)
    assert torch.equal(decoder.bind(generate)(**arguments, max_new_tokens=6), expected)
    assert all(torch.equal(result, expected) for result in served)
    assert len(served) == (not decoding)
    assert decoder.stats.policy_forwards > 0
    assert type(policy) is own
    assert torch.equal(decoder.bind(policy.generate)(**arguments, max_new_tokens=6), expected)
    decoder.close()


def test_processor_that_only_generate_sees_leaves_the_call_to_it():
    policy = fresh_policy()
    ids, mask = ragged_prompts([5, 3])
    generate = functools.partial(policy.generate, logits_processor=[OfItsOwn()])
    call, reasons = {"input_ids": ids, "attention_mask": mask, "max_new_tokens": 5}, []
    decoder = SpeculativeDecoder(policy, OracleDraft(policy), num_draft_tokens=2)
    assert torch.equal(decoder.bind(generate, reasons.append)(**call), generate(**call))
    decoder.close()
    assert len(reasons) == 1
    assert "OfItsOwn" in reasons[0]
