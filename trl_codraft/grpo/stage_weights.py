"""
Policies of which every rank holds its own stages alone (`pipeline_replica=False`): how TRL's trainer comes to have
one.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from accelerate.utils import is_peft_model
from torch import nn
from transformers import AutoConfig, PreTrainedModel

from ..config import CoDraftGRPOConfig
from ..modeling.modeling_eagle3 import Eagle3DraftModel
from ..modeling.policy import base_policy, decoder_of
from ..pp.balance import draft_cost_of, fastest_layers, head_cost_of
from ..pp.order import schedule_order
from ..pp.stages.split import keep_stages, require_split
from ..pp.stages.weights import load_stage_weights
from .building import config_of_draft
from .join_context import mesh_of
from .support import require_class_of_transformers, require_place_for_adapter
from .trl_patches import create_model_from_path, models_loaded_by


# Stages of a rank under the interleaved schedule, where `layers_per_stage` does not say.
INTERLEAVED_STAGES = 2


def layers_of_stages(
    args: CoDraftGRPOConfig, policy: nn.Module, draft: str | Eagle3DraftModel | None = None
) -> tuple[int, ...]:
    """
    Decoder layers of each stage: as the user says, or balanced with the head and the draft's training counted.

    Args:
        args ([`CoDraftGRPOConfig`]):
            The configuration.
        policy ([`~transformers.PreTrainedModel`]):
            The policy, whole; weights do not matter.
        draft (`str` or [`Eagle3DraftModel`], *optional*):
            The draft to start from; a fresh one if `None`.

    Raises:
        ValueError: if the policy has other layers than the user says, or fewer than stages.
    """
    if args.layers_per_stage is not None:
        require_split(policy, args.layers_per_stage)
        return tuple(args.layers_per_stage)
    size = args.pipeline_parallel_size
    num_stages = size * (INTERLEAVED_STAGES if args.pipeline_schedule == "Interleaved1F1B" else 1)
    num_microbatches = args.gradient_accumulation_steps * size * args.context_parallel_size
    # A layer that is recomputed takes a forward more.
    in_layers = 3 / 4 if args.gradient_checkpointing else 1
    draft_cost = 0.0
    if args.use_draft and args.draft_train:
        draft_cost = in_layers * draft_cost_of(policy, config_of_draft(args, policy, draft), args.draft_ttt_steps)
    return fastest_layers(
        len(decoder_of(policy).layers),
        schedule_order(args.pipeline_schedule, size, num_stages, num_microbatches),
        head_cost=in_layers * head_cost_of(policy),
        draft_cost=draft_cost,
    )


class StageWeights:
    """
    Cuts policies down to this rank's stages.

    Args:
        args ([`CoDraftGRPOConfig`]):
            The configuration.
        adapters (`Sequence[PeftConfig]`, *optional*, defaults to `()`):
            Configurations of the adapters that policies have or get.
        draft (`str` or [`Eagle3DraftModel`], *optional*):
            The draft to start from.

    Attributes:
        layers (`tuple[int, ...]` or `None`):
            Decoder layers of each stage, once a policy was cut.
    """

    def __init__(
        self, args: CoDraftGRPOConfig, adapters: Sequence[Any] = (), draft: str | Eagle3DraftModel | None = None
    ):
        self.args, self.adapters, self.draft = args, adapters, draft
        self.layers: tuple[int, ...] | None = None

    def cut(self, policy: PreTrainedModel) -> list[str]:
        """Drops other ranks' layers from a whole policy, in place, and returns the paths of the dropped modules."""
        layers = layers_of_stages(self.args, policy, self.draft)
        for adapter in self.adapters:
            require_place_for_adapter(adapter, policy, layers, self.args.pipeline_parallel_size)
        mesh = mesh_of(self.args)
        stages = range(mesh.place_of(self.args.process_index).pp, len(layers), mesh.pipeline_size)
        self.layers = layers
        # The reference policy keeps it too: TRL pairs its parameters with the policy's when it follows it.
        return keep_stages(policy, layers, stages, embedding=self.args.use_draft)

    def create_model_from_path(self, path: str, **kwargs: Any) -> PreTrainedModel:
        """Loads the stages of this rank alone, in place of TRL's function of the same name."""
        names = ("revision", "trust_remote_code")
        config = AutoConfig.from_pretrained(path, **{name: kwargs[name] for name in names if name in kwargs})
        architecture = require_class_of_transformers(path, config)
        return create_model_from_path(path, architecture=_StageArchitecture(architecture, self), **kwargs)


class _StageArchitecture:
    """Passes for a class of Transformers where TRL loads one: its `from_pretrained` loads this rank's stages."""

    def __init__(self, architecture: type[PreTrainedModel], stage_weights: StageWeights):
        self.architecture, self.stage_weights = architecture, stage_weights

    def from_pretrained(self, path: str, **kwargs: Any) -> PreTrainedModel:
        return load_stage_weights(self.architecture, path, self.stage_weights.cut, **kwargs)


@contextmanager
def only_stage_weights(
    args: CoDraftGRPOConfig, model: Any, peft_config: Any = None, draft: str | Eagle3DraftModel | None = None
) -> Iterator[StageWeights | None]:
    """
    Within it, `GRPOTrainer.__init__` loads this rank's stages of its policy and of its reference policy, if no rank
    holds the whole of them.

    Args:
        args ([`CoDraftGRPOConfig`]):
            The configuration.
        model (`str` or [`~transformers.PreTrainedModel`] or [`~peft.PeftModel`]):
            The argument of the trainer. An object is cut down in place.
        peft_config (`PeftConfig`, *optional*):
            The argument of the trainer.
        draft (`str` or [`Eagle3DraftModel`], *optional*):
            The draft to start from.
    """
    if args.holds_whole_policy:
        yield None
        return
    adapters = [*model.peft_config.values()] if isinstance(model, nn.Module) and is_peft_model(model) else []
    stage_weights = StageWeights(args, [*adapters, *([] if peft_config is None else [peft_config])], draft)
    if isinstance(model, nn.Module):
        stage_weights.cut(base_policy(model))
    with models_loaded_by(stage_weights.create_model_from_path):
        yield stage_weights
