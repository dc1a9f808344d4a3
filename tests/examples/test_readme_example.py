"""The README's notebook example, on a tiny policy and without a GPU."""

from pathlib import Path

import datasets
import pytest
from grpo_runs import letter_reward, prompt_dataset
from tiny import tiny_policy, tiny_tokenizer

from trl_codraft import CoDraftGRPOTrainer


README = Path(__file__).parents[2] / "README.md"
FOR_CPU = "    # bf16=False, use_cpu=True,"
# A run as small as a test's; what follows a name in the example is replaced.
SMALL = {
    '"Qwen/Qwen3-4B"': '"policy"',
    "draft_pretrain_steps=200,": "draft_pretrain_steps=1, max_steps=1, max_completion_length=4, report_to='none',",
    "accuracy_reward,": "letter_reward,",
}


def example():
    (block,) = [text.split("```")[0] for text in README.read_text().split("```python\n") if "trainer.train()" in text]
    for text, small in SMALL.items():
        assert text in block
        block = block.replace(text, small)
    return block


@pytest.fixture
def work_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tiny_policy().save_pretrained("policy")
    tiny_tokenizer().save_pretrained("policy")
    monkeypatch.setattr(datasets, "load_dataset", lambda name, split: prompt_dataset())
    pushed = []
    monkeypatch.setattr(CoDraftGRPOTrainer, "push_draft_to_hub", lambda self, repo_id: pushed.append(repo_id))
    return tmp_path, pushed


def test_the_example_runs_on_a_cpu_with_the_line_that_it_names(work_folder):
    folder, pushed = work_folder
    block = example()
    assert FOR_CPU in block
    state = {"letter_reward": letter_reward}
    exec(compile(block.replace(FOR_CPU, FOR_CPU.replace("# ", "")), "README.md", "exec"), state)
    assert state["trainer"].state.global_step == 1
    assert state["args"].device.type == "cpu"
    assert pushed == ["me/Qwen3-4B-eagle3"]
    saved = folder / "Qwen3-4B-grpo"
    assert (saved / "model.safetensors").is_file()
    assert state["validate_draft"](saved / "draft") == []
