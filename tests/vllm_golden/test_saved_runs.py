"""What a run with rollouts by vLLM saves is a policy and a draft that another vLLM serves."""

import pytest
from golden_models import PROMPTS
from own_proposals import agreement
from transformers import AutoModelForCausalLM

from trl_codraft.modeling.modeling_eagle3 import Eagle3DraftModel
from trl_codraft.serving.export import score_draft, validate_draft


@pytest.mark.vllm
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("kind", "inside"), [("live", "grpo"), ("live_server", ".")])
def test_saved_run_is_served(request, serve_saved, kind, inside):
    folder = request.getfixturevalue(kind)[1] / inside
    rows, counters = serve_saved(folder)
    policy = AutoModelForCausalLM.from_pretrained(folder / "out").eval()
    draft = Eagle3DraftModel.from_pretrained(folder / "out" / "draft", policy=policy).eval()
    assert validate_draft(folder / "out" / "draft", policy) == []
    equal, total = agreement(policy, draft, rows)
    assert equal == total > 10
    scores = score_draft(policy, draft, PROMPTS, max_new_tokens=len(rows[0]["output"]), eos_token_id=None)
    assert (
        counters == [scores[key] for key in ("verifications", "drafted", "accepted")] + scores["accepted_per_position"]
    )
