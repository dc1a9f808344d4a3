"""Runs that pipelines must reproduce: arguments of the trainer on top of those of `settings`."""

from group.replay_cases import CASES as REPLAY_CASES
from group.replay_cases import OLD_LOG_PROBS


# The load-balancing loss of experts is refused.
REPLAYED = {**REPLAY_CASES, "experts": {**REPLAY_CASES["experts"], "router_aux_loss_coef": 0.0}}

CASES = {
    **REPLAYED,
    "gpipe": {"pipeline_schedule": "GPipe", **OLD_LOG_PROBS},
    "interleaved": {"pipeline_schedule": "Interleaved1F1B", "layers_per_stage": [1, 2, 2, 1]},
    "tied": {"model_type": "tied"},
    # The first stage has nothing to train.
    "frozen layers": {"frozen_layers": 4},
    # As under DDP, the weights of the first rank count.
    "weights of each rank": {"disturbed": True},
    "no draft": {"use_draft": False, "beta": 0.1},
    "no clipping": {"max_grad_norm": 0.0},
    "frozen draft": {"draft_train": False},
    "prompts trained": {"draft_train_on_prompt": True, "draft_detach_passes": True},
    "reduced vocabulary": {"draft_vocab_size": 48},
    "short rows": {
        "prompts": ["x", "y"],
        "longest": 3,
        "max_completion_length": 2,
        "mask_truncated_completions": True,
        "per_device_train_batch_size": 1,
    },
    "untrained rank": {"mask_truncated_completions": True, "max_completion_length": 2, "longest": 6},
    "reentrant checkpointing": {
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": True},
    },
    "speculative": {
        "speculates": True,
        "dtype": "float32",
        "num_draft_tokens": "2",
        "draft_pretrain_steps": 2,
        "max_completion_length": 6,
        "save_strategy": "steps",
        "save_steps": 3,
    },
    "window": {"model_type": "mistral", **OLD_LOG_PROBS},
    "longrope": {"model_type": "phi3"},
    "dynamic": {"model_type": "dynamic", "pad_to_multiple_of": 32},
    "checkpointed lora": {
        "lora": True,
        "beta": 0.1,
        "gradient_checkpointing": True,
        "speculates": True,
        "num_draft_tokens": "2",
    },
}

# Enough to notice each part that could be missing; the others are marked slow.
DEFAULT_CASES = ["dapo", "adaptive entropy", "entropy quantile", "interleaved", "frozen layers", "speculative"]

# Six layers do not make two stages for each of four ranks.
IMPOSSIBLE = {("interleaved", "4")}

TOLERANCE = (1e-5, 2e-7)
TOLERANCES = {
    "speculative": (1e-5, 1e-6),
    "experts": (1e-5, 1e-6),
    "bf16": (3e-2, 1e-2),
}
