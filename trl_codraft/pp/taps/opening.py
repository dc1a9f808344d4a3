"""Which transport the taps of a pipeline travel by: found out by the ranks together, and logged."""

import logging
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

from .channel import TapChannel
from .gloo import GlooTransport
from .pinned import PinnedTransport
from .plan import TapPlan
from .processes import on_one_host
from .symmetric import SymmetricTransport
from .transport import Transport, TransportUnavailable


logger = logging.getLogger(__name__)


def open_channel(
    plan: TapPlan,
    stage: int | Sequence[int],
    group: dist.ProcessGroup,
    *,
    timeout: float,
    device: torch.device | str | None = None,
) -> TapChannel:
    """
    Makes a channel by the shortest way that works: over gloo for taps in host memory; for GPUs between their memories,
    or else over gloo through pinned memory. Collective. The first rank of the group logs the way, and why a shorter
    one does not work.

    Args:
        plan ([`TapPlan`]), stage (`int` or `Sequence[int]`), timeout (`float`):
            As in [`TapChannel`].
        group (`ProcessGroup`):
            All ranks of the pipeline, of the gloo backend.
        device (`torch.device` or `str`, *optional*):
            Where taps are captured and wanted, of the same type on all ranks. If `None`, the CPU.
    """
    device = torch.device("cpu" if device is None else device)
    if device.type != "cpu" and device.index is None:
        device = torch.device(device.type, torch.get_device_module(device).current_device())
    is_first = dist.get_rank(group) == 0
    for way, transport in _ways(group, device):
        try:
            channel = TapChannel(plan, stage, transport, timeout=timeout, device=device)
        except TransportUnavailable as reason:
            if is_first:
                logger.warning(f"Taps do not travel {way}: {reason}")
        else:
            if is_first:
                logger.info(f"Taps travel {way}.")
            return channel
    raise AssertionError("gloo is never unavailable")


def _ways(group: dist.ProcessGroup, device: torch.device) -> Iterator[tuple[str, Transport]]:
    """Yields the ways by which taps may travel, the shortest first. The last one always works."""
    if device.type == "cpu":
        yield "over gloo", GlooTransport(group)
        return
    if device.type == "cuda" and on_one_host(group):
        yield "from GPU to GPU", SymmetricTransport(GlooTransport(group), device)
    yield "over gloo, through pinned memory", PinnedTransport(GlooTransport(group, pin_memory=True), device)
