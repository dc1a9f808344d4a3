"""Builds a draft, and the arguments of its training, from the trainer's configuration."""

import torch
from transformers import PreTrainedModel

from ..config import SHAPE_SETTINGS, TRAINING_SETTINGS, CoDraftGRPOConfig
from ..modeling.configuration_eagle3 import Eagle3DraftConfig
from ..modeling.disk.tensors import check_fits_policy, read_draft_config
from ..modeling.modeling_eagle3 import Eagle3DraftModel
from ..modeling.policy import decoder_of
from ..training.draft_trainer import DraftTrainingArguments
from .warnings import warn_about_ignored_settings, warn_about_whole_vocabulary


def build_draft(
    args: CoDraftGRPOConfig, policy: PreTrainedModel, source: str | Eagle3DraftModel | None
) -> Eagle3DraftModel:
    """
    Builds or loads the draft that a run starts with, with fp32 weights.

    Args:
        args ([`CoDraftGRPOConfig`]):
            Shape of a fresh draft.
        policy ([`~transformers.PreTrainedModel`]):
            The causal language model it drafts for.
        source (`str` or [`Eagle3DraftModel`] or `None`):
            Checkpoint or model to start from. `None` builds a fresh draft, whose weights are set when training begins.

    Returns:
        [`Eagle3DraftModel`]

    Raises:
        ValueError: if the draft does not fit the policy.
    """
    if isinstance(source, str):
        draft = Eagle3DraftModel.from_pretrained(source, policy=policy)
    elif source is not None:
        draft = source
        check_fits_policy(draft, policy)
    else:
        draft = Eagle3DraftModel(fresh_config(args, policy))
        warn_about_whole_vocabulary(args, draft)
    if source is not None:
        warn_about_ignored_settings(args, draft.config)
    draft = draft.to(torch.float32)
    # Ranks that share the optimizer's state cut weights where they lie.
    for parameter in draft.parameters():
        parameter.data = parameter.data.contiguous()
    draft.compute_dtype = compute_dtype(args, policy)
    return draft


def config_of_draft(
    args: CoDraftGRPOConfig, policy: PreTrainedModel, source: str | Eagle3DraftModel | None
) -> Eagle3DraftConfig:
    """Returns the configuration of the draft that [`build_draft`] builds of the same arguments."""
    if isinstance(source, str):
        return read_draft_config(source, policy.config.get_text_config())
    return fresh_config(args, policy) if source is None else source.config


def fresh_config(args: CoDraftGRPOConfig, policy: PreTrainedModel) -> Eagle3DraftConfig:
    """The configuration of a fresh draft; what it refuses is named as the run's settings are."""
    shape = {field: getattr(args, setting) for field, setting in SHAPE_SETTINGS.items()}
    shape = {field: value for field, value in shape.items() if value is not None}
    # Some families count attentions, of which a layer may have two.
    shape["num_policy_layers"] = len(decoder_of(policy).layers)
    try:
        return Eagle3DraftConfig.from_policy(policy.config, **shape)
    except ValueError as error:
        message = str(error)
        for field, setting in SHAPE_SETTINGS.items():
            message = message.replace(f"`{field}`", f"`{setting}`")
        raise ValueError(message) from error


def compute_dtype(args: CoDraftGRPOConfig, policy: PreTrainedModel) -> torch.dtype:
    """The policy's compute dtype; fp32 where that is fp16, because the draft has no gradient scaler of its own."""
    if args.bf16:
        return torch.bfloat16
    return torch.float32 if args.fp16 or policy.dtype == torch.float16 else policy.dtype


def head_dtype(args: CoDraftGRPOConfig) -> torch.dtype | None:
    """Dtype in which TRL's loss multiplies with the policy's head: autocast's, else that of the weight (`None`)."""
    if args.cast_lm_head_to_fp32:
        return torch.float32
    return torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else None


def draft_training_arguments(args: CoDraftGRPOConfig, rollout_temperature: float) -> DraftTrainingArguments:
    """The part of the configuration that the draft's own training reads."""
    settings = {field: getattr(args, setting) for field, setting in TRAINING_SETTINGS.items()}
    settings = {field: value for field, value in settings.items() if value is not None}
    return DraftTrainingArguments(**settings, rollout_temperature=rollout_temperature)
