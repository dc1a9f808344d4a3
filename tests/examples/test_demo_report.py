"""The demo's comparison on a tiny policy: every arm rolls out every prompt, and counts its tokens alike."""

import sys
from pathlib import Path

import pytest
from tiny import tiny_policy, tiny_tokenizer

from trl_codraft import Eagle3DraftConfig, Eagle3DraftModel


sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

report = pytest.importorskip("demo.report", reason="the plot needs matplotlib: pip install -e .[demo]")


def test_comparison_counts_the_tokens_of_each_arm():
    policy, tokenizer = tiny_policy(), tiny_tokenizer()
    tokenizer.padding_side = "right"  # whatever it is, prompts are padded on the left
    draft = Eagle3DraftModel(Eagle3DraftConfig.from_policy(policy.config))
    prompts = [[{"role": "user", "content": "a b c"[: 1 + 2 * (index % 3)]}] for index in range(5)]
    settings = {"batch_size": 2, "num_draft_tokens": 2, "max_new_tokens": 6, "seconds": 60}
    result = report.compare_rollouts(policy, tokenizer, {"frozen": draft, "co-trained": draft}, prompts, **settings)
    assert result["prompts"] == 5
    plain, frozen, cotrained = result["arms"]
    assert plain["accept_length"] is None
    assert plain["ratio"] == 1.0
    # The same draft from the same seeds: equal counters, whatever the order of the arms in a turn.
    assert frozen["tokens"] == cotrained["tokens"]
    assert frozen["verifications"] == cotrained["verifications"] > 0
    for arm in result["arms"]:
        assert 5 <= arm["tokens"] <= 30
        assert arm["tokens_per_cpu_second"] == arm["tokens"] / arm["cpu_seconds"]
    text = report.table(result)
    assert len(text.splitlines()) == 7
    assert "co-trained" in text


def test_plot_is_written(tmp_path):
    history = [{"step": step, **dict.fromkeys(report.PANELS, step / 2)} for step in (1, 2, 3)]
    report.plot_history(history, str(tmp_path / "training.png"))
    assert (tmp_path / "training.png").read_bytes().startswith(b"\x89PNG")
