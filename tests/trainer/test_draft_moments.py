"""`draft_save_optimizer=False`: checkpoints without the moments of the draft's optimizer, and all the rest of it."""

import copy
import shutil
from pathlib import Path

import pytest
import torch
from forked_ranks import run_script
from grpo_runs import assert_equal_tensors, assert_same_run, codraft_trainer, plain_trainer
from peft import LoraConfig
from transformers.utils import logging


SAVING = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4, "draft_vocab_size": 48}


@pytest.fixture
def said(monkeypatch):
    """What the trainer says while it reads and writes checkpoints, by level."""
    texts = {"warning": [], "info": []}
    for level, heard in texts.items():
        monkeypatch.setattr(logging.get_logger("trl_codraft.grpo.draft_checkpoints"), level, heard.append)
    return texts


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The same run with the moments in its checkpoints and without."""
    trainers = {}
    for moments in (True, False):
        trainers[moments] = codraft_trainer(tmp_path_factory.mktemp("run"), draft_save_optimizer=moments, **SAVING)
        trainers[moments].train()
    return trainers


def checkpoint(trainer, step=2):
    return Path(trainer.args.output_dir) / f"checkpoint-{step}"


def saved_state(trainer, step=2):
    return torch.load(checkpoint(trainer, step) / "draft" / "draft_state.pt", weights_only=True)


def test_only_the_moments_are_left_out(runs):
    whole, lean = saved_state(runs[True]), saved_state(runs[False])
    assert lean["draft_trainer"].pop("optimizer") is None
    moments = whole["draft_trainer"].pop("optimizer")["state"]
    for name in ("draft", "target_ids"):
        ours, theirs = (state["draft_trainer"].pop(name) for state in (lean, whole))
        if name == "draft":
            assert_equal_tensors(ours, theirs)
        else:
            assert torch.equal(ours, theirs)
    assert lean == whole  # schedule, counters, controller
    weights = sum(parameter.numel() for parameter in runs[True].draft_trainer.parameters)
    assert sum(moment["exp_avg"].numel() + moment["exp_avg_sq"].numel() for moment in moments.values()) == 2 * weights
    sizes = {
        moments: (checkpoint(runs[moments]) / "draft" / "draft_state.pt").stat().st_size for moments in (True, False)
    }
    assert 0.98 * 8 * weights < sizes[True] - sizes[False] < 1.1 * 8 * weights + 20_000


def test_leaving_moments_out_changes_no_run(runs):
    assert_same_run(runs[False], runs[True])
    assert_equal_tensors(runs[False].draft_model.state_dict(), runs[True].draft_model.state_dict())


@pytest.mark.parametrize("now", [True, False], ids=["set True now", "set False now"])
@pytest.mark.parametrize("then", [True, False], ids=["saved with", "saved without"])
def test_resume_goes_on_with_what_there_is(then, now, runs, tmp_path, said):
    resumed = codraft_trainer(tmp_path, draft_save_optimizer=now, **SAVING)
    seen = {}
    load = resumed.draft_checkpoints.load

    def look(state):
        load(state)
        seen["state"] = copy.deepcopy(resumed.draft_trainer.state_dict())
        seen["random"] = torch.get_rng_state()
        seen["moments"] = len(resumed.draft_trainer.optimizer.state)

    resumed.draft_checkpoints.load = look
    resumed.train(resume_from_checkpoint=str(checkpoint(runs[then])))
    assert_equal_tensors(seen["state"]["draft"], saved_state(runs[then])["draft_trainer"]["draft"])
    for name in ("scheduler", "num_updates", "num_pretrain_updates"):
        assert seen["state"][name] == saved_state(runs[then])["draft_trainer"][name]
    assert (seen["moments"] > 0) == then
    complaints = [text for text in said["warning"] if "fresh moments" in text]
    assert len(complaints) == (0 if then else 1)
    # The policy's part, random state included: its rollouts are speculative, and do not follow the draft's moments
    # within the window that the resume begins.
    losses = [
        [entry["loss"] for entry in run.state.log_history if entry["step"] == 3] for run in (resumed, runs[True])
    ]
    assert losses[0] == losses[1]
    if then:
        assert_same_run_from(resumed, runs[True])
    assert (saved_state(resumed, 4)["draft_trainer"]["optimizer"] is not None) == now


def assert_same_run_from(resumed, whole):
    ours, theirs = (trainer.draft_trainer.state_dict() for trainer in (resumed, whole))
    assert_equal_tensors(ours["draft"], theirs["draft"])
    for name in ("exp_avg", "exp_avg_sq"):
        for index, moments in theirs["optimizer"]["state"].items():
            assert torch.equal(ours["optimizer"]["state"][index][name], moments[name])


def test_fresh_moments_are_those_of_a_new_optimizer(runs, tmp_path):
    """Not what a trainer had from an earlier run: the reference is AdamW's first update, in float64."""
    run = runs[False]
    resumed = codraft_trainer(tmp_path, **{**SAVING, "max_steps": 3})
    resumed.train()
    gradients, before = {}, {}
    update = resumed.draft_trainer._update

    def look():
        for name, parameter in resumed.draft_model.named_parameters():
            gradients[name], before[name] = parameter.grad.double().clone(), parameter.detach().double().clone()
        gradients["rate"] = resumed.draft_trainer.learning_rate
        update()

    resumed.draft_trainer._update = look
    resumed.train(resume_from_checkpoint=str(checkpoint(run)))
    for name, parameter in resumed.draft_model.named_parameters():
        # Bias correction makes the first step the gradient over its own size.
        expected = before[name] - gradients["rate"] * gradients[name] / (gradients[name].abs() + 1e-8)
        assert torch.allclose(parameter.double(), expected, rtol=0, atol=1e-6), name


@pytest.mark.parametrize("then", [True, False], ids=["trained then", "frozen then"])
def test_resume_across_a_change_of_draft_train(then, runs, tmp_path):
    """A frozen draft has no moments yet; those of a trained one wait."""
    runs[True].save_draft(tmp_path / "draft")
    config = {**SAVING, "save_steps": 1, "draft_model_name_or_path": str(tmp_path / "draft")}
    first = codraft_trainer(tmp_path / "first", draft_train=then, **{**config, "max_steps": 1})
    first.train()
    resumed = codraft_trainer(tmp_path / "resumed", draft_train=not then, **{**config, "max_steps": 2})
    resumed.train(resume_from_checkpoint=str(tmp_path / "first" / "checkpoint-1"))
    assert resumed.draft_trainer.num_updates == 1
    steps = {int(state["step"]) for state in resumed.draft_trainer.optimizer.state.values()}
    assert steps == {1}


def test_resume_takes_the_weight_decay_of_this_run(runs, tmp_path):
    resumed = codraft_trainer(tmp_path, draft_weight_decay=0.25, **SAVING)
    resumed.train(resume_from_checkpoint=str(checkpoint(runs[True])))
    assert [group["weight_decay"] for group in resumed.draft_trainer.optimizer.param_groups] == [0.25, 0.0]


def test_first_save_says_what_the_draft_adds_to_a_lora_run(tmp_path, said):
    lora = {"peft_config": LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")}
    config = {**SAVING, "save_steps": 1, "max_steps": 2}
    trainer = codraft_trainer(tmp_path / "ours", trainer=lora, **config)
    trainer.train()
    folder = tmp_path / "ours" / "checkpoint-1"
    files = {path: path.stat().st_size for path in folder.rglob("*") if path.is_file()}
    draft = sum(size for path, size in files.items() if path.parent.name == "draft")
    later = {"rng_state.pth", "trainer_state.json"}  # written after
    rest = sum(size for path, size in files.items() if path.parent.name != "draft" and path.name not in later)
    moments = 8 * sum(parameter.numel() for parameter in trainer.draft_trainer.parameters)
    (told,) = [text for text in said["warning"] if "bytes" in text]
    assert f"{draft:,} bytes of the draft and {rest:,} of everything else" in told
    counters = 4 * len(trainer.draft_trainer.parameters)
    assert f"{moments + counters:,} the state of its optimizer" in told
    assert "draft_save_optimizer=False" in told
    plain = plain_trainer(tmp_path / "plain", trainer=lora, save_strategy="steps", save_steps=1, max_steps=1)
    plain.train()
    assert not list((tmp_path / "plain").rglob("draft"))


def test_first_save_of_a_whole_policy_is_told_quietly(tmp_path, said):
    codraft_trainer(tmp_path, **{**SAVING, "save_steps": 1, "draft_vocab_size": 8, "max_steps": 2}).train()
    sizes = [text for text in said["info"] if "bytes of the draft" in text]
    assert len(sizes) == 1
    assert not [text for text in said["warning"] if "bytes of the draft" in text]


def test_save_over_an_earlier_run_leaves_nothing_of_it(runs, tmp_path):
    """`save_only_model=True` writes no state; that of the earlier run would be read in the place of what was saved."""
    shutil.copytree(checkpoint(runs[True]), tmp_path / "checkpoint-2")
    config = {**SAVING, "max_steps": 2, "learning_rate": 0.1}
    lean = codraft_trainer(tmp_path, save_only_model=True, **config)
    lean.train()
    assert not (tmp_path / "checkpoint-2" / "draft" / "draft_state.pt").exists()
    codraft_trainer(tmp_path, use_draft=False, **{**config, "draft_vocab_size": None}).train()
    assert not (tmp_path / "checkpoint-2" / "draft").exists()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    out = tmp_path_factory.mktemp("ranks")
    seen = run_script("draft_moments_worker.py", out, timeout=200, folder="distributed")
    return [{**rank, "checkpoint": out / "run" / "checkpoint-1"} for rank in seen]


def test_shared_moments_may_be_left_out_too(ranks):
    for rank in ranks:
        assert rank["optimizer"] is None
        assert rank["saved"].keys() == rank["draft"].keys()
        assert_equal_tensors(rank["saved"], rank["resumed from"])
        assert rank["moments after a step"] > 0
    assert_equal_tensors(ranks[0]["draft"], ranks[1]["draft"])
    assert [len(rank["warnings"]) for rank in ranks] == [1, 0]
    assert sum(rank["moments after a step"] for rank in ranks) == ranks[0]["weights"]


def test_one_process_resumes_what_two_have_saved(ranks, tmp_path):
    resumed = codraft_trainer(tmp_path, max_steps=2)
    resumed.train(resume_from_checkpoint=str(ranks[0]["checkpoint"]))
    assert resumed.state.global_step == 2
    assert resumed.draft_trainer.num_updates == 2
