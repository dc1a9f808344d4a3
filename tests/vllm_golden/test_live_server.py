"""
GRPO with rollouts by a vLLM server in a process of its own (live_server.py): refits over its routes, counters, tokens.
"""

import pytest


pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]


@pytest.fixture
def run(live_server):
    return live_server[0]


def test_server_generates_and_counts_as_we_do_before_the_run(run):
    assert run["started"]["server"] == run["started"]["ours"]


def test_every_refit_sends_the_draft_in_a_session_of_its_own_and_then_the_policy(run):
    session = ["start_draft_weight_update", "finish_weight_update", "start_weight_update", "finish_weight_update"]
    assert len(run["requests"]) >= 3 * len(session)  # one refit before the rollouts of each step
    assert run["requests"] == session * (len(run["requests"]) // len(session))


def test_rollouts_of_every_step_come_from_the_present_policy(run):
    assert len(run["logprob_differences"]) == 3
    assert max(run["logprob_differences"]) < 1e-4
    assert min(run["accept_lengths"]) > 1.5


def test_server_holds_the_policy_and_draft_of_the_last_step(run):
    assert run["server"] == run["ours"]
    assert run["server"]["counters"][2] > 0
    # Both have moved since the server was started.
    assert run["server"]["outputs"] != run["started"]["server"]["outputs"]
    assert run["server"]["counters"] != run["started"]["server"]["counters"]
