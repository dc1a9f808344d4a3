"""What cannot be supported raises at construction, or rolls out plainly with a warning, and says what to change."""

import logging
from types import SimpleNamespace

import pytest
import torch
from accelerate.utils import DistributedType
from grpo_runs import codraft_trainer, draft_settings, letter_reward, prompt_dataset, settings
from peft import PromptTuningConfig
from tiny import SIZES, tiny_policy, tiny_tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, ProcessorMixin, T5ForConditionalGeneration
from transformers.utils import logging as logging_utils

from trl_codraft import CoDraftGRPOConfig, CoDraftGRPOTrainer, Eagle3DraftConfig, Eagle3DraftModel
from trl_codraft.grpo.building import build_draft
from trl_codraft.grpo.support import (
    plain_rollout_reason,
    refuse_cuda_graphs_elsewhere,
    refuse_unsupported,
)
from trl_codraft.grpo.warnings import warn_about_unused_settings
from trl_codraft.modeling.policy import decoder_of


@pytest.fixture(autouse=True)
def forget_warnings():
    """`warning_once` remembers what it said for the life of the process."""
    logging_utils.warning_once.cache_clear()


class TextOnlyProcessor(ProcessorMixin):
    """The smallest thing that TRL takes for the processor of a vision-language model."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer


def fake_trainer(policy=None, **overrides):
    accelerator = SimpleNamespace(
        distributed_type=overrides.pop("distributed_type", DistributedType.NO),
        is_fsdp2=overrides.pop("is_fsdp2", False),
        state=SimpleNamespace(deepspeed_plugin=SimpleNamespace(zero_stage=overrides.pop("zero_stage", 0))),
    )
    values = {
        "model": tiny_policy() if policy is None else policy,
        "_is_vlm": False,
        "accelerator": accelerator,
        "use_vllm": False,
        "use_transformers_continuous_batching": False,
        "rollout_func": None,
        "generation_config": None,
        "aux_loss_enabled": False,
        **overrides,
    }
    return SimpleNamespace(**values)


def test_vision_language_policy_is_refused(tmp_path):
    policy = tiny_policy()
    policy.config.image_token_id = 5
    with pytest.raises(ValueError, match="vision-language model.*use_draft=False"):
        codraft_trainer(tmp_path, policy, {"processing_class": TextOnlyProcessor(tiny_tokenizer())})


def test_prompt_learning_is_refused(tmp_path):
    peft_config = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    with pytest.raises(ValueError, match="PROMPT_TUNING.*Use LoRA"):
        codraft_trainer(tmp_path, trainer={"peft_config": peft_config})


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"distributed_type": DistributedType.DEEPSPEED, "zero_stage": 3}, "ZeRO-3.*FSDP2"),
        ({"distributed_type": DistributedType.FSDP, "is_fsdp2": False}, "FSDP1.*fsdp_version: 2"),
    ],
    ids=["zero3", "fsdp1"],
)
def test_sharding_that_hides_the_head_is_refused(overrides, message):
    with pytest.raises(ValueError, match=message):
        refuse_unsupported(fake_trainer(**overrides))


@pytest.mark.parametrize(
    "overrides",
    [
        {"distributed_type": DistributedType.DEEPSPEED, "zero_stage": 2},
        {"distributed_type": DistributedType.FSDP, "is_fsdp2": True},
        {"distributed_type": DistributedType.MULTI_GPU},
    ],
    ids=["zero2", "fsdp2", "ddp"],
)
def test_supported_parallelism_is_not_refused(overrides):
    # What comes after it is, so that was reached.
    with pytest.raises(ValueError, match="with a processor takes images"):
        refuse_unsupported(fake_trainer(_is_vlm=True, **overrides))


def test_encoder_decoder_is_refused():
    config = AutoConfig.for_model("t5", d_model=16, d_ff=16, d_kv=4, num_layers=1, num_heads=2, vocab_size=32)
    with pytest.raises(ValueError, match="encoder-decoder.*use_draft=False"):
        decoder_of(T5ForConditionalGeneration(config))


def test_model_without_a_list_of_layers_is_refused():
    config = AutoConfig.for_model("gpt2", n_embd=16, n_layer=1, n_head=2, vocab_size=32)
    with pytest.raises(ValueError, match="list of `layers`.*use_draft=False"):
        decoder_of(AutoModelForCausalLM.from_config(config))


def test_both_ways_of_naming_a_draft_are_refused(tmp_path):
    draft = Eagle3DraftModel(Eagle3DraftConfig.from_policy(tiny_policy().config, tap_layers=[1, 2, 3]))
    arguments = {
        "model": tiny_policy(),
        "reward_funcs": letter_reward,
        "train_dataset": prompt_dataset(),
        "processing_class": tiny_tokenizer(),
        "draft_model": draft,
    }
    args = CoDraftGRPOConfig(**settings(tmp_path, draft_model_name_or_path="me/draft"))
    with pytest.raises(ValueError, match="Both `draft_model` and `draft_model_name_or_path`"):
        CoDraftGRPOTrainer(args=args, **arguments)
    args = CoDraftGRPOConfig(**settings(tmp_path, use_draft=False))
    with pytest.raises(ValueError, match="use_draft=False"):
        CoDraftGRPOTrainer(args=args, **arguments)


@pytest.mark.parametrize("source", ["", 3, True, tiny_policy(), []])
def test_what_is_no_draft_is_refused_before_anything_is_built(tmp_path, source):
    with pytest.raises(
        ValueError, match=r"^`draft_model` must be a name or a path that is not empty or None"
    ) as caught:
        codraft_trainer(tmp_path, trainer={"draft_model": source})
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize("by_setting", [False, True])
def test_a_path_names_a_draft_as_its_text_does(tmp_path, by_setting):
    draft = Eagle3DraftModel(Eagle3DraftConfig.from_policy(tiny_policy().config, tap_layers=[1, 2, 3]))
    draft.save_pretrained(tmp_path / "draft")
    path = tmp_path / "draft"
    given = {"draft_model_name_or_path": path} if by_setting else {"trainer": {"draft_model": path}}
    trainer = codraft_trainer(tmp_path / "out", **given)
    assert torch.equal(trainer.draft_model.fc.weight, draft.fc.weight)


def test_cuda_graphs_without_a_cuda_device_are_refused_at_construction(tmp_path):
    with pytest.raises(ValueError, match="`rollout_cuda_graphs=True` needs a CUDA device, and this run is on cpu"):
        codraft_trainer(tmp_path, rollout_cuda_graphs=True)
    # Rollouts without the draft have none.
    codraft_trainer(tmp_path, rollout_cuda_graphs=True, speculative_rollouts="false")


def test_cuda_graphs_of_a_sharded_policy_are_refused_at_construction():
    trainer = fake_trainer(distributed_type=DistributedType.FSDP, args=SimpleNamespace(rollout_cuda_graphs=True))
    trainer.accelerator.device = torch.device("cuda")
    with pytest.raises(ValueError, match="FSDP gathers them anew"):
        refuse_cuda_graphs_elsewhere(trainer)


def test_freezing_a_fresh_draft_is_refused(tmp_path):
    with pytest.raises(ValueError, match="`draft_train=False`.*`draft_model_name_or_path`.*`draft_pretrain_steps`"):
        codraft_trainer(tmp_path, draft_train=False)


@pytest.mark.parametrize("source", ["argument", "path", "pretraining", "no draft"])
def test_freezing_a_trained_draft_is_not_refused(tmp_path, source):
    draft = Eagle3DraftModel(Eagle3DraftConfig.from_policy(tiny_policy().config, tap_layers=[1, 2, 3]))
    ways = {
        "argument": {"trainer": {"draft_model": draft}},
        "path": {"draft_model_name_or_path": str(tmp_path / "draft")},
        "pretraining": {"draft_pretrain_steps": 1},
        "no draft": {"use_draft": False},
    }
    draft.save_pretrained(tmp_path / "draft")
    trainer = codraft_trainer(tmp_path, draft_train=False, max_steps=1, **ways[source])
    trainer.train()
    assert (trainer.draft_model is None) == (source == "no draft")
    # Inside the GRPO step nothing is trained.
    assert not any("draft/loss" in entry for entry in trainer.state.log_history)
    assert len(trainer.draft_pretraining_log) == (source == "pretraining")


def test_draft_of_another_policy_is_refused(tmp_path):
    other = tiny_policy(hidden_size=48)
    draft = Eagle3DraftModel(Eagle3DraftConfig.from_policy(other.config, tap_layers=[1, 2, 3]))
    with pytest.raises(ValueError, match="hidden"):
        codraft_trainer(tmp_path, trainer={"draft_model": draft})


def test_shape_settings_that_a_loaded_draft_does_not_follow_are_named(tmp_path, caplog):
    draft = Eagle3DraftModel(Eagle3DraftConfig.from_policy(tiny_policy().config, tap_layers=[1, 2, 3]))
    with caplog.at_level(logging.WARNING, logger="trl_codraft"):
        codraft_trainer(tmp_path, trainer={"draft_model": draft}, draft_vocab_size=30)
    assert ["`draft_vocab_size=30` is for fresh drafts" in record.getMessage() for record in caplog.records] == [True]


def test_a_head_over_the_whole_vocabulary_that_is_most_of_the_draft_is_named_unless_asked_for(caplog):
    def warnings(vocab_size, **config):
        caplog.clear()
        args = CoDraftGRPOConfig(use_cpu=True, bf16=False, **config)
        with caplog.at_level(logging.WARNING, logger="trl_codraft"):
            build_draft(args, tiny_policy(vocab_size=vocab_size), None)
        return caplog.messages

    # Head 2,048 x 32; fc 3 x 32 x 32, attention 64 x (32 + 16 + 16) and 32 x 32, MLP 3 x 32 x 48, four norms of 32.
    (message,) = warnings(2048)
    assert "all 2048 tokens has 84% of its weights" in message
    assert warnings(2048, draft_vocab_size=2048) == warnings(2048, draft_vocab_size=64) == warnings(104) == []


PLAIN = [
    ({"use_transformers_continuous_batching": True}, "continuous batching"),
    ({"rollout_func": lambda prompts, trainer: {}}, "`rollout_func` generates the rollouts"),
    ({"args": SimpleNamespace(neftune_noise_alpha=5.0)}, "`neftune_noise_alpha` adds noise"),
]


@pytest.mark.parametrize(("overrides", "reason"), PLAIN, ids=["continuous-batching", "rollout-func", "neftune"])
def test_generation_by_others_gives_plain_rollouts(overrides, reason):
    assert reason in plain_rollout_reason(fake_trainer(**overrides))


def test_plain_rollouts_warn_once_and_name_the_reason(tmp_path, caplog):
    policy = tiny_policy(attention_dropout=0.1)
    with caplog.at_level(logging.WARNING, logger="trl_codraft"):
        trainer = codraft_trainer(tmp_path, policy)
    assert not trainer.rollouts.possible
    assert sum("disable_dropout" in record.getMessage() for record in caplog.records) == 1
    trainer.train()
    assert {entry["rollout/speculation_on"] for entry in trainer.state.log_history if "loss" in entry} == {0.0}
    assert any("draft/loss" in entry for entry in trainer.state.log_history)


def test_a_step_in_which_the_draft_learns_nothing_says_so_once_and_stays_in_the_log(tmp_path, caplog):
    cut = {"mask_truncated_completions": True, "max_completion_length": 1}
    with caplog.at_level(logging.WARNING, logger="trl_codraft"):
        trainer = codraft_trainer(tmp_path, **cut)
        trainer.eos_token_ids = [-1]  # no completion ever ends
        trainer.train()
    said = [record.getMessage() for record in caplog.records if "learned nothing" in record.getMessage()]
    assert len(said) == 1
    assert "`max_completion_length=1`" in said[0]
    assert "`mask_truncated_completions=False`" in said[0]
    steps = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [entry["draft/rows"] for entry in steps] == [0.0] * 3
    assert not any("draft/loss" in entry for entry in steps)
    assert trainer.draft_trainer.num_updates == 0

    # Some completions are whole: nothing to say, and the rows are those with a target.
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="trl_codraft"):
        trainer = codraft_trainer(tmp_path, max_steps=1)
        trainer.train()
    assert not any("learned nothing" in record.getMessage() for record in caplog.records)
    entry = trainer.state.log_history[0]
    assert entry["draft/rows"] > 0
    assert entry["draft/loss"] > 0


def test_speculation_asked_for_but_impossible_raises(tmp_path):
    policy = tiny_policy(attention_dropout=0.1)
    with pytest.raises(ValueError, match="speculative_rollouts='true'.*disable_dropout"):
        codraft_trainer(tmp_path, policy, speculative_rollouts="true")


def test_rollout_func_still_trains_the_draft(tmp_path):
    def rollout(prompts, trainer):
        prompt_ids = trainer._tokenize_prompts(prompts)[0]
        completion_ids = [[8 + (len(ids) + step) % 90 for step in range(6)] + [2] for ids in prompt_ids]
        return {"prompt_ids": prompt_ids, "completion_ids": completion_ids, "logprobs": None}

    trainer = codraft_trainer(tmp_path, trainer={"rollout_func": rollout})
    assert not trainer.rollouts.possible
    trainer.train()
    assert [entry["draft/loss"] > 0 for entry in trainer.state.log_history if "draft/loss" in entry] == [True] * 3


def test_fresh_draft_without_pretraining_warns(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, logger="trl_codraft"):
        codraft_trainer(tmp_path)
    assert any("draft_pretrain_steps" in record.getMessage() for record in caplog.records)


def messages_without_draft(tmp_path, caplog, **config):
    with caplog.at_level(logging.WARNING, logger="trl_codraft"):
        codraft_trainer(tmp_path, use_draft=False, **config)
    return [record.getMessage() for record in caplog.records]


def test_settings_without_effect_are_named_once_without_a_draft(tmp_path, caplog):
    config = {"draft_pretrain_steps": 3, "draft_tap_layers": [1], "num_draft_tokens": "2"}
    for _ in range(2):
        messages = messages_without_draft(tmp_path, caplog, **config)
    assert messages == [
        "`use_draft=False`: `draft_tap_layers=[1]`, `draft_pretrain_steps=3`, `num_draft_tokens=2` without effect."
    ]


def test_the_tap_channel_of_a_pipeline_is_without_effect_without_a_draft(tmp_path, caplog):
    pipeline = {"use_draft": False, "pipeline_parallel_size": 2, "tap_channel_slots": 3}
    with caplog.at_level(logging.WARNING, logger="trl_codraft"):
        warn_about_unused_settings(CoDraftGRPOConfig(**settings(tmp_path, **pipeline)))
    assert caplog.messages == ["`use_draft=False`: `tap_channel_slots=3` without effect."]


def test_settings_that_agree_with_having_no_draft_are_not_named(tmp_path, caplog):
    assert messages_without_draft(tmp_path, caplog, draft_train=False, speculative_rollouts="false") == []
    assert messages_without_draft(tmp_path, caplog, draft_pretrain_steps=0, max_completion_length=4) == []


def test_save_steps_off_the_generation_window_warn(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, logger="trl_codraft"):
        codraft_trainer(tmp_path, steps_per_generation=4, save_strategy="steps", save_steps=1)
    assert any("`save_steps=1` does not fall on the boundary" in record.getMessage() for record in caplog.records)


def test_state_that_no_ranks_can_share_is_without_effect(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, logger="trl_codraft"):
        trainer = codraft_trainer(tmp_path, draft_shard_optimizer=True, draft_pretrain_steps=1)
    assert caplog.messages == ["`draft_shard_optimizer=True` has no effect: there is one process."]
    trainer.train()
    assert type(trainer.draft_trainer.optimizer) is torch.optim.AdamW


@pytest.mark.parametrize(
    ("tap_layers", "message"),
    [([1, 2, 9], f"do not exist.*to {SIZES['num_hidden_layers']}"), ([2, 1], "ascending"), ([], "at least one")],
    ids=["missing", "order", "none"],
)
def test_impossible_tap_layers_are_refused_by_the_name_of_the_setting(tmp_path, tap_layers, message):
    with pytest.raises(ValueError, match=f"^`draft_tap_layers` .*{message}"):
        codraft_trainer(tmp_path, **draft_settings(draft_tap_layers=tap_layers))


def test_draft_stays_out_of_the_policy(tmp_path):
    """The policy's parameters, and so its optimizer, gradient norm and checkpoints, do not contain the draft."""
    trainer = codraft_trainer(tmp_path)
    own = {id(parameter) for parameter in trainer.model.parameters()}
    assert own.isdisjoint(id(parameter) for parameter in trainer.draft_model.parameters())
    names = set(tiny_policy().state_dict())
    assert set(trainer.model.state_dict()) == names
    assert torch.equal(trainer.model.model.embed_tokens.weight, tiny_policy().model.embed_tokens.weight)
