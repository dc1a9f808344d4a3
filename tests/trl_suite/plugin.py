"""
pytest plugin that runs TRL's GRPO tests offline on a trainer of choice. It acts when it is loaded (`-p`), before the
test module imports its names: `trl.GRPOTrainer`, `trl.GRPOConfig` and `datasets.load_dataset` are what `--trl-trainer`
says.
"""

import functools
import json
from dataclasses import dataclass, field
from pathlib import Path

import datasets
import pytest
import trl
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.testing_utils import torch_device
from trl.trainer.base_config import _BaseConfig

from trl_codraft import CoDraftGRPOConfig, CoDraftGRPOTrainer

from . import zen


@dataclass
class WithoutDraftConfig(CoDraftGRPOConfig):
    """[`CoDraftGRPOConfig`] whose default is the run of `trl.GRPOTrainer`."""

    use_draft: bool = field(default=False, metadata={"help": "Whether to train a draft and roll out with it."})


class WithoutDraftTrainer(CoDraftGRPOTrainer):
    """[`CoDraftGRPOTrainer`] that builds its own configuration, when none is given, with `use_draft=False`."""

    @functools.wraps(CoDraftGRPOTrainer.__init__)
    def __init__(self, model, reward_funcs=None, args=None, *others, **kwargs):
        if args is None:
            args = WithoutDraftConfig("grpo-without-draft")
        super().__init__(model, reward_funcs, args, *others, **kwargs)


# Words in the names of tests that name token ids of the Hub's vocabularies, or count on a tiny chance of an end token.
FULL_VOCABULARY_TESTS = ("tool", "environment", "mask_truncated")

TRAINERS = {
    "original": (trl.GRPOTrainer, trl.GRPOConfig),
    "without_draft": (WithoutDraftTrainer, WithoutDraftConfig),
    "defaults": (CoDraftGRPOTrainer, CoDraftGRPOConfig),
    # What a user gets who renames the trainer only.
    "plain_config": (CoDraftGRPOTrainer, trl.GRPOConfig),
}


def pytest_addoption(parser):
    group = parser.getgroup("trl", "TRL's own tests")
    group.addoption("--trl-trainer", choices=sorted(TRAINERS), default="original", help="trainer to test")
    group.addoption("--trl-vocabulary", choices=("full", "short"), help="only the tests that need this cache")
    group.addoption("--trl-outcomes", type=Path, help="JSON file to write the outcome of each test to")


def pytest_configure(config):
    trl.GRPOTrainer, trl.GRPOConfig = TRAINERS[config.getoption("--trl-trainer")]
    # Steps with the long vocabulary are slow, and no test that needs it counts rows.
    num_train_rows = 2 if config.getoption("--trl-vocabulary") == "full" else None
    datasets.load_dataset = functools.partial(zen.load_dataset, num_train_rows=num_train_rows)
    if config.getoption("--trl-outcomes") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Outcomes(config.getoption("--trl-outcomes")))


def pytest_collection_modifyitems(config, items):
    vocabulary = config.getoption("--trl-vocabulary")
    if vocabulary is None:
        return
    full = [any(word in item.name for word in FULL_VOCABULARY_TESTS) for item in items]
    kept = [item for item, is_full in zip(items, full, strict=True) if is_full == (vocabulary == "full")]
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = kept


class Outcomes:
    """Writes `{test: {"outcome": ..., "message": ...}}`; a test that fails in its fixtures has failed."""

    def __init__(self, path: Path):
        self.path = path
        self.tests: dict[str, dict[str, str]] = {}

    def pytest_runtest_logreport(self, report):
        if report.when != "call" and report.passed:
            return
        name = report.nodeid.partition("::")[2]
        message = "" if report.passed or report.longrepr is None else str(report.longrepr)
        self.tests[name] = {"outcome": report.outcome, "message": message[-4000:]}

    def pytest_sessionfinish(self):
        self.path.write_text(json.dumps(self.tests, indent=1, sort_keys=True))


@pytest.fixture(autouse=True)
def cpu_without_accelerator(request, monkeypatch):
    """
    Without an accelerator: `use_cpu=True`, and where a test leaves them open fp32 (several times faster on a CPU) and,
    with the long vocabulary, one epoch.
    """
    if torch_device not in (None, "cpu"):
        return
    validate = _BaseConfig.__post_init__
    one_epoch = request.config.getoption("--trl-vocabulary") == "full"

    def validate_on_cpu(self):
        self.use_cpu = True
        self.bf16 = False if self.bf16 is None else self.bf16
        if one_epoch and self.num_train_epochs == _BaseConfig.num_train_epochs:
            self.num_train_epochs = 1.0
        validate(self)

    monkeypatch.setattr(_BaseConfig, "__post_init__", validate_on_cpu)


@pytest.fixture
def tiny_llama():
    """A one-layer Llama and a word-level tokenizer, as the fixture of that name in TRL's conftest."""
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    core = Tokenizer(WordLevel({"<pad>": 0, "<eos>": 1, "a": 2}, unk_token="a"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="<eos>")
    return LlamaForCausalLM(config), tokenizer
