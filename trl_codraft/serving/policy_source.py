"""
Resolves a policy's name: a folder or a Hub repository, of a whole model or of a LoRA adapter, such as a run or
one of its checkpoints leaves. Every command resolves its policy here.
"""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig, PreTrainedModel
from transformers.utils import cached_file


ADAPTER_FILE = "adapter_config.json"


@dataclass(frozen=True)
class PolicySource:
    """
    Names the source of a policy.

    Args:
        name (`str`):
            Folder or repository id.
        adapter_of (`str`, *optional*):
            The base model, if `name` holds a LoRA adapter and no whole model.
    """

    name: str
    adapter_of: str | None = None

    @classmethod
    def find(cls, name: str) -> "PolicySource":
        """
        Looks at what a name stands for.

        Args:
            name (`str`):
                Folder or repository id.

        Returns:
            [`PolicySource`]

        Raises:
            ValueError: if a folder holds no policy, or an adapter does not name its base model.
        """
        folder = Path(name)
        if folder.is_dir() and not any((folder / file).is_file() for file in ("config.json", ADAPTER_FILE)):
            raise ValueError(f"{name} holds no policy: neither config.json nor {ADAPTER_FILE}.{_newest(folder)}")
        if not folder.is_dir() and _is_path(name):
            raise ValueError(f"There is no policy folder at {name!r}.")
        # A whole model may have an adapter's file beside it; Transformers then loads that model too.
        found = None if _has_file(name, "config.json") else _file(name, ADAPTER_FILE)
        if found is None:
            return cls(name)
        base = _read_object(Path(found)).get("base_model_name_or_path")
        if not isinstance(base, str) or not base:
            raise ValueError(
                f"{name} holds an adapter whose {ADAPTER_FILE} names no base model. Write its folder or repository "
                "there as `base_model_name_or_path`."
            )
        if _is_path(base) and not os.path.isdir(base):
            raise ValueError(
                f"{name} holds an adapter of the model in {base}, which is not there. Write its folder or repository "
                f"into {ADAPTER_FILE} as `base_model_name_or_path`."
            )
        return cls(name, base)

    @classmethod
    def named(cls, name: str) -> "PolicySource":
        """As [`find`], of a name that may be that of a place elsewhere, or of a repository to come."""
        if os.path.isdir(name):
            return cls.find(name)
        if _is_path(name):
            return cls(name)
        try:
            return cls.find(name)
        except OSError:
            return cls(name)

    def load_config(self) -> PreTrainedConfig:
        """The policy's configuration, an adapter's base model's."""
        return AutoConfig.from_pretrained(self.adapter_of or self.name)

    def load_model(self) -> PreTrainedModel:
        """The policy in its stored dtype, with its adapter if it is one."""
        return AutoModelForCausalLM.from_pretrained(self.name, dtype="auto")

    def load_tokenizer(self):
        """The policy's tokenizer; the base model's where an adapter has none."""
        own = self.adapter_of is None or _has_file(self.name, "tokenizer_config.json")
        return AutoTokenizer.from_pretrained(self.name if own else self.adapter_of)


def _is_path(name: str) -> bool:
    """Whether a name cannot be that of a repository."""
    return name.startswith((".", "/", "~")) or name.count("/") > 1 or not name


def _read_object(file: Path) -> dict[str, Any]:
    """Reads the JSON object in a file."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} is not valid JSON: {error}.") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file} must hold a JSON object, not a {type(content).__name__}.")
    return content


def holds_adapter(name: str) -> bool:
    """Whether a name is that of a local folder with an adapter in it."""
    return os.path.isfile(os.path.join(name, ADAPTER_FILE))


def merged_name(adapter: str) -> str:
    """The folder for an adapter merged into its base model: beside a local one, here for one of the Hub."""
    if os.path.isdir(adapter) or _is_path(adapter):
        return adapter.rstrip("/") + "-merged"
    return adapter.split("/")[-1] + "-merged"


def _file(name: str, file: str) -> str | None:
    """The local place of a policy's file, or None where it has none that can be reached."""
    return cached_file(
        name,
        file,
        _raise_exceptions_for_gated_repo=False,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )


def _has_file(name: str, file: str) -> bool:
    return _file(name, file) is not None


def _newest(folder: Path) -> str:
    """A hint at the newest checkpoint of a run that saved no policy at its end."""
    steps = [int(path.name.split("-")[1]) for path in folder.glob("checkpoint-*") if path.name[11:].isdecimal()]
    return f" Its newest checkpoint is {folder / f'checkpoint-{max(steps)}'}: give that." if steps else ""
