"""Runs that pipelines must reproduce: arguments of the trainer on top of those of `settings`."""

from cp.trainer_cases import CASES as CONTEXT_PARALLEL_CASES
from group.replay_cases import OLD_LOG_PROBS


# The load-balancing loss of experts is refused; layouts are of shards.
SHARED = {
    name: {**case, "router_aux_loss_coef": 0.0} if case.get("model_type") == "mixtral" else case
    for name, case in CONTEXT_PARALLEL_CASES.items()
    if name != "whole rows travel"
}

CASES = {
    **SHARED,
    "gpipe": {"pipeline_schedule": "GPipe", **OLD_LOG_PROBS},
    "interleaved": {"pipeline_schedule": "Interleaved1F1B", "layers_per_stage": [1, 2, 2, 1]},
    "tied": {"model_type": "tied"},
    # The first stage has nothing to train.
    "frozen layers": {"frozen_layers": 4},
    # As under DDP, the weights of the first rank count.
    "weights of each rank": {"disturbed": True},
    "no clipping": {"max_grad_norm": 0.0},
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
