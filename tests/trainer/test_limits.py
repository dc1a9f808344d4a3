"""Every value and every bound of every field of ours, in Python, in YAML and on the command line."""

import math
import re
from dataclasses import fields
from pathlib import Path

import pytest
from grpo_runs import settings
from trainer.test_config import BASE, OWN_FIELDS, parse
from transformers import SchedulerType

from trl_codraft import CoDraftGRPOConfig
from trl_codraft.training.draft_trainer import DraftTrainingArguments


# field -> (values that work, values that do not), besides `WRONG`
FLAG = ([True, False], [None, 0, 1, "true", "false", "no"])
COUNT = ([1, 1000], [None, 0, -1, 2.0, True, "2"])
COUNT_OR_NONE = ([None, 1, 1000], [0, -1, 2.0, True, "2"])
STEPS = ([0, 1, 1000], [None, -1, 2.0, False, "2"])
POSITIVE = ([1e-30, 1, 2.5], [None, 0, 0.0, -1.0, True, "0.1", 10**400])
NOT_NEGATIVE = ([0, 0.0, 1, 2.5], [None, -1e-9, True, "0.1", 10**400])
LIMITS = {
    "use_draft": FLAG,
    "draft_model_name_or_path": ([None, "me/draft", Path("draft")], ["", 3, True]),
    "draft_train": FLAG,
    "draft_tap_layers": ([None, [0], [1, 2, 9]], [[-1, 2], [2, 1], [1, 1], [1.0], [True], ["1"], [None], 1, "1 2"]),
    "draft_num_hidden_layers": COUNT,
    "draft_vocab_size": COUNT_OR_NONE,
    "draft_fc_norm": FLAG,
    "draft_norm_output": FLAG,
    "draft_ttt_steps": COUNT,
    "draft_ttt_decay": ([1e-30, 0.5, 1, 1.0], [None, 0, 0.0, -0.5, 1.0000001, 1.5, 2, True, "0.5", 10**400]),
    "draft_detach_passes": FLAG,
    "draft_teacher_temperature": ([None, 1e-30, 1, 2.5], [0, 0.0, -1.0, True, "0.1", 10**400]),
    "draft_learning_rate": POSITIVE,
    "draft_pretrain_learning_rate": POSITIVE,
    "draft_lr_scheduler_type": (
        ["linear", "cosine", "cosine_with_restarts", "polynomial", "constant", "constant_with_warmup", "inverse_sqrt"],
        ["reduce_lr_on_plateau", "greedy", "warmup_stable_decay", "cosine_with_min_lr", "cosine_warmup_with_min_lr"]
        + ["zigzag", "", "Linear", None, 3, True],
    ),
    "draft_warmup_steps": STEPS,
    "draft_weight_decay": NOT_NEGATIVE,
    "draft_max_grad_norm": NOT_NEGATIVE,
    "draft_shard_optimizer": FLAG,
    "draft_save_optimizer": FLAG,
    "draft_loss_chunk_size": COUNT,
    "draft_train_on_prompt": FLAG,
    "draft_pretrain_steps": STEPS,
    "speculative_rollouts": (["auto", "true", "false", True, False, "True"], [None, 0, 1, "", "yes"]),
    "num_draft_tokens": (["auto", "AUTO", 1, 16, "1", "16"], [None, 0, 17, -1, 2.0, True, "0", "17", "9" * 5000, "x"]),
    "rollout_cuda_graphs": FLAG,
    "draft_vllm_server_sync": (["push", "static"], [None, "", "Push", True]),
    "context_parallel_size": COUNT,
    "context_parallel_layout": (["document", "hybrid"], [None, "", "pack"]),
    "context_parallel_trunk": (["ring", "gather_once"], [None, "", "once"]),
    "pipeline_parallel_size": COUNT,
    "pipeline_schedule": (["GPipe", "1F1B"], [None, "", "gpipe", "ZBV"]),
    "layers_per_stage": (
        [None, [1, 1], [3, 1]],
        [[0, 2], [-1, 3], [1.0, 1], [True, 1], ["1", 1], [None, 1], 2, "1 1"],
    ),
    "pipeline_replica": ([None, True, False], [0, 1, "true"]),
    "pipeline_shard_optimizer": FLAG,
    "tap_channel_slots": COUNT_OR_NONE,
}
WRONG = (math.nan, math.inf, -math.inf, [], {}, [math.nan], object(), b"2", 1j)
# What has a meaning in a pipeline only.
PIPELINE = ("layers_per_stage", "pipeline_replica", "pipeline_shard_optimizer", "tap_channel_slots")
# What the draft's own training has in common with the run, by field of both.
TRAINING = {
    "num_passes": "draft_ttt_steps",
    "loss_chunk_size": "draft_loss_chunk_size",
    "lr_scheduler_type": "draft_lr_scheduler_type",
    "max_grad_norm": "draft_max_grad_norm",
    "warmup_steps": "draft_warmup_steps",
    "weight_decay": "draft_weight_decay",
    "decay": "draft_ttt_decay",
    "learning_rate": "draft_learning_rate",
    "pretrain_learning_rate": "draft_pretrain_learning_rate",
    "detach_passes": "draft_detach_passes",
}
TEMPERATURES = ("teacher_temperature", "rollout_temperature")


def limited(tmp_path, name, value):
    """A configuration with one field set."""
    pipeline = {"pipeline_parallel_size": 2} if name in PIPELINE else {}
    return CoDraftGRPOConfig(**settings(tmp_path, **pipeline, **{name: value}))


def refused(name):
    """The error that names a field in its first words."""
    return pytest.raises(ValueError, match=rf"^`{name}[`=]")


def test_every_field_of_ours_has_limits_here():
    assert set(LIMITS) == OWN_FIELDS
    assert {spec.name for spec in fields(DraftTrainingArguments)} == {*TRAINING, *TEMPERATURES}


@pytest.mark.parametrize("name", LIMITS)
def test_every_value_inside_the_limits_of_a_field_is_taken(name, tmp_path):
    for value in LIMITS[name][0]:
        config = limited(tmp_path, name, value)
        assert str(getattr(config, name)).lower() == str(value).lower()


@pytest.mark.parametrize("name", LIMITS)
def test_every_value_outside_the_limits_of_a_field_is_refused_by_its_name(name, tmp_path):
    for value in (*LIMITS[name][1], *WRONG):
        with refused(name) as caught:
            limited(tmp_path, name, value)
        assert repr(value)[:70] in str(caught.value)
        assert len(str(caught.value)) < 600


@pytest.mark.parametrize("name", LIMITS)
def test_values_set_after_construction_are_refused_when_the_trainer_takes_them(name, tmp_path):
    config = limited(tmp_path, name, LIMITS[name][0][-1])
    assert CoDraftGRPOConfig.from_grpo_config(config) is config
    setattr(config, name, LIMITS[name][1][-1])
    with refused(name):
        CoDraftGRPOConfig.from_grpo_config(config)


@pytest.mark.parametrize("name", [*TRAINING, *TEMPERATURES])
def test_the_drafts_own_training_has_the_limits_of_the_run_and_positive_temperatures(name):
    good, bad = POSITIVE if name in TEMPERATURES else LIMITS[TRAINING[name]]
    for value in good:
        DraftTrainingArguments(**{name: value})
    for value in (*bad, *WRONG):
        with refused(name):
            DraftTrainingArguments(**{name: value})


def test_schedules_are_tried_for_every_kind_that_transformers_has():
    good, bad = LIMITS["draft_lr_scheduler_type"]
    assert {kind.value for kind in SchedulerType} <= {*good, *bad}


def test_the_error_about_a_schedule_lists_those_that_work(tmp_path):
    with refused("draft_lr_scheduler_type") as caught:
        limited(tmp_path, "draft_lr_scheduler_type", "greedy")
    assert re.findall(r"'(\w+)'", str(caught.value)) == ["greedy", *LIMITS["draft_lr_scheduler_type"][0]]


def test_a_run_without_randomness_has_no_draft(tmp_path):
    with refused("temperature"):
        limited(tmp_path, "temperature", 0.0)
    assert CoDraftGRPOConfig(**settings(tmp_path, temperature=0.0, use_draft=False)).temperature == 0.0


# field -> (text on the command line or in YAML, the value that results)
WRITTEN = {
    "draft_learning_rate": ("1e-4", 1e-4),  # to YAML 1.1, a string
    "draft_max_grad_norm": ("0", 0.0),
    "draft_train": ("no", False),
    "speculative_rollouts": ("False", "false"),
    "num_draft_tokens": ("4", 4),
    "draft_ttt_decay": ("1", 1.0),
}
MISWRITTEN = {
    "draft_ttt_decay": ".nan",
    "draft_learning_rate": ".inf",
    "draft_max_grad_norm": "-1",
    "draft_ttt_steps": "true",
    "draft_pretrain_steps": "2.5",
    "draft_warmup_steps": "null",
    "draft_weight_decay": "[1, 2]",
    "draft_tap_layers": "[2, 1]",
    "draft_model_name_or_path": "''",
    "draft_lr_scheduler_type": "reduce_lr_on_plateau",
}


@pytest.mark.parametrize("name", WRITTEN)
def test_what_yaml_and_the_command_line_write_is_read_alike(name, tmp_path):
    text, value = WRITTEN[name]
    path = tmp_path / "config.yaml"
    path.write_text(f"output_dir: {tmp_path}\nuse_cpu: true\nbf16: false\nreport_to: none\n{name}: {text}\n")
    for config in (parse(["--config", str(path)]), parse(["--output_dir", str(tmp_path), *BASE, f"--{name}", text])):
        assert getattr(config, name) == value
        assert isinstance(getattr(config, name), bool) == isinstance(value, bool)


@pytest.mark.parametrize("name", MISWRITTEN)
def test_what_yaml_writes_wrong_is_refused_by_its_name(name, tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(f"output_dir: {tmp_path}\nuse_cpu: true\nbf16: false\n{name}: {MISWRITTEN[name]}\n")
    with refused(name):
        parse(["--config", str(path)])


@pytest.mark.parametrize("text", ["nan", "inf", "-1", "0"])
def test_numbers_that_only_the_command_line_reads_are_refused(text, tmp_path):
    with refused("draft_learning_rate"):
        parse(["--output_dir", str(tmp_path), *BASE, "--draft_learning_rate", text])
