"""Checkpoints at odd moments, read under other settings, from other places, and pushed while an upload runs."""

import shutil
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import torch
from grpo_runs import assert_equal_tensors, assert_same_run, codraft_trainer, draft_of, plain_trainer, weights
from tiny import tiny_policy
from transformers import TrainerCallback

from trl_codraft import Eagle3DraftConfig, Eagle3DraftModel


SAVING = {"save_strategy": "steps", "save_steps": 1, "max_steps": 3, "draft_vocab_size": 48}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    trainer = codraft_trainer(tmp_path_factory.mktemp("whole"), **SAVING)
    trainer.train()
    return trainer


class SaveWithinWindow(TrainerCallback):
    """Saves after the first of the two microbatches of the second step, as a run that is told to end does."""

    def __init__(self, stops):
        self.stops = stops

    def on_substep_end(self, args, state, control, **kwargs):
        if state.global_step == 1:
            control.should_save = True
            control.should_training_stop = self.stops
        return control


def test_run_that_is_stopped_within_a_window_saves_and_resumes(tmp_path):
    """The checkpoint is that of the last whole step: the policy's gradients are not in it either."""
    first = codraft_trainer(
        tmp_path, trainer={"callbacks": [SaveWithinWindow(stops=True)]}, **{**SAVING, "save_steps": 9}
    )
    first.train()
    assert first.state.global_step == 1
    saved = torch.load(tmp_path / "checkpoint-1" / "draft" / "draft_state.pt", weights_only=True)["draft_trainer"]
    assert saved["num_updates"] == 1
    assert_equal_tensors(saved["draft"], draft_of(first))
    resumed = codraft_trainer(tmp_path / "resumed", **SAVING)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert (resumed.state.global_step, resumed.draft_trainer.num_updates) == (3, 3)


def test_save_within_a_window_does_not_change_the_run(whole, tmp_path):
    """The gradients that have accumulated stay: the reference is the run without such a save."""
    ours = codraft_trainer(tmp_path, trainer={"callbacks": [SaveWithinWindow(stops=False)]}, **SAVING)
    open_windows = []

    class Look(TrainerCallback):
        def on_substep_end(self, args, state, control, **kwargs):
            open_windows.append(ours.draft_trainer._flat is not None)
            ours._save_checkpoint(ours.model, trial=None)

    ours.add_callback(Look())
    ours.train()
    assert open_windows == [True] * 3
    assert_same_run(ours, whole)
    assert_equal_tensors(draft_of(ours), draft_of(whole))


@pytest.mark.parametrize("place", ["moved", "trailing slash", "relative", "True"])
def test_resume_from_any_place_is_the_same_run(place, whole, tmp_path, monkeypatch):
    runs = tmp_path / "moved"
    shutil.copytree(whole.args.output_dir, runs)
    shutil.rmtree(runs / "checkpoint-3")
    monkeypatch.chdir(tmp_path)
    path = {"moved": str(runs / "checkpoint-2"), "trailing slash": f"{runs}/checkpoint-2/", "True": True}
    resumed = codraft_trainer(runs if place == "True" else tmp_path / "resumed", **SAVING)
    resumed.train(resume_from_checkpoint=path.get(place, "moved/checkpoint-2"))
    assert_equal_tensors(weights(resumed), weights(whole))
    assert_equal_tensors(draft_of(resumed), draft_of(whole))


def test_trainer_that_has_trained_resumes_as_a_new_one_does(whole, tmp_path):
    trainer = codraft_trainer(tmp_path, **SAVING)
    trainer.train()
    trainer.train(resume_from_checkpoint=str(Path(whole.args.output_dir) / "checkpoint-2"))
    assert_equal_tensors(weights(trainer), weights(whole))
    assert_equal_tensors(draft_of(trainer), draft_of(whole))


@pytest.mark.parametrize(
    "setting",
    [{"draft_ttt_steps": 5}, {"num_draft_tokens": "6"}, {"num_draft_tokens": "1"}]
    + [{"speculative_rollouts": "false"}, {"draft_lr_scheduler_type": "cosine"}],
    ids=str,
)
def test_resume_under_settings_that_leave_the_weights_their_meaning(setting, whole, tmp_path):
    resumed = codraft_trainer(tmp_path, **{**SAVING, **setting})
    seen = {}
    load = resumed.draft_checkpoints.load

    def look(state):
        load(state)
        seen.update(draft_of(resumed))

    resumed.draft_checkpoints.load = look
    checkpoint = Path(whole.args.output_dir) / "checkpoint-2"
    resumed.train(resume_from_checkpoint=str(checkpoint))
    saved = torch.load(checkpoint / "draft" / "draft_state.pt", weights_only=True)["draft_trainer"]
    assert_equal_tensors(seen, saved["draft"])
    assert resumed.draft_trainer.num_updates == 3


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("intermediate_size", 64),
        ("rms_norm_eps", 1e-3),
        ("rope_parameters", {"rope_type": "default", "rope_theta": 77.0}),
    ],
)
def test_resume_without_the_draft_that_the_run_started_from_is_refused(field, value, tmp_path):
    """A fresh draft takes these from the policy. Of the last two the shapes would agree."""
    own = Eagle3DraftConfig.from_policy(tiny_policy().config, tap_layers=[1, 2, 3], **{field: value})
    draft = Eagle3DraftModel(own)
    for parameter in draft.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    config = {**SAVING, "draft_vocab_size": None, "max_steps": 1}
    codraft_trainer(tmp_path / "first", trainer={"draft_model": draft}, **config).train()
    resumed = codraft_trainer(tmp_path / "resumed", **config)
    with pytest.raises(ValueError, match=f"`{field}` .* there, .* here. Set `draft_model_name_or_path`"):
        resumed.train(resume_from_checkpoint=str(tmp_path / "first" / "checkpoint-1"))


@pytest.mark.parametrize(
    ("strategy", "always", "running", "copies"),
    [
        ("every_save", False, False, True),
        ("every_save", False, True, False),
        ("every_save", True, True, True),
        ("checkpoint", False, False, True),
        ("end", False, False, False),
    ],
)
def test_push_changes_no_files_under_a_running_upload(strategy, always, running, copies, whole, tmp_path, monkeypatch):
    """The draft goes into the output folder exactly when Transformers puts the policy there."""
    upload = MagicMock()
    upload.is_done.return_value = not running
    monkeypatch.setattr("transformers.trainer.hf_api", MagicMock)
    monkeypatch.setattr(whole, "push_in_progress", upload, raising=False)
    monkeypatch.setattr(whole, "hub_model_id", "me/policy", raising=False)
    for name, value in (("hub_strategy", strategy), ("hub_always_push", always), ("output_dir", str(tmp_path))):
        monkeypatch.setattr(whole.args, name, value)
    checkpoint = tmp_path / "checkpoint-3"
    plain = codraft_trainer(tmp_path / "source", **{**SAVING, "max_steps": 1})
    plain.train()
    shutil.copytree(tmp_path / "source" / "checkpoint-1", checkpoint)
    whole._push_from_checkpoint(str(checkpoint))
    assert (tmp_path / "model.safetensors").exists() == copies
    assert (tmp_path / "draft" / "model.safetensors").exists() == copies
    assert not (tmp_path / "draft" / "draft_state.pt").exists()


def test_save_model_twice_leaves_one_draft(whole, tmp_path):
    for _ in range(2):
        whole.save_model(str(tmp_path))
        files = {path.name: path.read_bytes() for path in (tmp_path / "draft").iterdir()}
        assert sorted(files) == ["README.md", "config.json", "model.safetensors"]
    assert not list(tmp_path.glob(".*"))


def test_resume_at_the_last_step_does_what_trls_does(whole, tmp_path):
    checkpoint = str(Path(whole.args.output_dir) / "checkpoint-3")
    theirs = plain_trainer(tmp_path / "theirs", save_strategy="no", max_steps=3)
    theirs.train(resume_from_checkpoint=checkpoint)
    ours = codraft_trainer(tmp_path / "ours", **SAVING)
    ours.train(resume_from_checkpoint=checkpoint)
    assert ours.state.global_step == theirs.state.global_step
    assert ours.draft_trainer.num_updates == ours.state.global_step
