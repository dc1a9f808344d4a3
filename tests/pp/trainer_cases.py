"""Runs that pipelines must reproduce: arguments of the trainer on top of those of `settings`."""

from cp.trainer_cases import CASES as CONTEXT_PARALLEL_CASES
from group.replay_cases import OLD_LOG_PROBS


# The load-balancing loss of experts is refused, and a stage that is read from files has the kernels for experts that
# do not take fp64; layouts are of shards.
SHARED = {
    name: {**case, "router_aux_loss_coef": 0.0, "dtype": "float32"} if case.get("model_type") == "mixtral" else case
    for name, case in CONTEXT_PARALLEL_CASES.items()
    if name != "whole rows travel"
}

CASES = {
    **SHARED,
    "gpipe": {"pipeline_schedule": "GPipe", **OLD_LOG_PROBS},
    "interleaved": {"pipeline_schedule": "Interleaved1F1B", "layers_per_stage": [1, 2, 2, 1]},
    "tied": {"model_type": "tied"},
    # The embedding becomes fp32 with the head; what it puts out stays bf16.
    "tied fp32 head": {"model_type": "tied", "dtype": "bfloat16", "cast_lm_head_to_fp32": True},
    # Experts that a buffer balances.
    "balanced experts": {"model_type": "glm4_moe", "dtype": "float32"},
    # The first stage has nothing to train.
    "frozen layers": {"frozen_layers": 4},
    # As under DDP, the weights of the first rank count.
    "weights of each rank": {"disturbed": True},
    "no clipping": {"max_grad_norm": 0.0},
    "reference that follows": {"beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 1},
}

# Enough to notice each part that could be missing; the others are marked slow.
DEFAULT_CASES = ["dapo", "adaptive entropy", "entropy quantile", "interleaved", "frozen layers", "speculative"]

# Six layers do not make two stages for each of four ranks. Parts of a policy cannot roll out, and start from those of
# several ranks.
IMPOSSIBLE = {("interleaved", "4"), ("interleaved", "4p")}
IMPOSSIBLE |= {
    (name, size)
    for name, case in CASES.items()
    for size in ("2p", "4p", "2x2p")
    if case.get("speculates") or case.get("disturbed")
}

TOLERANCE = (1e-5, 1e-7)
TOLERANCES = {
    "speculative": (1e-5, 1e-6),
    "experts": (1e-5, 1e-6),
    "checkpointed experts": (1e-5, 1e-6),
    "balanced experts": (1e-5, 1e-6),
    "bf16": (3e-2, 1e-2),
    "tied fp32 head": (3e-2, 1e-2),
}

# Runs on the rollouts of a server.
SERVED_CASES = {
    # A fresh draft is initialised and pretrained, and the policy moves between two pushes.
    "full": {"cast_lm_head_to_fp32": True},
    "interleaved": {"pipeline_schedule": "Interleaved1F1B", "layers_per_stage": [1, 2, 2, 1]},
    "tied, no draft": {"model_type": "tied", "use_draft": False},
    "tied fp32 head": {"model_type": "tied", "dtype": "bfloat16", "cast_lm_head_to_fp32": True},
    "lora": {"lora": {"modules_to_save": ["lm_head"]}},
    # The draft is pretrained and then stays as it is.
    "experts": {"model_type": "mixtral", "router_aux_loss_coef": 0.0, "draft_train": False},
}
