"""
Compares what the ranks of a run were started with, and finds one that was started differently.

Ranks that disagree on what to compute wait for each other until a collective times out, or add numbers that do not
belong together. So all of them say at construction what they were started with, and all raise the same error where
that differs. A setting counts unless it is listed in `MAY_DIFFER`: a new field of any configuration class is compared
without further ado.
"""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

import torch.distributed as dist
from accelerate.utils import is_peft_model
from torch import nn
from transformers import PreTrainedModel
from trl import GRPOConfig
from trl.trainer.utils import get_callable_name

from ..config import CoDraftGRPOConfig
from ..group.exchange import require_same
from ..modeling.configuration_eagle3 import Eagle3DraftConfig
from ..modeling.policy import base_policy
from .run import Run


# Settings that steer neither what a rank computes nor which collectives it takes part in, by reason.
MAY_DIFFER = {
    # Folders and names of one and the same thing may be others on other machines. What is read there is compared.
    "paths": {
        "output_dir",
        "resume_from_checkpoint",
        "draft_model_name_or_path",
        "deepspeed",
        "model_init_kwargs",  # holds a `device_map` for the rank; the policy that comes of it is compared
    },
    # The rank that writes logs uses these alone. How often ranks log is not among them: losses are gathered then.
    "logs": {
        "run_name",
        "project",
        "report_to",
        "disable_tqdm",
        "log_level",
        "log_level_replica",
        "log_on_each_node",
        "log_completions",
        "log_completions_hub_repo",
        "log_unique_prompts",
        "num_completions_to_print",
        "logging_nan_inf_filter",
        "trackio_space_id",
        "trackio_bucket_id",
        "trackio_static_space_id",
    },
    # The Hub is the business of one rank.
    "hub": {"hub_model_id", "hub_token", "hub_private_repo", "hub_revision", "hub_strategy", "hub_always_push"},
    # How a machine loads the rows that the sampler chose, and how long it waits.
    "machine": {
        "dataloader_num_workers",
        "dataloader_prefetch_factor",
        "dataloader_persistent_workers",
        "dataloader_pin_memory",
        "dataloader_multiprocessing_context",
        "skip_memory_metrics",
        "ddp_timeout",
        "local_rank",
    },
}
# Fields of a model's configuration that say where it was loaded from, and by which release.
ORIGIN = ("_name_or_path", "name_or_path", "base_model_name_or_path", "transformers_version", "peft_version")


def common_settings(args: GRPOConfig) -> dict[str, Any]:
    """
    The settings of a configuration that all ranks must share, by name.

    Args:
        args ([`~trl.GRPOConfig`]):
            The configuration, of any class that has this base.

    Returns:
        `dict[str, Any]`: every field but those of `MAY_DIFFER`, as plain values.
    """
    free = set().union(*MAY_DIFFER.values())
    return {f"`{spec.name}`": _plain(getattr(args, spec.name)) for spec in fields(args) if spec.name not in free}


def require_same_settings(args: CoDraftGRPOConfig, fresh_draft: bool) -> None:
    """
    Checks, before a policy is loaded, that all ranks were started with the same settings. Collective. Ranks of which
    none has a draft or shares microbatches do what TRL lets them do.

    Args:
        args ([`CoDraftGRPOConfig`]):
            This rank's.
        fresh_draft (`bool`):
            Whether its draft starts from nothing.

    Raises:
        ValueError: on all ranks alike, naming the settings that differ and their values.
    """
    if not _many_ranks():
        return
    settings = common_settings(args)
    if args.use_draft:
        settings["whether the draft is a fresh one (no `draft_model`, no `draft_model_name_or_path`)"] = fresh_draft
    plain = not args.use_draft and args.context_parallel_size * args.pipeline_parallel_size == 1
    require_same(dist.group.WORLD, settings, required=not plain)


def require_same_parts(run: Run) -> None:
    """
    Checks that all ranks were given the same policy, data and functions, as far as these decide what is computed and
    in which shapes: not the contents of datasets, nor what functions do. Collective.

    Args:
        run ([`~run.Run`]):
            The trainer, after `GRPOTrainer.__init__`.

    Raises:
        ValueError: on all ranks alike, naming what differs and its values.
    """
    if not _many_ranks():
        return
    accelerator, args = run.accelerator, run.args
    parts = {
        "the kind of parallelism (Accelerate's `distributed_type`)": accelerator.distributed_type.value,
        "the precision (Accelerate's `mixed_precision`)": accelerator.mixed_precision,
        "the class of the tokenizer (`processing_class`)": type(run.processing_class).__name__,
        "the number of tokens of the tokenizer": len(run._tokenizer),
        "the padding token": run._tokenizer.pad_token_id,
        "the length of `train_dataset`": _length(run.train_dataset),
        "the length of `eval_dataset`": _length(run.eval_dataset),
        "the number of reward functions": len(run.reward_funcs),
        "the names of `tools`": [get_callable_name(tool) for tool in run.tools],
        "whether there is a `rollout_func`": run.rollout_func is not None,
        "the names in `environment_factory`": sorted(map(str, run.environment_factories or ())),
        "whether there is a reference policy of its own": run.ref_model is not None,
        "the class of the optimizer in `optimizers`": _name_of_class(run.optimizer),
        "the class of the schedule in `optimizers`": _name_of_class(run.lr_scheduler),
        **_policy_parts(run.model, whole=args.holds_whole_policy),
    }
    require_same(dist.group.WORLD, parts)


def require_same_draft(config: Eagle3DraftConfig) -> None:
    """
    Checks that all ranks start with a draft of the same shape. Its weights will be those of one rank. Collective.

    Raises:
        ValueError: on all ranks alike, naming the field that differs and its values.
    """
    if _many_ranks():
        require_same(dist.group.WORLD, _fields_of("the draft's", config.to_dict()))


def require_same_start(run: Run) -> None:
    """
    Checks that training begins at the same step on all ranks, and with what the same files hold of a draft.
    Collective.

    Raises:
        ValueError: on all ranks alike.
    """
    if not _many_ranks():
        return
    start = {
        "the step that training starts from": run.state.global_step,
        "the number of steps": run.state.max_steps,
        "whether the draft goes on from a checkpoint": run.learner is not None
        and run.learner.resumes_from is not None,
        "whether the draft has been trained before": run.learner is not None and run.learner.trainer is not None,
    }
    require_same(dist.group.WORLD, start)


def _many_ranks() -> bool:
    return dist.is_initialized() and dist.get_world_size() > 1


def _policy_parts(model: nn.Module, whole: bool) -> dict[str, Any]:
    """Describes a policy by its configuration and, if the rank holds all of it, its parameters."""
    policy: PreTrainedModel = base_policy(model)
    adapters = model.peft_config if is_peft_model(model) else {}
    parts = {
        "the class of the policy": type(policy).__name__,
        "the list of adapters (`peft_config`)": sorted(adapters),
        "the policy's attention implementation": policy.config.get_text_config()._attn_implementation,
        **_fields_of("the policy's", policy.config.to_dict()),
        **_fields_of("the policy's generation setting", policy.generation_config.to_dict()),
    }
    for name, config in adapters.items():
        parts |= _fields_of(f"adapter {name}'s", config.to_dict())
    if whole:
        shapes = [(name, tuple(p.shape), str(p.dtype), p.requires_grad) for name, p in model.named_parameters()]
        parts["the number of the policy's parameters"] = sum(p.numel() for p in model.parameters())
        parts["the number of parameters that are trained"] = sum(
            p.numel() for p in model.parameters() if p.requires_grad
        )
        parts["a digest of the names, shapes and dtypes of the policy's parameters"] = _digest(shapes)
    return parts


def _fields_of(whose: str, config: Mapping[str, Any]) -> dict[str, Any]:
    return {f"{whose} `{name}`": _plain(value) for name, value in config.items() if name not in ORIGIN}


def _length(data: Any) -> Any:
    """Rows of a dataset, by name if there are several; of a stream nothing is known."""
    if isinstance(data, dict):
        return {name: _length(part) for name, part in data.items()}
    if data is None:
        return "no such dataset"
    return len(data) if hasattr(data, "__len__") else "a stream"


def _name_of_class(thing: Any) -> str | None:
    return None if thing is None else type(thing).__name__


def _digest(value: Any) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()[:16]


def _plain(value: Any) -> Any:
    """Returns numbers, texts or containers of these, which compare and travel; an object's fields or its class."""
    if isinstance(value, Enum):
        value = value.value
    if isinstance(value, float) and value != value:
        return "nan"  # which is not equal to itself
    if value is None or isinstance(value, (str, int, float, bool)):
        return value
    if is_dataclass(value) and not isinstance(value, type):
        value = {spec.name: getattr(value, spec.name) for spec in fields(value)}
    if isinstance(value, Mapping):
        return {str(name): _plain(part) for name, part in value.items() if name not in ORIGIN}
    if isinstance(value, (set, frozenset)):
        return sorted(map(repr, map(_plain, value)))
    if isinstance(value, Iterable):
        return [_plain(part) for part in value]
    if hasattr(value, "to_dict"):
        return _plain(value.to_dict())
    # Texts of other objects may hold an address in memory.
    return str(value) if type(value).__module__ == "torch" else type(value).__qualname__
