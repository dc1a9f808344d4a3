"""
Runs scripts of tests in processes that have imported everything already: importing TRL takes longer than most of them.

`python prepared.py` is the process that imports once and then, for each line on its standard input, forks one that
runs a script, and answers with its number and, when it has ended, its exit code and what it wrote.
"""

import atexit
import gc
import json
import os
import runpy
import select
import signal
import subprocess
import sys
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
    server = _server()
    request = {"command": command, "paths": [str(path) for path in paths]}
    server.stdin.write(json.dumps(request).encode() + b"\n")
    child = int(server.stdout.readline())
    try:
        ready, _, _ = select.select([server.stdout], [], [], timeout)
    except BaseException:
        # A test's own time is over: the script must not run on, nor its answer be taken for that to the next.
        os.killpg(child, signal.SIGKILL)
        server.stdout.readline()
        raise
    if not ready:
        os.killpg(child, signal.SIGKILL)
    returncode, output, errors = json.loads(server.stdout.readline())
    if not ready:
        raise subprocess.TimeoutExpired(command, timeout, output, errors)
    return subprocess.CompletedProcess(command, returncode, output, errors)


@cache
def _server():
    """One for each process that runs tests, started when it is first needed."""
    places = [str(Path(__file__).resolve().parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(places)}
    # Unbuffered: what a buffer holds, `select` does not see.
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "bufsize": 0}
    server = subprocess.Popen([sys.executable, __file__], env=environment, **pipes)
    atexit.register(server.stdin.close)
    return server


def _serve():
    import datasets
    import peft
    import torch
    import trl

    import trl_codraft.trainer

    assert all((datasets, peft, torch, trl, trl_codraft))
    # Every run of a trainer collects garbage: it need not look at what the imports left, nor copy the pages of it.
    gc.collect()
    gc.freeze()
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    for line in sys.stdin:
        request = json.loads(line)
        # In memory, so that tests which look for files left behind find none of these.
        files = [os.memfd_create(name) for name in ("stdout", "stderr")]
        child = os.fork()
        if child == 0:
            _run(request, *files)
        answers.write(f"{child}\n")
        _, status = os.waitpid(child, 0)
        written = [os.pread(file, os.fstat(file).st_size, 0).decode(errors="replace") for file in files]
        answers.write(json.dumps([os.waitstatus_to_exitcode(status), *written]) + "\n")
        for file in files:
            os.close(file)


def _run(request, stdout, stderr):
    """In the child: never returns."""
    os.setsid()
    os.dup2(stdout, 1)
    os.dup2(stderr, 2)
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
