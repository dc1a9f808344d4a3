"""One trainer used more than once: evaluation before training, training again, training after an error."""

import pytest
from grpo_runs import codraft_trainer, prompt_dataset


def learning_rates(trainer, name):
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def test_evaluation_before_training_says_that_it_is_plain(tmp_path):
    data = {"eval_dataset": prompt_dataset(copies=1).select(range(4))}
    trainer = codraft_trainer(tmp_path, trainer=data, per_device_eval_batch_size=4, max_steps=1)
    assert trainer.evaluate()["eval_rollout/speculation_on"] == 0.0
    trainer.train()
    assert trainer.evaluate()["eval_rollout/speculation_on"] == 1.0


def test_training_again_restarts_the_schedule_of_policy_and_draft(tmp_path):
    trainer = codraft_trainer(
        tmp_path, draft_lr_scheduler_type="linear", draft_warmup_steps=0, draft_learning_rate=1e-3
    )
    trainer.train()
    first = learning_rates(trainer, "draft/learning_rate")
    trainer.train()
    assert learning_rates(trainer, "draft/learning_rate") == first == learning_rates(trainer, "learning_rate")
    assert first[0] == 1e-3
    assert trainer.draft_trainer.num_updates == 6


def test_gradients_of_a_window_that_an_error_broke_off_are_not_used(tmp_path):
    trainer = codraft_trainer(tmp_path)
    compute_loss, calls = trainer._compute_loss, []

    def fail_once(model, inputs):
        calls.append(len(calls))
        if len(calls) == 2:
            raise RuntimeError("out of luck")
        return compute_loss(model, inputs)

    trainer._compute_loss = fail_once
    with pytest.raises(RuntimeError, match="out of luck"):
        trainer.train()
    accumulate, rows = trainer.draft_trainer.accumulate, []

    def spy(batch, *loss_function):
        rows.append(trainer.draft_trainer._counters["rows"][0].item())
        accumulate(batch, *loss_function)

    trainer.draft_trainer.accumulate = spy
    trainer.train()
    assert rows[0] == 0
    assert rows[1] > 0
