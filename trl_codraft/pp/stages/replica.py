"""
The whole policy on every rank of a pipeline, for rollouts: each rank then generates and scores its own rows, as in
data parallelism. The whole model has to fit beside the stage: see `pp/memory.py`.
"""

import copy
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from ...modeling.naming import few
from .split import PolicyStage


class _Piece(NamedTuple):
    """A parameter or buffer of the policy, as its stage describes it."""

    name: str
    shape: tuple[int, ...]
    frozen: bool


class PolicyReplica:
    """
    A copy of the whole policy without gradients, assembled from the stages by broadcasts. Collective in the group.

    Args:
        stages (`Sequence[PolicyStage]`):
            The stages of this rank.
        group (`ProcessGroup`):
            The ranks of the pipeline, between steps.
        whole ([`~transformers.PreTrainedModel`], *optional*):
            A policy that is not split, on this rank's device, whose weights are overwritten. Its parameters need the
            same names as the stages' and may be of another dtype. If `None`, one is made from the stage's class and
            config; a policy with adapters has to be passed, the same adapters in it. With stages that are views of it
            ([`StageView`]) it is taken to be up to date, and only parameters that other ranks train will be sent; so
            these alone may have quantised weights, which are packed bytes and scales beside them.

    Attributes:
        model ([`~transformers.PreTrainedModel`]): the replica, in evaluation mode. Tied weights stay tied.

    Raises:
        ValueError: on all ranks alike, if the names or shapes are not those of the stages.
    """

    def __init__(self, stages: Sequence[PolicyStage], group: dist.ProcessGroup, whole: nn.Module | None = None):
        shared = whole is stages[0].policy
        self.model = _like(stages[0].policy) if whole is None else whole
        if not shared:
            self.model.eval().requires_grad_(False)
        self._group = group
        self._rank = dist.get_rank(group)
        self._targets = {**dict(self.model.named_parameters()), **_saved_buffers(self.model)}
        self._sources = {name: value for stage in stages for name, value in stage.named_own_parameters()}
        for stage in stages:
            buffers = _saved_buffers(stage.policy)
            self._sources |= {name: buffers[name] for name, _ in stage.named_own_buffers() if name in buffers}
        own = [_Piece(name, tuple(value.shape), not value.requires_grad) for name, value in self._sources.items()]
        by_rank: list[list[_Piece]] = [[] for _ in range(dist.get_world_size(group))]
        dist.all_gather_object(by_rank, own, group)
        self._owners = [(piece, rank) for rank, pieces in enumerate(by_rank) for piece in pieces]
        self._require_same_tensors(shared)
        if not shared:
            self._send([(piece.name, rank) for piece, rank in self._owners])

    @property
    def trained_names(self) -> set[str]:
        """Parameters that some stage trained when the replica was made, by their names in the whole policy."""
        return {piece.name for piece, _ in self._owners if not piece.frozen}

    def refresh(self) -> None:
        """
        Brings the replica up to date, in place, after an optimizer step. Collective in the group. Parameters that were
        frozen when the replica was made are not sent again.
        """
        self._send([(piece.name, rank) for piece, rank in self._owners if not piece.frozen])

    @torch.no_grad()
    def _send(self, names: list[tuple[str, int]]) -> None:
        works = []
        for name, owner in names:
            target = self._targets[name]
            if owner == self._rank and self._sources[name] is not target:
                target.copy_(self._sources[name])
            works.append(dist.broadcast(target, group=self._group, group_src=owner, async_op=True))
        for (name, owner), work in zip(names, works, strict=True):
            try:
                work.wait()
            except RuntimeError as error:
                if owner == self._rank:
                    others = [rank for rank in range(dist.get_world_size(self._group)) if rank != owner]
                    lost = f"did not get from rank {owner} to all of rank(s) {others} of the pipeline"
                else:
                    lost = f"did not come from rank {owner} of the pipeline to rank {self._rank}"
                raise RuntimeError(
                    f"{name} {lost}: a process has ended, or hangs, that sends it, takes it or passes it on ({error})"
                ) from error

    def _require_same_tensors(self, shared: bool) -> None:
        stages = {piece.name: piece.shape for piece, _ in self._owners}
        replica = {name: tuple(value.shape) for name, value in self._targets.items()}
        every_name = {name for name, _ in self.model.named_parameters(remove_duplicate=False)}
        # Such as the scales of quantised weights: nobody sends them.
        others = [] if shared else sorted(self.model.state_dict().keys() - every_name - self._targets.keys())
        if stages != replica or others:
            differing = sorted(name for name in {*stages, *replica} if stages.get(name) != replica.get(name)) + others
            raise ValueError(
                f"A replica of {type(self.model).__name__} cannot be assembled: {len(differing)} tensors differ "
                f"between the stages and the whole model, among them {few(differing)}. Pass as `whole` a "
                "policy of the same class, config and adapters; quantised weights need stages that are views of it."
            )


def _saved_buffers(policy: nn.Module) -> dict[str, torch.Tensor]:
    """The buffers that checkpoints hold, such as biases that balance experts."""
    saved = policy.state_dict().keys()
    return {name: buffer for name, buffer in policy.named_buffers() if name in saved}


def _like(policy: nn.Module) -> nn.Module:
    """A whole policy of the class and config of a stage's, with other weights."""
    with torch.random.fork_rng(devices=[policy.device] if policy.device.type == "cuda" else []):
        whole = type(policy)._from_config(copy.deepcopy(policy.config), dtype=policy.dtype).to(policy.device)
    whole.generation_config = copy.deepcopy(policy.generation_config)
    return whole
