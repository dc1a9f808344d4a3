"""
Options from a YAML file: `--config FILE`, in every spelling that argparse knows, read so that no value of the file is
lost on its way. Options of the command line win.
"""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml


# YAML 1.1 reads these bare words as booleans, and they are choices of some options.
WORDS_OF_BOOLS = {False: ("no", "off", "false"), True: ("yes", "on", "true")}
LIST_NARGS = ("+", "*")
MERGE_TAG = "tag:yaml.org,2002:merge"


class ConfigFileOption(argparse.Action):
    """Stores the name of the file and refuses a second one, of which argparse would keep only the last."""

    def __call__(self, parser, namespace, values, option_string=None):
        if getattr(namespace, self.dest, None) is not None:
            parser.error(f"`--config` is given twice ({getattr(namespace, self.dest)} and {values}): name one file.")
        setattr(namespace, self.dest, values)


class _UniqueKeysLoader(yaml.SafeLoader):
    """A loader that refuses a key which stands twice in a mapping: YAML keeps only the last."""

    def construct_mapping(self, node, deep=False):
        seen = set()
        for key_node, _ in node.value:
            if key_node.tag == MERGE_TAG:  # `<<`, which takes over another mapping
                continue
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, str) and key in seen:
                raise yaml.YAMLError(f"the key {key!r} stands twice, again at line {key_node.start_mark.line + 1}")
            if isinstance(key, str):
                seen.add(key)
        return super().construct_mapping(node, deep)


def read_config_file(name: str) -> dict[str, Any]:
    """
    The options in a YAML file by their names with underscores.

    Args:
        name (`str`):
            The file.

    Returns:
        `dict[str, Any]`: values as YAML reads them.

    Raises:
        ValueError: if the file is no valid YAML, holds no mapping, or names an option twice.
        OSError: if it cannot be read.
    """
    file = Path(name).expanduser()
    if not str(name) or not file.is_file():
        raise ValueError(f"There is no file {str(name)!r} for `--config`.")
    try:
        content = yaml.load(file.read_text(encoding="utf-8"), Loader=_UniqueKeysLoader)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{name} is not valid YAML: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{name} must hold a mapping of options, such as `policy: me/policy`.")
    options: dict[str, Any] = {}
    for key, value in content.items():
        option = str(key).replace("-", "_")
        if option in options:
            raise ValueError(f"{name} names the option `{option}` twice, once with `-` and once with `_`: keep one.")
        options[option] = value
    return options


def option_value(action: argparse.Action, value: Any, *, text_only: bool) -> Any:
    """
    What an option becomes by a value of the file: the same as by that value on the command line.

    Args:
        action (`argparse.Action`):
            The option.
        value (`Any`):
            As YAML read it; not `None`.
        text_only (`bool`):
            Whether options of text refuse other values, which YAML may have rewritten (`0123` is 83, `no` is false).

    Returns:
        `Any`

    Raises:
        ValueError: naming the option and the value, if the option cannot take it.
    """
    if action.nargs == 0:
        if not isinstance(value, bool):
            raise ValueError(f"`{action.dest}` is a switch: write true or false, not {value!r}.")
        return action.const if value else action.default
    many = action.nargs in LIST_NARGS or isinstance(action, argparse._AppendAction)
    if isinstance(value, list) and many:
        return [_one_value(action, item, text_only) for item in value]
    if isinstance(value, (list, Mapping)) and (text_only or action.choices is not None or _is_scalar(action)):
        kind = "one value or a list of values" if many else "one value"
        raise ValueError(f"`{action.dest}` takes {kind}, not {value!r}.")
    single = _one_value(action, value, text_only)
    return [single] if many and not isinstance(value, Mapping) else single


def _is_scalar(action: argparse.Action) -> bool:
    """Whether argparse makes a number or a boolean of the option's text; by name, for transformers' own converter."""
    return getattr(action.type, "__name__", None) in ("int", "float", "string_to_bool")


def _one_value(action: argparse.Action, value: Any, text_only: bool) -> Any:
    """One value of an option, checked and converted as argparse does it with text."""
    if value is None or (isinstance(value, (list, Mapping)) and (text_only or _is_scalar(action))):
        raise ValueError(f"`{action.dest}` takes plain values, not {value!r}.")
    if action.choices is not None:
        return _choice(action, value)
    if _is_scalar(action):
        if action.type in (int, float) and isinstance(value, bool):
            raise ValueError(f"`{action.dest}` is a number, not {value!r}.")
        try:
            return action.type(str(value))
        except (ValueError, argparse.ArgumentTypeError) as error:
            raise ValueError(f"`{action.dest}` cannot be {value!r}: {error}") from error
    if text_only and not isinstance(value, str):
        raise ValueError(f"`{action.dest}` is text, and YAML read {value!r}: put it in quotes.")
    # Nested settings, such as TRL's `datasets` and `model_init_kwargs`, are read by those who own them.
    return value


def _choice(action: argparse.Action, value: Any) -> Any:
    """One of the option's choices."""
    words = WORDS_OF_BOOLS[value] if isinstance(value, bool) else (str(value),)
    # Some options list their choices as text and mean members of an enumeration or numbers.
    by_text = {str(choice): choice for choice in action.choices}
    found = next((by_text[word] for word in words if word in by_text), None)
    if found is None:
        raise ValueError(f"`{action.dest}` is {value!r}: choose one of {', '.join(by_text)}.")
    return found
