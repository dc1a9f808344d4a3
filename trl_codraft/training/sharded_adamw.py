"""The draft's optimizer, its state split over ranks (ZeRO, stage 1, arXiv 1910.02054)."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import Any

import torch
import torch.distributed as dist


MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, eq=False)
class Piece:
    """
    Elements of a flattened weight that one rank updates.

    Attributes:
        weight (`torch.Tensor`), number (`int`): the weight, and its place in the optimizer.
        owner (`int`): the rank.
        start (`int`), stop (`int`): its first element, and that after its last.
    """

    weight: torch.Tensor
    number: int
    owner: int
    start: int
    stop: int

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """These elements of a tensor in the weight's shape, flat; a view."""
        return tensor.detach().view(-1)[self.start : self.stop]


def cut_weights(weights: Sequence[torch.Tensor], num_ranks: int) -> list[Piece]:
    """
    Equal shares of weights for a number of ranks: of all elements in order, `total`, those of rank `r` end before
    `total * (r + 1) // num_ranks`, wherever in a weight that is.

    Returns:
        `list[Piece]`: in order, none of them empty.
    """
    total = sum(weight.numel() for weight in weights)
    shares = list(pairwise(total * rank // num_ranks for rank in range(num_ranks + 1)))
    pieces, first = [], 0
    for number, weight in enumerate(weights):
        for owner, (begin, end) in enumerate(shares):
            start, stop = max(begin - first, 0), min(end - first, weight.numel())
            if start < stop:
                pieces.append(Piece(weight, number, owner, start, stop))
        first += weight.numel()
    return pieces


class ShardedAdamW(torch.optim.AdamW):
    """
    AdamW for weights that every rank has whole: each keeps the moments of an equal share of them, updates that and
    sends it to the others. Torch's `ZeroRedundancyOptimizer` gives a rank whole weights, of which a draft has few
    large ones.

    Its state on disk is that of `torch.optim.AdamW`, so a run goes on with another number of ranks, or without.

    Args:
        groups (`list[dict]`):
            Weights and settings as for `torch.optim.AdamW`, the same on all ranks. Weights are contiguous, and all
            have gradients, the same on all ranks, when a step is made.
        sharers (`ProcessGroup`):
            The ranks.
        settings (`dict`, *optional*):
            Passed on.

    Raises:
        ValueError: on all ranks, if a weight is not contiguous.
    """

    def __init__(self, groups: list[dict[str, Any]], sharers: dist.ProcessGroup, **settings: Any):
        self.sharers = sharers
        self.sizes = [len(group["params"]) for group in groups]
        weights = [weight for group in groups for weight in group["params"]]
        if not all(weight.is_contiguous() for weight in weights):
            raise ValueError(
                "Some of the draft's weights are not contiguous, so they cannot be cut into shares. Call "
                "`.contiguous()`."
            )
        self.pieces = cut_weights(weights, sharers.size())
        own = [piece for piece in self.pieces if piece.owner == sharers.rank()]
        # The optimizer proper sees views of the weights.
        self.own = {piece: piece.of(piece.weight) for piece in own}
        parts, end = [], 0
        for group, size in zip(groups, self.sizes, strict=True):
            numbers, end = range(end, end + size), end + size
            parts.append({**group, "params": [view for piece, view in self.own.items() if piece.number in numbers]})
        super().__init__(parts, **settings)

    @torch.no_grad()
    def step(self) -> None:
        """Updates all weights. Collective."""
        for piece, view in self.own.items():
            view.data, view.grad = piece.of(piece.weight), piece.of(piece.weight.grad)
        super().step()
        for view in self.own.values():
            view.grad = None  # it would keep the gradients of all weights
        sends = [
            dist.broadcast(piece.of(piece.weight), group_src=piece.owner, group=self.sharers, async_op=True)
            for piece in self.pieces
        ]
        for send in sends:
            send.wait()

    def state_dict(self, keep: bool = True) -> dict[str, Any]:
        """
        The state of whole weights, as `torch.optim.AdamW` has it, on the CPU. Collective; a piece at a time travels.

        Args:
            keep (`bool`, *optional*, defaults to `True`):
                Whether this rank wants it. Without, it takes part and gets no moments.
        """
        numbers = iter(range(sum(self.sizes)))
        groups = [
            {**group, "params": list(islice(numbers, size))}
            for group, size in zip(super().state_dict()["param_groups"], self.sizes, strict=True)
        ]
        # A rank may have no piece, and all weights have made as many steps.
        steps = torch.zeros((), device=self.pieces[0].weight.device)
        steps += max((int(state["step"]) for state in self.state.values()), default=0)
        dist.all_reduce(steps, dist.ReduceOp.MAX, group=self.sharers)
        state: dict[int, dict[str, torch.Tensor]] = {}
        for piece in self.pieces if steps > 0 else []:
            if keep and piece.number not in state:
                moments = {name: torch.empty_like(piece.weight, device="cpu") for name in MOMENTS}
                state[piece.number] = {"step": steps.cpu().clone(), **moments}
            for name in MOMENTS:
                self._gather(piece, name, state[piece.number][name] if keep else None)
        return {"state": state, "param_groups": groups}

    def _gather(self, piece: Piece, name: str, whole: torch.Tensor | None) -> None:
        """Sends a piece of a moment to all ranks, of which some put it where it belongs in the whole."""
        view = self.own.get(piece)
        part = torch.empty_like(piece.of(piece.weight)) if view is None else self.state[view][name]
        dist.broadcast(part, group_src=piece.owner, group=self.sharers)
        if whole is not None:
            piece.of(whole).copy_(part)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """
        Takes this rank's share of a state of whole weights, and the settings.

        Raises:
            ValueError: if it is of another number of weights.
        """
        sizes = [len(group["params"]) for group in state_dict["param_groups"]]
        if sizes != self.sizes:
            raise ValueError(f"The saved optimizer has {sizes} weights in its groups, this one {self.sizes}.")
        own_groups = super().state_dict()["param_groups"]
        groups = [
            {**saved, "params": own["params"]}
            for saved, own in zip(state_dict["param_groups"], own_groups, strict=True)
        ]
        state = {}
        for index, piece in enumerate(self.own):
            if piece.number in state_dict["state"]:
                saved = state_dict["state"][piece.number]
                # Copies, so that nothing of the others' shares is kept.
                moments = {name: piece.of(saved[name].contiguous()).clone() for name in MOMENTS}
                state[index] = {"step": saved["step"].clone(), **moments}
        super().load_state_dict({"state": state, "param_groups": groups})
