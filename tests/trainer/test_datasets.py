"""
Datasets that hold no prompts, or empty ones: said at construction, or by the row, and never by reading rows away.
"""

import pytest
from datasets import Dataset, Features, IterableDataset, Value
from grpo_runs import assert_same_run, codraft_trainer, plain_trainer, prompt_dataset, weights
from tiny import tiny_policy, tiny_tokenizer

from trl_codraft import Eagle3DraftConfig, Eagle3DraftModel


QUESTIONS = [{"question": "1+1=", "answer": "2"}] * 8
PROMPT_ROWS = [{"prompt": f"row {index}"} for index in range(16)]


def stream(rows, **kwargs):
    """A stream that does not know its columns unless it is told."""
    return IterableDataset.from_generator(lambda: iter(rows), **kwargs)


WITHOUT_PROMPTS = {
    "rows": Dataset.from_list(QUESTIONS),
    "stream": stream(QUESTIONS),
    "shuffled stream": stream(QUESTIONS).shuffle(seed=1, buffer_size=4),
    "stream with columns": stream(
        QUESTIONS, features=Features({"question": Value("string"), "answer": Value("string")})
    ),
}


@pytest.mark.parametrize("kind", WITHOUT_PROMPTS)
def test_training_set_without_prompts_is_refused_at_construction(tmp_path, kind):
    message = (
        r"`train_dataset` has no column `prompt`.*\['question', 'answer'\].*rename_column\('question', 'prompt'\)"
    )
    with pytest.raises(ValueError, match=message):
        codraft_trainer(tmp_path, trainer={"train_dataset": WITHOUT_PROMPTS[kind]})


@pytest.mark.parametrize("kind", [*WITHOUT_PROMPTS, "list"])
def test_evaluation_sets_without_prompts_are_refused_by_their_name(tmp_path, kind):
    dataset = {**WITHOUT_PROMPTS, "list": QUESTIONS}[kind]
    for given, name in (
        (dataset, "eval_dataset"),
        ({"good": prompt_dataset(), "bad": dataset}, r"eval_dataset\['bad'\]"),
    ):
        with pytest.raises(ValueError, match=f"^`{name}` has no column `prompt`"):
            codraft_trainer(tmp_path, trainer={"eval_dataset": given})


def test_without_a_draft_the_errors_of_a_dataset_are_those_of_trl(tmp_path):
    dataset = {"trainer": {"train_dataset": WITHOUT_PROMPTS["rows"]}}
    with pytest.raises(KeyError, match="prompt"):
        plain_trainer(tmp_path, **dataset).train()
    with pytest.raises(KeyError, match="prompt"):
        codraft_trainer(tmp_path, use_draft=False, **dataset).train()


def test_training_set_without_rows_is_refused_at_construction(tmp_path):
    for rows in (Dataset.from_list([]), Dataset.from_dict({"prompt": []}), prompt_dataset().filter(lambda row: False)):
        with pytest.raises(ValueError, match="`train_dataset` has no rows"):
            codraft_trainer(tmp_path, trainer={"train_dataset": rows})


def test_a_column_that_a_transform_makes_is_there(tmp_path):
    dataset = Dataset.from_list(QUESTIONS).with_transform(lambda rows: {"prompt": rows["question"]})
    data = {"train_dataset": dataset, "eval_dataset": {"empty": Dataset.from_list([])}}
    trainer = codraft_trainer(tmp_path, trainer=data, max_steps=1)
    prompts = {row["prompt"] for batch in trainer.get_train_dataloader() for row in batch}
    assert prompts == {row["question"] for row in QUESTIONS}


@pytest.mark.parametrize("shuffled", [False, True])
def test_looking_for_prompts_leaves_every_row_of_a_stream_to_the_training(tmp_path, shuffled):
    """Also the order and the random state: a run with plain rollouts is that of plain TRL."""

    def dataset():
        rows = stream(PROMPT_ROWS)
        return rows.shuffle(seed=3, buffer_size=5) if shuffled else rows

    assert dataset().column_names is None
    draft = Eagle3DraftModel(Eagle3DraftConfig.from_policy(tiny_policy().config, tap_layers=[1, 2, 3]))
    given = {"train_dataset": dataset(), "draft_model": draft}
    codraft = codraft_trainer(tmp_path / "ours", trainer=given, speculative_rollouts="false", max_steps=2)
    codraft.train()
    plain = plain_trainer(tmp_path / "plain", trainer={"train_dataset": dataset()}, max_steps=2)
    plain.train()
    assert_same_run(codraft, plain)
    assert any((weights(plain)[name] != value).any() for name, value in tiny_policy().state_dict().items())


EMPTY = {"text": ["abc", ""], "all": ["", ""], "first": ["", "abc"]}


@pytest.mark.parametrize("kind", EMPTY)
@pytest.mark.parametrize("speculative_rollouts", ["true", "false"])
def test_an_empty_prompt_is_named(tmp_path, kind, speculative_rollouts):
    draft = Eagle3DraftModel(Eagle3DraftConfig.from_policy(tiny_policy().config, tap_layers=[1, 2, 3]))
    given = {"train_dataset": Dataset.from_dict({"prompt": EMPTY[kind] * 4}), "draft_model": draft}
    trainer = codraft_trainer(tmp_path, trainer=given, speculative_rollouts=speculative_rollouts)
    with pytest.raises(ValueError, match=r"Prompt \d of this batch of 8 is empty \((4|8) in all\)"):
        trainer.train()


def test_a_prompt_that_the_chat_template_leaves_empty_is_named(tmp_path):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] if m['role'] == 'system' }}{% endfor %}"
    given = {"train_dataset": prompt_dataset(conversational=True), "processing_class": tokenizer}
    with pytest.raises(ValueError, match=r"Prompt 0 of this batch of 8 is empty \(8 in all\): .*chat template"):
        codraft_trainer(tmp_path, trainer=given).train()
