"""Checkpoints that hold no draft, or none that this run can go on with: every reader of `draft/` treats them alike."""

import os
import shutil
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import torch
from forked_ranks import run_script
from grpo_runs import assert_equal_tensors, codraft_trainer, plain_trainer, prompt_dataset, weights
from transformers import AutoModelForCausalLM
from transformers.utils import logging
from trl import GRPOTrainer

from trl_codraft.grpo.saved_draft import find_draft


SAVING = {"save_strategy": "steps", "save_steps": 1, "max_steps": 2}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    trainer = codraft_trainer(tmp_path_factory.mktemp("run"), **SAVING)
    trainer.train()
    return trainer


@pytest.fixture
def warnings_of_readers(monkeypatch):
    """What the trainer warns of while it reads checkpoints."""
    said = []
    monkeypatch.setattr(logging.get_logger("trl_codraft.grpo.draft_checkpoints"), "warning", said.append)
    return said


def no_folder(draft):
    shutil.rmtree(draft)


def empty_folder(draft):
    shutil.rmtree(draft)
    draft.mkdir()


def a_file_of_that_name(draft):
    shutil.rmtree(draft)
    draft.touch()


def no_config(draft):
    """As an interrupted save leaves it: the config is written last, the state of training after it."""
    (draft / "config.json").unlink()
    (draft / "draft_state.pt").unlink()


def state_alone(draft):
    for file in draft.iterdir():
        if file.name != "draft_state.pt":
            file.unlink()


def config_alone(draft):
    (draft / "model.safetensors").unlink()
    (draft / "draft_state.pt").unlink()


ABSENT = [no_folder, empty_folder, a_file_of_that_name, no_config, state_alone, config_alone]


def checkpoint_of(run, folder, spoil):
    """A copy of the run's first checkpoint whose draft is spoiled."""
    checkpoint = folder / "checkpoint-1"
    shutil.copytree(Path(run.args.output_dir) / "checkpoint-1", checkpoint)
    spoil(checkpoint / "draft")
    return checkpoint


def flat(trainer):
    state = trainer.draft_trainer.state_dict()
    tensors = {name: tensor.clone() for name, tensor in state["draft"].items()}
    for index, moments in state["optimizer"]["state"].items():
        tensors |= {f"{index}.{name}": tensor.clone() for name, tensor in moments.items()}
    return tensors


@pytest.mark.parametrize("spoil", ABSENT, ids=lambda spoil: spoil.__name__)
def test_best_model_without_a_draft_keeps_the_present_one(spoil, run, tmp_path, warnings_of_readers, monkeypatch):
    checkpoint = checkpoint_of(run, tmp_path, spoil)
    before, policy = flat(run), weights(run)
    monkeypatch.setattr(run.state, "best_model_checkpoint", str(checkpoint))
    run._load_best_model()
    assert_equal_tensors(flat(run), before)
    assert_equal_tensors(weights(run), AutoModelForCausalLM.from_pretrained(checkpoint).state_dict())
    assert len(warnings_of_readers) == 1
    assert f"The checkpoint {checkpoint} holds no draft: " in warnings_of_readers[0]
    assert "the draft stays that of the last step" in warnings_of_readers[0]
    run.model.load_state_dict(policy)


@pytest.mark.parametrize("spoil", ABSENT, ids=lambda spoil: spoil.__name__)
def test_resume_without_a_draft_starts_one_as_a_new_run_does(spoil, run, tmp_path, warnings_of_readers):
    checkpoint = checkpoint_of(run, tmp_path, spoil)
    resumed = codraft_trainer(tmp_path / "resumed", max_steps=2, draft_pretrain_steps=1)
    resumed.train(resume_from_checkpoint=str(checkpoint))
    assert resumed.state.global_step == 2
    assert len(resumed.draft_pretraining_log) == 1
    assert resumed.draft_trainer.num_updates == 2
    assert len(warnings_of_readers) == 1
    assert f"The checkpoint {checkpoint} holds no draft: " in warnings_of_readers[0]
    assert "starts as in a new run" in warnings_of_readers[0]


@pytest.mark.parametrize("spoil", ABSENT, ids=lambda spoil: spoil.__name__)
def test_push_of_a_checkpoint_without_a_draft_pushes_none(spoil, run, tmp_path, monkeypatch):
    checkpoint = checkpoint_of(run, tmp_path, spoil)
    pushed = MagicMock()
    monkeypatch.setattr(GRPOTrainer, "_push_from_checkpoint", pushed)
    monkeypatch.setattr(run, "push_in_progress", None, raising=False)
    monkeypatch.setattr(run.args, "output_dir", str(tmp_path / "out"))
    run._push_from_checkpoint(str(checkpoint))
    assert not (tmp_path / "out" / "draft").exists()
    pushed.assert_called_once()


def test_run_whose_best_checkpoint_is_a_plain_one_ends(tmp_path, warnings_of_readers):
    """From a plain run to one with a draft, its first checkpoint being the best: `num_tokens` only grows."""
    config = {
        "eval_strategy": "steps",
        "eval_steps": 1,
        "per_device_eval_batch_size": 4,
        "load_best_model_at_end": True,
        "metric_for_best_model": "num_tokens",
        "greater_is_better": False,
        **SAVING,
    }
    data = {"eval_dataset": prompt_dataset(copies=1).select(range(4))}
    plain_trainer(tmp_path, trainer=data, **{**config, "max_steps": 1}).train()
    ours = codraft_trainer(tmp_path, trainer=data, **{**config, "max_steps": 3})
    ours.train(resume_from_checkpoint=True)
    assert (ours.state.global_step, ours.state.best_global_step) == (3, 1)
    assert ours.draft_trainer.num_updates == 2
    best = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-1").state_dict()
    assert_equal_tensors(weights(ours), best)
    assert len(warnings_of_readers) == 2  # at the resume and at the end


def damaged_state(draft):
    state = draft / "draft_state.pt"
    os.truncate(state, state.stat().st_size // 2)


def state_of_something_else(draft):
    torch.save({"weights": torch.zeros(1)}, draft / "draft_state.pt")


def text_for_state(draft):
    (draft / "draft_state.pt").write_text("a text\n" * 30)


def state_without_schedule(draft):
    state = torch.load(draft / "draft_state.pt", weights_only=True)
    del state["draft_trainer"]["scheduler"]
    torch.save(state, draft / "draft_state.pt")


def damaged_config(draft):
    (draft / "config.json").write_text("{")


def other_taps(draft):
    config = draft / "config.json"
    config.write_text(config.read_text().replace("1,\n    2,\n    3", "0,\n    2,\n    3"))


def damaged_weights_alone(draft):
    (draft / "draft_state.pt").unlink()
    weights = draft / "model.safetensors"
    os.truncate(weights, weights.stat().st_size // 2)


UNUSABLE = {
    damaged_state: r"draft_state.pt cannot be read, it is damaged or incomplete",
    text_for_state: r"draft_state.pt cannot be read, it is damaged or incomplete",
    state_without_schedule: r"draft_state.pt is not the state of a draft",
    state_of_something_else: r"draft_state.pt is not the state of a draft",
    damaged_config: r"config.json is not valid JSON",
    other_taps: r"`tap_layers` \[0, 2, 3\] there, \[1, 2, 3\] here",
    damaged_weights_alone: r"model.safetensors cannot be read",
}


@pytest.mark.parametrize(("spoil", "message"), UNUSABLE.items(), ids=lambda case: getattr(case, "__name__", ""))
def test_unusable_draft_is_refused_by_a_resume_and_left_by_the_best_model(
    spoil, message, run, tmp_path, warnings_of_readers, monkeypatch
):
    """A resume costs nothing yet, so it raises. At the end of a run there is a draft to lose."""
    checkpoint = checkpoint_of(run, tmp_path, spoil)
    resumed = codraft_trainer(tmp_path / "resumed", max_steps=1)
    with pytest.raises(ValueError, match=message):
        resumed.train(resume_from_checkpoint=str(checkpoint))
    assert warnings_of_readers == []
    before, policy = flat(run), weights(run)
    monkeypatch.setattr(run.state, "best_model_checkpoint", str(checkpoint))
    run._load_best_model()
    assert_equal_tensors(flat(run), before)
    (said,) = warnings_of_readers
    assert str(checkpoint) in said
    assert "the draft stays that of the last step" in said
    run.model.load_state_dict(policy)


def test_trainer_whose_resume_was_refused_can_train(run, tmp_path):
    checkpoint = checkpoint_of(run, tmp_path, damaged_state)
    trainer = codraft_trainer(tmp_path / "resumed", max_steps=1)
    with pytest.raises(ValueError, match="damaged"):
        trainer.train(resume_from_checkpoint=str(checkpoint))
    trainer.train()
    assert trainer.draft_trainer.num_updates == 1
    # Finished as a fresh draft is, with the policy's head, which a step moves by its learning rate.
    head = weights(trainer)["lm_head.weight"]
    assert torch.allclose(trainer.draft_model.lm_head.weight, head, rtol=0, atol=2e-3)


def test_one_answer(run):
    found = find_draft(Path(run.args.output_dir) / "checkpoint-2")
    assert (found.lack, found.has_state) == (None, True)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return run_script("absent_draft_worker.py", tmp_path_factory.mktemp("ranks"), timeout=200, folder="distributed")


@pytest.mark.parametrize("missing", ["draft", "draft_state.pt", "damaged"])
def test_ranks_decide_alike_where_one_does_not_see_the_draft(missing, ranks):
    """One of them looks at a folder of its own, as on hosts without a common file system."""
    first, second = (rank[missing] for rank in ranks)
    assert first["error"] == second["error"]
    if first["error"] is None:
        assert_equal_tensors(first["draft"], second["draft"])
    if missing == "draft":
        assert "holds no draft on rank 1" in first["warnings"][0]
        assert (first["updates"], second["updates"]) == (1, 1)
        assert_equal_tensors(first["best"], first["draft"])
    elif missing == "draft_state.pt":
        assert "not the state of its training" in first["warnings"][0]
        assert (first["updates"], second["updates"]) == (1, 1)
    else:
        assert "damaged" in first["error"]
    assert second["warnings"] == []
