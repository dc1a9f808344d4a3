"""
The command line: `trl-codraft grpo | export | validate | score | push`.

`grpo` takes the arguments of the GRPO script, through `TrlParser`; the others have few of their own. All read
`--config FILE.yaml`, whose options those of the command line replace. Mistakes of the user end with one line on stderr
and exit status 1; `--traceback` shows where they were noticed. Once `grpo` trains, an error may be anything, so it
keeps its traceback.
"""

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from .modeling.disk.folder import resolve_folder
from .modeling.modeling_eagle3 import Eagle3DraftModel
from .scripts.config_file import ConfigFileOption, option_value, read_config_file
from .serving.export import check_repo_id, export_draft, push_draft, score_draft
from .serving.model_card import SCORE_KEYS
from .serving.policy_source import PolicySource
from .serving.validation import problems, validate_draft


TRACEBACK = "--traceback"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def main(argv: Sequence[str] | None = None) -> int:
    """
    Runs one subcommand.

    Args:
        argv (`Sequence[str]`, *optional*):
            Arguments without the program's name; those of the process by default.

    Returns:
        `int`: exit status, 0 if all is well.
    """
    given = list(sys.argv[1:] if argv is None else argv)
    prog = "trl-codraft"
    shows_traceback = TRACEBACK in given
    try:
        if [argument for argument in given if argument != TRACEBACK][:1] == ["grpo"]:
            prog = "trl-codraft grpo"
            train = _grpo([argument for argument in given if argument != TRACEBACK][1:])
        else:
            args = _parse(given)
            prog, shows_traceback = f"trl-codraft {args.command}", args.traceback
            return args.run(args)
    except (ValueError, OSError) as error:
        if shows_traceback:
            raise
        print(f"{prog}: error: {error}", file=sys.stderr)
        return 1
    train()
    return 0


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    """
    The options of the command line, and of the `--config` file it names. The line is parsed twice by argparse itself,
    so that every spelling argparse knows is understood: once to learn the file and which options are given, and once
    with the file's options in the place of the defaults.
    """
    scout = _parser()
    for command in _commands(scout).values():
        for action in command._actions:
            if action.option_strings:
                action.required, action.default = False, argparse.SUPPRESS
        for group in command._mutually_exclusive_groups:
            group.required = False
    line = vars(scout.parse_args(arguments))
    parser = _parser()
    if "config" in line:
        _apply_config(_commands(parser)[line["command"]], line["config"], line)
    return parser.parse_args(arguments)


def _commands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """The parsers of the subcommands by name."""
    return next(action for action in parser._actions if action.dest == "command").choices


def _apply_config(command: argparse.ArgumentParser, name: str, line: Mapping[str, Any]) -> None:
    """Puts the options of a file in the place of a command's defaults; of those on the line, the line's count."""
    options = {action.dest: action for action in command._actions if action.option_strings}
    settable = sorted(options.keys() - {"help", "config"})
    found = {}
    for key, value in read_config_file(name).items():
        if key not in settable:
            raise ValueError(
                f"{name}: `{key}` is no option of `{command.prog}`, whose options are {', '.join(settable)}. Remove "
                "it, or write arguments without `--` on the command line."
            )
        if value is not None:
            found[key] = option_value(options[key], value, text_only=True)
    for group in command._mutually_exclusive_groups:
        together = [action.dest for action in group._group_actions if action.dest in found or action.dest in line]
        if len(together) > 1:
            raise ValueError(
                f"{name} and the command line give {' and '.join(f'`{key}`' for key in together)}: keep one."
            )
        group.required = group.required and not together
    for key in found.keys() - line.keys():
        options[key].required = False
        options[key].default = found[key]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="trl-codraft",
        description="Train, check, score and publish EAGLE-3 drafts.",
        epilog="`trl-codraft COMMAND --help` lists the options of a command. All take `--traceback`, which shows "
        "where an error comes from.",
    )
    parser.add_argument(TRACEBACK, action="store_true", help="show where an error comes from")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    # Listed for --help only: the script has a parser of its own, so `main` hands the arguments on unread.
    grpo = commands.add_parser(
        "grpo", help="train a policy and its draft (all arguments of the GRPO script)", add_help=False
    )
    grpo.set_defaults(run=lambda args: grpo.error("write `grpo` first"))

    export = _add_command(commands, "export", "rewrite a draft as one folder for vLLM, SGLang and speculators")
    export.add_argument("draft", help="folder or Hub repository of a draft in any EAGLE-3 layout")
    export.add_argument("output", help="folder to write")
    _add_policy(export)
    _add_card(export)
    export.set_defaults(run=_export)

    validate = _add_command(commands, "validate", "name everything a server would misread")
    validate.add_argument("path", help="folder or Hub repository of a draft")
    _add_policy(validate, required=False)
    validate.set_defaults(run=_validate)

    score = _add_command(commands, "score", "measure the accept length on prompts")
    score.add_argument("draft", help="folder or Hub repository of a draft")
    _add_policy(score)
    prompts = score.add_mutually_exclusive_group(required=True)
    prompts.add_argument("--prompt", action="append", help="one prompt; may be repeated")
    prompts.add_argument("--prompts-file", help="text file with one prompt per line, or .jsonl with a `prompt` field")
    score.add_argument("--num-draft-tokens", type=int, default=3, help="draft tokens per verification (default: 3)")
    score.add_argument("--max-new-tokens", type=int, default=128, help="longest completion (default: 128)")
    score.add_argument("--temperature", type=float, default=0.0, help="0 decodes greedily (default: 0)")
    score.add_argument("--batch-size", type=int, default=8, help="prompts generated together (default: 8)")
    score.add_argument("--seed", type=int, default=0, help="seed of sampling (default: 0)")
    score.add_argument("--output", help="also write the result to this JSON file, for `--scores` of export and push")
    score.set_defaults(run=_score)

    push = _add_command(commands, "push", "upload a draft, with its card, to a Hub repository of its own")
    push.add_argument("draft", help="folder or Hub repository of a draft")
    push.add_argument("repo_id", help="repository to create or update")
    _add_policy(push)
    _add_card(push)
    push.add_argument("--private", action="store_true", default=None, help="create the repository as private")
    push.add_argument("--commit-message", default="Upload draft", help="message of the commit")
    push.set_defaults(run=_push)
    return parser


def _add_command(commands, name: str, purpose: str) -> argparse.ArgumentParser:
    description = purpose[0].upper() + purpose[1:] + "."
    parser = commands.add_parser(name, help=purpose, description=description, allow_abbrev=False)
    parser.add_argument(
        "--config",
        metavar="FILE",
        action=ConfigFileOption,
        help="YAML file with options; those of the command line win",
    )
    # Without a default: that would replace what was given before the command.
    parser.add_argument(
        TRACEBACK, action="store_true", default=argparse.SUPPRESS, help="show where an error comes from"
    )
    return parser


def _add_policy(parser: argparse.ArgumentParser, required: bool = True) -> None:
    parser.add_argument(
        "--policy", required=required, help="folder or Hub repository of the policy, or of its LoRA adapter"
    )


def _add_card(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dtype", choices=DTYPES, help="stored dtype; the policy's by default")
    parser.add_argument("--base-model", help="name of the policy for the card; --policy by default")
    parser.add_argument("--license", help="licence identifier for the card")
    parser.add_argument("--scores", help="JSON file written by `trl-codraft score --output`")


def _card_arguments(args: argparse.Namespace) -> dict:
    named = PolicySource.named(args.base_model) if args.base_model else PolicySource.find(args.policy)
    return {
        "dtype": DTYPES[args.dtype] if args.dtype else None,
        "base_model": named.name,
        "adapter_of": named.adapter_of,
        "license": args.license,
        "scores": _read_scores(args.scores) if args.scores else None,
    }


def _read_scores(name: str) -> dict:
    try:
        scores = json.loads(Path(name).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{name} is not valid JSON: {error}") from error
    if not isinstance(scores, dict) or not scores.keys() >= set(SCORE_KEYS):
        raise ValueError(f"{name} is no result of `trl-codraft score --output`: it must hold {', '.join(SCORE_KEYS)}.")
    return scores


def _load_policy(name: str) -> PreTrainedModel:
    policy = PolicySource.find(name).load_model()
    return policy.to("cuda" if torch.cuda.is_available() else "cpu").eval()


def _load_draft(name: str, policy: PreTrainedModel) -> Eagle3DraftModel:
    return Eagle3DraftModel.from_pretrained(name, policy=policy, compute_dtype=policy.dtype).to(policy.device).eval()


def _read_prompts(args: argparse.Namespace) -> list[str]:
    if args.prompt:
        return args.prompt
    lines = [line for line in Path(args.prompts_file).read_text(encoding="utf-8").splitlines() if line.strip()]
    if not args.prompts_file.endswith(".jsonl"):
        return lines
    prompts = [json.loads(line).get("prompt") for line in lines]
    if not all(isinstance(prompt, str) for prompt in prompts):
        raise ValueError(f"Each line of {args.prompts_file} must be an object whose `prompt` is a string.")
    return prompts


def _grpo(arguments: list[str]) -> Callable[[], None]:
    """The run that the arguments ask for, ready to start."""
    # Imported here: the script needs TRL, which is slow to import and of no use to the other commands.
    from .scripts.grpo import prepare, run

    return partial(run, *prepare(arguments))


def _export(args: argparse.Namespace) -> int:
    policy = _load_policy(args.policy)
    notes = export_draft(_load_draft(args.draft, policy), policy, args.output, **_card_arguments(args))
    print("\n".join([*notes, f"wrote {args.output}"]))
    return 0


def _validate(args: argparse.Namespace) -> int:
    policy_config = None if args.policy is None else PolicySource.find(args.policy).load_config()
    messages = validate_draft(resolve_folder(args.path), policy_config)
    found = problems(messages)
    for message in messages:
        print(message)
    print(f"{args.path}: {len(found)} problem(s)" if found else f"{args.path}: valid")
    return 1 if found else 0


def _score(args: argparse.Namespace) -> int:
    policy = _load_policy(args.policy)
    scores = score_draft(
        policy,
        _load_draft(args.draft, policy),
        _read_prompts(args),
        PolicySource.find(args.policy).load_tokenizer(),
        num_draft_tokens=args.num_draft_tokens,
        max_new_tokens=args.max_new_tokens,
        temperature=args.temperature,
        batch_size=args.batch_size,
        generator=torch.Generator(policy.device).manual_seed(args.seed),
    )
    text = json.dumps(scores, indent=2)
    if args.output:
        Path(args.output).write_text(text + "\n", encoding="utf-8")
    print(text)
    return 0


def _push(args: argparse.Namespace) -> int:
    check_repo_id("repo_id", args.repo_id)
    policy = _load_policy(args.policy)
    commit = push_draft(
        _load_draft(args.draft, policy),
        policy,
        args.repo_id,
        private=args.private,
        commit_message=args.commit_message,
        **_card_arguments(args),
    )
    print(commit.commit_url)
    return 0


if __name__ == "__main__":
    sys.exit(main())
