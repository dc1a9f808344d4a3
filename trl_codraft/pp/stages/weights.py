"""
The weights of a rank's stages where no rank has the whole policy: read from a checkpoint without the rest, streamed to
one rank parameter by parameter, and kept in step where two ranks hold the same tensor.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel


def load_stage_weights(
    architecture: type[PreTrainedModel], path: str, keep: Callable[[PreTrainedModel], list[str]], **kwargs: Any
) -> PreTrainedModel:
    """
    Loads some stages of a policy. Other weights are never allocated, nor read from the checkpoint.

    Args:
        architecture (`type[PreTrainedModel]`):
            The policy's class.
        path (`str`):
            A folder or Hub id.
        keep (`Callable`):
            Given the policy before its weights are there, drops the modules of other stages, as [`keep_stages`] does,
            and returns their paths.
        kwargs (*optional*):
            Passed on to `from_pretrained`.

    Returns:
        [`~transformers.PreTrainedModel`]: of the class `architecture`.
    """

    frozen: set[str] = set()

    class StagesOnly(architecture):
        def __init__(self, config, *args, **others):
            super().__init__(config, *args, **others)
            dropped = {rf"^{re.escape(name)}\." for name in keep(self)}
            frozen.update(name for name, parameter in self.named_parameters() if not parameter.requires_grad)
            self._keys_to_ignore_on_load_unexpected = set(self._keys_to_ignore_on_load_unexpected or ()) | dropped

    for name in ("__name__", "__qualname__", "__module__"):
        setattr(StagesOnly, name, getattr(architecture, name))
    policy = StagesOnly.from_pretrained(path, **kwargs)
    policy.__class__ = architecture
    for name in frozen:  # loading has made parameters anew
        policy.get_parameter(name).requires_grad_(False)
    return policy


@torch.no_grad()
def align_stage_weights(
    policy: nn.Module, pipeline: dist.ProcessGroup, holders: dist.ProcessGroup, *, embedding: bool = False
) -> None:
    """
    Gives ranks that hold the same stages the weights of the first of them. Collective in both groups.

    Args:
        policy ([`~transformers.PreTrainedModel`]):
            The policy, cut down to the stages of this rank.
        pipeline (`ProcessGroup`), holders (`ProcessGroup`):
            The ranks of this pipeline, in order, and the ranks of the run that hold the same stages.
        embedding (`bool`, *optional*, defaults to `False`):
            Whether the last stage has a copy of the input embedding; it becomes that of the first stage.
    """
    for tensor in [*policy.parameters(), *policy.buffers()]:
        dist.broadcast(tensor.data, group=holders, group_src=0)
    if embedding:
        send_embedding(policy, pipeline)


@torch.no_grad()
def send_embedding(policy: nn.Module, group: dist.ProcessGroup) -> None:
    """
    Brings the copy of the input embedding on the last stage up to date. Called by all ranks of a pipeline; `V * H`
    values travel.

    Args:
        policy ([`~transformers.PreTrainedModel`]):
            The policy, cut down to the stages of this rank.
        group (`ProcessGroup`):
            The ranks of the pipeline, between steps.
    """
    rank, last = dist.get_rank(group), dist.get_world_size(group) - 1
    if rank not in (0, last) or last == 0:
        return
    weight = policy.get_input_embeddings().weight.data
    with naming(last if rank == 0 else 0, "the input embedding"):
        if rank == 0:
            dist.send(weight, group=group, group_dst=last)
        else:
            dist.recv(weight, group=group, group_src=0)


@contextmanager
def naming(rank: int, what: str) -> Iterator[None]:
    """
    Says in an error of a process group whom it was about.

    Args:
        rank (`int`), what (`str`):
            The rank in the group that a message goes to or comes from, and what it is.
    """
    try:
        yield
    except RuntimeError as error:
        raise RuntimeError(
            f"{what} did not get to or from rank {rank} of the pipeline: its process has ended, or hangs ({error})"
        ) from error


class TensorInfo(NamedTuple):
    """Name, dtype and shape of a tensor that another rank will send."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


class WholeStream:
    """
    The tensors of a whole policy on the first rank of a pipeline, one at a time, where each rank has its stages alone.

    Args:
        own (`Iterable[tuple[str, torch.Tensor]]`):
            Names and tensors of this rank, in the order in which it will pass them to [`~WholeStream.stream`]. A
            tensor that an earlier rank has by the same name is left out.
        group (`ProcessGroup`):
            The ranks of the pipeline, which all make one: collective.
        device (`torch.device`):
            Where tensors arrive.

    Attributes:
        tensors (`list[TensorInfo]`): of the whole policy, in the order in which they come.
    """

    def __init__(self, own: Iterable[tuple[str, torch.Tensor]], group: dist.ProcessGroup, device: torch.device):
        self.group, self.rank, self.device = group, dist.get_rank(group), device
        everyone: list[list[TensorInfo]] = [[] for _ in range(dist.get_world_size(group))]
        infos = [TensorInfo(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in own]
        dist.all_gather_object(everyone, infos, group)
        seen: set[str] = set()
        self._of_rank: list[list[TensorInfo]] = []
        for theirs in everyone:
            self._of_rank.append([info for info in theirs if info.name not in seen])
            seen |= {info.name for info in theirs}
        self.begin()

    @property
    def tensors(self) -> list[TensorInfo]:
        return [info for infos in self._of_rank for info in infos]

    def begin(self) -> None:
        """Before every pass over the tensors."""
        # Tensors that this rank still has to send, or to take.
        ranks = range(1, len(self._of_rank)) if self.rank == 0 else [self.rank]
        self._left = iter([(rank, info) for rank in ranks for info in self._of_rank[rank]])

    @torch.no_grad()
    def stream(self, own: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """
        Sends this rank's tensors, or on the first rank yields its own and then those of the others as they come, each
        in memory of its own. Every rank of the group has to iterate to the end, or to call [`~WholeStream.give_up`].
        """
        due = {info.name for info in self._of_rank[self.rank]}
        for name, tensor in own:
            if name not in due:
                continue
            if self.rank == 0:
                yield name, tensor
            else:
                with naming(0, name):
                    dist.send(tensor.contiguous(), group=self.group, group_dst=0)
                next(self._left)
        for rank, info in self._left:
            yield info.name, self._receive(rank, info)

    def give_up(self) -> None:
        """Ends a pass that failed on this rank, so that no other waits: takes and drops the rest, or sends zeros."""
        for rank, info in self._left:
            if self.rank == 0:
                self._receive(rank, info)
            else:
                zeros = torch.zeros(info.shape, dtype=info.dtype, device=self.device)
                with naming(0, info.name):
                    dist.send(zeros, group=self.group, group_dst=0)

    def _receive(self, rank: int, info: TensorInfo) -> torch.Tensor:
        tensor = torch.empty(info.shape, dtype=info.dtype, device=self.device)
        with naming(rank, info.name):
            dist.recv(tensor, group=self.group, group_src=rank)
        return tensor
