"""Policies whose head has more rows than the vocabulary: rows of the padding can be sampled, but never drafted."""

import pytest
import torch
from grpo_runs import assert_same_run, codraft_trainer, plain_trainer
from modeling.draft_cases import pad_head
from tiny import SIZES, tiny_policy

from trl_codraft import speculative_generate


def padded_policy(dtype=torch.float32):
    """Peaked logits, and an embedding that has the padding's rows too: they are sampled, and read again."""
    policy = tiny_policy(dtype=dtype, scale=8.0, tie_word_embeddings=True)
    pad_head(policy)
    return policy


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    trainer = plain_trainer(tmp_path_factory.mktemp("plain"), model=padded_policy(), max_steps=2)
    trainer.train()
    return trainer


@pytest.mark.parametrize("draft_vocab_size", [None, 40])
def test_a_draft_learns_beside_plain_training_and_its_rollouts_are_the_policys(plain, tmp_path, draft_vocab_size):
    ours = codraft_trainer(
        tmp_path,
        model=padded_policy(),
        draft_vocab_size=draft_vocab_size,
        draft_pretrain_steps=1,
        speculative_rollouts="false",
        max_steps=2,
    )
    ours.train()
    assert_same_run(ours, plain)
    assert all(entry["draft/loss"] > 0 for entry in ours.state.log_history if "loss" in entry)

    policy, ids = padded_policy(torch.float64), torch.arange(3, 24).view(3, 7)
    greedy = {"max_new_tokens": 24, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    expected = policy.generate(ids, **greedy)
    assert (expected >= SIZES["vocab_size"]).any()
    output = speculative_generate(policy, ours.draft_model.double(), ids, num_draft_tokens=3, **greedy)
    assert torch.equal(output.sequences, expected)
    assert output.stats.drafted > 0
