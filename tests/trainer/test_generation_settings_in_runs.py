"""Settings of `generate` that the loop does not serve, by each way they get into a run."""

import functools
import logging

import pytest
from grpo_runs import codraft_trainer, prompt_dataset
from tiny import tiny_policy
from transformers.utils import logging as logging_utils


def stored(policy):
    policy.generation_config.cache_implementation = "static"
    return {}


def passed(policy):
    return {"generation_kwargs": {"cache_implementation": "static"}}


def wrapped(policy):
    policy.generate = functools.partial(policy.generate, cache_implementation="static")
    return {}


WAYS = [stored, passed, wrapped]


@pytest.fixture(autouse=True)
def warnings(caplog):
    logging_utils.warning_once.cache_clear()
    logging_utils.enable_propagation()
    yield lambda: [record.message for record in caplog.records if "Rollouts are plain" in record.message]
    logging_utils.disable_propagation()


@pytest.mark.parametrize("way", WAYS)
def test_run_is_plain_with_one_warning_or_refused_when_it_is_built(way, tmp_path, warnings, caplog):
    caplog.set_level(logging.WARNING)
    for speculative_rollouts in ("true", "auto"):
        policy = tiny_policy()
        config = {
            "max_steps": 1,
            "draft_pretrain_steps": 1,
            "speculative_rollouts": speculative_rollouts,
            **way(policy),
        }
        if speculative_rollouts == "true":
            with pytest.raises(ValueError, match="speculative_rollouts='true'.*`cache_implementation='static'`"):
                codraft_trainer(tmp_path, policy, **config)
    assert not warnings()
    trainer = codraft_trainer(tmp_path, policy, **config)
    trainer.train()
    assert len(warnings()) == 1
    assert trainer.state.log_history[0]["rollout/speculation_on"] == 0.0


def test_setting_that_turns_up_later_makes_calls_plain_and_is_asked_about_everywhere(tmp_path, warnings, caplog):
    caplog.set_level(logging.WARNING)
    trainer = codraft_trainer(
        tmp_path, trainer={"eval_dataset": prompt_dataset().select(range(4))}, max_steps=1, draft_pretrain_steps=1
    )
    stored(trainer.model)
    trainer.train()
    trainer.evaluate()
    assert len(warnings()) == 1
    logs = {key: value for entry in trainer.state.log_history for key, value in entry.items()}
    assert logs["rollout/speculation_on"] == logs["eval_rollout/speculation_on"] == 0.0
    assert not trainer.draft_checkpoints._can_score_draft()
    trainer.model.generation_config.cache_implementation = None
    assert trainer.draft_checkpoints._can_score_draft()
