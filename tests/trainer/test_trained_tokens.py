"""Which tokens the draft learns from, on what context, against masks worked out by hand."""

import pytest
import torch
from datasets import Dataset
from grpo_runs import PROMPTS, codraft_trainer, prompt_dataset
from tiny import tiny_tokenizer

from trl_codraft.grpo import pretraining
from trl_codraft.grpo.pretraining import PolicyRollouts


ENV_TOKENS = [20, 21, 22]


def run_and_capture(trainer):
    """Trains and returns every draft batch as a list of documents `(token ids, trained flags)`."""
    documents = []
    start = trainer.learner.start

    def start_and_spy(resumes):
        start(resumes)
        accumulate = trainer.draft_trainer.accumulate

        def spy(batch, *loss_function):
            for ids, trained in zip(
                batch.input_ids.split(batch.layout.doc_lens), batch.trained.split(batch.layout.doc_lens), strict=True
            ):
                documents.append((ids.tolist(), trained.tolist()))
            accumulate(batch, *loss_function)

        trainer.draft_trainer.accumulate = spy

    trainer.learner.start = start_and_spy
    trainer.train()
    return documents


def scripted_rollout(prompts, trainer):
    """Completion: 3 tokens, 3 of the environment, 2 tokens and an EOS."""
    prompt_ids = trainer._tokenize_prompts(prompts)[0]
    completions = [[30 + len(ids), 31, 32, *ENV_TOKENS, 33, 34, 2] for ids in prompt_ids]
    masks = [[1, 1, 1, 0, 0, 0, 1, 1, 1] for _ in prompt_ids]
    return {"prompt_ids": prompt_ids, "completion_ids": completions, "logprobs": None, "env_mask": masks}


def prompt_lengths():
    tokenizer = tiny_tokenizer()
    return {len(tokenizer(prompt).input_ids) for prompt in PROMPTS}


@pytest.mark.parametrize("train_on_prompt", [False, True])
def test_completion_tokens_of_the_policy_are_trained_and_tool_tokens_are_context(train_on_prompt, tmp_path):
    trainer = codraft_trainer(
        tmp_path, trainer={"rollout_func": scripted_rollout}, draft_train_on_prompt=train_on_prompt, max_steps=1
    )
    documents = run_and_capture(trainer)
    assert len(documents) == 8
    for ids, trained in documents:
        num_prompt = len(ids) - 9
        assert num_prompt in prompt_lengths()
        assert ids[num_prompt + 3 : num_prompt + 6] == ENV_TOKENS
        assert trained == [train_on_prompt] * num_prompt + [True] * 3 + [False] * 3 + [True] * 3


def test_documents_hold_no_pads_and_start_at_position_zero(tmp_path):
    trainer = codraft_trainer(tmp_path, max_steps=1)
    documents = run_and_capture(trainer)
    lengths = prompt_lengths()
    for ids, trained in documents:
        assert 0 not in ids[: trained.index(True)]
        assert trained.index(True) in lengths
        assert all(trained[trained.index(True) :])


def test_truncated_rows_train_nothing_when_masked(tmp_path):
    trainer = codraft_trainer(tmp_path, max_steps=1, mask_truncated_completions=True, max_completion_length=3)
    documents = run_and_capture(trainer)
    truncated = [trained for ids, trained in documents if 2 not in ids]
    assert truncated
    assert not any(any(trained) for trained in truncated)


def test_iterable_dataset_trains_and_pretrains(tmp_path):
    stream = prompt_dataset().to_iterable_dataset()
    trainer = codraft_trainer(tmp_path, trainer={"train_dataset": stream}, draft_pretrain_steps=2, draft_vocab_size=64)
    trainer.train()
    assert len(trainer.draft_pretraining_log) == 2
    assert trainer.draft_trainer.num_updates == 5


def test_reduced_vocabulary_holds_specials_and_the_prompts_most_frequent_tokens(tmp_path):
    frequent = Dataset.from_dict({"prompt": ["zzzzzzzzqqqqqqqq"] * 24})
    trainer = codraft_trainer(
        tmp_path, trainer={"train_dataset": frequent}, draft_vocab_size=16, max_completion_length=1, max_steps=1
    )
    trainer.train()
    tokenizer = tiny_tokenizer()
    chosen = set(trainer.draft_model.target_ids.tolist())
    assert set(tokenizer.all_special_ids) <= chosen
    assert set(tokenizer.convert_tokens_to_ids(["z", "q"])) <= chosen
    assert len(chosen) == 16


def test_rollouts_use_the_updated_draft(tmp_path):
    """The copy that drafts is refreshed after every update, and it is the one the decoder holds."""
    trainer = codraft_trainer(tmp_path, draft_learning_rate=1e-2, draft_warmup_steps=0)
    seen = []
    generate = trainer._generate_single_turn

    def watch(*args, **kwargs):
        output = generate(*args, **kwargs)
        if trainer.draft_trainer is not None:
            seen.append(trainer.rollouts.decoder.draft.lm_head.weight.clone())
            assert torch.equal(seen[-1], trainer.draft_model.lm_head.weight.to(seen[-1].dtype))
        return output

    trainer._generate_single_turn = watch
    trainer.train()
    assert len(seen) == 3
    assert not torch.equal(seen[0], seen[1])
    assert not torch.equal(seen[1], seen[2])


def pretrained(tmp_path, monkeypatch, limit, **config):
    """Log of 9 pretraining updates, and how often the policy ran over rollouts for them."""
    count, record = [], PolicyRollouts.record
    with monkeypatch.context() as patch:
        patch.setattr(pretraining, "MAX_HELD_BYTES", limit)
        patch.setattr(PolicyRollouts, "record", lambda self, rows: count.append(1) or record(self, rows))
        trainer = codraft_trainer(tmp_path, draft_pretrain_steps=9, max_steps=1, **config)
        trainer.train()
    return trainer.draft_pretraining_log, len(count)


def test_pretraining_is_the_same_whether_taps_are_held_or_recorded_anew(tmp_path, monkeypatch):
    """Also counts the policy forwards: one per microbatch of a window, or one per update."""
    runs = [pretrained(tmp_path, monkeypatch, limit, speculative_rollouts="false") for limit in (2**31, 0)]
    assert runs[0][0] == runs[1][0]
    # One for the tap scales; windows of 2 microbatches serve 8 updates.
    assert [records for _, records in runs] == [1 + 4, 1 + 9]


def test_hidden_states_of_speculative_rollouts_need_no_forward_of_their_own(tmp_path, monkeypatch):
    assert pretrained(tmp_path, monkeypatch, 2**31)[1] == 1
    assert pretrained(tmp_path, monkeypatch, 0)[1] == 1 + 9  # too large to be held


def test_pretraining_batches_of_rollouts_equal_separate_forwards(tmp_path, monkeypatch):
    recorded, compared = PolicyRollouts.recorded, []

    def compare(self, rollouts, first):
        (ours,), (theirs,) = recorded(self, rollouts, first), self.record(rollouts)
        assert self._trace is not None
        assert torch.equal(ours.input_ids, theirs.input_ids)
        assert torch.equal(ours.trained, theirs.trained)
        assert ours.layout.doc_lens == theirs.layout.doc_lens
        assert ours.layout.first_valid_root == theirs.layout.first_valid_root
        read = torch.ones(len(ours.input_ids), dtype=torch.bool)
        read[torch.tensor(ours.layout.doc_lens).cumsum(0) - 1] = False  # the policy never reads a row's last token
        torch.testing.assert_close(ours.taps[read], theirs.taps[read], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(ours.last_hidden[read], theirs.last_hidden[read], rtol=1e-4, atol=1e-5)
        compared.append(ours)
        return [ours]

    monkeypatch.setattr(PolicyRollouts, "recorded", compare)
    codraft_trainer(tmp_path, draft_pretrain_steps=9, max_steps=1).train()
    assert len(compared) == 4


def test_last_token_of_a_rollout_plays_no_part_in_the_loss(tmp_path, monkeypatch):
    """Its hidden states are zero where rollouts are traced; garbage there changes no gradient."""
    recorded, logs = PolicyRollouts.recorded, []
    for value in (0.0, 1e3):

        def spoilt(self, rollouts, first, value=value):
            (batch,) = recorded(self, rollouts, first)
            last = torch.tensor(batch.layout.doc_lens).cumsum(0) - 1
            batch.taps[last] = batch.last_hidden[last] = value
            return [batch]

        monkeypatch.setattr(PolicyRollouts, "recorded", spoilt)
        trainer = codraft_trainer(tmp_path, draft_pretrain_steps=5, max_steps=1)
        trainer.train()
        logs.append(trainer.draft_pretraining_log)
    assert logs[0] == logs[1]
