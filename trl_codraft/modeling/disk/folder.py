"""
A draft folder: `config.json` beside safetensors (or older `.bin`) weights, local or from the Hub. Knows nothing of
what is inside.
"""

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError, RepositoryNotFoundError
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from ..naming import few


CONFIG_NAME = "config.json"
WEIGHTS_NAME = "model.safetensors"
LFS_POINTER = b"version https://git-lfs"
# Servers look for them in this order.
WEIGHT_FILES = (
    "model.safetensors.index.json",
    WEIGHTS_NAME,
    "pytorch_model.bin.index.json",
    "pytorch_model.bin",
)


def resolve_folder(path_or_repo: str | os.PathLike, *, subfolder: str | None = None, **hub_kwargs: Any) -> Path:
    """
    A local folder, or the local snapshot of a Hub repository.

    Args:
        path_or_repo (`str` or `os.PathLike`):
            Folder or repository id.
        subfolder (`str`, *optional*):
            Folder inside it that holds the draft (`"draft"` in a repository pushed during training).
        hub_kwargs (*optional*):
            `revision`, `token`, `cache_dir`, ... of [`~huggingface_hub.snapshot_download`].

    Raises:
        ValueError: if there is no such folder or repository, or it holds no `config.json`.
    """
    folder = Path(path_or_repo)
    if not os.path.isdir(folder):  # False, where pathlib raises, for what cannot be a path
        name = os.fspath(path_or_repo)
        if name.startswith((".", "/", "~")) or name.count("/") > 1 or "\\" in name or not name:
            raise ValueError(f"There is no draft folder at {name!r}.")
        prefix = f"{subfolder}/" if subfolder else ""
        patterns = [prefix + pattern for pattern in ("*.json", "*.safetensors", "pytorch_model*.bin")]
        try:
            folder = Path(snapshot_download(name, allow_patterns=patterns, **hub_kwargs))
        except (HFValidationError, LocalEntryNotFoundError, RepositoryNotFoundError) as error:
            raise ValueError(
                f"There is no folder {name!r} here, and no repository of that name can be reached: {error}"
            ) from error
    if subfolder:
        folder = folder / subfolder
    if not (folder / CONFIG_NAME).is_file():
        raise ValueError(
            f"{folder} holds no {CONFIG_NAME}, so it is not a draft, or writing it was interrupted: the config is "
            "written last. Export the draft again."
        )
    return folder


def read_config(folder: Path) -> dict[str, Any]:
    """
    Parses `config.json`.

    Raises:
        ValueError: if it is no JSON object.
    """
    return _read_json(folder / CONFIG_NAME)


def _read_json(file: Path) -> dict[str, Any]:
    """The JSON object in a file; ValueError if there is none."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{file} is not valid JSON: {error}.") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file} must hold a JSON object, not a {type(content).__name__}.")
    return content


def weight_files(folder: Path) -> list[Path]:
    """
    The files that hold a draft's tensors.

    Raises:
        ValueError: if there are none, or an index names a shard that is not in the folder.
    """
    for name in WEIGHT_FILES:
        if not (folder / name).is_file():
            continue
        if not name.endswith(".index.json"):
            return [folder / name]
        places = _read_json(folder / name).get("weight_map")
        if not (isinstance(places, dict) and places and all(isinstance(shard, str) for shard in places.values())):
            raise ValueError(
                f"{folder / name} is not an index of shards: `weight_map` must map tensors to file names."
            )
        shards = sorted(set(places.values()))
        lost = [shard for shard in shards if Path(shard).name != shard or not (folder / shard).is_file()]
        if lost:
            raise ValueError(f"{folder / name} names shards that are not there: {few(lost)}.")
        return [folder / shard for shard in shards]
    raise ValueError(f"{folder} holds no weights: looked for {', '.join(WEIGHT_FILES)}.")


def stray_weight_files(folder: Path) -> list[str]:
    """
    Names of safetensors files that are not the draft's as this package and transformers read it. A server that finds
    no index loads all safetensors files of the folder, one over the other.
    """
    files = weight_files(folder)
    if files[0].suffix != ".safetensors" or (folder / WEIGHT_FILES[0]).is_file():
        return []
    return sorted(file.name for file in folder.glob("*.safetensors") if file not in files)


def read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """
    All tensors of a folder under their names on disk, on the CPU, in their stored dtypes.

    Raises:
        ValueError: if there are no weights, a file is damaged or holds something else, or shards repeat a tensor.
    """
    tensors: dict[str, torch.Tensor] = {}
    for file in weight_files(folder):
        found = _read_file(file)
        repeated = tensors.keys() & found.keys()
        if repeated:
            raise ValueError(f"{file} repeats tensors of another shard: {few(sorted(repeated))}.")
        tensors |= found
    return tensors


def tensor_names(folder: Path) -> list[str]:
    """
    Names of all tensors of a folder on disk, of safetensors without reading the tensors.

    Raises:
        ValueError: as in [`read_tensors`].
    """
    names: list[str] = []
    for file in weight_files(folder):
        if file.suffix != ".safetensors":
            names += _read_file(file)
            continue
        _refuse_pointer(file)
        try:
            with safe_open(file, "pt") as opened:
                names += opened.keys()
        except (SafetensorError, RuntimeError, ValueError) as error:
            raise ValueError(_damage(file, error)) from error
    return names


def _read_file(file: Path) -> dict[str, torch.Tensor]:
    """The named tensors of one file."""
    if file.suffix != ".safetensors":
        content = load_pickled(file)
    else:
        _refuse_pointer(file)
        try:
            return load_file(file)
        except (SafetensorError, RuntimeError, ValueError) as error:
            raise ValueError(_damage(file, error)) from error
    named = isinstance(content, dict) and all(isinstance(name, str) for name in content)
    if not (named and all(isinstance(tensor, torch.Tensor) for tensor in content.values())):
        raise ValueError(f"{file} does not hold a dict of named tensors, which servers expect.")
    return content


def load_pickled(file: Path, *, mapped: bool = False) -> Any:
    """
    What `torch.save` wrote, on the CPU: tensors and plain containers, nothing that runs code.

    Args:
        file (`Path`):
            The file.
        mapped (`bool`, *optional*, defaults to `False`):
            Whether tensors are mapped into memory, for those who need a part of them.

    Raises:
        ValueError: naming the file, if it is damaged, incomplete, or of another kind.
    """
    _refuse_pointer(file)
    try:
        return torch.load(file, map_location="cpu", weights_only=True, mmap=mapped)
    # What comes of arbitrary bytes, for there is no error of its own for a damaged file.
    except (UnpicklingError, RuntimeError, EOFError, LookupError, ValueError, TypeError, AttributeError) as error:
        raise ValueError(_damage(file, error)) from error


def _damage(file: Path, error: Exception) -> str:
    """What an error of reading says of a file; torch goes on for paragraphs about files one trusts."""
    first_line = next(iter(str(error).splitlines()), "")
    return f"{file} cannot be read, it is damaged or incomplete ({type(error).__name__}: {first_line[:200]})."


def _refuse_pointer(file: Path) -> None:
    with file.open("rb") as stream:
        if stream.read(len(LFS_POINTER)) == LFS_POINTER:
            raise ValueError(f"{file} is a Git LFS pointer in the place of the weights: run `git lfs pull`.")


def write_folder(
    path: str | os.PathLike,
    disk_config: Mapping[str, Any],
    tensors: Mapping[str, torch.Tensor],
    *,
    texts: Mapping[str, str] | None = None,
    check: Callable[[Path], None] | None = None,
) -> None:
    """
    Writes a draft folder so that a crash at any moment leaves either no `config.json` or a complete draft: everything
    goes to a sibling folder first; then the old config goes, the weights come, and the config comes last.

    Args:
        path (`str` or `os.PathLike`):
            Created if needed. Weights of an earlier draft in it are replaced; other files are left alone.
        disk_config (`Mapping[str, Any]`):
            Content of `config.json`.
        tensors (`Mapping[str, torch.Tensor]`):
            Content of `model.safetensors`.
        texts (`Mapping[str, str]`, *optional*):
            More files: name to content.
        check (`Callable[[Path], None]`, *optional*):
            Called on the sibling folder before anything is moved; an error in it leaves `path` untouched.
    """
    path = Path(path).absolute()
    path.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}-"))
    try:
        save_file(dict(tensors), staging / WEIGHTS_NAME, metadata={"format": "pt"})
        for name, text in (texts or {}).items():
            (staging / name).write_text(text, encoding="utf-8")
        (staging / CONFIG_NAME).write_text(json.dumps(disk_config, indent=2) + "\n", encoding="utf-8")
        # safetensors writes files that only their owner can read; a server often runs as someone else.
        shutil.copymode(staging / CONFIG_NAME, staging / WEIGHTS_NAME)
        if check is not None:
            check(staging)
        path.mkdir(exist_ok=True)
        (path / CONFIG_NAME).unlink(missing_ok=True)
        for stale in [file for pattern in ("*.safetensors*", "pytorch_model*.bin*") for file in path.glob(pattern)]:
            stale.unlink()
        for name in [WEIGHTS_NAME, *(texts or {}), CONFIG_NAME]:
            _sync(staging / name)
            os.replace(staging / name, path / name)
        _sync(path)
    finally:
        shutil.rmtree(staging)


def _sync(path: Path) -> None:
    """Makes a file, or the names in a folder, survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
