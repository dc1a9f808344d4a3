"""
Checkpoints of a policy that is split into stages: one file per stage, tensors and optimizer state under the names that
parameters have in the whole policy. So a checkpoint does not depend on the number of stages it was written with.

Every file is written by the rank of its stage into one folder, which all ranks of the pipeline see. With several
pipelines the first one saves and all load.
"""

import copy
import json
import os
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from ...modeling.naming import few
from .shared_optimizer import SharedOptimizer
from .split import PolicyStage


MODEL_FILES = "model-{:05d}-of-{:05d}.safetensors"
OPTIMIZER_FILES = "optimizer-{:05d}-of-{:05d}.pt"
ALL_OPTIMIZER_FILES = "optimizer-*-of-*.pt"
INDEX = "model.safetensors.index.json"


def save_policy(
    stages: Sequence[PolicyStage], folder: str | os.PathLike, group: dist.ProcessGroup, *, timeout: float = 60.0
) -> None:
    """
    Writes the whole policy as `AutoModelForCausalLM.from_pretrained` reads it: a shard per stage, an index, the
    config. Collective in the group. Other weight files of the policy in the folder are removed, as `save_pretrained`
    does.

    Args:
        stages (`Sequence[PolicyStage]`):
            The stages of this rank.
        folder (`str` or `os.PathLike`):
            Made if it is not there.
        group (`ProcessGroup`):
            The ranks of the pipeline, between steps, on gloo (a group of its own if the pipeline runs on another
            backend).
        timeout (`float`, *optional*, defaults to `60.0`):
            Seconds after which rank 0 gives other ranks up. Other ranks wait as long as the group's own timeout.

    Raises:
        RuntimeError: if not every rank of the group makes the call.
        ValueError: on all ranks alike, if the stages together are not a plain policy, such as one with adapters.
    """
    _meet(group, "save_policy", timeout)
    own = {stage.index: {**dict(stage.named_own_parameters()), **dict(stage.named_own_buffers())} for stage in stages}
    policy, num_stages = stages[0].policy, stages[0].num_stages
    names: list[list[str]] = [[] for _ in range(dist.get_world_size(group))]
    dist.all_gather_object(names, [name for tensors in own.values() for name in tensors], group)
    _require_plain_policy(policy, [name for theirs in names for name in theirs])
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    sizes: dict[int, dict[str, int]] = {}
    for index, tensors in own.items():
        # Names and shapes on disk, where those in memory are others, as with experts that are one tensor here.
        on_disk = revert_weight_conversion(policy, {name: value.detach() for name, value in tensors.items()})
        contents = {name: value.cpu().contiguous() for name, value in on_disk.items()}
        sizes[index] = {name: value.nbytes for name, value in contents.items()}
        save_file(contents, folder / MODEL_FILES.format(index + 1, num_stages), metadata={"format": "pt"})
    by_rank: list[dict[int, dict[str, int]]] = [{} for _ in range(dist.get_world_size(group))]
    dist.all_gather_object(by_rank, sizes, group)
    by_stage = {index: names for theirs in by_rank for index, names in theirs.items()}
    _meet(group, "save_policy", timeout)
    if dist.get_rank(group) == 0:
        files = {name: MODEL_FILES.format(index + 1, num_stages) for index in by_stage for name in by_stage[index]}
        total = sum(sum(names.values()) for names in by_stage.values())
        index_text = json.dumps({"metadata": {"total_size": total}, "weight_map": files}, indent=2, sort_keys=True)
        (folder / INDEX).write_text(index_text + "\n")
        config = copy.deepcopy(policy.config)
        config.architectures = [type(policy).__name__]
        config.dtype = str(policy.dtype).removeprefix("torch.")
        config.save_pretrained(folder)
        policy.generation_config.save_pretrained(folder)
        _remove(folder, "model*.safetensors", set(files.values()))
    _meet(group, "save_policy", timeout)


def _require_plain_policy(policy: nn.Module, names: list[str]) -> None:
    """Refuses stages that do not hold every tensor that `from_pretrained` will look for, each once."""
    if not isinstance(policy, PreTrainedModel):
        raise ValueError(f"A {type(policy).__name__} cannot be saved by stages: split a Transformers model.")
    with torch.device("meta"):
        whole = type(policy)._from_config(copy.deepcopy(policy.config))
    parameters = {name for name, _ in whole.named_parameters()}
    buffers = set(whole.state_dict()) - {name for name, _ in whole.named_parameters(remove_duplicate=False)}
    if sorted(names) != sorted(parameters | buffers):
        differing = sorted(set(names) ^ (parameters | buffers)) or sorted(
            {name for name in names if names.count(name) > 1}
        )
        raise ValueError(
            f"The stages together are not a {type(policy).__name__}: {len(differing)} tensors are missing, extra or "
            f"double, among them {few(differing)}. Policies with adapters cannot be saved by stages: "
            "assemble a `PolicyReplica` and save that."
        )


def save_optimizer(
    optimizer: torch.optim.Optimizer,
    stages: Sequence[PolicyStage],
    folder: str | os.PathLike,
    group: dist.ProcessGroup,
    *,
    timeout: float = 60.0,
) -> None:
    """
    Writes an optimizer's state, a file per stage: see [`load_optimizer`]. Collective in the group.

    Args:
        optimizer (`torch.optim.Optimizer`):
            Optimizer of this rank's stages, or of the policy that they are views of. A [`SharedOptimizer`] keeps a
            share of the state on each of its ranks: all of them call this, each in its pipeline, and there is a file
            for each of them and each stage.
        stages, folder, group, timeout:
            As in [`save_policy`].

    Raises:
        RuntimeError: if not every rank of the group makes the call.
        ValueError: if the optimizer has parameters that are not in the stages.
    """
    _meet(group, "save_optimizer", timeout)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    # Which share of a stage's state this rank has, of how many.
    share, num_shares = 0, 1
    shown = optimizer.param_groups
    if isinstance(optimizer, SharedOptimizer):
        # Its own settings count: the optimizer of its share takes them over in a step only.
        share, num_shares, optimizer = optimizer.rank, optimizer.world_size, optimizer.optim
    names = _names_of(optimizer, stages)
    own = {name: stage.index for stage in stages for name, _ in stage.named_own_parameters()}
    contents: dict[int, dict[str, Any]] = {stage.index: {"state": {}, "settings": {}} for stage in stages}
    for settings, members in zip(shown, optimizer.param_groups, strict=True):
        for parameter in members["params"]:
            name = names[parameter]
            if name in own:  # not the copy of a tied embedding, which is the same as on the first stage
                content = contents[own[name]]
                content["settings"][name] = {key: value for key, value in settings.items() if key != "params"}
                if parameter in optimizer.state:
                    content["state"][name] = dict(optimizer.state[parameter])
    num_files = stages[0].num_stages * num_shares
    for index, content in contents.items():
        torch.save(content, folder / OPTIMIZER_FILES.format(index * num_shares + share + 1, num_files))
    if dist.get_rank(group) == 0 and share == 0:
        _remove(folder, ALL_OPTIMIZER_FILES, {OPTIMIZER_FILES.format(i + 1, num_files) for i in range(num_files)})
    _meet(group, "save_optimizer", timeout)


def load_optimizer(optimizer: torch.optim.Optimizer, stages: Sequence[PolicyStage], folder: str | os.PathLike) -> None:
    """
    Reads the files of [`save_optimizer`], written under this or another number of stages, shared or not. Not
    collective.

    Args:
        optimizer (`torch.optim.Optimizer`):
            Optimizer of this rank's stages, of the same class as the saved one. Its groups take the saved settings
            (learning rate, weight decay, ...) of their parameters.
        stages (`Sequence[PolicyStage]`):
            The stages of this rank.
        folder (`str` or `os.PathLike`):
            The checkpoint.

    Raises:
        ValueError: if files or parameters are missing, or parameters of one group had different settings.
    """
    _apply(optimizer, stages, folder, *_read_optimizer(Path(folder)))


def has_stage_files(folder: str | os.PathLike) -> bool:
    """Whether [`save_optimizer`] wrote into a folder."""
    return next(Path(folder).glob(ALL_OPTIMIZER_FILES), None) is not None


def remove_stage_files(folder: str | os.PathLike) -> None:
    """Removes the files of [`save_optimizer`] from a folder."""
    _remove(Path(folder), ALL_OPTIMIZER_FILES, set())


def load_whole_optimizer(
    optimizer: torch.optim.Optimizer,
    stages: Sequence[PolicyStage],
    file: str | os.PathLike,
    names: Sequence[Sequence[str]],
) -> None:
    """
    Reads the state of an optimizer of the whole policy, as a run without a pipeline saves it. Not collective.

    Args:
        optimizer (`torch.optim.Optimizer`), stages (`Sequence[PolicyStage]`):
            As in [`load_optimizer`].
        file (`str` or `os.PathLike`):
            A saved `optimizer.state_dict()`.
        names (`Sequence[Sequence[str]]`):
            By group of that optimizer, the names of its parameters in order.

    Raises:
        ValueError: if the groups have other sizes than `names`, or lack parameters of these stages.
    """
    content = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
    sizes, saved = [len(group) for group in names], [len(group["params"]) for group in content["param_groups"]]
    if sizes != saved:
        raise ValueError(
            f"{file} holds groups of {saved} parameters, but this run trains groups of {sizes}. Resume with the model "
            "and the trained parameters of the checkpoint."
        )
    state, settings = {}, {}
    for group, members in zip(content["param_groups"], names, strict=True):
        for number, name in zip(group["params"], members, strict=True):
            settings[name] = {key: value for key, value in group.items() if key != "params"}
            if number in content["state"]:
                state[name] = content["state"][number]
    _apply(optimizer, stages, file, state, settings)


def _apply(
    optimizer: torch.optim.Optimizer,
    stages: Sequence[PolicyStage],
    source: str | os.PathLike,
    state: dict[str, dict[str, Any]],
    settings: dict[str, dict[str, Any]],
) -> None:
    """
    Gives an optimizer the saved settings of its parameters, by name, and the state of those that these stages train:
    with stages that are views of a whole policy it may have others too.
    """
    shared = optimizer if isinstance(optimizer, SharedOptimizer) else None
    if shared is not None:
        optimizer = shared.optim
    names = _names_of(optimizer, stages)
    trained = {parameter for stage in stages for _, parameter in stage.named_own_parameters()}
    trained |= {stage.tied_copy for stage in stages} - {None}
    missing = sorted(name for name in names.values() if name not in settings)
    if missing:
        raise ValueError(
            f"The optimizer state in {source} lacks {len(missing)} parameters of this rank, among them "
            f"{few(missing)}. Resume with the model and the trained parameters of the checkpoint."
        )
    numbered, groups = {}, []
    for group in optimizer.param_groups:
        members = [names[parameter] for parameter in group["params"]]
        # A group without parameters on these stages keeps the settings it has.
        chosen = settings[members[0]] if members else {key: group[key] for key in group if key != "params"}
        if any(settings[name] != chosen for name in members):
            raise ValueError(
                f"Parameters of one group, among them {members[0]}, had different settings when they were saved. "
                "Group parameters as in the run that wrote the checkpoint."
            )
        first = sum(len(earlier["params"]) for earlier in groups)
        groups.append({**chosen, "params": list(range(first, first + len(members)))})
        for number, (name, parameter) in enumerate(zip(members, group["params"], strict=True), first):
            if name in state and parameter in trained:
                # Copies: the file's memory is not kept.
                numbered[number] = {
                    key: value.clone() if isinstance(value, torch.Tensor) else value
                    for key, value in state[name].items()
                }
    optimizer.load_state_dict({"state": numbered, "param_groups": groups})
    if shared is not None:
        # Its own settings, which it hands to the optimizer of its share in every step.
        for shown, group in zip(shared.param_groups, optimizer.param_groups, strict=True):
            shown.update({key: value for key, value in group.items() if key != "params"})


def _read_optimizer(folder: Path) -> tuple[dict[str, dict[str, Any]], dict[str, dict[str, Any]]]:
    """State and group settings by parameter name, from the files of all stages."""
    files = sorted(folder.glob(ALL_OPTIMIZER_FILES))
    expected = [OPTIMIZER_FILES.format(index + 1, len(files)) for index in range(len(files))]
    if not files or [file.name for file in files] != expected:
        raise ValueError(
            f"{folder} does not hold the optimizer files of all stages of one save, but "
            f"{[file.name for file in files]}. Copy the whole checkpoint, or choose another."
        )
    state, settings = {}, {}
    for file in files:
        content = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
        state.update(content["state"])
        settings.update(content["settings"])
    return state, settings


def _names_of(optimizer: torch.optim.Optimizer, stages: Sequence[PolicyStage]) -> dict[nn.Parameter, str]:
    """Names in the whole policy of an optimizer's parameters."""
    every_name = {parameter: name for stage in stages for name, parameter in stage.policy.named_parameters()}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    strange = [tuple(parameter.shape) for parameter in parameters if parameter not in every_name]
    if strange:
        raise ValueError(
            f"The optimizer has {len(strange)} parameters that are not in the stages of this rank, of the shapes "
            f"{strange[:4]}. Make it of the stages' parameters, after the policy is split."
        )
    return {parameter: every_name[parameter] for parameter in parameters}


def _meet(group: dist.ProcessGroup, call: str, timeout: float) -> None:
    """A barrier that ends with an error when a rank does not come."""
    try:
        dist.monitored_barrier(group, timeout=timedelta(seconds=timeout), wait_all_ranks=True)
    except RuntimeError as error:
        raise RuntimeError(
            f"`{call}` was called on rank {dist.get_rank(group)} of a pipeline, but not all of its "
            f"{dist.get_world_size(group)} ranks came: it is collective. Call it on every rank, not on the main "
            f"process only. ({str(error).splitlines()[0]})"
        ) from error


def _remove(folder: Path, pattern: str, keep: set[str]) -> None:
    """Files of an earlier save under another number of stages: loaders would prefer or mix them."""
    for file in folder.glob(pattern):
        if file.name not in keep:
            file.unlink()
