"""The GRPO script on a tiny policy and a local dataset, and its refusals."""

import json
import os
import re
import sys
from unittest.mock import patch

import pytest
import trl
from tiny import tiny_policy, tiny_tokenizer
from trl import DatasetMixtureConfig
from trl.scripts import grpo as trl_grpo

from trl_codraft import Eagle3DraftModel
from trl_codraft.cli import main
from trl_codraft.scripts import grpo


def arguments(tmp_path, *extra):
    policy, tokenizer = tiny_policy(), tiny_tokenizer()
    policy.save_pretrained(tmp_path / "policy")
    tokenizer.save_pretrained(tmp_path / "policy")
    (tmp_path / "data").mkdir()
    rows = [{"prompt": f"prompt {index}"} for index in range(8)]
    (tmp_path / "data" / "train.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    return [
        *("--model_name_or_path", str(tmp_path / "policy"), "--dataset_name", str(tmp_path / "data")),
        *("--output_dir", str(tmp_path / "out"), "--use_cpu", "--bf16", "false", "--max_steps", "1"),
        *("--per_device_train_batch_size", "4", "--num_generations", "4", "--max_completion_length", "4"),
        *("--draft_pretrain_steps", "1", "--num_draft_tokens", "2", "--report_to", "none", "--disable_tqdm", "true"),
        *("--save_strategy", "no", *extra),
    ]


def by_length(completions, **kwargs):
    return [float(len(completion)) for completion in completions]


def test_script_trains_and_saves_policy_and_draft(tmp_path):
    grpo.main(arguments(tmp_path, "--reward_funcs", f"{__name__}.by_length"))
    assert (tmp_path / "out" / "model.safetensors").is_file()
    draft = Eagle3DraftModel.from_pretrained(str(tmp_path / "out" / "draft"))
    assert draft.config.vocab_size == tiny_policy().config.vocab_size


MISTAKES = {
    "value": (["--speculative_rollouts", "maybe"], "`speculative_rollouts` must be 'auto', 'true' or 'false'"),
    "option": (["--draft_ttt_step5", "3"], "--draft_ttt_step5"),
    "config": (["--config", "nowhere.yaml"], "nowhere.yaml"),
    "broken-config": (["--config", "BROKEN"], "not valid YAML"),
    "model": (["--model_name_or_path", "./no-policy"], "./no-policy"),
    "dataset": (["--dataset_name", "./no-data"], "./no-data"),
    "split": (["--dataset_train_split", "trian"], "no split 'trian': its splits are ['train']"),
    "reward": (["--reward_funcs", "nonsense"], "Unknown reward function 'nonsense'"),
    "reward-module": (["--reward_funcs", "no_such.module.reward"], "No module 'no_such'"),
    "reward-function": (["--reward_funcs", f"{__name__}.by_size"], "has no function 'by_size'"),
    "reward-class": (["--reward_funcs", "no_such.module.Kind.reward"], "No module 'no_such'"),
    "reward-path": (["--reward_funcs", "./rewards.py"], "is no dotted import path"),
    "reward-model": (["--reward_funcs", "me/reward-1.5"], "A reward model goes to `--reward_model_name_or_path`"),
    "reward-dots": (["--reward_funcs", ".rewards..length"], "is no dotted import path"),
    "reward-value": (["--reward_funcs", "math.pi"], "`--reward_funcs math.pi` is a float, which cannot be called"),
    "reward-package": (["--reward_funcs", "os.path"], "`--reward_funcs os.path` is a module, which cannot be called"),
    "repo": (["--draft_repo_id", "bad repo id!!"], "`draft_repo_id='bad repo id!!'` can be no repository of the Hub"),
    "repo-empty": (["--draft_repo_id", ""], "`draft_repo_id=''` can be no repository of the Hub"),
    "repo-without-draft": (["--draft_repo_id", "me/draft", "--use_draft", "false"], "there will be no draft to push"),
    "decay": (
        ["--draft_ttt_decay", "1.5"],
        "`draft_ttt_decay` must be a finite number above 0 and at most 1, got 1.5",
    ),
    "schedule": (["--draft_lr_scheduler_type", "greedy"], "`draft_lr_scheduler_type='greedy'` depends on more"),
    "taps": (["--draft_tap_layers", "1", "9"], "`draft_tap_layers` [1, 9] do not exist"),
}


@pytest.mark.parametrize(("mistake", "message"), MISTAKES.values(), ids=MISTAKES)
def test_mistakes_end_with_one_line(tmp_path, capsys, mistake, message):
    (tmp_path / "broken.yaml").write_text("a: [")
    mistake = [str(tmp_path / "broken.yaml") if part == "BROKEN" else part for part in mistake]
    # What is wrong comes last and wins.
    assert main(["grpo", *arguments(tmp_path, "--reward_funcs", f"{__name__}.by_length"), *mistake]) == 1
    error = capsys.readouterr().err
    assert "Traceback" not in error
    assert message in error[error.index("trl-codraft grpo: error: ") :]


@pytest.mark.parametrize("mistake", [["--max_steps", "many"], ["--config"]], ids=["value", "no-config"])
def test_value_of_the_wrong_type_ends_with_one_line_after_a_short_usage(capsys, mistake):
    with pytest.raises(SystemExit) as stop:
        main(["grpo", *mistake])
    assert stop.value.code == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 2


def test_errors_inside_a_module_of_rewards_are_not_taken_for_a_wrong_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rewards_with_a_bug.py").write_text("import no_such_dependency\n")
    with pytest.raises(ModuleNotFoundError, match="no_such_dependency"):
        grpo.load_reward_funcs(grpo.CoDraftScriptArguments(reward_funcs=["rewards_with_a_bug.reward"]))


LAZY = """
import importlib

class Kind:
    @staticmethod
    def reward(completions, **kwargs):
        return [3.0] * len(completions)

    def __call__(self, completions, **kwargs):
        return [4.0] * len(completions)

eager = Kind()
MODEL = "me/reward-model"

def __getattr__(name):
    if name == "late":
        return importlib.import_module("lazy_rewards.inner").reward
    raise AttributeError(f"nothing lazy is called {name}")
"""


@pytest.fixture
def lazy_package(tmp_path, monkeypatch):
    """
    A package in the working directory that makes a name when asked for it, as Transformers and TRL themselves do.
    """
    package = tmp_path / "lazy_rewards"
    package.mkdir()
    (package / "__init__.py").write_text(LAZY)
    (package / "inner.py").write_text("def reward(completions, **kwargs):\n    return [5.0] * len(completions)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "lazy_rewards"]:
        del sys.modules[name]


def as_trl_finds(path):
    """What TRL's own script makes of a dotted path."""
    built = []

    def trainer(**kwargs):
        built.extend(kwargs["reward_funcs"])
        raise StopIteration

    arguments = trl_grpo.GRPOScriptArguments(reward_funcs=[path], dataset_name="any")
    with patch("trl.GRPOTrainer", trainer), patch("datasets.load_dataset", lambda *args, **kwargs: {"train": None}):
        with pytest.raises(StopIteration):
            trl_grpo.main(
                arguments, trl.GRPOConfig(use_cpu=True, bf16=False), trl.ModelConfig(), DatasetMixtureConfig()
            )
    return built


def as_we_find(path):
    return grpo.load_reward_funcs(grpo.CoDraftScriptArguments(reward_funcs=[path]))


@pytest.mark.usefixtures("lazy_package")
@pytest.mark.parametrize(
    "path",
    ["lazy_rewards.late", "lazy_rewards.eager", "lazy_rewards.Kind", "lazy_rewards.MODEL", "lazy_rewards.inner.reward"]
    + ["trl.rewards.accuracy_reward", "trl.rewards.format_rewards.think_format_reward", "accuracy_reward"],
)
def test_rewards_are_found_where_trl_finds_them(path):
    (ours,), (theirs,) = as_we_find(path), as_trl_finds(path)
    assert ours is theirs


@pytest.mark.usefixtures("lazy_package")
def test_attributes_of_classes_are_found_too():
    (reward,) = as_we_find("lazy_rewards.Kind.reward")
    assert reward(completions=["a", "b"]) == [3.0, 3.0]


@pytest.mark.usefixtures("lazy_package")
def test_names_that_a_lazy_module_does_not_know_are_named_with_its_own_reason():
    with pytest.raises(ValueError, match="no function 'later' for .*nothing lazy is called later"):
        as_we_find("lazy_rewards.later")


def test_config_file_is_overridden_by_the_command_line(tmp_path):
    config = tmp_path / "run.yaml"
    config.write_text("draft_ttt_steps: 3\ndraft_vocab_size: 64\nuse_cpu: true\nbf16: false\n")
    parsed = grpo.make_parser().parse_args_and_config(args=["--config", str(config), "--draft_ttt_steps", "2"])
    assert (parsed[1].draft_ttt_steps, parsed[1].draft_vocab_size) == (2, 64)


SPELLINGS = {
    "apart": lambda name: ["--draft_ttt_steps", "2", "--config", name],
    "joined": lambda name: [f"--config={name}", "--draft-ttt-steps=2"],
    "abbreviated": lambda name: ["--conf", name, "--draft_ttt_st", "2"],
    "abbreviated-joined": lambda name: ["--draft_ttt_steps=2", f"--confi={name}"],
}


@pytest.mark.parametrize("spelling", SPELLINGS.values(), ids=SPELLINGS)
def test_every_spelling_of_the_config_option_is_read(tmp_path, spelling):
    config = tmp_path / "run.yaml"
    config.write_text("draft_ttt_steps: 3\ndraft-vocab-size: 64\nuse_cpu: true\nbf16: false\n")
    parsed = grpo.make_parser().parse_args_and_config(spelling(str(config)))
    assert (parsed[1].draft_ttt_steps, parsed[1].draft_vocab_size) == (2, 64)


# A line of the file, and the same on the command line.
SAME_VALUES = {
    "one-for-a-list": ("reward_funcs: accuracy_reward", ["--reward_funcs", "accuracy_reward"]),
    "list": ("draft_tap_layers: [1, 2]", ["--draft_tap_layers", "1", "2"]),
    "list-of-floats": ("reward_weights: [1, 0.5]", ["--reward_weights", "1", "0.5"]),
    "scientific": ("learning_rate: 1e-5", ["--learning_rate", "1e-5"]),
    "word-that-is-false": ("save_strategy: no", ["--save_strategy", "no"]),
    "switch-off": ("use_draft: false", ["--no_use_draft"]),
    "quoted-switch": ('use_draft: "false"', ["--use_draft", "false"]),
    "choice": ("lr_scheduler_type: cosine", ["--lr_scheduler_type", "cosine"]),
    "number-as-text": ("num_draft_tokens: 4", ["--num_draft_tokens", "4"]),
    "null": ("draft_vocab_size: null", []),
}


@pytest.mark.parametrize(("content", "line"), SAME_VALUES.values(), ids=SAME_VALUES)
def test_a_value_of_the_file_is_the_value_of_the_command_line(tmp_path, content, line):
    common = ["--use_cpu", "--bf16", "false", "--output_dir", str(tmp_path)]
    (tmp_path / "run.yaml").write_text(content + "\n")
    from_file = grpo.make_parser().parse_args_and_config([*common, "--config", str(tmp_path / "run.yaml")])
    from_line = grpo.make_parser().parse_args_and_config([*common, *line])
    # By text: settings that became objects do not compare.
    assert [{name: str(getattr(part, name)) for name in part.__dataclass_fields__} for part in from_file] == [
        {name: str(getattr(part, name)) for name in part.__dataclass_fields__} for part in from_line
    ]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("max_stepz: 3", "max_stepz"),
        ("config: other.yaml", "config"),
        ("max_steps: 3\nmax_steps: 4", "stands twice"),
        ("max_steps: 3\nmax-steps: 4", "twice, once with"),
        ("max_steps: 2.5", "`max_steps` cannot be 2.5"),
        ("max_steps: true", "`max_steps` is a number"),
        ("max_steps: [1]", "`max_steps` takes one value"),
        ("use_draft: maybe", "`use_draft` cannot be 'maybe'"),
        ("save_strategy: never", "`save_strategy` is 'never': choose one of no, steps"),
        ("draft_tap_layers: [1, null]", "`draft_tap_layers` takes plain values"),
        ("env: [1]", "`env` must map"),
        ("- max_steps", "must hold a mapping"),
    ],
)
def test_no_value_of_a_file_is_dropped_or_bent(tmp_path, content, message):
    (tmp_path / "run.yaml").write_text(content + "\n")
    with pytest.raises(ValueError, match=re.escape(message)):
        grpo.make_parser().parse_args_and_config(["--config", str(tmp_path / "run.yaml")])


def test_variables_of_the_file_are_set_and_nested_settings_stay_nested(tmp_path, monkeypatch):
    monkeypatch.setenv("OF_THE_FILE", "")
    (tmp_path / "run.yaml").write_text(
        "env: {OF_THE_FILE: 3}\nmodel_init_kwargs: {a: {b: 1}}\ndatasets:\n  - path: p\nuse_cpu: true\nbf16: false\n"
    )
    parsed = grpo.make_parser().parse_args_and_config([f"--config={tmp_path / 'run.yaml'}"])
    assert os.environ["OF_THE_FILE"] == "3"
    assert parsed[1].model_init_kwargs == {"a": {"b": 1}}
    assert parsed[3].datasets[0].path == "p"


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"reward_funcs": ["nonsense"]}, "Unknown reward function 'nonsense'"), ({}, "No reward")],
)
def test_missing_or_unknown_rewards_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        grpo.load_reward_funcs(grpo.CoDraftScriptArguments(**settings))


def test_every_reward_that_the_help_names_is_there():
    named = re.findall(r"`(\w+)`", grpo.CoDraftScriptArguments.__dataclass_fields__["reward_funcs"].metadata["help"])
    rewards = grpo.load_reward_funcs(grpo.CoDraftScriptArguments(reward_funcs=named))
    assert len(rewards) == 4
    assert rewards[named.index("get_soft_overlong_punishment")](completion_ids=[[1] * 1000, [1] * 1300]) == [0, -1]


def test_missing_dataset_is_refused():
    with pytest.raises(ValueError, match="No dataset"):
        grpo.load_splits(grpo.CoDraftScriptArguments(), grpo.DatasetMixtureConfig())
