"""
Policies of which every rank holds its own stages alone (`pipeline_replica=False`): how TRL's trainer comes to have
one.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import transformers
from accelerate.utils import is_peft_model
from torch import nn
from transformers import AutoConfig, PreTrainedModel

from ..config import CoDraftGRPOConfig
from ..modeling.modeling_eagle3 import Eagle3DraftModel
from ..modeling.policy import base_policy, decoder_of
from ..pp.balance import draft_cost_of, fastest_layers, head_cost_of
from ..pp.order import schedule_order
from ..pp.shape import stages_of_layers
from ..pp.stages.split import keep_stages, require_split
from ..pp.stages.weights import load_stage_weights
from .building import config_of_draft
from .join_context import mesh_of
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


def require_place_for_adapter(config: Any, policy: nn.Module, layers: Sequence[int], num_ranks: int) -> None:
    """
    Refuses LoRA that a rank with its stages alone has no module for: PEFT would fail there, and there only.

    Args:
        config (`PeftConfig`):
            Configuration of the adapter.
        policy ([`~transformers.PreTrainedModel`]):
            The policy, whole; weights do not matter.
        layers (`Sequence[int]`), num_ranks (`int`):
            Decoder layers of each stage, and ranks of a pipeline.

    Raises:
        ValueError: naming the setting and which to change.
    """
    from peft import LoraConfig
    from peft.tuners.tuners_utils import check_target_module_exists

    if not isinstance(config, LoraConfig):
        return
    # PEFT's own choices are of all layers, and of nothing else.
    chosen = config.target_modules not in (None, "all-linear")
    paths = {module: path for path, module in policy.named_modules()}
    targets = [path for path in paths.values() if chosen and check_target_module_exists(config, path)]
    outside = {paths[policy.get_input_embeddings()], paths[policy.get_output_embeddings()]} & set(targets)
    if outside or config.trainable_token_indices:
        what = f"adapts `{min(outside)}`" if outside else "has `trainable_token_indices`"
        raise ValueError(
            f"The LoRA configuration {what}, and no rank but its stage's has that module (`pipeline_replica=False`). "
            "Leave it out (`modules_to_save` trains embedding or head whole), or set `pipeline_replica=True`."
        )
    own = zip(stages_of_layers(layers), decoder_of(policy).layers, strict=True)
    served = {
        stage % num_ranks for stage, layer in own if any(path.startswith(f"{paths[layer]}.") for path in targets)
    }
    if chosen and len(served) < num_ranks:
        raise ValueError(
            f"The LoRA configuration adapts no layer on ranks {sorted(set(range(num_ranks)) - served)} of a pipeline, "
            f"which have layers {list(layers)} of the policy by stage (`pipeline_replica=False`). Change "
            "`target_modules`, `layers_to_transform` or `layers_per_stage` so that every rank has an adapter, or set "
            "`pipeline_replica=True`."
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
        # A class of the checkpoint's own code, or none at all.
        architecture = getattr(transformers, (config.architectures or [""])[0], None)
        if architecture is None:
            raise ValueError(
                f"{path} has the architecture {config.architectures}, which Transformers does not have itself: it "
                "cannot be loaded by stages. Pass a model object instead, or set `pipeline_replica=True`."
            )
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
