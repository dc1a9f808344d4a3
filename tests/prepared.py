"""
Runs scripts of tests in processes that have imported everything already: importing TRL takes longer than most of them.

`python prepared.py` is the process that imports once and then, for each line on its standard input, forks one that runs a
script, and answers with its number and, when it has ended, its exit code.
"""

import atexit
import json
import os
import runpy
import select
import signal
import subprocess
import sys
import tempfile
import traceback
from functools import cache
from pathlib import Path


def run_prepared(script, *arguments, paths, timeout):
    """
    `subprocess.run([sys.executable, script, *arguments], capture_output=True)` with `paths` as its `PYTHONPATH`.

    Raises:
        subprocess.TimeoutExpired: after `timeout` seconds. The script and what it started is killed.
    """
    command = [str(script), *map(str, arguments)]
    with tempfile.TemporaryDirectory() as folder:
        request = {"command": command, "paths": [str(path) for path in paths], "folder": folder}
        server = _server()
        server.stdin.write(json.dumps(request) + "\n")
        server.stdin.flush()
        child = int(server.stdout.readline())
        ready, _, _ = select.select([server.stdout], [], [], timeout)
        if not ready:
            os.killpg(child, signal.SIGKILL)
        returncode = int(server.stdout.readline())
        output, errors = (Path(folder, name).read_text(errors="replace") for name in ("stdout", "stderr"))
        if not ready:
            raise subprocess.TimeoutExpired(command, timeout, output, errors)
    return subprocess.CompletedProcess(command, returncode, output, errors)


@cache
def _server():
    """One for each process that runs tests, started when it is first needed."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).resolve().parents[1])}
    server = subprocess.Popen(
        [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    )
    atexit.register(server.stdin.close)
    return server


def _serve():
    import datasets
    import peft
    import torch
    import trl

    import trl_codraft.trainer

    assert all((datasets, peft, torch, trl, trl_codraft))
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    for line in sys.stdin:
        request = json.loads(line)
        child = os.fork()
        if child == 0:
            _run(request)
        answers.write(f"{child}\n")
        _, status = os.waitpid(child, 0)
        answers.write(f"{os.waitstatus_to_exitcode(status)}\n")


def _run(request):
    """In the child: never returns."""
    os.setsid()
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(Path(request["folder"], name), os.O_WRONLY | os.O_CREAT), number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    script = request["command"][0]
    sys.argv = request["command"]
    sys.path[:1] = [str(Path(script).parent), *request["paths"]]
    os.environ["PYTHONPATH"] = os.pathsep.join(request["paths"])
    code = 1
    try:
        runpy.run_path(script, run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    _serve()
