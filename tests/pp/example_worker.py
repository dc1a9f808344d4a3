"""
Ranks of `test_docs_example.py`: `python example_worker.py OUT SCRIPT` runs a script on two ranks, as torchrun would.
"""

import runpy
import sys

from forked_ranks import fork_ranks


def run_example(rank, world_size, script):
    variables = runpy.run_path(script, run_name="__main__")
    return {name: variables.get(name) for name in ("n", "taps", "hidden")}


if __name__ == "__main__":
    fork_ranks(run_example, 2, sys.argv[1], sys.argv[2], timeout=None)
