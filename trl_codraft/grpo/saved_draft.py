"""
Reads and writes the draft of a checkpoint, as far as a run can go on with it. Everything that reads `draft/` asks
here, so that "not there" means the same to a resume, to the best model at the end of a run and to a push.
"""

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig

from ..config import SHAPE_SETTINGS
from ..modeling.configuration_eagle3 import Eagle3DraftConfig
from ..modeling.disk.config import config_from_disk
from ..modeling.disk.folder import CONFIG_NAME, WEIGHT_FILES, load_pickled, read_config
from ..modeling.modeling_eagle3 import Eagle3DraftModel


DRAFT_FOLDER = "draft"
DRAFT_STATE_NAME = "draft_state.pt"
# Keys that [`~training.draft_trainer.DraftTrainer.load_state_dict`] reads.
STATE_KEYS = {"draft", "target_ids", "optimizer", "scheduler", "num_updates", "num_pretrain_updates"}
# Fields that decide what the draft's weights mean, or their shapes, and that neither the policy nor a setting of its
# own decides: a draft that a run was started from brought them along.
INHERITED_FIELDS = (
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "rms_norm_eps",
    "rope_parameters",
    "norm_before_residual",
    "norm_before_fc",
)
MEANING_SETTINGS = {**SHAPE_SETTINGS, **dict.fromkeys(INHERITED_FIELDS, "draft_model_name_or_path")}


@dataclass(frozen=True)
class SavedDraft:
    """
    Describes the draft of a checkpoint as it lies there.

    Attributes:
        folder (`Path`): the checkpoint's `draft/`.
        lack (`str` or `None`): why no run can go on with it; `None` if one can.
        has_state (`bool`): whether the state of its training is there, besides the weights as servers load them.
    """

    folder: Path
    lack: str | None
    has_state: bool


def find_draft(checkpoint: str | os.PathLike) -> SavedDraft:
    """
    Looks for the draft of a checkpoint, without reading it. It is there if its `config.json`, which is written last,
    and weights are: in the format of servers, in the state of its training, or in both.

    Args:
        checkpoint (`str` or `os.PathLike`):
            Folder of a checkpoint, of a run, or a download of one.

    Returns:
        [`SavedDraft`]
    """
    folder = Path(checkpoint) / DRAFT_FOLDER
    has_state = (folder / DRAFT_STATE_NAME).is_file()
    if not folder.is_dir():
        lack = f"{checkpoint} has no folder `{DRAFT_FOLDER}`"
    elif not (folder / CONFIG_NAME).is_file():
        lack = f"{folder} has no {CONFIG_NAME}, which is written last"
    elif not has_state and not any((folder / name).is_file() for name in WEIGHT_FILES):
        lack = f"{folder} has no weights"
    else:
        lack = None
    return SavedDraft(folder, lack, has_state)


def read_draft(
    saved: SavedDraft, own: Eagle3DraftConfig, policy_config: PreTrainedConfig, *, mapped: bool = False
) -> dict[str, Any]:
    """
    Reads the draft of a checkpoint, on the CPU.

    Args:
        saved ([`SavedDraft`]):
            The result of [`find_draft`].
        own ([`Eagle3DraftConfig`]):
            The run's draft.
        policy_config ([`~transformers.PreTrainedConfig`]):
            The policy's text configuration.
        mapped (`bool`, *optional*, defaults to `False`):
            Whether the state is mapped into memory, for those who need a part of it.

    Returns:
        `dict[str, Any]`: `draft_trainer` and `controller`, as they were saved, or `weights` where there is no state.

    Raises:
        ValueError: if the draft means something else in this run, or a file is damaged.
    """
    check_same_draft(config_from_disk(read_config(saved.folder), policy_config), own)
    if not saved.has_state:
        return {"weights": Eagle3DraftModel.from_pretrained(str(saved.folder)).state_dict()}
    file = saved.folder / DRAFT_STATE_NAME
    remedy = (
        "Resume from another checkpoint, or remove the file to go on with the weights beside it and fresh moments."
    )
    try:
        # On the CPU: AdamW's step counters belong there, and loading moves the moments to the weights' device.
        state = load_pickled(file, mapped=mapped)
    except ValueError as error:
        raise ValueError(f"{error} {remedy}") from error
    if not (
        isinstance(state, dict)
        and state.keys() >= {"draft_trainer", "controller"}
        and isinstance(state["draft_trainer"], dict)
        and state["draft_trainer"].keys() >= STATE_KEYS
        and isinstance(state["controller"], dict)
        and isinstance(state["controller"].get("acceptance"), dict)
    ):
        raise ValueError(f"{file} is not the state of a draft. {remedy}")
    return state


def write_state(folder: Path, state: dict[str, Any]) -> None:
    """Writes the state of a draft's training beside its weights; a crash leaves the whole file or none."""
    part = folder / f".{DRAFT_STATE_NAME}"
    torch.save(state, part)
    os.replace(part, folder / DRAFT_STATE_NAME)


def remove_stale_draft(checkpoint: str | os.PathLike) -> None:
    """Removes a draft that an earlier run left in a checkpoint which now gets a policy without one."""
    saved = find_draft(checkpoint)
    if saved.lack is None:
        shutil.rmtree(saved.folder)


def check_same_draft(saved: Eagle3DraftConfig, own: Eagle3DraftConfig) -> None:
    """
    Refuses to continue with weights that mean something else in this run, even where their shapes agree.

    Raises:
        ValueError: naming what differs and the settings to put back.
    """
    different = {
        field: setting for field, setting in MEANING_SETTINGS.items() if getattr(saved, field) != getattr(own, field)
    }
    if different:
        values = ", ".join(
            f"`{field}` {getattr(saved, field)} there, {getattr(own, field)} here" for field in different
        )
        settings = ", ".join(f"`{setting}`" for setting in dict.fromkeys(different.values()))
        raise ValueError(
            f"The checkpoint's draft is not the draft of this run: {values}. Set {settings} as in the run that wrote "
            "it."
        )
