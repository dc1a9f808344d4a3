"""Which transport the taps of a pipeline travel by: found out by the ranks together, and logged."""

import logging
import sys
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist

from .channel import TapChannel
from .cuda import CudaTransport
from .cuda_calls import CudaCalls
from .gloo import GlooTransport
from .pinned import PinnedTransport
from .plan import TapPlan
from .shared_memory import SharedMemoryTransport
from .sockets import place
from .transport import Transport, TransportUnavailable


logger = logging.getLogger(__name__)


def open_channel(
    plan: TapPlan,
    stage: int | Sequence[int],
    group: dist.ProcessGroup,
    *,
    timeout: float,
    device: torch.device | str | None = None,
    calls: Callable[[torch.device], CudaCalls] | None = None,
) -> TapChannel:
    """
    A channel by the shortest way that works: between the memories of GPUs, in shared memory, over gloo; for GPUs, the last two
    through pinned memory. Collective. The first rank of the group logs the way, and why a shorter one does not work.

    Args:
        plan ([`TapPlan`]), stage (`int` or `Sequence[int]`), timeout (`float`):
            As in [`TapChannel`].
        group (`ProcessGroup`):
            All ranks of the pipeline, of the gloo backend.
        device (`torch.device` or `str`, *optional*):
            Where taps are captured and wanted, of the same type on all ranks. If `None`, the CPU.
        calls (`Callable`, *optional*):
            What makes of a GPU the object that calls CUDA. If `None`, [`CudaCalls`] for devices of CUDA.
    """
    device = torch.device("cpu" if device is None else device)
    if calls is None and device.type == "cuda":
        calls = CudaCalls
    open_with = partial(TapChannel, plan, stage, timeout=timeout, device=device)
    one_host, is_first = share_memory(group), dist.get_rank(group) == 0
    if calls is not None and one_host:
        try:
            channel = open_with(transport=CudaTransport(group, device, calls))
        except TransportUnavailable as reason:
            if is_first:
                logger.warning(f"Taps go through host memory, since GPUs do not reach each other's: {reason}")
        else:
            if is_first:
                logger.info("Taps travel from GPU to GPU.")
            return channel
    transport: Transport = SharedMemoryTransport(group) if one_host else GlooTransport(group)
    if calls is not None:
        transport = PinnedTransport(transport, device, calls)
    channel = open_with(transport=transport)
    if is_first:
        logger.info(f"Taps travel over {'shared memory' if one_host else 'gloo'}.")
    return channel


def share_memory(group: dist.ProcessGroup) -> bool:
    """Whether all ranks of a group run in one container of one Linux host. Collective."""
    mine = place() if sys.platform == "linux" else None
    everyone = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, mine, group)
    return mine is not None and all(theirs == mine for theirs in everyone)
