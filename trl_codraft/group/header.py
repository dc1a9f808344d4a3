"""
The header that every rank sends before any group work: what it is about to do, and on what.

Everything after a header (how many passes, of which shapes, in which order) derives from the headers of all ranks,
never from local data, so ranks cannot disagree silently and wait for each other forever.
"""

from dataclasses import dataclass, field
from enum import IntEnum

import torch


# Travelling tensors have at most this many dimensions, and a microbatch at most this many tensors.
MAX_DIMS = 2
MAX_TENSORS = 16
ABSENT = -1

DTYPES = (
    torch.bool,
    torch.uint8,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
)


class Phase(IntEnum):
    """A computation that the group is about to begin."""

    ROLLOUT = 0
    LOG_PROBS = 1
    ENTROPY_THRESHOLD = 2
    LOSS = 3
    EVALUATION = 4

    def __str__(self) -> str:
        return self.name.lower().replace("_", " ")


@dataclass(frozen=True)
class TensorSpec:
    """Shape and dtype of a tensor that travels."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True)
class Header:
    """
    Announcement of one rank.

    Args:
        step (`int`):
            Micro-step the rank is at.
        phase ([`Phase`]):
            The computation it is about to begin.
        rows (`int`), prompt_length (`int`), completion_length (`int`):
            Its microbatch: `B` rows of `P + C` padded columns. Zero rows are legal.
        chunk_rows (`int`, *optional*, defaults to `0`):
            Largest number of rows per forward, 0 for all of them.
        shard_tokens (`tuple[int, ...]`):
            Tokens of its microbatch that each rank of the group runs.
        tensors (`dict[str, TensorSpec]`, *optional*):
            The tensors of the microbatch. All ranks use the same names in the same order.
        error_bytes (`int`, *optional*, defaults to `0`):
            Length of the message of an exception on this rank, 0 if there was none.
    """

    step: int
    phase: Phase
    rows: int = 0
    prompt_length: int = 0
    completion_length: int = 0
    chunk_rows: int = 0
    shard_tokens: tuple[int, ...] = ()
    tensors: dict[str, TensorSpec] = field(default_factory=dict)
    error_bytes: int = 0

    @property
    def chunk_starts(self) -> list[int]:
        """First rows of the forwards this rank's rows need, but for row 0: where `tensor_split` cuts."""
        return list(range(self.chunk_rows, self.rows, self.chunk_rows)) if self.chunk_rows else []

    def encode(self, names: tuple[str, ...], group_size: int) -> list[int]:
        """The header as integers; the length depends on `group_size` alone."""
        shard_tokens = self.shard_tokens or (0,) * group_size
        numbers = [self.step, self.phase, self.rows, self.prompt_length, self.completion_length, self.chunk_rows]
        numbers += [self.error_bytes, *shard_tokens]
        for index in range(MAX_TENSORS):
            spec = self.tensors.get(names[index]) if index < len(names) else None
            if spec is None:
                numbers += [ABSENT] * (1 + MAX_DIMS)
            else:
                numbers += [DTYPES.index(spec.dtype), *spec.shape, *[ABSENT] * (MAX_DIMS - len(spec.shape))]
        return numbers

    @classmethod
    def decode(cls, numbers: list[int], names: tuple[str, ...], group_size: int) -> "Header":
        """The inverse of [`Header.encode`]."""
        step, phase, rows, prompt_length, completion_length, chunk_rows, error_bytes = numbers[:7]
        rest = numbers[7 + group_size :]
        tensors = {}
        for index, name in enumerate(names):
            dtype, *shape = rest[index * (1 + MAX_DIMS) : (index + 1) * (1 + MAX_DIMS)]
            if dtype != ABSENT:
                tensors[name] = TensorSpec(DTYPES[dtype], tuple(size for size in shape if size != ABSENT))
        return cls(
            step=step,
            phase=Phase(phase),
            rows=rows,
            prompt_length=prompt_length,
            completion_length=completion_length,
            chunk_rows=chunk_rows,
            shard_tokens=tuple(numbers[7 : 7 + group_size]),
            tensors=tensors,
            error_bytes=error_bytes,
        )


def describe(tensors: dict[str, torch.Tensor | None], names: tuple[str, ...]) -> dict[str, TensorSpec]:
    """
    Shapes and dtypes of the tensors of a microbatch. `None` counts as absent.

    Raises:
        ValueError: if a tensor cannot travel: its name is unknown, or its dtype or number of dimensions.
    """
    specs = {}
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if name not in names:
            raise ValueError(
                f"The microbatch holds `{name}`, which does not travel between the ranks that share a loss (only "
                f"{', '.join(names)} do). Set `context_parallel_size=1` and `pipeline_parallel_size=1` to use it."
            )
        if tensor.dim() > MAX_DIMS or tensor.dtype not in DTYPES:
            raise ValueError(f"`{name}` of shape {tuple(tensor.shape)} and dtype {tensor.dtype} cannot travel.")
        specs[name] = TensorSpec(tensor.dtype, tuple(tensor.shape))
    return specs


def require_agreement(headers: list[Header]) -> None:
    """
    Raises where ranks are about to do different things.

    Args:
        headers (`list[Header]`):
            Headers of all ranks, by rank.

    Raises:
        RuntimeError: naming the first two ranks that disagree, and on what.
    """
    for rank, header in enumerate(headers):
        for name in ("phase", "step", "chunk_rows"):
            ours, theirs = getattr(headers[0], name), getattr(header, name)
            if ours != theirs:
                raise RuntimeError(
                    f"Ranks that compute losses together disagree on the {name}: {ours} on rank 0, {theirs} on rank "
                    f"{rank}. Start all ranks with the same arguments and resume all from the same checkpoint: "
                    "`num_iterations`, `steps_per_generation`, `beta` and the batch sizes decide what is computed "
                    "when."
                )
