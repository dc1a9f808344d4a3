"""The command line: results, exit status, and errors without a traceback."""

import json
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from checkpoints import flat_config, flat_tensors, write
from tiny import tiny_policy, tiny_tokenizer

from trl_codraft import cli
from trl_codraft.cli import main
from trl_codraft.scripts.config_file import read_config_file
from trl_codraft.serving.model_card import SCORE_KEYS


@pytest.fixture(scope="module")
def policy_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("policy")
    tiny_policy(num_hidden_layers=8).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture
def foreign(tmp_path):
    return str(write(tmp_path / "foreign", flat_config(head_dim=None), flat_tensors()))


def test_export_then_validate(tmp_path, policy_folder, foreign, capsys):
    target = str(tmp_path / "draft")
    assert main(["validate", foreign]) == 1
    assert "`head_dim` is missing" in capsys.readouterr().out
    assert main(["export", foreign, target, "--policy", policy_folder, "--dtype", "bfloat16"]) == 0
    capsys.readouterr()
    assert main(["validate", target, "--policy", policy_folder]) == 0
    out = capsys.readouterr().out
    assert "valid" in out
    assert "note: the tensors are torch.bfloat16" in out


def test_validate_prints_each_problem(tmp_path, policy_folder, capsys):
    broken = write(
        tmp_path / "broken", flat_config(tie_word_embeddings=True, rope_theta=None, model_type=None), flat_tensors()
    )
    assert main(["validate", str(broken), "--policy", policy_folder]) == 1
    out = capsys.readouterr().out
    for text in ("`model_type` is missing", "`tie_word_embeddings`", "`rope_theta` is missing", "3 problem(s)"):
        assert text in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["validate", "./nowhere"], "no draft folder"),
        (["export", "./nowhere", "x", "--policy", "POLICY"], "no draft folder"),
        (["score", "FOREIGN", "--policy", "POLICY", "--prompts-file", "./nowhere.txt"], "nowhere.txt"),
        (["score", "FOREIGN", "--policy", "POLICY", "--prompts-file", "BAD"], "`prompt` is a string"),
        (["export", "FOREIGN", "x", "--policy", "POLICY", "--scores", "BAD"], "no result of `trl-codraft score"),
        (
            ["export", "FOREIGN", "x", "--policy", "POLICY", "--scores", "BIASED/model.safetensors"],
            "is not valid JSON",
        ),
        (["export", "BIASED", "x", "--policy", "POLICY"], "biases"),
    ],
)
def test_mistakes_end_with_one_line(tmp_path, policy_folder, foreign, capsys, arguments, message):
    (tmp_path / "bad.jsonl").write_text('{"question": "?"}\n')
    biased = write(tmp_path / "biased", flat_config(), flat_tensors() | {"fc.bias": torch.zeros(32)})
    places = {
        "POLICY": policy_folder,
        "FOREIGN": foreign,
        "BAD": str(tmp_path / "bad.jsonl"),
        "BIASED": str(biased),
        "BIASED/model.safetensors": str(biased / "model.safetensors"),
    }
    assert main([places.get(argument, argument) for argument in arguments]) == 1
    captured = capsys.readouterr()
    error = captured.err.strip().splitlines()[-1]
    assert error.startswith(f"trl-codraft {arguments[0]}: error: ")
    assert message in error
    assert "Traceback" not in captured.err


def test_score_writes_json(tmp_path, policy_folder, foreign, capsys):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "abc"}\n\n{"prompt": "d"}\n')
    arguments = ["score", foreign, "--policy", policy_folder, "--prompts-file", str(prompts)]
    arguments += ["--max-new-tokens", "6", "--num-draft-tokens", "2", "--output", str(tmp_path / "scores.json")]
    assert main(arguments) == 0
    scores = json.loads((tmp_path / "scores.json").read_text())
    assert scores == json.loads(capsys.readouterr().out)
    assert scores["num_prompts"] == 2
    assert scores["accept_length"] >= 1.0
    assert len(scores["accept_rate_per_position"]) == 2


def test_push_hands_over_the_card(tmp_path, policy_folder, foreign, capsys, monkeypatch):
    received = {}

    def push_draft(draft, policy, repo_id, **kwargs):
        received.update(repo_id=repo_id, **kwargs)
        return SimpleNamespace(commit_url="https://hub/commit")

    monkeypatch.setattr(cli, "push_draft", push_draft)
    scores = dict.fromkeys(SCORE_KEYS, 2.0)
    (tmp_path / "scores.json").write_text(json.dumps(scores))
    arguments = ["push", foreign, "me/draft", "--policy", policy_folder, "--base-model", "org/policy", "--private"]
    assert main([*arguments, "--scores", str(tmp_path / "scores.json")]) == 0
    assert capsys.readouterr().out.strip().endswith("https://hub/commit")
    assert received["repo_id"] == "me/draft"
    assert received["private"] is True
    assert received["base_model"] == "org/policy"
    assert received["scores"] == scores


def script_of(monkeypatch, prepare, run):
    script = ModuleType("trl_codraft.scripts.grpo")
    script.prepare, script.run = prepare, run
    monkeypatch.setitem(sys.modules, "trl_codraft.scripts.grpo", script)


def test_grpo_hands_all_arguments_to_the_script_and_runs_what_it_prepares(monkeypatch):
    received = []
    script_of(monkeypatch, lambda arguments: ("prepared", arguments), lambda *prepared: received.append(prepared))
    assert main(["grpo", "--model_name_or_path", "m", "--help"]) == 0
    assert received == [("prepared", ["--model_name_or_path", "m", "--help"])]


@pytest.mark.parametrize("error", [RuntimeError("bug"), TypeError("bug")], ids=["runtime", "type"])
def test_grpo_hides_no_bug_before_training(monkeypatch, error):
    script_of(monkeypatch, lambda arguments: throw(error), None)
    with pytest.raises(type(error), match="bug"):
        main(["grpo"])


@pytest.mark.parametrize("error", [ValueError("late"), OSError("late")], ids=["value", "os"])
def test_grpo_hides_no_error_of_the_training_itself(monkeypatch, error):
    script_of(monkeypatch, lambda arguments: (), lambda: throw(error))
    with pytest.raises(type(error), match="late"):
        main(["grpo"])


def throw(error):
    raise error


@pytest.mark.parametrize("arguments", [["validate", "./nowhere"], ["grpo", "--config", "./nowhere"]])
def test_traceback_is_shown_on_request(arguments):
    with pytest.raises((ValueError, OSError), match="nowhere"):
        main([*arguments, "--traceback"])
    with pytest.raises((ValueError, OSError), match="nowhere"):
        main(["--traceback", *arguments])


def test_options_come_from_yaml_and_the_command_line_wins(tmp_path, policy_folder, foreign, capsys):
    config = tmp_path / "score.yaml"
    content = f"policy: {policy_folder}\nprompt: [abc, d]\nmax_new_tokens: 6\nnum-draft-tokens: 4\ntemperature: 0.0\n"
    config.write_text(content)
    assert main(["score", foreign, "--config", str(config), "--num-draft-tokens", "2"]) == 0
    scores = json.loads(capsys.readouterr().out)
    assert (scores["num_prompts"], scores["num_draft_tokens"]) == (2, 2)
    assert scores["committed"] <= 12


@pytest.mark.parametrize(
    ("content", "message"), [("[1, 2]", "must hold a mapping"), ("a: [", "not valid YAML")], ids=["list", "broken"]
)
def test_bad_yaml_ends_with_one_line(tmp_path, capsys, content, message):
    (tmp_path / "bad.yaml").write_text(content)
    assert main(["validate", "somewhere", "--config", str(tmp_path / "bad.yaml")]) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("name", ["", "nowhere.yaml", "~/nowhere.yaml"])
def test_a_config_file_that_is_not_there_is_named(name, capsys):
    assert main(["validate", "draft", "--config", name]) == 1
    assert f"There is no file {name!r} for `--config`" in capsys.readouterr().err


def test_merged_mappings_of_yaml_are_read(tmp_path):
    (tmp_path / "options.yaml").write_text("<<: {policy: me/policy, seed: 3}\nseed: 4\n")
    assert read_config_file(tmp_path / "options.yaml") == {"policy": "me/policy", "seed": 4}


def test_flags_and_unknown_options_of_yaml(tmp_path, capsys, monkeypatch):
    received = []
    monkeypatch.setattr(cli, "_push", lambda args: received.append(args) or 0)
    config = tmp_path / "push.yaml"
    config.write_text("policy: p\nprivate: true\nlicense: mit\n")
    assert main(["push", "d", "me/draft", "--config", str(config)]) == 0
    assert (received[0].private, received[0].license, received[0].draft) == (True, "mit", "d")
    config.write_text("policy: p\nprivat: true\n")
    assert main(["push", "d", "me/draft", "--config", str(config)]) == 1
    error = capsys.readouterr().err
    assert "`privat` is no option of `trl-codraft push`" in error
    assert "private" in error


# How argparse lets one write the options of one run, the file among them.
SPELLINGS = {
    "behind": lambda file: ["D", "--config", file],
    "joined": lambda file: ["D", f"--config={file}"],
    "before": lambda file: [f"--config={file}", "D"],
    "between": lambda file: ["--seed", "3", "--config", file, "D"],
    "separator": lambda file: ["--config", file, "--", "D"],
}


@pytest.mark.parametrize("spelling", SPELLINGS.values(), ids=SPELLINGS)
def test_every_spelling_of_the_config_option_is_read(tmp_path, monkeypatch, spelling):
    received = []
    monkeypatch.setattr(cli, "_score", lambda args: received.append(args) or 0)
    (tmp_path / "my score.yaml").write_text("policy: p\nprompt: [a, b]\nnum_draft_tokens: 4\n")
    assert main(["score", *spelling(str(tmp_path / "my score.yaml"))]) == 0
    args = received[0]
    assert (args.draft, args.policy, args.prompt, args.num_draft_tokens) == ("D", "p", ["a", "b"], 4)


@pytest.mark.parametrize(
    "arguments",
    [
        ["D", "--conf", "FILE"],
        ["D", "--config"],
        ["D", "--config", "FILE", "--config=FILE"],
        ["--", "D", "--config=FILE"],
    ],
    ids=["abbreviated", "no-name", "twice", "positional"],
)
def test_what_is_not_read_as_the_config_option_is_refused(tmp_path, arguments, capsys):
    (tmp_path / "v.yaml").write_text("policy: p\n")
    with pytest.raises(SystemExit) as stop:
        main(["validate", *[part.replace("FILE", str(tmp_path / "v.yaml")) for part in arguments]])
    assert stop.value.code == 2


@pytest.mark.parametrize("command", ["export", "validate", "score", "push"])
def test_every_command_reads_its_options_from_the_file(tmp_path, monkeypatch, command):
    received = []
    monkeypatch.setattr(cli, f"_{command}", lambda args: received.append(args) or 0)
    options = {"policy": "p"}
    if command == "score":
        options |= {"prompts_file": "f", "temperature": 1, "output": "o"}
    elif command != "validate":
        options |= {"dtype": "float16", "base_model": "b", "license": "mit", "scores": "s"}
    (tmp_path / "c.yaml").write_text(json.dumps(options))
    places = ["a"] if command in ("validate", "score") else ["a", "b"]
    assert main([command, *places, f"--config={tmp_path / 'c.yaml'}"]) == 0
    assert {key: getattr(received[0], key) for key in options} == options


def test_the_command_line_replaces_values_of_the_file_also_of_repeated_options(tmp_path, monkeypatch):
    received = []
    monkeypatch.setattr(cli, "_score", lambda args: received.append(args) or 0)
    (tmp_path / "c.yaml").write_text("policy: p\nprompt: [a, b]\nseed: null\noutput: null\n")
    assert main(["score", "d", f"--config={tmp_path / 'c.yaml'}", "--prompt", "c", "--prompt", "e", "--policy=q"]) == 0
    args = received[0]
    assert (args.prompt, args.policy, args.seed, args.output) == (["c", "e"], "q", 0, None)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("polici: p", "`polici` is no option"),
        ("path: p", "`path` is no option of `trl-codraft validate`"),
        ("num_draft_tokens: 3", "`num_draft_tokens` is no option of `trl-codraft validate`"),
        ("config: other", "`config` is no option"),
        ("policy: a\npolicy: b", "stands twice"),
        ("policy: [a, b]", "`policy` takes one value"),
        ("policy: {a: b}", "`policy` takes one value"),
        ("policy: 123", "put it in quotes"),
        ("policy: no", "put it in quotes"),
        ("traceback: 1", "`traceback` is a switch"),
    ],
)
def test_no_value_of_a_file_is_dropped_or_bent(tmp_path, capsys, content, message):
    (tmp_path / "c.yaml").write_text(content + "\n")
    assert main(["validate", "somewhere", f"--config={tmp_path / 'c.yaml'}"]) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("prompt: a\nprompts_file: f", "`prompt` and `prompts_file`"),
        ("prompt: a\nmax_new_tokens: 1.5", "`max_new_tokens` cannot be 1.5"),
        ("prompt: a\nmax_new_tokens: true", "`max_new_tokens` is a number"),
        ("prompt: [[a]]", "`prompt` takes plain values"),
        ("prompt: [1]", "put it in quotes"),
    ],
)
def test_numbers_lists_and_exclusive_options_of_a_file(tmp_path, capsys, content, message):
    (tmp_path / "c.yaml").write_text(f"policy: p\n{content}\n")
    assert main(["score", "d", f"--config={tmp_path / 'c.yaml'}"]) == 1
    assert message in capsys.readouterr().err


def test_a_required_option_that_is_null_is_missing(tmp_path, capsys):
    (tmp_path / "c.yaml").write_text("policy: null\nprompt: a\n")
    with pytest.raises(SystemExit):
        main(["score", "d", f"--config={tmp_path / 'c.yaml'}"])
    assert "--policy" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["export", "validate", "score", "push"])
def test_every_option_has_help(command, capsys):
    parser = cli._parser()
    chosen = next(action for action in parser._actions if action.dest == "command").choices[command]
    assert all(action.help for action in chosen._actions)
    with pytest.raises(SystemExit):
        main([command, "--help"])
    out = capsys.readouterr().out
    assert "--config" in out
    assert "--traceback" in out


def test_help_and_missing_command(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["--help"])
    assert stop.value.code == 0
    assert "validate" in capsys.readouterr().out
    with pytest.raises(SystemExit) as stop:
        main([])
    assert stop.value.code == 2
