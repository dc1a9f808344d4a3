"""One reading of a policy's name in all commands, and cards whose commands work as printed."""

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
import torch
from checkpoints import flat_config, flat_tensors, write
from grpo_runs import codraft_trainer
from peft import LoraConfig, PeftModel, get_peft_model
from tiny import tiny_policy, tiny_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from trl_codraft import Eagle3DraftConfig, Eagle3DraftModel
from trl_codraft.cli import main
from trl_codraft.serving import policy_source
from trl_codraft.serving.model_card import draft_card
from trl_codraft.serving.policy_source import PolicySource


LORA = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
IDS = torch.arange(3, 20)[None]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A whole model, an adapter of it, and runs with checkpoints of each, in a folder whose name needs quotes."""
    root = tmp_path_factory.mktemp("it's a run")
    whole = root / "whole model"
    tiny_policy(num_hidden_layers=8).save_pretrained(whole)
    tiny_tokenizer().save_pretrained(whole)
    adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(whole), LORA)
    adapted.save_pretrained(root / "adapter")
    shutil.copytree(whole, root / "run" / "checkpoint-2")
    shutil.copytree(root / "adapter", root / "lora run" / "checkpoint-10")
    tiny_tokenizer().save_pretrained(root / "lora run" / "checkpoint-10")
    (root / "lora run" / "checkpoint-9").mkdir()
    write(root / "draft", flat_config(), flat_tensors())
    return root


KINDS = ["whole model", "adapter", "run/checkpoint-2", "lora run/checkpoint-10"]


@pytest.mark.parametrize("kind", KINDS)
def test_every_command_takes_every_kind_of_policy(folders, tmp_path, capsys, kind):
    policy, draft = ["--policy", str(folders / kind)], str(folders / "draft")
    assert main(["export", draft, str(tmp_path / "out"), *policy]) == 0
    assert main(["validate", str(tmp_path / "out"), *policy]) == 0
    assert main(["score", draft, *policy, "--prompt", "abc", "--max-new-tokens", "3"]) == 0
    assert "valid" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["validate", "score", "export"])
@pytest.mark.parametrize(
    ("name", "message"),
    [("lora run", "newest checkpoint is .*checkpoint-10: give that"), ("nowhere", "no policy folder")],
)
def test_a_folder_without_a_policy_is_refused_alike(folders, tmp_path, capsys, command, name, message):
    further = {"validate": [], "score": ["--prompt", "a"], "export": [str(tmp_path / "out")]}[command]
    assert main([command, str(folders / "draft"), *further, "--policy", str(folders / name)]) == 1
    assert re.search(message, capsys.readouterr().err)


def test_an_adapter_without_the_name_of_its_base_is_named(folders, tmp_path, capsys):
    shutil.copytree(folders / "adapter", tmp_path / "adapter")
    file = tmp_path / "adapter" / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"base_model_name_or_path": None}))
    assert main(["validate", str(folders / "draft"), "--policy", str(tmp_path / "adapter")]) == 1
    assert "names no base model" in capsys.readouterr().err


def test_an_adapter_of_the_hub_is_told_from_a_whole_model(folders, monkeypatch):
    def cached_file(name, file, **kwargs):
        place = {"me/adapter": folders / "adapter", "me/whole": folders / "whole model"}[name] / file
        return str(place) if place.is_file() else None

    monkeypatch.setattr(policy_source, "cached_file", cached_file)
    assert PolicySource.find("me/adapter") == PolicySource("me/adapter", str(folders / "whole model"))
    assert PolicySource.find("me/whole") == PolicySource("me/whole")
    assert PolicySource.named("/on/the/server") == PolicySource("/on/the/server")


def commands_of(card):
    """The command lines of a card, by their program, as a shell splits them."""
    blocks = re.findall(r"```bash\n(.*?)\n```", card, flags=re.DOTALL)
    lines = [shlex.split(block.replace("\\\n", " ")) for block in blocks]
    return {"merge" if line[:2] == ["python", "-c"] else line[0]: line for line in lines}


def run_card(card):
    """Merges where the card says so; the policy and the draft that both servers would load, and the policy's name."""
    commands = commands_of(card)
    if "merge" in commands:
        exec(commands["merge"][2], {})
    vllm, sglang = commands["vllm"], commands["python"]
    config = json.loads(vllm[vllm.index("--speculative-config") + 1])
    assert vllm[:2] == ["vllm", "serve"]
    assert vllm[2] == sglang[sglang.index("--model-path") + 1]
    assert config["model"] == sglang[sglang.index("--speculative-draft-model-path") + 1]
    AutoTokenizer.from_pretrained(vllm[2])
    # Servers load no adapter in the place of a model.
    assert (Path(vllm[2]) / "config.json").is_file()
    policy = AutoModelForCausalLM.from_pretrained(vllm[2]).eval()
    return policy, Eagle3DraftModel.from_pretrained(config["model"], policy=policy), vllm[2]


@pytest.mark.parametrize("kind", KINDS)
def test_commands_of_a_card_work_as_printed(folders, tmp_path, monkeypatch, kind):
    monkeypatch.chdir(folders)
    out = str(tmp_path / "a draft's folder")
    assert main(["export", "draft", out, "--policy", kind]) == 0
    policy, draft, name = run_card((Path(out) / "README.md").read_text())
    expected = AutoModelForCausalLM.from_pretrained(folders / kind).eval()
    torch.testing.assert_close(policy(IDS).logits, expected(IDS).logits)
    assert torch.equal(draft.fc.weight, flat_tensors()["fc.weight"])
    config = json.loads((Path(out) / "config.json").read_text())
    assert config["speculators_config"]["verifier"]["name_or_path"] == name


def test_cards_of_the_hub(policy):
    config = Eagle3DraftConfig.from_policy(policy.config)
    whole = commands_of(draft_card(config, repo_id="me/draft", base_model="me/policy"))
    assert whole.keys() == {"vllm", "python"}
    assert whole["vllm"][2] == "me/policy"
    inside = commands_of(draft_card(config, path="out/draft", base_model="me/policy", in_policy_repo=True))
    assert inside["hf"] == ["hf", "download", "me/policy", "--include", "draft/*", "--local-dir", "policy"]
    assert json.loads(inside["vllm"][-1])["model"] == "policy/draft"
    adapter = commands_of(draft_card(config, repo_id="me/draft", base_model="me/lora", adapter_of="org/base"))
    assert adapter["vllm"][2] == "lora-merged"
    assert '"org/base"' in adapter["merge"][2]


@pytest.mark.parametrize("lora", [False, True], ids=["whole", "lora"])
def test_cards_of_a_run_and_of_its_checkpoint_work_as_printed(tmp_path, monkeypatch, lora):
    monkeypatch.chdir(tmp_path)
    tiny_policy().save_pretrained(tmp_path / "base model")
    settings = {"peft_config": LORA} if lora else {}
    trainer = codraft_trainer(
        tmp_path / "my run", model="base model", trainer=settings, max_steps=1, save_strategy="steps", save_steps=1,
        num_draft_tokens=2,
    )  # fmt: skip
    trainer.train()
    trainer.save_model()
    with torch.no_grad():
        expected = trainer.model.eval()(IDS).logits
    for folder in (tmp_path / "my run" / "checkpoint-1", tmp_path / "my run"):
        policy, _, name = run_card((folder / "draft" / "README.md").read_text())
        assert name == (f"{folder}-merged" if lora else str(folder))
        torch.testing.assert_close(policy(IDS).logits, expected)
    if lora:
        assert isinstance(trainer.model, PeftModel)


@pytest.mark.parametrize("kind", KINDS)
def test_a_draft_is_not_written_over_a_policy(folders, tmp_path, capsys, kind):
    policy = tmp_path / "policy"
    shutil.copytree(folders / kind, policy)
    before = {file.name: file.read_bytes() for file in policy.iterdir()}
    assert main(["export", str(folders / "draft"), str(policy), "--policy", str(folders / kind)]) == 1
    assert "holds a policy, whose files a draft would replace" in capsys.readouterr().err
    assert {file.name: file.read_bytes() for file in policy.iterdir()} == before


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[1]", "adapter_config.json must hold a JSON object, not a list"),
        ("{", "adapter_config.json is not valid JSON"),
        ('{"base_model_name_or_path": 3}', "adapter_config.json names no base model"),
        ('{"base_model_name_or_path": "/gone"}', "holds an adapter of the model in /gone, which is not there"),
    ],
)
def test_a_damaged_adapter_is_named(folders, tmp_path, capsys, content, message):
    (tmp_path / "adapter_config.json").write_text(content)
    assert main(["validate", str(folders / "draft"), "--policy", str(tmp_path)]) == 1
    assert message in capsys.readouterr().err


def test_an_empty_policy_is_not_no_policy(folders, capsys):
    assert main(["validate", str(folders / "draft"), "--policy", ""]) == 1
    assert "holds no policy" in capsys.readouterr().err
