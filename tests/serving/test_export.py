"""Export, score, card and upload."""

import json
from types import SimpleNamespace

import pytest
import torch
from checkpoints import V, flat_config, flat_tensors, write
from huggingface_hub import ModelCard, metadata_load
from safetensors.torch import load_file
from tiny import tiny_policy, tiny_tokenizer

from trl_codraft import speculative_generate
from trl_codraft.modeling.configuration_eagle3 import Eagle3DraftConfig
from trl_codraft.modeling.modeling_eagle3 import Eagle3DraftModel
from trl_codraft.modeling.teacher import PolicyHead
from trl_codraft.serving import export
from trl_codraft.serving.export import export_draft, push_draft, score_draft, validate_draft
from trl_codraft.serving.model_card import draft_card, serve_commands


def make_draft(policy, **overrides):
    draft = Eagle3DraftModel(Eagle3DraftConfig.from_policy(policy.config, **overrides))
    return draft.eval()


SCORES = {
    "accept_length": 2.345,
    "accept_rate": 0.448,
    "accept_rate_per_position": [0.7, 0.4, 0.2],
    "num_draft_tokens": 3,
    "num_prompts": 16,
    "committed": 2048,
    "temperature": 0.0,
}


class TestExport:
    def test_writes_a_valid_folder_with_a_card(self, tmp_path, policy):
        assert export_draft(make_draft(policy), policy, tmp_path / "a" / "draft") == []
        folder = tmp_path / "a" / "draft"
        assert sorted(file.name for file in folder.iterdir()) == ["README.md", "config.json", "model.safetensors"]
        assert [file.name for file in (tmp_path / "a").iterdir()] == ["draft"]
        assert validate_draft(folder, policy) == []

    def test_dtype_is_the_policys_by_default(self, tmp_path):
        policy = tiny_policy(num_hidden_layers=8, dtype=torch.bfloat16)
        draft = make_draft(policy)
        export_draft(draft, policy, tmp_path / "a")
        export_draft(draft, policy, tmp_path / "b", dtype=torch.float32)
        assert load_file(tmp_path / "a" / "model.safetensors")["fc.weight"].dtype == torch.bfloat16
        assert torch.equal(load_file(tmp_path / "b" / "model.safetensors")["fc.weight"], draft.fc.weight)

    def test_refuses_what_does_not_validate_and_leaves_the_old_draft(self, tmp_path, policy):
        draft = make_draft(policy)
        export_draft(draft, policy, tmp_path / "draft")
        before = {file.name: file.read_bytes() for file in (tmp_path / "draft").iterdir()}
        with torch.no_grad():
            draft.lm_head.weight[3, 3] = float("nan")
        with pytest.raises(ValueError, match="not written.*`lm_head.weight` holds NaN"):
            export_draft(draft, policy, tmp_path / "draft")
        assert {file.name: file.read_bytes() for file in (tmp_path / "draft").iterdir()} == before
        assert [file.name for file in tmp_path.iterdir()] == ["draft"]

    def test_refuses_a_draft_of_another_policy(self, tmp_path, policy):
        with pytest.raises(ValueError, match="`hidden_size` is 32 but the policy's hidden_size is 64"):
            export_draft(make_draft(policy), tiny_policy(hidden_size=64), tmp_path / "draft")
        assert not list(tmp_path.iterdir())

    def test_inherited_flags_survive_and_are_reported(self, tmp_path, policy):
        source = write(tmp_path / "source", flat_config(norm_before_residual=True), flat_tensors())
        draft = Eagle3DraftModel.from_pretrained(source, policy=policy)
        notes = export_draft(draft, policy, tmp_path / "draft")
        assert len(notes) == 1
        assert "not SGLang" in notes[0]
        assert json.loads((tmp_path / "draft" / "config.json").read_text())["norm_before_residual"] is True
        assert "Not SGLang" in (tmp_path / "draft" / "README.md").read_text()

    def test_foreign_checkpoint_becomes_a_folder_for_all_servers(self, tmp_path, policy):
        source = write(
            tmp_path / "source", flat_config(draft_vocab_size=20, head_dim=None), flat_tensors(draft_vocab=20)
        )
        assert validate_draft(source) != []
        export_draft(Eagle3DraftModel.from_pretrained(source, policy=policy), policy, tmp_path / "draft")
        assert validate_draft(tmp_path / "draft", policy) == []


class TestCard:
    def test_says_what_is_needed(self, policy):
        config = make_draft(policy, draft_vocab_size=20, tap_layers=[1, 8]).config
        card = ModelCard(draft_card(config, repo_id="me/draft", base_model="org/policy", scores=SCORES, license="mit"))
        assert card.data.base_model == "org/policy"
        assert card.data.license == "mit"
        assert {"eagle3", "speculative-decoding"} <= set(card.data.tags)
        for text in (
            "2.345",
            "0.700, 0.400, 0.200",
            *serve_commands("me/draft", "org/policy").values(),
            "2609.07108",
            "2503.01840",
            "transformers: 5.24",
            "20 of 104 tokens",
            "Not servers that need 3 tap layers",
            "Not SGLang: one tap is the output of the last layer",
        ):
            assert text in card.content, text

    def test_passes_the_hub_librarys_own_readers(self, policy, tmp_path, monkeypatch):
        """
        Metadata as `huggingface_hub` reads it back from the file, and the request of its `validate`, answered here.
        """
        text = draft_card(make_draft(policy).config, repo_id="me/draft", base_model="org/policy", scores=SCORES)
        (tmp_path / "README.md").write_text(text)
        assert metadata_load(tmp_path / "README.md") == {
            "base_model": "org/policy",
            "pipeline_tag": "text-generation",
            "tags": ["eagle3", "speculative-decoding", "trl-codraft"],
        }
        card, asked = ModelCard.load(tmp_path / "README.md"), []

        class Session:
            def post(self, url, json, headers):
                asked.append((url.rsplit("/", 1)[1], json))
                return SimpleNamespace(status_code=200)

        monkeypatch.setattr("huggingface_hub.repocard.hf_raise_for_status", lambda response: None)
        monkeypatch.setattr("huggingface_hub.repocard.get_session", Session)
        card.validate()
        assert asked == [("validate-yaml", {"repoType": "model", "content": text})]

    def test_provenance_is_listed(self, policy):
        text = draft_card(make_draft(policy).config, provenance={"GRPO steps": 7, "seed": 3})
        assert "## Provenance\n\n- GRPO steps: 7\n- seed: 3\n" in text
        assert "Provenance" not in draft_card(make_draft(policy).config)

    def test_claims_no_training_of_a_draft_from_elsewhere(self, policy):
        assert "trained" not in draft_card(make_draft(policy).config, base_model="org/policy").split("## Citations")[0]

    def test_without_scores_and_with_a_local_policy(self, policy, tmp_path):
        card = ModelCard(draft_card(make_draft(policy).config, base_model=str(tmp_path)))
        assert "base_model" not in card.data.to_dict()
        assert "Not measured" in card.text
        assert "Limits" not in card.text

    def test_commands(self):
        commands = serve_commands("d", "p", 4)
        config = commands["vllm"].split("--speculative-config ")[1].strip("'")
        assert json.loads(config) == {"method": "eagle3", "model": "d", "num_speculative_tokens": 4}
        assert "--speculative-num-steps 4 " in commands["sglang"]
        assert commands["sglang"].endswith("--speculative-num-draft-tokens 5")


class FakeApi:
    calls = []

    def __init__(self, token=None):
        self.token = token

    def create_repo(self, repo_id, **kwargs):
        FakeApi.calls.append(("create_repo", repo_id, kwargs))
        return SimpleNamespace(repo_id=f"me/{repo_id.split('/')[-1]}")

    def upload_folder(self, *, folder_path, **kwargs):
        files = sorted(file.name for file in folder_path.iterdir())
        FakeApi.calls.append(("upload_folder", files, kwargs, (folder_path / "README.md").read_text()))
        return "commit"


def test_push_uploads_an_exported_folder(policy, monkeypatch):
    monkeypatch.setattr(export, "HfApi", FakeApi)
    monkeypatch.setattr(FakeApi, "calls", [])
    draft = make_draft(policy)
    assert push_draft(draft, policy, "me/draft", private=True, scores=SCORES, base_model="org/policy") == "commit"
    create, upload = FakeApi.calls
    assert create == ("create_repo", "me/draft", {"private": True, "exist_ok": True})
    assert upload[1] == ["README.md", "config.json", "model.safetensors"]
    assert upload[2]["repo_id"] == "me/draft"
    assert "2.345" in upload[3]
    assert '"model": "me/draft"' in upload[3]


def test_push_uploads_nothing_that_does_not_validate(policy, monkeypatch):
    monkeypatch.setattr(export, "HfApi", FakeApi)
    monkeypatch.setattr(FakeApi, "calls", [])
    draft = make_draft(policy)
    with torch.no_grad():
        draft.fc.weight.fill_(float("inf"))
    with pytest.raises(ValueError, match="holds NaN or infinite"):
        push_draft(draft, policy, "me/draft")
    assert FakeApi.calls == []


class TestScore:
    def test_perfect_draft_is_always_accepted(self):
        """A policy that always says the same token, and a draft that says it too."""
        policy = tiny_policy(num_hidden_layers=2)
        with torch.no_grad():
            policy.lm_head.weight.zero_()
            policy.model.norm.weight.fill_(1.0)
        draft = make_draft(policy)
        draft.initialize_from_policy(PolicyHead(policy))
        scores = score_draft(policy, draft, [[5, 6, 7], [9]], num_draft_tokens=3, max_new_tokens=9, eos_token_id=None)
        # All logits are zero: both take token 0. 1 token from the prefill, then blocks of 4.
        assert scores["accept_length"] == 4.0
        assert scores["accept_rate_per_position"] == [1.0, 1.0, 1.0]
        assert scores["committed"] == 18
        assert scores["verifications"] == 4
        assert scores["num_prompts"] == 2

    def test_last_block_counts_in_full_as_on_a_server_and_the_tokens_stay_the_same(self):
        """Golden counters of a real server are in tests/vllm_golden; this one is done by hand."""
        policy = tiny_policy(num_hidden_layers=2)
        with torch.no_grad():
            policy.lm_head.weight.zero_()
        draft = make_draft(policy)
        draft.initialize_from_policy(PolicyHead(policy))
        scores = score_draft(policy, draft, [[5, 6, 7]], num_draft_tokens=3, max_new_tokens=7, eos_token_id=None)
        # 1 token from the prefill, a block of 4, and 2 of the next 4.
        assert (scores["verifications"], scores["drafted"], scores["accepted"]) == (2, 6, 6)
        assert scores["committed"] == 7
        # Token 0 ends the row in the prefill: nothing is drafted. As an id that never comes, it changes nothing.
        ended = score_draft(policy, draft, [[5, 6, 7]], max_new_tokens=7, eos_token_id=0, pad_token_id=1)
        assert (ended["verifications"], ended["committed"]) == (0, 1)
        ids, settings = torch.tensor([[5, 6, 7]]), {"num_draft_tokens": 3, "max_new_tokens": 7, "do_sample": False}
        for eos in (None, 9):
            outputs = [
                speculative_generate(policy, draft, ids, counts_overrun=overrun, eos_token_id=eos, **settings)
                for overrun in (False, True)
            ]
            assert torch.equal(outputs[0].sequences, outputs[1].sequences)
            assert [output.stats.drafted for output in outputs] == [4, 6]
            assert [output.stats.accepted for output in outputs] == [4, 6]

    def test_text_prompts_in_batches_equal_ids_at_once(self):
        policy = tiny_policy(num_hidden_layers=2, scale=4.0)
        draft = make_draft(policy)
        draft.initialize_from_policy(PolicyHead(policy))
        tokenizer = tiny_tokenizer()
        prompts = ["abc", "a longer prompt", "zz"]
        ids = [tokenizer(prompt)["input_ids"] for prompt in prompts]
        once = score_draft(policy, draft, ids, max_new_tokens=12)
        split = score_draft(policy, draft, prompts, tokenizer, max_new_tokens=12, batch_size=1)
        for key in ("committed", "accepted", "drafted", "verifications", "accepted_per_position", "row_forwards"):
            assert once[key] == split[key], key
        assert once["policy_forwards"] < split["policy_forwards"]

    def test_sampling_follows_the_generator(self):
        policy = tiny_policy(num_hidden_layers=2)
        draft = make_draft(policy)
        results = [
            score_draft(
                policy,
                draft,
                [[5, 6, 7]],
                max_new_tokens=12,
                temperature=1.0,
                generator=torch.Generator().manual_seed(seed),
            )
            for seed in (0, 0)
        ]
        assert results[0]["accepted"] == results[1]["accepted"]
        assert results[0]["temperature"] == 1.0

    def test_mistakes(self, policy):
        with pytest.raises(ValueError, match="no prompts"):
            score_draft(policy, make_draft(policy), [])
        with pytest.raises(ValueError, match="`tokenizer=` is needed"):
            score_draft(policy, make_draft(policy), ["text"])
        with pytest.raises(ValueError, match="`num_draft_tokens` must be at least 1, got 0"):
            score_draft(policy, make_draft(policy), [[5, 6]], num_draft_tokens=0)


def test_vocabulary_constant_is_the_tiny_policys(policy):
    assert policy.config.vocab_size == V
