"""Training sets and tokenizers out of the ordinary: the draft starts from them, or says why it cannot."""

import itertools
from types import SimpleNamespace

import pytest
from datasets import Dataset, Features, IterableDataset, Value
from grpo_runs import codraft_trainer, prompt_dataset
from tiny import tiny_policy, tiny_tokenizer
from torch import nn

from trl_codraft import Eagle3DraftConfig, Eagle3DraftModel
from trl_codraft.grpo.pretraining import PolicyRollouts, count_tokens


def stream(num_rows):
    def rows():
        yield from ({"prompt": f"row {index}"} for index in range(num_rows))

    return IterableDataset.from_generator(rows, features=Features({"prompt": Value("string")}))


def rollouts_of(dataset, rank, num_ranks):
    accelerator = SimpleNamespace(process_index=rank, num_processes=num_ranks)
    return PolicyRollouts(SimpleNamespace(train_dataset=dataset, accelerator=accelerator), None, seed=0)


def test_empty_training_set_raises_instead_of_waiting_for_a_row(tmp_path):
    trainer = codraft_trainer(tmp_path, trainer={"train_dataset": stream(0)})
    with pytest.raises(ValueError, match=r"has no rows.*use_draft=False"):
        trainer.train()


@pytest.mark.parametrize(("rank", "first"), [(0, ["row 0", "row 2", "row 0"]), (1, ["row 1"] * 3), (3, ["row 2"] * 3)])
def test_ranks_share_a_stream_and_none_goes_without(rank, first):
    source = rollouts_of(stream(3), rank, 2 if rank < 2 else 4)
    assert [row["prompt"] for row in itertools.islice(source._rows, 3)] == first


def test_special_tokens_that_the_policy_has_no_row_for_stay_out_of_the_draft_vocabulary(tmp_path):
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<never>"]})
    assert len(tokenizer) > 104
    trainer = codraft_trainer(
        tmp_path,
        trainer={"processing_class": tokenizer, "train_dataset": prompt_dataset()},
        draft_vocab_size=16,
        max_steps=1,
        max_completion_length=2,
    )
    trainer.train()
    assert {0, 1, 2} <= set(trainer.draft_model.target_ids.tolist())


def test_environments_that_nobody_passed_are_named_before_anything_is_generated():
    rows = [{"prompt": "x", "environment": name} for name in ("counter", "abacus")]
    trainer = SimpleNamespace(
        train_dataset=IterableDataset.from_generator(lambda: iter(rows)),
        accelerator=SimpleNamespace(process_index=0, num_processes=1),
        model=nn.Linear(1, 1),
        environment_factories={"counter": object},
        _multi_environment=True,
    )
    with pytest.raises(ValueError, match=r"`environment` abacus, which is not among the environments.*\['counter'\]"):
        PolicyRollouts(trainer, None, seed=0).generate(2)


def test_prompts_that_only_a_rollout_func_understands_need_a_trained_draft(tmp_path):
    def rollout(prompts, trainer):
        rows = [[5, 6 + prompt["task"]] for prompt in prompts]
        return {"prompt_ids": rows, "completion_ids": [[7, 8, 9]] * len(rows), "logprobs": None}

    tasks = Dataset.from_list([{"prompt": {"task": task}} for task in range(8)])
    source = {"rollout_func": rollout, "train_dataset": tasks}
    with pytest.raises(ValueError, match="neither a string nor messages.*`draft_model_name_or_path`"):
        codraft_trainer(tmp_path, trainer=source, max_steps=1).train()
    draft = Eagle3DraftModel(Eagle3DraftConfig.from_policy(tiny_policy().config, tap_layers=[1, 2, 3]))
    trainer = codraft_trainer(tmp_path, trainer={**source, "draft_model": draft}, max_steps=1)
    trainer.train()
    assert trainer.state.log_history[0]["draft/loss"] > 0


@pytest.mark.parametrize("rank", [0, 1])
def test_prompts_that_are_no_text_are_refused_on_all_ranks_whoever_counts_them(rank):
    trainer = SimpleNamespace(
        train_dataset=[{"prompt": "text"}, {"prompt": {"task": 3}}],
        environment_factories=None,
        accelerator=SimpleNamespace(
            process_index=rank, num_processes=2, device="cpu", reduce=lambda counts, **_: counts
        ),
        _tokenize_prompts=lambda prompts: ([[1] for _ in prompts], None, {}),
    )
    with pytest.raises(ValueError, match="neither a string nor messages"):
        count_tokens(trainer, 8, [])
