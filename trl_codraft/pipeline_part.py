"""
Policies of which every rank holds its own stages alone (`pipeline_replica=False`): how TRL's trainer comes to have one.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import transformers
from torch import nn
from transformers import AutoConfig, PreTrainedModel
from trl.trainer import grpo_trainer

from .compatibility import base_policy
from .config import CoDraftGRPOConfig
from .modeling.taps import decoder_of
from .pp import balance_layers, head_cost_of, keep_stages, load_part, require_split


# Stages of a rank under the interleaved schedule, where `layers_per_stage` does not say.
INTERLEAVED_STAGES = 2


def layers_of_stages(args: CoDraftGRPOConfig, policy: nn.Module) -> tuple[int, ...]:
    """
    Decoder layers of each stage: what the user says, or balanced with the head counted.

    Args:
        args ([`CoDraftGRPOConfig`]):
            The configuration.
        policy ([`~transformers.PreTrainedModel`]):
            The policy, whole; weights do not matter.

    Raises:
        ValueError: if the policy has other layers than the user says, or fewer than stages.
    """
    if args.layers_per_stage is not None:
        require_split(policy, args.layers_per_stage)
        return tuple(args.layers_per_stage)
    per_rank = INTERLEAVED_STAGES if args.pipeline_schedule == "Interleaved1F1B" else 1
    num_layers = len(decoder_of(policy).layers)
    return balance_layers(num_layers, per_rank * args.pipeline_parallel_size, head_cost=head_cost_of(policy))


def place_in_pipeline(args: CoDraftGRPOConfig, rank: int) -> int:
    """Which of the ranks of its pipeline a rank of the run is: ranks that share a stage are neighbours."""
    return rank % (args.pipeline_parallel_size * args.context_parallel_size) // args.context_parallel_size


class PolicyParts:
    """
    Cuts policies down to this rank's stages.

    Args:
        args ([`CoDraftGRPOConfig`]):
            The configuration.

    Attributes:
        layers (`tuple[int, ...]` or `None`):
            Decoder layers of each stage, once a policy was cut.
    """

    def __init__(self, args: CoDraftGRPOConfig):
        self.args = args
        self.layers: tuple[int, ...] | None = None

    def cut(self, policy: PreTrainedModel) -> list[str]:
        """Drops other ranks' layers from a whole policy, in place; the paths of what it dropped."""
        layers = layers_of_stages(self.args, policy)
        size = self.args.pipeline_parallel_size
        stages = range(place_in_pipeline(self.args, self.args.process_index), len(layers), size)
        self.layers = layers
        # In the reference policy too, whose parameters TRL pairs with the policy's when it follows it.
        return keep_stages(policy, layers, stages, embedding=self.args.use_draft)

    def create_model_from_path(self, path: str, **kwargs: Any) -> PreTrainedModel:
        """TRL's function of that name for a part of the policy."""
        names = ("revision", "trust_remote_code")
        config = AutoConfig.from_pretrained(path, **{name: kwargs[name] for name in names if name in kwargs})
        # A class of the checkpoint's own code, or none at all.
        architecture = getattr(transformers, (config.architectures or [""])[0], None)
        if architecture is None:
            raise ValueError(
                f"{path} has the architecture {config.architectures}, which Transformers does not have itself: it cannot "
                "be loaded in parts. Pass a model object instead, or set `pipeline_replica=True`."
            )
        return create_model_from_path(path, architecture=_Part(architecture, self), **kwargs)


class _Part:
    """What TRL takes for a class to load: its `from_pretrained` loads this rank's part."""

    def __init__(self, architecture: type[PreTrainedModel], parts: PolicyParts):
        self.architecture, self.parts = architecture, parts

    def from_pretrained(self, path: str, **kwargs: Any) -> PreTrainedModel:
        return load_part(self.architecture, path, self.parts.cut, **kwargs)


create_model_from_path = grpo_trainer.create_model_from_path


@contextmanager
def policies_in_parts(args: CoDraftGRPOConfig, model: Any) -> Iterator[PolicyParts | None]:
    """
    Within it, `GRPOTrainer.__init__` loads parts of its policy and of its reference policy, if ranks hold parts.

    Args:
        args ([`CoDraftGRPOConfig`]):
            The configuration.
        model (`str` or [`~transformers.PreTrainedModel`] or [`~peft.PeftModel`]):
            The argument of the trainer. An object is cut down in place.
    """
    if args.holds_whole_policy:
        yield None
        return
    parts = PolicyParts(args)
    if isinstance(model, nn.Module):
        parts.cut(base_policy(model))
    grpo_trainer.create_model_from_path = parts.create_model_from_path
    try:
        yield parts
    finally:
        grpo_trainer.create_model_from_path = create_model_from_path
