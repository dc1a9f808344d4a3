"""
The GRPO script: TRL's arguments, with the draft's added. `trl-codraft grpo` and `examples/scripts/grpo_codraft.py`
both run it.
"""

import importlib
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from datasets import load_dataset
from trl import (
    DatasetMixtureConfig,
    ModelConfig,
    TrlParser,
    get_dataset,
    get_peft_config,
    get_quantization_config,
)
from trl.rewards import (
    accuracy_reward,
    get_soft_overlong_punishment,
    reasoning_accuracy_reward,
    think_format_reward,
)
from trl.scripts.grpo import GRPOScriptArguments

from ..config import CoDraftGRPOConfig
from ..serving.export import check_repo_id
from ..trainer import CoDraftGRPOTrainer
from .config_file import ConfigFileOption, option_value, read_config_file


REWARD_FUNCS = {
    "accuracy_reward": accuracy_reward,
    "reasoning_accuracy_reward": reasoning_accuracy_reward,
    "think_format_reward": think_format_reward,
    # With TRL's numbers, which the help of `--reward_funcs` gives.
    "get_soft_overlong_punishment": get_soft_overlong_punishment(max_completion_len=1280, soft_punish_cache=256),
}


@dataclass
class CoDraftScriptArguments(GRPOScriptArguments):
    """
    Arguments of the script, besides those of the trainer and the model.

    Args:
        draft_repo_id (`str`, *optional*):
            Hub repository that the trained draft is pushed to, with a card, when training is over. Servers take a
            draft from a repository of its own, not from the policy's `draft/` folder.

    Raises:
        ValueError: if `draft_repo_id` can be no repository.
    """

    draft_repo_id: str | None = field(
        default=None, metadata={"help": "Hub repository that the trained draft is pushed to after training."}
    )

    def __post_init__(self):
        if self.draft_repo_id is not None:
            check_repo_id("draft_repo_id", self.draft_repo_id)


class CoDraftParser(TrlParser):
    """
    `TrlParser` whose `--config` is an option like any other, so that argparse's spellings of it are understood, and
    whose files mean what the same values mean on the command line: one value for a list is a list of one, a number or
    a choice is checked, and no key is dropped.
    """

    def __init__(self, dataclass_types, **kwargs):
        super().__init__(dataclass_types, **kwargs)
        self.add_argument(
            "--config", metavar="FILE", action=ConfigFileOption, help="YAML file; options of the command line win"
        )

    def parse_args_and_config(self, args: Sequence[str] | None = None) -> tuple:
        """
        Reads the command line and the file it names.

        Args:
            args (`Sequence[str]`, *optional*):
                Command-line arguments; those of the process by default.

        Returns:
            `tuple`: one instance of each dataclass.

        Raises:
            ValueError: if the file is no mapping of options, or an option is unknown or cannot take its value.
            OSError: if the file cannot be read.
        """
        arguments = list(sys.argv[1:] if args is None else args)
        name = self.parse_known_args(arguments)[0].config
        if name is not None:
            config = read_config_file(name)
            variables = config.pop("env", None) or {}
            if not isinstance(variables, dict):
                raise ValueError(f"{name}: `env` must map environment variables to values, not {variables!r}.")
            os.environ.update({key: str(value) for key, value in variables.items()})
            unknown = sorted(config.keys() - {action.dest for action in self._actions} | config.keys() & {"config"})
            if unknown:
                raise ValueError(
                    f"{name} has options that are none of this command: {', '.join(unknown)}. Remove them."
                )
            self.set_defaults_with_config(**config)
        # Behind the dataclasses comes what else was read: `--config`.
        return self.parse_args_into_dataclasses(args=arguments)[: len(self.dataclass_types)]

    def set_defaults_with_config(self, **kwargs) -> list[str]:
        actions = {action.dest: action for action in reversed(self._actions)}
        values = {
            key: option_value(actions[key], value, text_only=False) if key in actions and value is not None else value
            for key, value in kwargs.items()
        }
        return super().set_defaults_with_config(**values)


def make_parser(prog: str | None = None) -> CoDraftParser:
    """A parser of script, trainer, model and dataset arguments, from the command line and `--config` files."""
    return CoDraftParser(
        (CoDraftScriptArguments, CoDraftGRPOConfig, ModelConfig, DatasetMixtureConfig),
        prog=prog,
        # The generated one lists some hundred options before the one line that says what is wrong.
        usage="%(prog)s [--config FILE] [options]",
    )


def load_reward_funcs(script_args: CoDraftScriptArguments) -> list[str | Callable]:
    """
    The rewards named by `--reward_funcs` (TRL's names, or dotted import paths such as `my_lib.rewards.length`) and
    `--reward_model_name_or_path`.

    Raises:
        ValueError: if a name is neither, or there is none.
    """
    rewards = [script_args.reward_model_name_or_path] if script_args.reward_model_name_or_path else []
    for name in script_args.reward_funcs or []:
        if name in REWARD_FUNCS:
            rewards.append(REWARD_FUNCS[name])
        elif "." in name:
            rewards.append(_imported(name))
        else:
            raise ValueError(
                f"Unknown reward function {name!r}. Take one of {sorted(REWARD_FUNCS)}, or the dotted path of your "
                "own."
            )
    if not rewards:
        raise ValueError("No reward: set `--reward_funcs` or `--reward_model_name_or_path`.")
    return rewards


def _imported(path: str) -> str | Callable:
    """Imports the object of a user's path, as TRL's script finds it. Errors inside modules stay what they are."""
    if "/" in path or not all(path.split(".")):
        raise ValueError(
            f"`--reward_funcs {path}` is no dotted import path such as `my_lib.rewards.length`. A reward model goes "
            "to `--reward_model_name_or_path`."
        )
    sys.path.insert(0, os.getcwd())
    reward = _attribute(path, asked=path)
    if not (callable(reward) or isinstance(reward, str)):
        raise ValueError(f"`--reward_funcs {path}` is a {type(reward).__name__}, which cannot be called.")
    return reward


def _attribute(path: str, asked: str) -> Any:
    """Returns an attribute of a module, also one that the module makes when asked, or of a class in a module."""
    owner_path, _, name = path.rpartition(".")
    try:
        owner = importlib.import_module(owner_path)
    except ModuleNotFoundError as error:
        if not f"{owner_path}.".startswith(f"{error.name}."):
            raise
        if "." not in owner_path:
            raise ValueError(
                f"No module {error.name!r} for the reward function {asked!r}, also not in {os.getcwd()}."
            ) from error
        owner = _attribute(owner_path, asked)
    try:
        return getattr(owner, name)
    except AttributeError as error:
        raise ValueError(f"{owner_path!r} has no function {name!r} for `--reward_funcs {asked}`: {error}.") from error


def load_splits(script_args: CoDraftScriptArguments, dataset_args: DatasetMixtureConfig):
    """The dataset named by `--dataset_name`, or the mixture of a config file's `datasets`."""
    if dataset_args.datasets:
        return get_dataset(dataset_args)
    if script_args.dataset_name is None:
        raise ValueError("No dataset: set `--dataset_name`, or `datasets` in a config file.")
    return load_dataset(
        script_args.dataset_name, name=script_args.dataset_config, streaming=script_args.dataset_streaming
    )


def build_trainer(
    script_args: CoDraftScriptArguments,
    training_args: CoDraftGRPOConfig,
    model_args: ModelConfig,
    dataset_args: DatasetMixtureConfig,
) -> CoDraftGRPOTrainer:
    """The trainer of a run with a model and a dataset of the Hub, or of local folders."""
    if script_args.draft_repo_id is not None and not training_args.use_draft:
        raise ValueError(
            f"`draft_repo_id={script_args.draft_repo_id!r}` with `use_draft=False`: there will be no draft to push. "
            "Drop one of the two."
        )
    training_args.model_init_kwargs = {
        "revision": model_args.model_revision,
        "trust_remote_code": training_args.trust_remote_code,
        "attn_implementation": model_args.attn_implementation,
        "dtype": model_args.dtype,
        **(training_args.model_init_kwargs or {}),
    }
    splits = load_splits(script_args, dataset_args)
    evaluates = training_args.eval_strategy != "no"
    for option, name, needed in (
        ("--dataset_train_split", script_args.dataset_train_split, True),
        ("--dataset_test_split", script_args.dataset_test_split, evaluates),
    ):
        if needed and name not in splits:
            raise ValueError(f"The dataset has no split {name!r}: its splits are {list(splits)}. Set `{option}`.")
    return CoDraftGRPOTrainer(
        model=model_args.model_name_or_path,
        reward_funcs=load_reward_funcs(script_args),
        args=training_args,
        train_dataset=splits[script_args.dataset_train_split],
        eval_dataset=splits[script_args.dataset_test_split] if evaluates else None,
        quantization_config=get_quantization_config(model_args),
        peft_config=get_peft_config(model_args),
    )


def prepare(arguments: Sequence[str]) -> tuple[CoDraftScriptArguments, CoDraftGRPOTrainer]:
    """
    Everything that mistakes in arguments can spoil: reads them, loads policy, draft and dataset, builds the trainer.

    Args:
        arguments (`Sequence[str]`):
            Command-line arguments.

    Returns:
        `tuple`: the script's own arguments, and the trainer.

    Raises:
        ValueError: if arguments are wrong or do not go together.
        OSError: if a file, a model or a dataset is not there.
    """
    parsed = make_parser(prog="trl-codraft grpo").parse_args_and_config(arguments)
    return parsed[0], build_trainer(*parsed)


def run(script_args: CoDraftScriptArguments, trainer: CoDraftGRPOTrainer) -> None:
    """Trains, saves and, where asked, pushes."""
    training_args = trainer.args
    trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
    trainer.save_model(training_args.output_dir)
    trainer.accelerator.print(f"Policy in {training_args.output_dir}, draft in {training_args.output_dir}/draft.")
    if training_args.push_to_hub:
        trainer.push_to_hub(dataset_name=script_args.dataset_name)
    if script_args.draft_repo_id is not None:
        trainer.push_draft_to_hub(script_args.draft_repo_id)
    trainer.end()


def main(arguments: Sequence[str] | None = None) -> None:
    """
    Trains, saves and, where asked, pushes.

    Args:
        arguments (`Sequence[str]`, *optional*):
            Command-line arguments; those of the process by default.
    """
    run(*prepare(sys.argv[1:] if arguments is None else arguments))


if __name__ == "__main__":
    main()
