"""Runs that group machinery must reproduce: arguments of the trainer on top of those of `settings`."""

# Generation every second micro-step of four, so that the rollouts are older than the policy.
OLD_LOG_PROBS = {"num_iterations": 2, "steps_per_generation": 2, "gradient_accumulation_steps": 2}

LOSS_TYPES = ["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "vespo"]

CASES = {
    **{loss_type: {"loss_type": loss_type, **OLD_LOG_PROBS} for loss_type in LOSS_TYPES},
    "luspo": {"loss_type": "luspo", "importance_sampling_level": "sequence", **OLD_LOG_PROBS},
    "sequence level": {"importance_sampling_level": "sequence", "loss_type": "grpo", **OLD_LOG_PROBS},
    "entropy quantile": {"top_entropy_quantile": 0.4},
    "entropy quantile and bonus": {"top_entropy_quantile": 0.6, "entropy_coef": 0.1, "loss_type": "grpo"},
    "adaptive entropy": {
        "use_adaptive_entropy": True,
        "entropy_coef": 0.05,
        "entropy_coef_delta": 0.01,
        "entropy_target": 4.2,
    },
    "reference": {"beta": 0.1, "num_iterations": 2},
    "steps per generation": {"steps_per_generation": 3, "gradient_accumulation_steps": 2},
    "many steps per generation": {"steps_per_generation": 4, "gradient_accumulation_steps": 2, "loss_type": "grpo"},
    "lora": {"lora": True, "beta": 0.1},
    "evaluation": {"evaluate": True, "top_entropy_quantile": 0.5},
    "short window": {
        "max_steps": -1,
        "num_train_epochs": 1,
        "steps_per_generation": 1,
        "gradient_accumulation_steps": 2,
        "prompts_per_rank": 3,
    },
    "environment": {"environment": True, "use_adaptive_entropy": True, "entropy_target": 4.2, "entropy_coef": 0.05},
    "truncated": {"mask_truncated_completions": True, "max_completion_length": 5},
    "experts": {"model_type": "mixtral"},
    "off-policy mask": {"off_policy_mask_threshold": 0.01, **OLD_LOG_PROBS},
    "bf16": {"bf16": True, "dtype": "float32"},
    "checkpointing": {"gradient_checkpointing": True},
}

# Enough to notice each part that could be missing; the others are marked slow.
DEFAULT_CASES = [
    "dapo",
    "sequence level",
    "entropy quantile and bonus",
    "adaptive entropy",
    "reference",
    "many steps per generation",
    "evaluation",
    "short window",
    "truncated",
]

# Largest relative and absolute difference. Under autocast each rank's gradient is rounded to bf16.
TOLERANCES = {"bf16": (2e-2, 1e-2)}
TOLERANCE = (1e-5, 1e-7)
