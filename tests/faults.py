"""One of two ranks fails, dies or stalls in the middle of a run, and how both of them end."""

import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from forked_ranks import start_ranks


# Of a rank that waits for another, in seconds.
TIMEOUT = 10


@dataclass
class Ending:
    """
    Args:
        exitcodes (`list`): of both ranks; one that was killed or stalled on purpose may have `None`.
        seconds (`float`): from the fault to the end of the ranks that were to end by themselves.
        messages (`list[str]`): what each rank raised, empty where it raised no `RuntimeError`.
    """

    exitcodes: list
    seconds: float
    messages: list[str]


def strike(out, fault):
    """The end of the rank that calls this: an exception, a stall or death, as the name of the fault says."""
    (out / "struck").write_text(str(time.time()))
    if "raised" in fault:
        raise ValueError("this rank gives up")
    if "killed" in fault:
        os._exit(9)
    time.sleep(3600)


def save_endings(train, faults):
    """Runs `train(rank, world_size, out, fault)` on two ranks for each fault; `sys.argv[1]` is the folder `out`."""
    out = Path(sys.argv[1])
    torch.save({fault: _ending_of(train, out, fault) for fault in faults}, out / "rank0.pt")


def _ending_of(train, out, fault):
    files = [out / name for name in ("struck", "message0", "message1")]
    for file in files:
        file.unlink(missing_ok=True)
    ranks = start_ranks(_train, 2, out, train, out, fault, timeout=TIMEOUT)
    # The second rank is the culprit of these.
    for rank in ranks[: 1 if "killed" in fault or "stalled" in fault else 2]:
        rank.join(240)
    ended = time.time()
    exitcodes = [rank.exitcode for rank in ranks]
    for rank in ranks:
        rank.kill()
    struck, *messages = (file.read_text() if file.exists() else "" for file in files)
    return Ending(exitcodes, ended - float(struck), messages)


def _train(rank, world_size, train, out, fault):
    try:
        train(rank, world_size, out, fault)
    except RuntimeError as error:
        (out / f"message{rank}").write_text(str(error))
        raise
