"""Runs that context parallelism must reproduce: arguments of the trainer on top of those of `settings`."""

from group.replay_cases import CASES as REPLAY_CASES
from group.replay_cases import OLD_LOG_PROBS


CASES = {
    **REPLAY_CASES,
    "whole rows travel": {"context_parallel_layout": "document", "context_parallel_trunk": "gather_once"},
    "no draft": {"use_draft": False, "beta": 0.1},
    "frozen draft": {"draft_train": False},
    "prompts trained": {"draft_train_on_prompt": True, "draft_detach_passes": True},
    "reduced vocabulary": {"draft_vocab_size": 48},
    # Microbatches of one row: a prompt of one token, and at most two of completion that count. Rows are shorter than
    # 2c, and shards without a token occur.
    "short rows": {
        "prompts": ["x", "y"],
        "longest": 3,
        "max_completion_length": 2,
        "mask_truncated_completions": True,
        "per_device_train_batch_size": 1,
    },
    # Every completion of some ranks is masked, so that neither loss nor draft has a token there.
    "untrained rank": {"mask_truncated_completions": True, "max_completion_length": 2, "longest": 6},
    # That of all: the draft has no token anywhere.
    "nothing trained": {"mask_truncated_completions": True, "ends": False},
    "reentrant checkpointing": {
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": True},
    },
    "checkpointed experts": {
        "model_type": "mixtral",
        "dtype": "float32",
        "gradient_checkpointing": True,
        "num_iterations": 2,
    },
    # Nothing replayed: a fresh draft is initialised and pretrained, proposes in every rollout, and is saved.
    "speculative": {
        "speculates": True,
        # Servers read no fp64, so a draft in it is not saved.
        "dtype": "float32",
        "num_draft_tokens": "2",
        "draft_pretrain_steps": 2,
        "max_completion_length": 6,
        "save_strategy": "steps",
        "save_steps": 3,
    },
    "window": {"model_type": "mistral", **OLD_LOG_PROBS},
    "longrope": {"model_type": "phi3"},
    # The longest batch so far decides in plain runs too: of the same length here, as after rollouts of the policy.
    "dynamic": {"model_type": "dynamic", "pad_to_multiple_of": 32},
    # Rollouts of its own, between backwards that recompute attention.
    "checkpointed lora": {
        "lora": True,
        "beta": 0.1,
        "gradient_checkpointing": True,
        "speculates": True,
        "num_draft_tokens": "2",
    },
}

# Enough to notice each part that could be missing; the others are marked slow.
DEFAULT_CASES = [
    "dapo",
    "evaluation",
    "short rows",
    "checkpointed experts",
    "checkpointed lora",
]

DRAFT_PASSES = 3

# Ranks of a sharded policy run as many forwards as the one whose rollouts take longest.
LOCKSTEP = "rollout/policy_forwards"

# With a policy that FSDP2 shards.
SHARDED_CASES = ["dapo", "checkpointed experts", "checkpointed lora"]

# As for groups without sharded attention; the kernels of transformers' experts do not take fp64.
TOLERANCE = (1e-5, 1e-7)
TOLERANCES = {
    "checkpointed experts": (1e-5, 5e-7),
    "speculative": (1e-5, 1e-6),
    "bf16": (3e-2, 2e-2),
}
