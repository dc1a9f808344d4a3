"""The GRPO script on a tiny policy and a local dataset, and its refusals."""

import json

import pytest
from tiny import tiny_policy, tiny_tokenizer

from trl_codraft import Eagle3DraftModel
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


def test_config_file_is_overridden_by_the_command_line(tmp_path):
    config = tmp_path / "run.yaml"
    config.write_text("draft_ttt_steps: 3\ndraft_vocab_size: 64\nuse_cpu: true\nbf16: false\n")
    parsed = grpo.make_parser().parse_args_and_config(args=["--config", str(config), "--draft_ttt_steps", "2"])
    assert (parsed[1].draft_ttt_steps, parsed[1].draft_vocab_size) == (2, 64)


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"reward_funcs": ["nonsense"]}, "Unknown reward function 'nonsense'"), ({}, "No reward")],
)
def test_missing_or_unknown_rewards_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        grpo.load_reward_funcs(grpo.CoDraftScriptArguments(**settings))


def test_missing_dataset_is_refused():
    with pytest.raises(ValueError, match="No dataset"):
        grpo.load_splits(grpo.CoDraftScriptArguments(), grpo.DatasetMixtureConfig())
