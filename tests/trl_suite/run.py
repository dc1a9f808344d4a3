"""
Runs TRL's own `tests/test_grpo_trainer.py` offline on three trainers and compares the outcomes:

    python tests/trl_suite/run.py --tests /path/to/trl/tests      (or: make test-trl TRL_TESTS=...)

`original` is `trl.GRPOTrainer`; `without_draft` is `CoDraftGRPOTrainer` with `use_draft=False`; `defaults` is
`CoDraftGRPOTrainer` with `CoDraftGRPOConfig` as it comes. A test that passes with the original must pass with ours; at
defaults it may also fail as `refusals.txt` says. TRL's tests are not vendored: give a checkout of the installed
version. The models and data come from a local cache (`hub.py`, `zen.py`); a test that needs other files fails with the
original too and so says nothing. Qwen's vision-language models need torchvision. With `--vocabularies short` it takes
about 11 minutes of CPU time per trainer; the tests with Qwen's real ids, 19 of 186, as much as two hours more.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path


HERE = Path(__file__).parent
VOCABULARIES = ("short", "full")
MODES = ("original", "without_draft", "defaults", "plain_config")
REFUSALS = HERE / "refusals.txt"


@dataclass(frozen=True)
class Refusal:
    """A test that the draft refuses by design: the row of the compatibility table and words of the error."""

    test: str
    row: str
    words: str


def read_refusals(path: Path) -> dict[str, Refusal]:
    """Reads lines `test | row of the compatibility table | words that the error must contain`."""
    refusals = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        parts = [part.strip() for part in line.split(" | ")]
        if len(parts) != 3:
            raise ValueError(f"{path}: expected `test | row | words`, got {line!r}.")
        refusals[parts[0]] = Refusal(*parts)
    return refusals


def compare(original: dict, ours: dict, refusals: dict[str, Refusal]) -> list[str]:
    """
    Problems of one mode.

    Args:
        original (`dict`): `{test: {"outcome": ..., "message": ...}}` with `trl.GRPOTrainer`.
        ours (`dict`): the same with our trainer.
        refusals (`dict[str, Refusal]`): tests that may fail, each with words of the error. Empty: none may.

    Returns:
        `list[str]`: one line per test that passes with the original and neither passes with ours nor is refused as
        listed, and per listed test that passes.
    """
    problems = []
    for test, result in sorted(original.items()):
        if result["outcome"] != "passed":
            continue
        outcome = ours.get(test, {"outcome": "missing", "message": ""})
        refusal = refusals.get(test)
        if outcome["outcome"] == "passed":
            if refusal is not None:
                problems.append(f"{test}: listed as refused ({refusal.row}), but it passes")
        elif refusal is None:
            problems.append(f"{test}: {outcome['outcome']}, not listed: {last_line(outcome['message'])}")
        elif refusal.words not in outcome["message"]:
            problems.append(f"{test}: refused, but not with {refusal.words!r}: {last_line(outcome['message'])}")
    return problems


def last_line(message: str) -> str:
    """The first `E` line of a pytest report, which names the error."""
    errors = [line[1:].strip() for line in message.splitlines() if line.startswith("E ")]
    return errors[0] if errors else message[-200:]


def cache_folder(parent: Path | None) -> Path:
    """A folder for the cache, named after its sources: a change of `hub.py` makes a new one."""
    sources = [(HERE / name).read_bytes() for name in ("hub.py", "tiny_models.py", "vocabularies.py", "zen.py")]
    return (parent or Path(tempfile.gettempdir())) / f"trl-suite-{hashlib.sha256(b''.join(sources)).hexdigest()[:12]}"


def environment(cache: Path, vocabulary: str) -> dict[str, str]:
    paths = [str(HERE.parent), str(HERE.parent.parent), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "HF_HOME": str(cache / vocabulary),
        "HF_HUB_CACHE": str(cache / vocabulary / "hub"),
        "HF_HUB_OFFLINE": "1",
        "CI": "1",
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


def ensure_cache(cache: Path) -> None:
    if (cache / "complete").exists():
        return
    print(f"building the tiny models in {cache}", flush=True)
    with tempfile.TemporaryDirectory(dir=cache.parent) as scratch:
        built = Path(scratch) / "cache"
        for vocabulary in VOCABULARIES:
            command = [sys.executable, "-m", "trl_suite.hub", str(built / vocabulary / "hub"), vocabulary]
            subprocess.run(command, env=environment(built, vocabulary), check=True, stderr=subprocess.DEVNULL)
        (built / "complete").touch()
        built.rename(cache)


def run_mode(mode: str, args: argparse.Namespace, cache: Path, output: Path) -> dict:
    """Runs the suite on one trainer, in a process per cache, and returns the outcomes."""
    file = args.tests if args.tests.suffix == ".py" else args.tests / "test_grpo_trainer.py"
    outcomes = {}
    for vocabulary in args.vocabularies:
        part = output / f"{mode}.{vocabulary}.json"
        if args.reuse and part.exists():
            outcomes.update(json.loads(part.read_text()))
            continue
        part.unlink(missing_ok=True)
        command = [
            *(sys.executable, "-m", "pytest", "-p", "trl_suite.plugin", "-p", "no:cacheprovider"),
            *("-c", str(HERE / "settings.ini"), "--rootdir", str(file.parent.parent), "-v", "--tb=short"),
            *(f"--trl-trainer={mode}", f"--trl-vocabulary={vocabulary}", f"--trl-outcomes={part}"),
            *(("-n", str(args.workers)) if args.workers > 1 else ()),
            *(("-k", args.select) if args.select else ()),
            str(file),
        ]
        log = output / f"{mode}.{vocabulary}.log"
        with log.open("w") as stream:
            process = subprocess.run(
                command, env=environment(cache, vocabulary), stdout=stream, stderr=subprocess.STDOUT
            )
        # 1: tests failed; 5: none selected.
        if process.returncode not in (0, 1, 5) or not part.exists():
            raise SystemExit(f"pytest ended with {process.returncode} in mode {mode}: see {log}")
        outcomes.update(json.loads(part.read_text()))
    return outcomes


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[1], allow_abbrev=False)
    parser.add_argument("--tests", type=Path, required=True, help="tests folder of a checkout of TRL, or the file")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES[:3]), help="trainers to run")
    parser.add_argument(
        "--vocabularies",
        nargs="+",
        choices=VOCABULARIES,
        default=list(VOCABULARIES),
        help="'full' are the tests that need Qwen's real token ids: few, and most of the time",
    )
    parser.add_argument("--select", help="pytest -k expression")
    parser.add_argument("--workers", type=int, default=1, help="pytest-xdist processes")
    parser.add_argument("--cache", type=Path, help="parent folder of the model cache (a temporary folder)")
    parser.add_argument("--output", type=Path, help="folder for logs and outcomes (a temporary folder)")
    parser.add_argument("--reuse", action="store_true", help="take outcomes that lie in --output instead of running")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    args.tests = args.tests.resolve()
    cache = cache_folder(args.cache)
    ensure_cache(cache)
    output = args.output or Path(tempfile.mkdtemp(prefix="trl-suite-"))
    output.mkdir(parents=True, exist_ok=True)
    print(f"logs and outcomes in {output}", flush=True)

    modes = ["original", *(mode for mode in args.modes if mode != "original")]
    outcomes = {}
    for mode in modes:
        outcomes[mode] = run_mode(mode, args, cache, output)
        print(f"{mode}: {dict(Counter(result['outcome'] for result in outcomes[mode].values()))}", flush=True)

    refusals = read_refusals(REFUSALS)
    failed = False
    for mode in modes[1:]:
        problems = compare(outcomes["original"], outcomes[mode], {} if mode == "without_draft" else refusals)
        for problem in problems:
            print(f"[{mode}] {problem}")
        failed |= bool(problems)
    idle = [test for test in refusals if outcomes["original"].get(test, {}).get("outcome") != "passed"]
    if not args.select and len(args.vocabularies) == len(VOCABULARIES) and idle:
        print(f"{len(idle)} listed refusals were not exercised: the test does not pass with the original here.")
    print(
        "FAILED"
        if failed
        else "ok: every test that passes with the original passes with ours, or is refused as listed"
    )
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
