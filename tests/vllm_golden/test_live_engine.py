"""Our package and a real vLLM in one process (live_engine.py): refits, counters, sampling, GRPO."""

import pytest


pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]


@pytest.fixture
def found(live):
    return live[0]


def test_score_draft_counts_what_vllm_counts(found):
    counters = found["counters"]
    for case in ("to the limit", "to a stop token"):
        assert counters[case]["ours"] == counters[case]["vllm"]
    assert counters["to the limit"]["vllm"][2] > 2 * counters["to the limit"]["vllm"][0]  # several a step
    assert min(counters["lengths"]) < 20  # the stop token stopped something


def test_refit_of_a_live_draft_changes_acceptance_as_it_should(found):
    refit = found["refit"]
    assert refit["built"]["vllm"][2] == 0
    for stage in ("trained", "disturbed", "noise"):
        assert refit[stage]["vllm"] == refit[stage]["ours"], stage
    accepted = [refit[stage]["vllm"][2] / refit[stage]["vllm"][0] for stage in ("trained", "disturbed", "noise")]
    assert accepted[0] > accepted[1] > accepted[2]


def test_refit_of_a_live_draft_does_not_change_the_output(found):
    assert all(outputs == found["refit"]["outputs"][0] for outputs in found["refit"]["outputs"])


def test_vllm_shares_a_head_equal_to_the_policys_and_it_is_noticed(found):
    assert "lm_head.weight of the draft one with the policy's" in found["shared_head"]["error"]


def test_sampling_with_a_probabilistic_draft_has_the_policys_distribution(found):
    sampled = found["distribution"]
    freedom = sampled["cells"] - 1
    # Five standard deviations of the chi-square distribution.
    assert sampled["chi_square"] < freedom + 5 * (2 * freedom) ** 0.5
    assert sampled["accepted"] > 100


def test_grpo_rolls_out_in_vllm_with_its_own_policy_and_draft(found):
    run = found["grpo"]
    assert max(run["logprob_differences"]) < 1e-4
    assert min(run["accept_lengths"]) > 1.5
    assert run["draft_head_difference"] == 0.0
    assert run["vocabulary_moved"]
    assert run["vllm"] == run["ours"]
    assert run["vllm"]["counters"][2] > 0
    assert run["vllm"]["outputs"] != run["started"]["outputs"]


def test_stand_ins_have_vllms_signatures(found):
    signatures = found["signatures"]
    assert signatures["LLM.sleep"][:2] == ["self", "level"]
    assert signatures["LLM.wake_up"] == ["self", "tags"]
    for name in ("LLM.get_metrics", "get_draft_model", "LLM.start_draft_weight_update"):
        assert signatures[name] == ["self"]
    assert signatures["load_weights"] == ["self", "weights"]
    assert signatures["engine"] == ["disable_log_stats", "speculative_config"]
    assert len(signatures["speculation"]) == 5
