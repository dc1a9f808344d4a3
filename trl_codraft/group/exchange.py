"""
The ranks that compute each other's losses, and the messages between them.

Shapes: `B` rows of a microbatch, `P` prompt columns, `C` completion columns, `n` completion tokens of one shard,
`F` values per token (log-prob, entropy).
"""

import hashlib
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
import torch.distributed as dist

from .header import MAX_TENSORS, Header, TensorSpec, require_agreement


# Longest message of a failed rank that the others repeat, in bytes.
MAX_MESSAGE = 4000
# Of settings that differ, an error names so many, and of their values so many characters.
NAMED_SETTINGS = 5
MAX_VALUE = 200
_ABSENT = "not there"
# Tensors that travel in one buffer start at multiples of the largest item size.
ALIGNMENT = 8


class LossGroup:
    """
    The ranks that compute each other's losses together (`size` of them), and the headers of all ranks of the run.

    Args:
        members (`ProcessGroup`):
            The group. Member `i` is its rank `i`.
        world (`ProcessGroup`):
            All ranks of the run.
        device (`torch.device`):
            Where tensors travel: the accelerator's device.
        names (`tuple[str, ...]`):
            Names of the tensors that a microbatch may hold, the same on all ranks.

    Raises:
        ValueError: if there are more names than a header holds.
    """

    def __init__(
        self, members: dist.ProcessGroup, world: dist.ProcessGroup, device: torch.device, names: tuple[str, ...]
    ):
        if len(names) > MAX_TENSORS:
            raise ValueError(f"A header has room for {MAX_TENSORS} tensors, got {len(names)} names.")
        self.members = members
        self.world = world
        self.device = device
        self.names = names
        self.size = dist.get_world_size(members)
        self.rank = dist.get_rank(members)
        self._world_ranks = [dist.get_group_rank(world, rank) for rank in dist.get_process_group_ranks(members)]

    def exchange(self, header: Header, failure: Exception | None = None) -> list[Header]:
        """
        Sends this rank's header to all ranks of the run and checks that all are about to do the same.

        Args:
            header ([`Header`]):
                This rank's.
            failure (`Exception`, *optional*):
                Exception of this rank since the last exchange.

        Returns:
            `list[Header]`: the headers of the members of this group, by member.

        Raises:
            RuntimeError: on all ranks alike, if one of them failed (with its message) or they disagree.
        """
        message = b""
        if failure is not None:
            message = f"{type(failure).__name__}: {failure}".encode()[:MAX_MESSAGE]
        numbers = replace(header, error_bytes=len(message)).encode(self.names, self.size)
        headers = [
            Header.decode(row, self.names, self.size)
            for row in _all_gather(torch.tensor(numbers, device=self.device), self.world).tolist()
        ]
        self._raise_failures(headers, message, failure)
        require_agreement(headers)
        return [headers[rank] for rank in self._world_ranks]

    def _raise_failures(self, headers: list[Header], message: bytes, failure: Exception | None) -> None:
        longest = max(header.error_bytes for header in headers)
        if longest == 0:
            return
        text = torch.zeros(longest, dtype=torch.uint8, device=self.device)
        text[: len(message)] = torch.tensor(list(message), dtype=torch.uint8, device=self.device)
        texts = _all_gather(text, self.world).cpu()
        lines = [
            f"rank {rank}: {bytes(texts[rank, : header.error_bytes].tolist()).decode(errors='replace')}"
            for rank, header in enumerate(headers)
            if header.error_bytes
        ]
        raise RuntimeError(f"Training stops on all ranks because of {'; '.join(lines)}") from failure

    def require_same(self, settings: dict[str, object]) -> None:
        """[`require_same`] among all ranks of the run."""
        require_same(self.world, settings)

    def send_rows(self, tensors: dict[str, torch.Tensor], header: Header, member: int) -> dict[str, torch.Tensor]:
        """
        Gives every member the tensors of one of them.

        Args:
            tensors (`dict[str, torch.Tensor]`):
                The tensors of this rank. Used on the sending rank only.
            header ([`Header`]):
                The sender's header, which says what to expect.
            member (`int`):
                The sender.

        Returns:
            `dict[str, torch.Tensor]`: the sender's tensors, in the order of `names`.
        """
        specs = {name: header.tensors[name] for name in self.names if name in header.tensors}
        mine = member == self.rank
        buffer = _pack(tensors, specs) if mine else None
        if buffer is None:
            buffer = torch.empty(sum(map(_padded_bytes, specs.values())), dtype=torch.uint8, device=self.device)
        with _named(dist.get_process_group_ranks(self.members), "handing out a microbatch"):
            dist.broadcast(buffer, group=self.members, group_src=member)
        return {name: tensors[name] for name in specs} if mine else _unpack(buffer, specs)

    def gather_shards(
        self, values: torch.Tensor, positions: list[torch.Tensor], shape: tuple[int, int]
    ) -> torch.Tensor:
        """
        Puts the values of all shards together. The backward hands each rank the gradient of its own values as it is:
        no communication and no factor, because the mean over all ranks that follows is the data-parallel gradient.

        Args:
            values (`torch.Tensor` of shape `(F, n)`):
                Values of the tokens this rank owns.
            positions (`list[torch.LongTensor]`, each of shape `(n,)`):
                Per member, where in the flattened `(B, C)` its values belong. Negative: a token that stands in for an
                empty shard, which is dropped. All ranks pass the same list.
            shape (`tuple[int, int]`):
                `(B, C)`.

        Returns:
            `torch.Tensor` of shape `(F, B, C)`: zero where no rank owns a token.
        """
        return _GatherShards.apply(values, positions, shape, self)


def require_same(group: dist.ProcessGroup, settings: dict[str, object], required: bool = True) -> None:
    """
    Checks that all ranks of a process group have the same settings. Collective.

    Args:
        group (`dist.ProcessGroup`):
            The ranks.
        settings (`dict[str, object]`):
            This rank's, by what an error calls them.
        required (`bool`, *optional*, defaults to `True`):
            Whether this rank needs that. If no rank does, nothing is compared.

    Raises:
        ValueError: on all ranks alike, naming what differs and its values.
    """
    digest = hashlib.sha256(repr(sorted(settings.items())).encode()).hexdigest()
    by_rank: list[tuple[str, bool]] = [("", True)] * dist.get_world_size(group)
    dist.all_gather_object(by_rank, (digest, required), group=group)
    if len({digest for digest, _ in by_rank}) == 1 or not any(required for _, required in by_rank):
        return
    all_settings: list[dict[str, object]] = [{} for _ in by_rank]
    dist.all_gather_object(all_settings, settings, group=group)
    names = dict.fromkeys(name for theirs in all_settings for name in theirs)
    differences = [
        text for name in names if (text := _difference(name, [theirs.get(name, _ABSENT) for theirs in all_settings]))
    ]
    if differences:
        more = f"; and {len(differences) - NAMED_SETTINGS} more settings" if len(differences) > NAMED_SETTINGS else ""
        raise ValueError(
            f"Ranks disagree: {'; '.join(differences[:NAMED_SETTINGS])}{more}. They would wait for each other or "
            "compute what does not belong together: start all of them with the same values."
        )


def _difference(name: str, values: list[object]) -> str | None:
    """What a setting is on the first rank, and where and what it is on the first rank where it is something else."""
    others = [rank for rank, value in enumerate(values) if value != values[0]]
    if not others:
        return None
    more = f" (and {len(others) - 1} more)" if len(others) > 1 else ""
    texts = [textwrap.shorten(str(value), MAX_VALUE) for value in (values[0], values[others[0]])]
    return f"{name} is {texts[0]} on rank 0 and {texts[1]} on rank {others[0]}{more}"


# Torch has renamed it.
_gather_flat = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def _all_gather(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """A tensor of the same shape on all ranks, stacked by rank."""
    size = dist.get_world_size(group)
    gathered = tensor.new_empty(size * tensor.numel())
    with _named(dist.get_process_group_ranks(group), "gathering what each of them has"):
        _gather_flat(gathered, tensor.contiguous().view(-1), group=group)
    return gathered.view(size, *tensor.shape)


@contextmanager
def _named(ranks: list[int], what: str) -> Iterator[None]:
    """An error of a collective inside names the other ranks that take part."""
    try:
        yield
    except RuntimeError as error:
        names = ", ".join(str(rank) for rank in ranks if rank != dist.get_rank())
        raise RuntimeError(
            f"Ranks that share a microbatch: no answer from rank {names} (if several, one of them) while {what}. Look "
            f"at their logs first; how long others wait is `ddp_timeout`. ({error})"
        ) from error


def _padded_bytes(spec: TensorSpec) -> int:
    return -(-spec.num_bytes // ALIGNMENT) * ALIGNMENT


def _pack(tensors: dict[str, torch.Tensor], specs: dict[str, TensorSpec]) -> torch.Tensor:
    """One buffer of bytes, each tensor at an aligned offset."""
    parts = []
    for name, spec in specs.items():
        content = tensors[name].contiguous().view(-1).view(torch.uint8)
        parts += [content, content.new_zeros(_padded_bytes(spec) - content.numel())]
    return torch.cat(parts)


def _unpack(buffer: torch.Tensor, specs: dict[str, TensorSpec]) -> dict[str, torch.Tensor]:
    """The inverse of `_pack`; the tensors are views of the buffer."""
    tensors, offset = {}, 0
    for name, spec in specs.items():
        tensors[name] = buffer[offset : offset + spec.num_bytes].view(spec.dtype).view(spec.shape)
        offset += _padded_bytes(spec)
    return tensors


class _GatherShards(torch.autograd.Function):
    """Forward: all-gather of the shards. Backward: this rank's own slice."""

    @staticmethod
    def forward(ctx, values, positions, shape, group):
        ctx.own = positions[group.rank]
        full = values.new_zeros(len(values), shape[0] * shape[1])
        longest = max(len(position) for position in positions)
        if longest:
            padded = values.new_zeros(len(values), longest)
            padded[:, : values.shape[1]] = values
            for position, shard in zip(positions, _all_gather(padded, group.members), strict=True):
                real = position >= 0
                full[:, position[real]] = shard[:, : len(position)][:, real]
        return full.view(len(values), *shape)

    @staticmethod
    def backward(ctx, gradient):
        own = gradient.flatten(1)[:, ctx.own.clamp(min=0)]
        return own.masked_fill(ctx.own < 0, 0.0), None, None, None
