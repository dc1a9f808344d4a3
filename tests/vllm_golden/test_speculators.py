"""The speculators library loads our folders, computes our logits in every pass, and writes back what it read."""

import os
import subprocess
from pathlib import Path

import pytest
import torch
from golden_models import CASES, build_draft, build_policy
from safetensors.torch import load_file, save_file

from trl_codraft.modeling.modeling_eagle3 import Eagle3DraftModel
from trl_codraft.modeling.packing import PackedLayout
from trl_codraft.modeling.taps import TapRecorder
from trl_codraft.serving.export import export_draft


NUM_PASSES = 3
TOKENS = torch.tensor([5, 17, 99, 3, 42, 8, 61, 100, 2, 77, 77, 30])
pytestmark = [pytest.mark.peers, pytest.mark.timeout(900)]


def taps_of(policy, draft):
    recorder = TapRecorder(policy, draft.config.tap_layers)
    with torch.no_grad(), recorder.record() as record:
        policy(TOKENS[None])
    recorder.close()
    return torch.cat(record.taps, dim=-1)[0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    python = os.environ.get("SPECULATORS_PYTHON")
    assert python, "set SPECULATORS_PYTHON to the python of an environment with speculators 0.9 (README.md)"
    folder = tmp_path_factory.mktemp("cases")
    for name, case in CASES.items():
        policy = build_policy(case)
        draft = build_draft(case, policy)
        policy.save_pretrained(folder / name / "policy")
        export_draft(draft, policy, folder / name / "draft", base_model=str(folder / name / "policy"))
        save_file({"taps": taps_of(policy, draft), "tokens": TOKENS}, folder / name / "inputs.safetensors")
    script = Path(__file__).parent / "speculators_logits.py"
    subprocess.run([python, script, folder, str(NUM_PASSES)], check=True)
    return folder


@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_logits_of_every_pass_are_ours(folder, name):
    policy = build_policy(CASES[name])
    draft = build_draft(CASES[name], policy)
    embeds = policy.get_input_embeddings().weight[TOKENS]
    outputs = draft.unroll(taps_of(policy, draft), embeds, PackedLayout([len(TOKENS)]), NUM_PASSES)
    theirs = load_file(folder / name / "logits.safetensors")
    for num_pass, hidden in enumerate(outputs):
        rows = len(TOKENS) - 1 - num_pass  # rows whose token of this pass exists
        ours = draft.compute_logits(hidden[:rows])
        torch.testing.assert_close(theirs[f"pass_{num_pass}"][:rows], ours, rtol=2e-4, atol=2e-4)
        assert ours.std() > 0.1


@pytest.mark.parametrize("name", CASES)
def test_round_trip_through_speculators_loses_nothing(folder, name):
    policy = build_policy(CASES[name])
    before, after = (
        Eagle3DraftModel.from_pretrained(folder / name / kind, policy=policy) for kind in ("draft", "resaved")
    )
    assert after.config == before.config
    ours, theirs = before.state_dict(), after.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)
