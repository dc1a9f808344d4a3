"""
GRPO with rollouts by a (fake) vLLM engine: it always generates with the trainer's policy and draft of that moment.
"""

import logging
from types import SimpleNamespace

import pytest
import torch
from fake_vllm import FakeLLM, engine_class
from grpo_runs import codraft_trainer, prompt_dataset
from tiny import tiny_policy, tiny_tokenizer
from transformers import AutoModelForCausalLM
from transformers.utils import logging as logging_utils
from trl.generation import vllm_generation
from trl.trainer import grpo_trainer

from trl_codraft.grpo.warnings import warn_about_collapse, warn_about_metrics
from trl_codraft.rollout.stats import SpeculativeStats
from trl_codraft.vllm import generation as vllm_rollouts
from trl_codraft.vllm.generation import DraftVLLMGeneration
from trl_codraft.vllm.refit import refuse_shared_weights, write_engine_draft


@pytest.fixture(autouse=True)
def forget_warnings():
    logging_utils.warning_once.cache_clear()


@pytest.fixture
def engine(monkeypatch):
    """Installs the fake engine; the class is returned, its `events` are the calls in order."""

    def install(level=None):
        fake = engine_class(level)
        monkeypatch.setattr(vllm_generation, "LLM", fake, raising=False)
        monkeypatch.setattr(vllm_generation, "SamplingParams", SimpleNamespace, raising=False)
        monkeypatch.setattr(vllm_generation, "is_vllm_available", lambda: True)
        monkeypatch.setattr(vllm_rollouts, "CPU_SAMPLES_WRONGLY", False)
        return fake

    return install


@pytest.fixture(scope="module")
def policy_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("policy")
    tiny_policy(scale=3.0).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def vllm_trainer(tmp_path, policy_folder, eval_dataset=None, **overrides):
    policy = AutoModelForCausalLM.from_pretrained(policy_folder, dtype=torch.float32)
    settings = {
        "use_vllm": True,
        "vllm_mode": "colocate",
        "speculative_rollouts": "true",
        "max_steps": 2,
        "max_completion_length": 6,
        "gradient_accumulation_steps": 1,
        **overrides,
    }
    return codraft_trainer(tmp_path, policy, {"eval_dataset": eval_dataset}, **settings)


def record_staleness(trainer, monkeypatch):
    """At each generation, the largest differences of the engine's policy and draft from the trainer's."""
    found = []
    generate = FakeLLM.generate

    def checked(self, *args, **kwargs):
        names = dict(self.policy.named_parameters())
        policy = max((names[n] - p).abs().max().item() for n, p in trainer.model.named_parameters())
        own = self.draft.state_dict()
        draft = max(
            (own[n].float() - t.float()).abs().max().item() for n, t in trainer.draft_model.state_dict().items()
        )
        found.append((policy, draft))
        return generate(self, *args, **kwargs)

    monkeypatch.setattr(FakeLLM, "generate", checked)
    return found


@pytest.mark.parametrize(
    ("level", "overrides"),
    [
        (None, {}),
        (None, {"draft_vocab_size": 40, "draft_fc_norm": True, "draft_pretrain_steps": 2}),
        (1, {"vllm_enable_sleep_mode": True}),
        (2, {"vllm_enable_sleep_mode": True}),
    ],
    ids=["awake", "reduced-vocabulary", "sleep-level-1", "sleep-level-2"],
)
def test_engine_generates_with_the_policy_and_the_draft_of_the_moment(
    tmp_path, policy_folder, engine, monkeypatch, level, overrides
):
    engine(level)
    trainer = vllm_trainer(tmp_path, policy_folder, **overrides)
    found = record_staleness(trainer, monkeypatch)
    trainer.train()
    assert len(found) >= 2
    assert all(difference == (0.0, 0.0) for difference in found)


def test_both_models_are_pushed_while_awake_and_before_generating(tmp_path, policy_folder, engine):
    fake = engine()
    trainer = vllm_trainer(tmp_path, policy_folder, vllm_enable_sleep_mode=True)
    assert fake.events == ["sleep 2"]
    fake.events.clear()
    trainer.train()
    step = ["wake weights", "load policy", "reset cache", "load draft", "wake kv_cache", "generate", "sleep 2"]
    assert fake.events == step * 2


def test_engine_is_built_with_the_draft_and_with_what_trl_asks_for(tmp_path, policy_folder, engine):
    engine()
    trainer = vllm_trainer(tmp_path, policy_folder, vllm_max_model_length=64, num_draft_tokens="auto")
    llm = trainer.vllm_generation.llm
    speculation = llm.speculative_config
    assert (speculation["method"], speculation["num_speculative_tokens"]) == ("eagle3", 3)
    assert llm.draft.config == trainer.draft_model.config
    assert llm.kwargs["model"] == str(policy_folder)
    assert llm.kwargs["max_model_len"] == 64
    assert llm.kwargs["logprobs_mode"] == "processed_logprobs"
    assert grpo_trainer.VLLMGeneration is vllm_generation.VLLMGeneration  # TRL's own again


@pytest.mark.parametrize("speculate", ["true", "false"])
def test_metrics_are_the_engines_counters(tmp_path, policy_folder, engine, speculate):
    engine()
    trainer = vllm_trainer(tmp_path, policy_folder, speculative_rollouts=speculate, draft_pretrain_steps=2)
    trainer.train()
    entries = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert {entry["rollout/speculation_on"] for entry in entries} == {float(speculate == "true")}
    assert all("rollout/policy_forwards" not in entry for entry in entries)
    if speculate == "false":
        assert {entry["rollout/accept_length"] for entry in entries} == {1.0}
        return
    stats = trainer.vllm_generation.llm.stats
    assert stats.accepted > 0
    lengths = [entry["rollout/accept_length"] for entry in entries]
    assert min(lengths) <= stats.accept_length <= max(lengths)  # pretraining rollouts are in the engine's sum alone
    assert all(entry["rollout/num_draft_tokens"] <= 2 for entry in entries)


def test_policy_learns_from_what_the_engine_sampled(tmp_path, policy_folder, engine):
    engine()
    trainer = vllm_trainer(tmp_path, policy_folder)
    trainer.train()
    differences = [entry["sampling/sampling_logp_difference/max"] for entry in trainer.state.log_history[:-1]]
    assert max(differences) < 1e-4


def test_head_equal_to_the_policys_is_never_shared_with_it(tmp_path, policy_folder, engine):
    engine()
    trainer = vllm_trainer(tmp_path, policy_folder)
    trainer.draft_model.lm_head.weight.data.copy_(trainer.model.lm_head.weight)
    generation = trainer.vllm_generation
    generation.start(trainer.draft_model, 2, "push")
    generation.sync_weights()
    with torch.no_grad():
        trainer.draft_model.lm_head.weight.add_(1.0)
    generation.sync_weights()
    assert torch.equal(generation.llm.policy.lm_head.weight, trainer.model.lm_head.weight)
    assert torch.equal(generation.llm.draft.lm_head.weight, trainer.draft_model.lm_head.weight)


def test_engine_that_shares_the_head_all_the_same_is_refused(tmp_path, policy_folder, engine, monkeypatch):
    engine()

    def with_the_policys_head(draft, dtype, policy_name, folder):
        draft.lm_head.weight.data.copy_(AutoModelForCausalLM.from_pretrained(policy_name).lm_head.weight)
        zeros = torch.zeros_like
        monkeypatch.setattr(torch, "zeros_like", lambda tensor: tensor)
        write_engine_draft(draft, dtype, policy_name, folder)
        monkeypatch.setattr(torch, "zeros_like", zeros)

    monkeypatch.setattr(vllm_rollouts, "write_engine_draft", with_the_policys_head)
    with pytest.raises(RuntimeError, match="lm_head.weight of the draft one with the policy's"):
        vllm_trainer(tmp_path, policy_folder)


def test_of_shared_weights_all_but_the_embedding_are_refused():
    policy, draft = torch.nn.Module(), torch.nn.Module()
    policy.embed_tokens = draft.embed_tokens = torch.nn.Embedding(4, 2)
    policy.lm_head = draft.lm_head = torch.nn.Linear(2, 4, bias=False)
    with pytest.raises(RuntimeError, match="^vLLM made lm_head.weight of the draft one"):
        refuse_shared_weights(policy, draft)
    draft.lm_head = torch.nn.Linear(2, 4, bias=False)
    refuse_shared_weights(policy, draft)


def test_draft_of_an_evaluation_before_training_is_pushed_again(tmp_path, policy_folder, engine, monkeypatch):
    engine()
    prompts = prompt_dataset(copies=1).select(range(4))
    trainer = vllm_trainer(tmp_path, policy_folder, prompts, per_device_eval_batch_size=4)
    trainer.evaluate()
    found = record_staleness(trainer, monkeypatch)
    trainer.train()
    assert found
    assert all(difference == (0.0, 0.0) for difference in found)


def test_engine_that_dies_in_a_refit_ends_the_run_with_its_error(tmp_path, policy_folder, engine):
    engine()
    trainer = vllm_trainer(tmp_path, policy_folder)
    calls = []

    def die(weights):
        calls.append(len(weights))
        raise RuntimeError("engine core died")

    trainer.vllm_generation.llm.draft.load_weights = die
    with pytest.raises(RuntimeError, match="engine core died"):
        trainer.train()
    assert len(calls) == 1


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        ({"min_p": 0.1}, "vLLM ignores `min_p`"),
        ({"generation_kwargs": {"logit_bias": {3: 1.0}}}, "vLLM ignores `logit_bias`"),
    ],
    ids=["min_p", "logit_bias"],
)
def test_sampling_that_vllm_would_drop_is_plain_or_refused(tmp_path, policy_folder, engine, caplog, overrides, reason):
    engine()
    with pytest.raises(ValueError, match=reason):
        vllm_trainer(tmp_path, policy_folder, **overrides)
    with caplog.at_level(logging.WARNING, logger="trl_codraft"):
        trainer = vllm_trainer(tmp_path, policy_folder, speculative_rollouts="auto", **overrides)
    assert [reason in record.getMessage() for record in caplog.records if "plain" in record.getMessage()] == [True]
    assert trainer.vllm_generation.llm.speculative_config is None


def test_sampling_on_a_cpu_is_plain_and_greedy_decoding_is_not(tmp_path, policy_folder, engine, monkeypatch):
    engine()
    monkeypatch.setattr(vllm_rollouts, "CPU_SAMPLES_WRONGLY", True)
    with pytest.raises(ValueError, match="CPU backend"):
        vllm_trainer(tmp_path, policy_folder)
    assert vllm_trainer(tmp_path, policy_folder, generation_kwargs={"temperature": 0.0}).rollouts.possible


def test_without_a_draft_the_engine_is_trls(tmp_path, policy_folder, engine):
    engine()
    trainer = vllm_trainer(tmp_path, policy_folder, use_draft=False, speculative_rollouts="auto")
    assert type(trainer.vllm_generation) is not DraftVLLMGeneration
    assert trainer.vllm_generation.llm.speculative_config is None


def collapse_warnings(caplog, stats, **history):
    with caplog.at_level(logging.WARNING, logger="trl_codraft"):
        warn_about_collapse(stats, **history)
    return [record.getMessage() for record in caplog.records if "accept length of rollouts" in record.getMessage()]


@pytest.mark.parametrize(
    "history", [{"simulated": 2.5, "speculated_well": False}, {"simulated": None, "speculated_well": True}]
)
def test_collapse_of_acceptance_warns_once_whatever_it_measures(caplog, history):
    for accepted in (4, 3, 5):
        found = collapse_warnings(
            caplog, SpeculativeStats(verifications=400, drafted=1200, accepted=accepted), **history
        )
    assert ["below 1.05" in text and "troubleshooting" in text for text in found] == [True]


def test_metrics_that_should_be_better_are_said_once_whatever_they_are(caplog):
    with caplog.at_level(logging.WARNING, logger="trl_codraft"):
        for part in (0.0, 0.01, 0.02):
            for coverage, accepted in ((0.5, 1.0), (0.9, 1.05)):
                metrics = {"draft/vocab_coverage": coverage + part, "draft/accept_length_sim": accepted + part}
                warn_about_metrics({"draft/rows": 8.0, **metrics}, draft_is_fresh=False, args=None)
    texts = [record.getMessage() for record in caplog.records]
    assert ["draft_vocab_size" in text for text in texts] == [True, False]
    assert ["trl-codraft validate" in text for text in texts] == [False, True]


def test_collapse_after_good_rollouts_of_our_own_loop_is_left_to_its_alarm(caplog, tmp_path):
    trainer = codraft_trainer(tmp_path)
    for good in (True, False):
        trainer.rollouts._speculated_well = good
        trainer.rollouts.decoder.stats.add(SpeculativeStats(verifications=400, drafted=1200))
        trainer.learner.simulated_accept_length = 2.0
        with caplog.at_level(logging.WARNING, logger="trl_codraft"):
            trainer.rollouts.log()
        said = sum("accept length of rollouts" in record.getMessage() for record in caplog.records)
        assert said == (0 if good else 1)


@pytest.mark.parametrize(
    ("stats", "simulated"),
    [
        (SpeculativeStats(verifications=400, drafted=1200, accepted=4), 1.1),
        (SpeculativeStats(verifications=400, drafted=1200, accepted=300), 2.5),
        (SpeculativeStats(verifications=5, drafted=15, accepted=0), 2.5),
        (SpeculativeStats(), 2.5),
    ],
    ids=["untrained draft", "fine", "too few", "nothing drafted"],
)
def test_other_acceptance_does_not_warn(caplog, stats, simulated):
    assert collapse_warnings(caplog, stats, simulated=simulated, speculated_well=False) == []


def test_run_whose_engine_accepts_nothing_of_a_good_draft_warns_once(tmp_path, policy_folder, engine, caplog):
    engine()
    trainer = vllm_trainer(tmp_path, policy_folder)
    trainer.vllm_generation.take_stats = lambda: SpeculativeStats(verifications=400, drafted=800)
    with caplog.at_level(logging.WARNING, logger="trl_codraft"):
        trainer.train()
    assert trainer.learner.simulated_accept_length > 1.5
    assert sum("accept length of rollouts" in record.getMessage() for record in caplog.records) == 1
