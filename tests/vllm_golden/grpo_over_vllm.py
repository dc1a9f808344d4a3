"""
The small GRPO run that both live scripts make with rollouts by a real vLLM, and what must be true when it is over.

Policy and prompts are as in golden_models.py, so make_golden.py can serve what the run saved.
"""

import json
from pathlib import Path

import torch
from golden_models import MAX_NEW_TOKENS, PROMPTS, VOCAB_SIZE, checksum
from grpo_runs import codraft_trainer
from tiny import tiny_policy, tiny_tokenizer
from transformers import AutoModelForCausalLM

from trl_codraft import score_draft
from trl_codraft.vllm import generation as vllm_rollouts


DRAFT_VOCAB_SIZE = 96
SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "head_dim": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "eos_token_id": None,
}
GREEDY = {"eos_token_id": None, "pad_token_id": 0, "max_new_tokens": MAX_NEW_TOKENS}


def write_start(folder: Path):
    """Writes the policy that the run starts from, and returns it."""
    policy = tiny_policy(scale=4.5, **SIZES)
    policy.save_pretrained(folder / "policy")
    tiny_tokenizer(VOCAB_SIZE).save_pretrained(folder / "policy")
    return policy


def build_trainer(folder: Path, **settings):
    """A trainer of three steps with a reduced draft, after [`write_start`]."""
    vllm_rollouts.CPU_SAMPLES_WRONGLY = False
    return codraft_trainer(
        folder / "out",
        AutoModelForCausalLM.from_pretrained(folder / "policy", dtype=torch.float32),
        {"processing_class": tiny_tokenizer(VOCAB_SIZE)},
        use_vllm=True,
        speculative_rollouts="true",
        num_draft_tokens="auto",
        draft_vocab_size=DRAFT_VOCAB_SIZE,
        draft_pretrain_steps=60,
        draft_pretrain_learning_rate=1e-3,
        max_completion_length=24,
        temperature=0.7,
        learning_rate=3e-3,
        **settings,
    )


def ours(policy, draft) -> dict:
    """Greedy completions of the golden prompts, and the counters of our own speculative decoding."""
    policy.eval()
    outputs = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        outputs.append(policy.generate(ids, do_sample=False, **GREEDY)[0, len(prompt) :].tolist())
    scores = score_draft(policy, draft, PROMPTS, **GREEDY)
    counters = [scores[name] for name in ("verifications", "drafted", "accepted", "accepted_per_position")]
    return {"outputs": outputs, "counters": counters}


def report(trainer) -> dict:
    """What the logs say of the run, step by step, and what vLLM must do with the policy and draft as they are now."""
    entries = [entry for entry in trainer.state.log_history if "loss" in entry]
    return {
        "accept_lengths": [entry["rollout/accept_length"] for entry in entries],
        "logprob_differences": [entry["sampling/sampling_logp_difference/max"] for entry in entries],
        "ours": ours(trainer.model, trainer.draft_model),
    }


def save(trainer, folder: Path) -> None:
    """Saves as a user does, and says in make_golden.py's way where policy and draft are."""
    trainer.save_model()
    case = folder / "served" / "grpo"
    case.mkdir(parents=True)
    (case / "policy").symlink_to(folder / "out")
    (case / "draft").symlink_to(folder / "out" / "draft")
    sums = {"grpo": [checksum(trainer.model), checksum(trainer.draft_model)]}
    (folder / "served" / "checksums.json").write_text(json.dumps(sums))
