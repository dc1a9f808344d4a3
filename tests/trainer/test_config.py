"""Every draft field through `TrlParser`, and the refusals of the configuration."""

import os
import re
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from accelerate import ParallelismConfig
from accelerate.commands.config import load_config_from_file
from accelerate.utils.launch import prepare_extend_env_parallelism_config
from grpo_runs import settings
from trl import GRPOConfig, TrlParser

from trl_codraft import CoDraftGRPOConfig
from trl_codraft.grpo.trl_patches import not_sharded_by_accelerate


# field -> (text on the command line, value in YAML, value after parsing)
VALUES = {
    "use_draft": ("false", False, False),
    "draft_model_name_or_path": ("me/draft", "me/draft", "me/draft"),
    "draft_train": ("false", False, False),
    "draft_tap_layers": ("1 2 3", [1, 2, 3], [1, 2, 3]),
    "draft_num_hidden_layers": ("2", 2, 2),
    "draft_vocab_size": ("64", 64, 64),
    "draft_fc_norm": ("true", True, True),
    "draft_norm_output": ("true", True, True),
    "draft_ttt_steps": ("7", 7, 7),
    "draft_ttt_decay": ("0.5", 0.5, 0.5),
    "draft_detach_passes": ("true", True, True),
    "draft_teacher_temperature": ("0.7", 0.7, 0.7),
    "draft_learning_rate": ("1e-4", 1e-4, 1e-4),
    "draft_pretrain_learning_rate": ("2e-4", 2e-4, 2e-4),
    "draft_lr_scheduler_type": ("cosine", "cosine", "cosine"),
    "draft_warmup_steps": ("3", 3, 3),
    "draft_weight_decay": ("0.1", 0.1, 0.1),
    "draft_max_grad_norm": ("0.5", 0.5, 0.5),
    "draft_shard_optimizer": ("true", True, True),
    "draft_save_optimizer": ("false", False, False),
    "draft_loss_chunk_size": ("64", 64, 64),
    "draft_train_on_prompt": ("true", True, True),
    "draft_pretrain_steps": ("5", 5, 5),
    "speculative_rollouts": ("true", True, "true"),
    "num_draft_tokens": ("3", 3, 3),
    "rollout_cuda_graphs": ("true", True, True),
    "context_parallel_size": ("2", 2, 2),
    "context_parallel_layout": ("document", "document", "document"),
    "context_parallel_trunk": ("gather_once", "gather_once", "gather_once"),
    "draft_vllm_server_sync": ("static", "static", "static"),
    "pipeline_parallel_size": ("2", 2, 2),
    "pipeline_schedule": ("Interleaved1F1B", "Interleaved1F1B", "Interleaved1F1B"),
    "layers_per_stage": ("1 2 2 1", [1, 2, 2, 1], [1, 2, 2, 1]),
    "tap_channel_slots": ("4", 4, 4),
    "pipeline_replica": ("false", False, False),
    "pipeline_shard_optimizer": ("true", True, True),
}
OWN_FIELDS = {spec.name for spec in fields(CoDraftGRPOConfig)} - {spec.name for spec in fields(GRPOConfig)}
BASE = ["--use_cpu", "true", "--bf16", "false", "--report_to", "none"]


def parse(arguments):
    (config,) = TrlParser(CoDraftGRPOConfig).parse_args_and_config(arguments)
    return config


def test_every_own_field_is_listed_and_has_help():
    assert OWN_FIELDS == set(VALUES)
    for spec in fields(CoDraftGRPOConfig):
        if spec.name in OWN_FIELDS:
            assert spec.metadata["help"] % () == spec.metadata["help"]


def test_no_arguments_give_the_defaults(tmp_path):
    config = parse(["--output_dir", str(tmp_path), *BASE])
    for spec in fields(CoDraftGRPOConfig):
        if spec.name in OWN_FIELDS:
            assert getattr(config, spec.name) == spec.default


def test_all_fields_on_the_command_line(tmp_path):
    arguments = ["--output_dir", str(tmp_path), *BASE]
    for name, (text, _, _) in VALUES.items():
        if text is not None:
            arguments += [f"--{name}", *text.split()]
    config = parse(arguments)
    assert {name: getattr(config, name) for name in VALUES} == {name: value[2] for name, value in VALUES.items()}


def test_all_fields_in_yaml(tmp_path):
    path = tmp_path / "config.yaml"
    content = {"output_dir": str(tmp_path), "use_cpu": True, "bf16": False, "report_to": "none"}
    content.update({name: value[1] for name, value in VALUES.items() if value[1] is not None})
    path.write_text(yaml.safe_dump(content))
    config = parse(["--config", str(path)])
    assert {name: getattr(config, name) for name in VALUES} == {name: value[2] for name, value in VALUES.items()}


def test_plain_grpo_config_gets_the_drafts_defaults_without_a_second_post_init(tmp_path):
    plain = GRPOConfig(**settings(tmp_path))
    config = CoDraftGRPOConfig.from_grpo_config(plain)
    assert config.generation_batch_size == plain.generation_batch_size
    assert config.draft_ttt_steps == 4
    assert CoDraftGRPOConfig.from_grpo_config(config) is config


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"num_draft_tokens": "0"}, "speculative_rollouts='false'"),
        ({"num_draft_tokens": "many"}, "must be 'auto' or an integer of at least 1 and at most 16, got 'many'"),
        ({"speculative_rollouts": "maybe"}, "must be 'auto', 'true' or 'false'"),
        ({"draft_vllm_server_sync": "sometimes"}, r"must be one of \('push', 'static'\)"),
        ({"draft_ttt_steps": 0}, "`draft_ttt_steps` must be an integer of at least 1"),
        ({"draft_pretrain_steps": 1.5}, "`draft_pretrain_steps` must be an integer of at least 0"),
        ({"full_determinism": True}, "Set `num_draft_tokens` to an integer"),
        ({"context_parallel_size": 0}, "`context_parallel_size` must be an integer of at least 1"),
        ({"context_parallel_layout": "pack"}, r"`context_parallel_layout` must be one of \('document', 'hybrid'\)"),
        ({"context_parallel_trunk": "once"}, r"`context_parallel_trunk` must be one of \('ring', 'gather_once'\)"),
        (
            {"context_parallel_size": 4, "parallelism_config": ParallelismConfig(cp_size=2)},
            "`context_parallel_size=4`, but `cp_size=2`",
        ),
        ({"parallelism_config": ParallelismConfig(cp_size=2, tp_size=2)}, "Set `tp_size=1`"),
        ({"pipeline_parallel_size": 0}, "`pipeline_parallel_size` must be an integer of at least 1"),
        ({"pipeline_schedule": "ZBV"}, r"`pipeline_schedule` must be one of \('GPipe', '1F1B', 'Interleaved1F1B'\)"),
        ({"layers_per_stage": [2, 2]}, "`layers_per_stage` is set with `pipeline_parallel_size=1`"),
        ({"pipeline_replica": False}, "`pipeline_replica` is set with `pipeline_parallel_size=1`"),
        ({"pipeline_shard_optimizer": True}, "`pipeline_shard_optimizer` is set with `pipeline_parallel_size=1`"),
        ({"tap_channel_slots": 4}, "`tap_channel_slots` is set with `pipeline_parallel_size=1`"),
        (
            {"pipeline_parallel_size": 2, "tap_channel_slots": 0},
            "`tap_channel_slots` must be an integer of at least 1 or None",
        ),
        ({"pipeline_parallel_size": 2, "layers_per_stage": [1, 1, 1]}, "gives 3 stages to 2 ranks"),
        ({"pipeline_parallel_size": 2, "layers_per_stage": [1, 1, 1, 1]}, "gives 4 stages to 2 ranks under"),
        (
            {"pipeline_parallel_size": 2, "pipeline_schedule": "Interleaved1F1B", "layers_per_stage": [2, 2]},
            "with 'Interleaved1F1B' two or more times as many",
        ),
        ({"pipeline_parallel_size": 2, "fp16": True}, "Set `bf16=True`"),
    ],
)
def test_refused_value(overrides, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        CoDraftGRPOConfig(**settings(tmp_path, **overrides))


@pytest.mark.parametrize("size", [1, 2])
def test_context_parallelism_of_accelerate_is_taken_over_and_not_passed_on(size, tmp_path):
    given = ParallelismConfig(cp_size=2)
    config = CoDraftGRPOConfig(**settings(tmp_path, context_parallel_size=size, parallelism_config=given))
    assert config.context_parallel_size == 2
    assert config.parallelism_config is None


def test_replicas_of_accelerate_stay_and_shards_grow_by_the_ranks_of_a_group(tmp_path):
    given = ParallelismConfig(cp_size=2, dp_replicate_size=3, dp_shard_size=4)
    config = CoDraftGRPOConfig(**settings(tmp_path, parallelism_config=given)).parallelism_config
    assert (config.cp_size, config.dp_replicate_size, config.dp_shard_size) == (1, 3, 8)


@pytest.fixture
def launched_with_two_context_ranks(monkeypatch):
    """What `accelerate launch` sets for `parallelism_config_cp_size: 2`."""
    monkeypatch.setenv("ACCELERATE_USE_PARALLELISM_CONFIG", "true")
    monkeypatch.setenv("PARALLELISM_CONFIG_CP_SIZE", "2")


@pytest.mark.usefixtures("launched_with_two_context_ranks")
def test_context_parallelism_that_accelerate_launch_sets_is_taken_over_by_every_config(tmp_path):
    for _ in range(2):
        assert CoDraftGRPOConfig(**settings(tmp_path)).context_parallel_size == 2
        assert CoDraftGRPOConfig.from_grpo_config(GRPOConfig(**settings(tmp_path))).context_parallel_size == 2


@pytest.mark.usefixtures("launched_with_two_context_ranks")
def test_accelerate_does_not_see_the_context_parallelism_that_is_taken_over(tmp_path):
    config = CoDraftGRPOConfig(**settings(tmp_path))
    with not_sharded_by_accelerate(config.context_parallel_size):
        assert os.environ["ACCELERATE_USE_PARALLELISM_CONFIG"] == "false"
    assert os.environ["ACCELERATE_USE_PARALLELISM_CONFIG"] == "true"


def test_parallelism_without_context_is_passed_on(tmp_path):
    given = ParallelismConfig(dp_shard_size=2)
    config = CoDraftGRPOConfig(**settings(tmp_path, parallelism_config=given))
    assert config.parallelism_config is given
    assert config.context_parallel_size == 1


def test_example_for_accelerate_launch_asks_for_context_parallelism(tmp_path, monkeypatch):
    example = Path(__file__).resolve().parents[2] / "examples" / "accelerate_configs" / "context_parallel.yaml"
    arguments = load_config_from_file(str(example))
    assert arguments.num_processes % arguments.parallelism_config["parallelism_config_cp_size"] == 0
    launched = SimpleNamespace(**arguments.parallelism_config)
    for name, value in prepare_extend_env_parallelism_config(launched, {}).items():
        monkeypatch.setenv(name, value)
    config = CoDraftGRPOConfig(**settings(tmp_path))
    assert (config.context_parallel_size, config.parallelism_config) == (4, None)


def test_example_for_two_nodes_holds_whole_pipelines_on_each():
    folder = Path(__file__).resolve().parents[2]
    example = folder / "examples" / "accelerate_configs" / "pipeline_parallel.yaml"
    arguments = load_config_from_file(str(example))
    docs = (folder / "docs" / "parallelism.md").read_text()
    (size,) = set(re.findall(r"pipeline_parallel\.yaml[^`]*?--pipeline_parallel_size (\d+)", docs))
    assert f"`--pipeline_parallel_size {size}`" in example.read_text()
    assert (arguments.num_machines, arguments.num_processes) == (2, 16)
    assert arguments.num_processes // arguments.num_machines % int(size) == 0


@pytest.mark.parametrize(
    ("settings", "whole"),
    [
        ({"pipeline_parallel_size": 1}, True),
        ({"pipeline_parallel_size": 1, "use_vllm": True, "vllm_mode": "server"}, True),
        ({}, True),
        ({"use_vllm": True, "vllm_mode": "server"}, False),
        ({"use_vllm": True, "vllm_mode": "server", "pipeline_replica": True}, True),
        ({"pipeline_replica": False}, False),
    ],
)
def test_ranks_of_a_pipeline_hold_the_whole_policy_unless_a_server_generates(tmp_path, settings, whole):
    config = CoDraftGRPOConfig(
        str(tmp_path), **{"use_cpu": True, "bf16": False, "pipeline_parallel_size": 2, **settings}
    )
    assert config.holds_whole_policy is whole
