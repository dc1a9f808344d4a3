"""
Warns about settings that work but are rarely meant, and about drafts that are of no use.

Nothing here stops a run: `support.py` does.
"""

import math
from dataclasses import fields

from transformers.utils import logging

from ..config import SHAPE_SETTINGS, CoDraftGRPOConfig
from ..modeling.configuration_eagle3 import Eagle3DraftConfig
from ..modeling.modeling_eagle3 import Eagle3DraftModel
from ..rollout.stats import SpeculativeStats


logger = logging.get_logger(__name__)

# Rollouts below this accept length accept nothing to speak of.
COLLAPSED_ACCEPT_LENGTH = 1.05
# A draft that reached this one is clearly of use.
GOOD_ACCEPT_LENGTH = 1.5
# Fewer verifications say nothing.
MIN_VERIFICATIONS = 100
# Settings that only a draft gives a meaning, besides those that begin with `draft_`.
DRAFT_ONLY_SETTINGS = (
    "speculative_rollouts",
    "num_draft_tokens",
    "rollout_cuda_graphs",
    "context_parallel_trunk",
    "tap_channel_slots",
)


def warn_about_settings(args: CoDraftGRPOConfig, draft_is_fresh: bool) -> None:
    """Warns once about settings that work but are rarely meant."""
    if draft_is_fresh and args.draft_pretrain_steps == 0:
        logger.warning_once(
            "A fresh draft starts with `draft_pretrain_steps=0`: the first rollouts will accept almost nothing of "
            "what it proposes. Set `draft_pretrain_steps`, or start from a trained draft with "
            "`draft_model_name_or_path`."
        )
    if args.draft_shard_optimizer and args.world_size == 1:
        logger.warning_once("`draft_shard_optimizer=True` has no effect: there is one process.")
    window = args.steps_per_generation * args.num_iterations
    saves = args.save_strategy == "steps" and args.save_steps >= 1
    if saves and (args.save_steps * args.gradient_accumulation_steps) % window:
        logger.warning_once(
            f"`save_steps={args.save_steps}` does not fall on the boundary of a generation window "
            f"({window} micro-steps): a run resumed from such a checkpoint generates new rollouts in the middle of "
            "a window and does not repeat the uninterrupted run exactly."
        )


def warn_about_unused_settings(args: CoDraftGRPOConfig) -> None:
    """Warns once about settings of the draft that `use_draft=False` leaves without effect."""
    satisfied = {"draft_train": False, "speculative_rollouts": "false"}
    unused = [
        f"`{spec.name}={getattr(args, spec.name)!r}`"
        for spec in fields(args)
        if (spec.name.startswith("draft_") or spec.name in DRAFT_ONLY_SETTINGS)
        and getattr(args, spec.name) not in (spec.default, satisfied.get(spec.name))
    ]
    if unused:
        logger.warning_once(f"`use_draft=False`: {', '.join(unused)} without effect.")


def warn_about_ignored_settings(args: CoDraftGRPOConfig, config: Eagle3DraftConfig) -> None:
    """Warns about settings of a fresh draft's shape that a loaded draft does not follow."""
    defaults = {spec.name: spec.default for spec in fields(args)}
    for field, setting in SHAPE_SETTINGS.items():
        asked, has = getattr(args, setting), getattr(config, field)
        if asked != defaults[setting] and asked != has:
            logger.warning(
                f"`{setting}={asked}` is for fresh drafts: the loaded draft keeps its `{field}={has}`. Drop the "
                "setting, or start from a draft of that shape."
            )


def warn_about_whole_vocabulary(args: CoDraftGRPOConfig, draft: Eagle3DraftModel) -> None:
    """Warns if the head of a fresh draft is most of it, and nobody asked for that."""
    head = draft.lm_head.weight.numel() / sum(parameter.numel() for parameter in draft.parameters())
    if args.draft_vocab_size is None and head > 0.5 and args.process_index == 0:
        size = draft.config.vocab_size
        logger.warning(
            f"The draft's head over all {size} tokens has {head:.0%} of its weights, and most of what drafting and "
            "training it costs. Set `draft_vocab_size` (4096 to 32000) for a head over the most frequent tokens, "
            f"which `draft/vocab_coverage` watches, or `draft_vocab_size={size}` to keep it as it is."
        )


def warn_about_metrics(metrics: dict[str, float], draft_is_fresh: bool, args: CoDraftGRPOConfig) -> None:
    """Warns once when a draft learns nothing, or learns and cannot be of use. Takes metrics over all ranks."""
    if not metrics["draft/rows"]:
        logger.warning_once(
            f"The draft learned nothing in a step: {_why_nothing_taught(metrics, args)} Such steps leave it as it is "
            "and log `draft/rows` 0 and no `draft/loss`."
        )
    if metrics.get("draft/vocab_coverage", 1.0) < 0.9:
        logger.warning_once(
            "Less than 90% of the policy's probability (`draft/vocab_coverage`) lies in the draft vocabulary: the "
            "rest can never be drafted. Raise `draft_vocab_size`."
        )
    if not draft_is_fresh and metrics.get("draft/accept_length_sim", math.inf) < 1.05:
        logger.warning_once(
            "The loaded draft's simulated accept length (`draft/accept_length_sim`) is below 1.05: it proposes almost "
            "nothing that the policy accepts. Check that it was trained for this policy and that its tap layers are "
            "numbered as in vLLM (`trl-codraft validate`)."
        )


def _why_nothing_taught(metrics: dict[str, float], args: CoDraftGRPOConfig) -> str:
    """Why no token of a step counted for the draft, and what to set."""
    if metrics["draft/masked_rows"]:
        return (
            "wherever it could have, the policy's first choice lies outside its vocabulary. Raise `draft_vocab_size`."
        )
    if args.mask_truncated_completions:
        return (
            "`mask_truncated_completions=True` hides truncated completions from policy and draft, and all were. Raise "
            f"`max_completion_length={args.max_completion_length}`, or set `mask_truncated_completions=False`."
        )
    return "no completion had a token that the policy chose itself and that follows two others."


def warn_about_collapse(stats: SpeculativeStats, simulated: float | None, speculated_well: bool) -> None:
    """
    Warns once when rollouts accept next to nothing of a draft that should do better.

    Args:
        stats ([`SpeculativeStats`]):
            Counters of one batch of rollouts, over all ranks.
        simulated (`float`, *optional*):
            The latest `draft/accept_length_sim`: what the draft reaches on the tokens it is trained on.
        speculated_well (`bool`):
            Whether earlier rollouts of this run accepted a fair share.
    """
    if stats.verifications < MIN_VERIFICATIONS or stats.accept_length >= COLLAPSED_ACCEPT_LENGTH:
        return
    if speculated_well or (simulated or 1.0) >= GOOD_ACCEPT_LENGTH:
        # Without measured numbers: another text would be another warning.
        logger.warning_once(
            f"The accept length of rollouts (`rollout/accept_length`) is below {COLLAPSED_ACCEPT_LENGTH}, although "
            f"earlier rollouts or the simulated one (`draft/accept_length_sim`) reached {GOOD_ACCEPT_LENGTH}: "
            "rollouts do not run with the draft that is trained, or sample from another distribution. See the "
            "checklist under 'Accept length near 1' in docs/troubleshooting.md."
        )
