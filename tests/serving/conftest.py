import json

import pytest
import torch
from safetensors.torch import load_file
from tiny import tiny_policy

from trl_codraft.modeling.configuration_eagle3 import Eagle3DraftConfig
from trl_codraft.modeling.modeling_eagle3 import Eagle3DraftModel
from trl_codraft.serving.validation import validate_draft


@pytest.fixture(scope="session")
def policy():
    """8 layers: the servers' default taps are [2, 4, 5]."""
    return tiny_policy(num_hidden_layers=8)


@pytest.fixture(scope="module")
def good(policy, tmp_path_factory):
    """A reduced draft, valid without a word."""
    folder = tmp_path_factory.mktemp("good") / "draft"
    draft = Eagle3DraftModel(Eagle3DraftConfig.from_policy(policy.config, draft_vocab_size=20))
    draft.set_vocab(torch.arange(20) * 2)
    draft.save_pretrained(folder)
    assert validate_draft(folder, policy) == []
    return json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
