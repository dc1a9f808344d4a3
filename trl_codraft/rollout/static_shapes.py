"""
How the forwards of decoding rounds run: as they come, or in a few fixed shapes that are recorded as CUDA graphs.

On a GPU a small forward takes longer to launch than to compute, and speculation adds small forwards. A graph launches
all kernels of a forward at once, but only with the shapes and the addresses it was recorded with. So rows, columns and
slots are padded up to a few sizes, inputs are copied to where the recording read them, and caches never move.

Shapes: `n` rows, `q` columns.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from .cache import RaggedCache
from .controller import row_bucket


# Numbers of visible cache slots are multiples of this, and of an eighth of themselves or more.
SLOT_MULTIPLE = 256

Step = Callable[..., tuple[torch.Tensor, ...]]


class LiveSteps:
    """Every forward runs as it comes."""

    just_recorded = False

    def rows(self, count: int) -> int:
        """Rows to pad `count` to."""
        return count

    def columns(self, count: int) -> int:
        """Columns to pad `count` to."""
        return count

    def slots(self, count: int, limit: int) -> int:
        """Visible cache slots to round `count` up to, `limit` at most."""
        return count

    def cache(self, num_rows: int, max_slots: int, initial_slots: int) -> RaggedCache:
        """A cache for `num_rows` rows, which starts with room for `initial_slots` slots."""
        return RaggedCache(num_rows, max_slots, initial_slots)

    def __call__(self, name: tuple, step: Step, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """
        Runs one forward.

        Args:
            name (`tuple`):
                What the forward depends on besides the shapes of its inputs.
            step (`Callable`):
                Takes `inputs` and returns a tuple of tensors.
            *inputs (`torch.Tensor`):
                All that changes from call to call.

        Returns:
            `tuple[torch.Tensor, ...]`: what `step` returned; valid until the next call.
        """
        return step(*inputs)


class StaticSteps(LiveSteps):
    """
    Forwards of the same name and shapes run once, are recorded once, and are replayed from then on.

    Args:
        record (`Callable`):
            Called with a step that has just run, its inputs and its outputs; returns a callable that takes inputs of
            the same shapes and returns such outputs, such as [`CudaGraphs`].

    Attributes:
        just_recorded (`bool`):
            Whether anything was recorded since this was last set to `False`.
    """

    def __init__(self, record: Callable[[Step, tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]], Step]):
        self.just_recorded = False
        self._record = record
        self._replays: dict[tuple[Any, ...], Step] = {}

    def rows(self, count: int) -> int:
        return row_bucket(count)

    def columns(self, count: int) -> int:
        return row_bucket(count)

    def slots(self, count: int, limit: int) -> int:
        step = max(SLOT_MULTIPLE, 1 << max(count.bit_length() - 3, 0))
        return min(-(-count // step) * step, limit)

    def cache(self, num_rows: int, max_slots: int, initial_slots: int) -> RaggedCache:
        # All slots at once: a buffer that grew would lie elsewhere than where recordings read it.
        return RaggedCache(num_rows, max_slots, spare_rows=self.rows(num_rows) - num_rows)

    def __call__(self, name: tuple, step: Step, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        key = (*name, *(tensor.shape for tensor in inputs))
        if key in self._replays:
            return self._replays[key](*inputs)
        outputs = step(*inputs)
        self._replays[key] = self._record(step, inputs, outputs)
        self.just_recorded = True
        return outputs


class CudaGraphs:
    """Records steps as CUDA graphs, for [`StaticSteps`]. All of them share their memory, outputs included."""

    def __init__(self):
        self._pool = torch.cuda.graph_pool_handle()
        self._outputs: dict[tuple[int, torch.dtype], torch.Tensor] = {}

    def __call__(self, step: Step, inputs: tuple[torch.Tensor, ...], outputs: tuple[torch.Tensor, ...]) -> Step:
        """
        Records a step that has just run.

        Raises:
            RuntimeError: if it does what a graph cannot hold. CUDA's random numbers may be unusable in this process
            then.
        """
        held = tuple(tensor.clone() for tensor in inputs)
        results = tuple(self._place(index, tensor) for index, tensor in enumerate(outputs))
        graph = torch.cuda.CUDAGraph()
        # Autocast would keep casts that were made outside, and free them while the graph still reads them. Other
        # threads (NCCL's watchdog) may call CUDA meanwhile.
        try:
            with (
                torch.cuda.device(outputs[0].device),
                torch.autocast("cuda", enabled=torch.is_autocast_enabled("cuda"), cache_enabled=False),
                torch.cuda.graph(
                    graph, self._pool, capture_stream(outputs[0].device), capture_error_mode="thread_local"
                ),
            ):
                for result, output in zip(results, step(*held), strict=True):
                    result.copy_(output)
        except RuntimeError as error:
            raise RuntimeError(
                f"A forward of this policy or its draft cannot be recorded as a CUDA graph: {error}. Set "
                "`rollout_cuda_graphs=False`."
            ) from error

        def replay(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
            for target, given in zip(held, inputs, strict=True):
                target.copy_(given)
            graph.replay()
            return results

        return replay

    def _place(self, index: int, like: torch.Tensor) -> torch.Tensor:
        """Where an output is left: logits are large, so recordings that never run at once do not keep one each."""
        whole = self._outputs.get((index, like.dtype))
        if whole is None or whole.numel() < like.numel():
            whole = self._outputs[index, like.dtype] = like.new_empty(like.numel())
        return whole[: like.numel()].view(like.shape)


@cache
def capture_stream(device: torch.device) -> torch.cuda.Stream:
    """
    Where a device records. PyTorch's own is on the device of the first capture in the process, whatever runs later; on
    another device than that of its kernels a graph stays empty. One for all rollouts, because cuBLAS keeps memory for
    each.
    """
    return torch.cuda.Stream(device)


def steps_for(device: torch.device, cuda_graphs: bool) -> LiveSteps:
    """
    How forwards run in one rollout; recordings end with it.

    Raises:
        ValueError: if CUDA graphs are asked for on another device.
    """
    if not cuda_graphs:
        return LiveSteps()
    if device.type != "cuda":
        raise ValueError(f"`rollout_cuda_graphs=True` needs a CUDA device; the policy is on {device}. Unset it.")
    return StaticSteps(CudaGraphs())


def padded(tensor: torch.Tensor, rows: int, columns: int | None = None, fill: int = 0) -> torch.Tensor:
    """`(n, ...)` with `rows` rows, or `(n, q, ...)` with `columns` columns too; the new entries hold `fill`."""
    shape = (rows, *tensor.shape[1:]) if columns is None else (rows, columns, *tensor.shape[2:])
    if shape == tensor.shape:
        return tensor
    out = tensor.new_full(shape, fill)
    out[tuple(slice(size) for size in tensor.shape)] = tensor
    return out
