"""
Who is late. Every rank of a run says in the store that started the process group what it has come to; when a collective of
TRL, Accelerate or torch then fails because some rank is missing from it, the error names the ranks that have come least
far. Collectives of our groups name theirs themselves (`group/exchange.py`).

With NCCL the watchdog ends a process that waits too long without an exception, unless `TORCH_NCCL_BLOCKING_WAIT=1`;
then there is nothing to add to.
"""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch.distributed as dist
from trl import GRPOTrainer
from trl.trainer import grpo_trainer


# In the order in which a micro-step goes through them.
STAGES = ("nothing yet", "rollouts", "rollouts done", "rewards", "rewards done", "loss", "draft", "draft done")
OF_THE_DRAFT = STAGES[-2:]
# What torch's own errors and those of gloo say when a rank is gone or late.
COLLECTIVE_ERRORS = ("Timed out waiting", "Connection closed by peer", "Connection reset", "pair closure", "gloo")
NAMED_RANKS = 8


@dataclass
class Progress:
    """
    What a rank has come to.

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
            Of this process.
    """

    def __init__(self, store: dist.Store, rank: int, world_size: int):
        self.store, self.rank, self.world_size = dist.PrefixStore("trl_codraft/progress", store), rank, world_size

    def note(self, micro_step: int, stage: str) -> None:
        """Says what this rank has come to."""
        self.store.set(str(self.rank), json.dumps(asdict(Progress(micro_step, stage, time.time()))))

    def read(self) -> list[Progress]:
        """By rank. One that has never said anything has come to nothing yet."""
        silent = json.dumps(asdict(Progress(0, STAGES[0], time.time())))
        names = map(str, range(self.world_size))
        return [Progress(**json.loads(self.store.get(n) if self.store.check([n]) else silent)) for n in names]

    def explanation(self) -> str:
        """Which ranks have come least far, and this one for comparison."""
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


class KnownProgress(GRPOTrainer):
    """Notes what this rank has come to, and explains errors of collectives by what the others have."""

    _board: ProgressBoard | None = None
    _micro_step = 0

    def train(self, *args, **kwargs):
        if dist.is_initialized() and dist.get_world_size() > 1:
            store = dist.distributed_c10d._get_default_store()
            self._board = ProgressBoard(store, dist.get_rank(), dist.get_world_size())
            # In place of what an earlier run of this process came to.
            self._note(STAGES[0])
        with self._explained_errors():
            return super().train(*args, **kwargs)

    @contextmanager
    def _explained_errors(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            if self._board is None or not (
                isinstance(error, dist.DistError) or any(text in str(error) for text in COLLECTIVE_ERRORS)
            ):
                raise
            raise RuntimeError(f"{error}\n{self._board.explanation()}") from error

    def _note(self, stage: str) -> None:
        if stage not in OF_THE_DRAFT:  # it learns when TRL has counted the micro-step, or in a pipeline before that
            self._micro_step = self._step
        if self._board is not None:
            self._board.note(self._micro_step, stage)

    @contextmanager
    def _noted_at_gather(self, owner: Any, stage: str) -> Iterator[None]:
        """
        Within it, a stage is reached where TRL first waits for other ranks: `owner.gather` is the collective behind the
        callables that users pass, which TRL gets as they are.
        """
        gather = owner.gather

        def noting_gather(tensor):
            self._note(stage)
            return gather(tensor)

        own = vars(owner).get("gather")  # `None` for a method of the class
        owner.gather = noting_gather
        try:
            yield
        finally:
            if own is None:
                del owner.gather
            else:
                owner.gather = own

    def _generate(self, prompts):
        self._note("rollouts")
        if self.rollout_func is None or self._board is None:
            return super()._generate(prompts)
        with self._noted_at_gather(self.accelerator, "rollouts done"):
            return super()._generate(prompts)

    def _generate_single_turn(self, *args, **kwargs):
        result = super()._generate_single_turn(*args, **kwargs)
        self._note("rollouts done")
        return result

    def _calculate_rewards(self, *args):
        self._note("rewards")
        if self._board is None:
            return super()._calculate_rewards(*args)
        # TRL runs the functions and gathers what they return in one go.
        with self._noted_at_gather(grpo_trainer, "rewards done"):
            return super()._calculate_rewards(*args)

    def _prepare_inputs(self, generation_batch):
        inputs = super()._prepare_inputs(generation_batch)
        self._note("loss")
        return inputs
