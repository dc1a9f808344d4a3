"""
The small policies and drafts of the golden file, the same on every machine: seeded normal numbers, and one trained
draft that is stored beside the golden file.

    python tests/vllm_golden/golden_models.py FOLDER      writes FOLDER/<case>/{policy,draft} for make_golden.py

Sizes are the smallest that vLLM's CPU attention takes (head_dim 32). Every weight, norms included, is drawn far from
the value it could be forgotten at.
"""

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from trl_codraft.modeling.configuration_eagle3 import Eagle3DraftConfig
from trl_codraft.modeling.modeling_eagle3 import Eagle3DraftModel
from trl_codraft.serving.export import export_draft


GOLDEN = Path(__file__).parent / "golden"
VOCAB_SIZE = 128
PROMPTS = ([5, 17, 99, 3, 42, 8, 61], [100, 2, 77, 77, 30, 12, 9, 64, 51, 120, 33], [11])
NUM_DRAFT_TOKENS = 3
MAX_NEW_TOKENS = 20


@dataclass
class Case:
    """
    One policy with one draft; `draft` holds overrides of `Eagle3DraftConfig.from_policy`, `adapter` those of LoRA.
    """

    policy: dict = field(default_factory=dict)
    draft: dict = field(default_factory=dict)
    adapter: dict = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    trained: bool = False


LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 20000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
# The policy has 4 layers, 4 query heads on 2 key heads, and head_dim 32 where hidden / heads is 16.
CASES = {
    "plain": Case(),
    "fc_norm": Case(draft={"fc_norm": True}),
    "norm_output": Case(draft={"norm_output": True}),
    "inherited_norms": Case(draft={"norm_before_residual": True, "norm_before_fc": True}),
    "reduced_vocab": Case(draft={"draft_vocab_size": 48}),
    "two_taps": Case(draft={"tap_layers": [1, 4]}),
    "tied_default_taps_two_layers": Case(
        policy={"model_type": "qwen2", "num_hidden_layers": 8, "tie_word_embeddings": True, "num_attention_heads": 2},
        draft={"num_hidden_layers": 2},
    ),
    "qwen3": Case(policy={"model_type": "qwen3"}),
    "three_heads_of_80_in_96": Case(
        policy={"hidden_size": 96, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 80}
    ),
    "merged_adapter": Case(adapter={"r": 4, "target_modules": "all-linear"}),
    "scaled_rope_bf16": Case(policy={"rope_parameters": LLAMA3_ROPE}, dtype=torch.bfloat16),
    "trained": Case(trained=True),
}


def _randomize(model: nn.Module, seed: int, gain: float) -> None:
    """Matrices normal with variance gain^2 / fan_in, vectors (norms and biases) near 1 and 0 but not at them."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() > 1:
                parameter.copy_(noise * gain / parameter.shape[-1] ** 0.5)
            else:
                parameter.copy_(noise * 0.3 + (0.0 if name.endswith("bias") else 1.0))


def build_policy(case: Case) -> nn.Module:
    """The policy of a case, fp32, in eval mode."""
    sizes = {
        "model_type": "llama",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 256,
        "bos_token_id": 1,
        "eos_token_id": None,
        "pad_token_id": 0,
        **case.policy,
    }
    policy = AutoModelForCausalLM.from_config(AutoConfig.for_model(**sizes), dtype=torch.float32)
    _randomize(policy, seed=1, gain=1.5)
    if case.adapter:
        policy = get_peft_model(policy, LoraConfig(**case.adapter))
        _randomize(
            nn.ModuleList(module for name, module in policy.named_modules() if "lora_" in name), seed=4, gain=1.0
        )
        policy = policy.merge_and_unload()
    return policy.eval()


def build_draft(case: Case, policy: torch.nn.Module) -> Eagle3DraftModel:
    """The draft of a case with fp32 parameters that hold exactly the stored values."""
    if case.trained:
        return Eagle3DraftModel.from_pretrained(GOLDEN / "trained", policy=policy)
    draft = Eagle3DraftModel(Eagle3DraftConfig.from_policy(policy.config, **case.draft))
    _randomize(draft, seed=2, gain=1.5)
    if draft.config.draft_vocab_size < VOCAB_SIZE:
        order = torch.randperm(VOCAB_SIZE, generator=torch.Generator().manual_seed(3))
        draft.set_vocab(order[: draft.config.draft_vocab_size].sort().values)
    return draft.to(case.dtype).float()


def checksum(model: nn.Module) -> float:
    """A number that moves when any weight does."""
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).double()
    return float(weights @ torch.arange(len(weights)).double().cos())


def write_case(name: str, folder: Path) -> None:
    """Writes `policy` and `draft` of a case into a folder."""
    policy = build_policy(CASES[name])
    policy.save_pretrained(folder / "policy")
    export_draft(build_draft(CASES[name], policy), policy, folder / "draft", dtype=CASES[name].dtype)


def write_all(folder: Path) -> None:
    """Writes every case, and the checksums that the golden file repeats."""
    sums = {}
    for name, case in CASES.items():
        write_case(name, folder / name)
        policy = build_policy(case)
        sums[name] = [checksum(policy), checksum(build_draft(case, policy))]
    (folder / "checksums.json").write_text(json.dumps(sums))


if __name__ == "__main__":
    write_all(Path(sys.argv[1]))
