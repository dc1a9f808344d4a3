"""Examples of README and docs, on a tiny policy and without a GPU."""

from pathlib import Path

import datasets
import pytest
from grpo_runs import letter_reward, prompt_dataset
from tiny import tiny_policy, tiny_tokenizer

from trl_codraft import CoDraftGRPOTrainer, Eagle3DraftConfig, Eagle3DraftModel, export_draft


ROOT = Path(__file__).parents[2]
FOR_CPU = "    # bf16=False, use_cpu=True,"
# A run as small as a test's; what follows a name in the example is replaced.
SMALL = {
    '"Qwen/Qwen3-4B"': '"policy"',
    "draft_pretrain_steps=200,": "draft_pretrain_steps=1, max_steps=1, max_completion_length=4, report_to='none',",
    "draft_vocab_size=32_000,": "draft_vocab_size=64,",
    "accuracy_reward,": "letter_reward,",
}


def block_with(path, text):
    """The one Python block of a document that holds a text, and the line before it."""
    parts = (ROOT / path).read_text().split("```python\n")
    pairs = zip(parts[1:], parts, strict=False)
    ((block, before),) = [(part.split("```")[0], before) for part, before in pairs if text in part.split("```")[0]]
    return block, before.strip().splitlines()[-1]


def small_example():
    block, _ = block_with("README.md", "trainer.train()")
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
    block = small_example()
    assert FOR_CPU in block
    state = {"letter_reward": letter_reward}
    exec(compile(block.replace(FOR_CPU, FOR_CPU.replace("# ", "")), "README.md", "exec"), state)
    assert state["trainer"].state.global_step == 1
    assert state["args"].device.type == "cpu"
    assert pushed == ["me/Qwen3-4B-eagle3"]
    saved = folder / "Qwen3-4B-grpo"
    assert (saved / "model.safetensors").is_file()
    assert state["validate_draft"](saved / "draft") == []


def test_the_example_of_rollouts_runs_on_what_the_demo_leaves(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    policy = tiny_policy()
    draft = Eagle3DraftModel(Eagle3DraftConfig.from_policy(policy.config))
    policy.save_pretrained("outputs/demo")
    tiny_tokenizer().save_pretrained("outputs/demo")
    export_draft(draft, policy, "outputs/demo/draft")
    block, before = block_with("docs/rollouts.md", "speculative_generate(")
    assert "`make demo`" in before
    state = {}
    exec(compile(block.replace("max_new_tokens=64", "max_new_tokens=4"), "rollouts.md", "exec"), state)
    assert state["output"].stats.rows == 2
    assert "3 + 4" in capsys.readouterr().out
