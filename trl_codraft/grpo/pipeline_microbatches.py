"""
Brings the microbatches of an accumulation window into the one shape of a pipeline step: whole ones are padded; with
context parallelism each rank's packed tokens are padded to one length.

Shapes: `B` rows, `P` prompt columns, `C` completion columns, `S` padded columns, `T` rows of a shard, `H` hidden size.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple, Protocol

import torch

from ..cp.rotary import decided_by_length
from ..cp.sharding import IGNORED, ContextSharding, PackedMicrobatch
from ..group.exchange import LossGroup
from ..group.members import Scores
from ..pp.padding import BUCKET, PaddedMicrobatch, pad_microbatches
from ..pp.pipeline import Microbatch
from ..pp.stages.view import Shard


class MemberMicrobatch(NamedTuple):
    """The tensors of one micro-step of one member: a microbatch of a pipeline step."""

    member: int
    tensors: dict[str, torch.Tensor]

    @property
    def input_ids(self) -> torch.Tensor:
        """`(B, P+C)`."""
        return torch.cat([self.tensors["prompt_ids"], self.tensors["completion_ids"]], dim=1)

    @property
    def attention_mask(self) -> torch.Tensor:
        """`(B, P+C)`."""
        return torch.cat([self.tensors["prompt_mask"], self.tensors["completion_mask"]], dim=1)

    @property
    def completion_shape(self) -> torch.Size:
        """`(B, C)`."""
        return self.tensors["completion_ids"].shape


class StepMicrobatches(Protocol):
    """The microbatches of one pipeline step."""

    def inputs(self) -> list[Microbatch]:
        """Returns the arguments of the stages, all of one shape."""

    def tap_shapes(self) -> list[tuple[int, int]] | None:
        """Returns the leading dimensions of each microbatch's taps, `None` if the inputs have the same."""

    def forward_of(self, microbatch: int, layers: Sequence[int]) -> AbstractContextManager[Shard | None]:
        """Surrounds a stage's forward of a microbatch, with these layers."""

    def label_arguments(self, microbatch: int, labels: torch.Tensor) -> dict[str, Any]:
        """Returns the arguments in which the policy's fused head takes the labels of `inputs`."""

    def scores(self, microbatch: int, output: torch.Tensor) -> Scores:
        """Reads log-probs and entropies of a whole microbatch from the last stage's output."""

    def keep_states(self, microbatch: int, hidden: torch.Tensor) -> torch.Tensor:
        """Returns the hidden states of a microbatch without the padding that was added."""

    def packed(self, microbatch: int) -> PackedMicrobatch | None:
        """Returns how a microbatch is split over ranks, `None` if it is whole."""


class PaddedStep:
    """
    Pads whole microbatches. A [`StepMicrobatches`].

    Positions count the columns that a microbatch has without the added padding, as in a plain run. Rotary embeddings
    that follow the length follow that number of columns on every stage, whatever its rank ran before.

    Args:
        microbatches (`Sequence[MemberMicrobatch]`):
            The microbatches.
        pad_token_id (`int`):
            Id of added columns.
        rotary (`Sequence[nn.Module]`):
            Modules of the policy that follow the length: see [`~cp.rotary.rotary_by_length`].
    """

    def __init__(
        self, microbatches: Sequence[MemberMicrobatch], pad_token_id: int, rotary: Sequence[torch.nn.Module] = ()
    ):
        self.microbatches, self.rotary = microbatches, rotary
        whole = [PaddedMicrobatch(own.input_ids, own.attention_mask, own.completion_shape[1]) for own in microbatches]
        self.padded = pad_microbatches(whole, pad_token_id=pad_token_id)

    def inputs(self) -> list[Microbatch]:
        return [self._inputs(number) for number in range(len(self.microbatches))]

    def _inputs(self, number: int) -> Microbatch:
        padded, own = self.padded[number], self.microbatches[number]
        columns = torch.arange(padded.input_ids.shape[1], device=padded.input_ids.device)
        positions = (columns - self._added_left(number)).clamp(0, own.attention_mask.shape[1] - 1)
        labels = padded.input_ids.masked_fill(padded.attention_mask == 0, IGNORED)
        labels[:, : -padded.completion_length] = IGNORED
        return {
            "input_ids": padded.input_ids,
            "attention_mask": padded.attention_mask,
            "position_ids": positions.expand_as(padded.input_ids),
            "labels": labels,
        }

    def _added_left(self, number: int) -> int:
        """Columns that were added before the prompt."""
        padded = self.padded[number]
        return (
            padded.input_ids.shape[1]
            - padded.completion_length
            - self.microbatches[number].tensors["prompt_ids"].shape[1]
        )

    def tap_shapes(self) -> None:
        return None

    @contextmanager
    def forward_of(self, microbatch: int, layers: Sequence[int]) -> Iterator[None]:
        with decided_by_length(self.rotary, self.microbatches[microbatch].attention_mask.shape[1]):
            yield None

    def label_arguments(self, microbatch: int, labels: torch.Tensor) -> dict[str, Any]:
        return {"labels": labels}

    def scores(self, microbatch: int, output: torch.Tensor) -> Scores:
        num_rows, num_columns = self.microbatches[microbatch].completion_shape
        # Log-probs of column `i + 1` lie at `i`; the completions are the last columns either way.
        own = output[:num_rows, -self.padded[microbatch].completion_length :][:, :num_columns]
        return Scores(own[..., 0], own[..., 1], None)

    def keep_states(self, microbatch: int, hidden: torch.Tensor) -> torch.Tensor:
        num_rows, num_columns = self.microbatches[microbatch].attention_mask.shape
        first = self._added_left(microbatch)
        return hidden[:num_rows, first : first + num_columns]

    def packed(self, microbatch: int) -> None:
        return None


class ShardedStep:
    """
    Splits microbatches over ranks and pads this rank's shards. A [`StepMicrobatches`].

    Args:
        microbatches (`Sequence[MemberMicrobatch]`):
            The microbatches.
        sharding ([`~cp.sharding.ContextSharding`]):
            How each is split over the ranks that run the same stage.
        group ([`~group.LossGroup`]):
            The ranks that share it.
        policy ([`~transformers.PreTrainedModel`]):
            The policy.
    """

    def __init__(
        self,
        microbatches: Sequence[MemberMicrobatch],
        sharding: ContextSharding,
        group: LossGroup,
        policy: torch.nn.Module,
    ):
        self.microbatches, self.sharding, self.group, self.policy = microbatches, sharding, group, policy
        self.packs = [
            sharding.pack(own.input_ids, own.attention_mask, own.completion_shape[1]) for own in microbatches
        ]
        longest = max(pack.layout.num_rows for pack in self.packs)
        self.num_columns = -(-longest // BUCKET) * BUCKET

    def inputs(self) -> list[Microbatch]:
        return [self._inputs(pack) for pack in self.packs]

    def _inputs(self, pack: PackedMicrobatch) -> Microbatch:
        layout = pack.layout
        values = {
            "input_ids": layout.shard(pack.input_ids),
            "position_ids": layout.shard(pack.columns),
            # Shifted before it is cut: the next token of a segment's last row lies on another rank.
            "labels": layout.shard(pack.labels, offset=1, fill=IGNORED),
        }
        added = (0, self.num_columns - layout.num_rows)
        fill = {"labels": IGNORED}
        return {
            name: torch.nn.functional.pad(value, added, value=fill.get(name, 0)).unsqueeze(0)
            for name, value in values.items()
        }

    def tap_shapes(self) -> list[tuple[int, int]]:
        return [(1, pack.layout.num_rows) for pack in self.packs]

    @contextmanager
    def forward_of(self, microbatch: int, layers: Sequence[int]) -> Iterator[Shard]:
        layout, columns = self.packs[microbatch].layout, self.microbatches[microbatch].attention_mask.shape[1]
        with self.sharding.route(self.policy).forward_on(layout, columns, layers) as arguments:
            yield Shard(layout.num_rows, arguments)

    def label_arguments(self, microbatch: int, labels: torch.Tensor) -> dict[str, Any]:
        return {"shift_labels": labels[:, : self.packs[microbatch].layout.num_rows]}

    def scores(self, microbatch: int, output: torch.Tensor) -> Scores:
        pack = self.packs[microbatch]
        own = pack.layout.shard(pack.labels, offset=1, fill=IGNORED) != IGNORED
        values = output[0, : pack.layout.num_rows][own].T
        full = self.group.gather_shards(
            values, pack.positions(), tuple(self.microbatches[microbatch].completion_shape)
        )
        return Scores(full[0], full[1], None)

    def keep_states(self, microbatch: int, hidden: torch.Tensor) -> torch.Tensor:
        return hidden

    def packed(self, microbatch: int) -> PackedMicrobatch:
        return self.packs[microbatch]
