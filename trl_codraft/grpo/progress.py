"""
Tells which ranks are late. Every rank of a run says in the store that started the process group what it has come to;
when a collective of TRL, Accelerate or torch then fails because some rank is missing from it, the error names the
ranks that have come least far. Collectives of our groups name theirs themselves (`group/exchange.py`).

With NCCL the watchdog ends a process that waits too long without an exception, unless `TORCH_NCCL_BLOCKING_WAIT=1`;
then there is nothing to add to.
"""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch.distributed as dist

from .run import Run


# In the order in which a micro-step goes through them.
STAGES = ("nothing yet", "rollouts", "rollouts done", "rewards", "rewards done", "loss", "draft", "draft done")
OF_THE_DRAFT = STAGES[-2:]
# Words in the errors of torch and gloo when a rank is gone or late.
COLLECTIVE_ERRORS = ("Timed out waiting", "Connection closed by peer", "Connection reset", "pair closure", "gloo")
NAMED_RANKS = 8


@dataclass
class Progress:
    """
    Records how far a rank has come.

    Attributes:
        micro_step (`int`): micro-steps since training began.
        stage (`str`): one of `STAGES`.
        time (`float`): when, in seconds of that machine's clock.
    """

    micro_step: int
    stage: str
    time: float

    def __str__(self) -> str:
        return f"{self.stage!r} of micro-step {self.micro_step}, {time.time() - self.time:.0f} s ago"

    @property
    def place(self) -> tuple[int, int]:
        """Larger the further a rank has come."""
        return self.micro_step, STAGES.index(self.stage)


class ProgressBoard:
    """
    The progress of all ranks, in a store that all of them can reach.

    Args:
        store (`torch.distributed.Store`):
            Kept by a process that outlives the ranks where possible, as torchrun does.
        rank (`int`), world_size (`int`):
            Rank and number of the processes.
    """

    def __init__(self, store: dist.Store, rank: int, world_size: int):
        self.store, self.rank, self.world_size = dist.PrefixStore("trl_codraft/progress", store), rank, world_size

    def note(self, micro_step: int, stage: str) -> None:
        """Says how far this rank has come."""
        self.store.set(str(self.rank), json.dumps(asdict(Progress(micro_step, stage, time.time()))))

    def read(self) -> list[Progress]:
        """Reads the progress of each rank. A rank that has never said anything has done nothing yet."""
        silent = json.dumps(asdict(Progress(0, STAGES[0], time.time())))
        names = map(str, range(self.world_size))
        return [Progress(**json.loads(self.store.get(n) if self.store.check([n]) else silent)) for n in names]

    def explanation(self) -> str:
        """Names the ranks that have come least far, and this one for comparison."""
        try:
            progress = self.read()
        except RuntimeError as error:  # every error of a store is one
            return f"What the other ranks have come to is unknown, their store is gone ({error})."
        own, least = progress[self.rank], min(state.place for state in progress)
        late = [rank for rank, state in enumerate(progress) if state.place == least]
        if own.place == least:
            return f"No rank has come less far than this one, rank {self.rank}: {own}."
        named = "; ".join(f"rank {rank}: {progress[rank]}" for rank in late[:NAMED_RANKS])
        more = f"; and {len(late) - NAMED_RANKS} more" if len(late) > NAMED_RANKS else ""
        return f"Ranks that have come least far: {named}{more}. This one, rank {self.rank}: {own}."


class ProgressReports:
    """
    Notes how far this rank has come, and explains errors of collectives by how far the others have.

    Args:
        run ([`~run.Run`]):
            The trainer.

    Attributes:
        board ([`ProgressBoard`] or `None`):
            The board of all ranks; `None` in a single process, or before training.
    """

    def __init__(self, run: Run):
        self.run = run
        self.board: ProgressBoard | None = None
        self._micro_step = 0

    def start(self) -> None:
        """Begins a run's reports, in place of what an earlier run of this process came to."""
        if dist.is_initialized() and dist.get_world_size() > 1:
            store = dist.distributed_c10d._get_default_store()
            self.board = ProgressBoard(store, dist.get_rank(), dist.get_world_size())
            self.note(STAGES[0])

    def note(self, stage: str) -> None:
        """Says that this rank has reached one of `STAGES`."""
        if self.board is None:
            return
        if stage not in OF_THE_DRAFT:  # it learns when TRL has counted the micro-step, or in a pipeline before that
            self._micro_step = self.run._step
        self.board.note(self._micro_step, stage)

    @contextmanager
    def explained_errors(self) -> Iterator[None]:
        """Within it, an error of a collective names the ranks that have come least far."""
        try:
            yield
        except RuntimeError as error:
            if self.board is None or not (
                isinstance(error, dist.DistError) or any(text in str(error) for text in COLLECTIVE_ERRORS)
            ):
                raise
            raise RuntimeError(f"{error}\n{self.board.explanation()}") from error

    def noting(self, stage: str) -> Callable[[Callable], Callable]:
        """
        Makes of a `gather` one that notes a stage first: there TRL waits for other ranks, behind the callables that
        users pass, which it gets as they are.
        """

        def wrap(gather: Callable) -> Callable:
            def noting_gather(tensor: Any) -> Any:
                self.note(stage)
                return gather(tensor)

            return noting_gather

        return wrap
