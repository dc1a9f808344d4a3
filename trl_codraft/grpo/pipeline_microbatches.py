"""
How the microbatches of an accumulation window go through a pipeline: whole, padded to one shape, or with context
parallelism as shards, each rank's packed tokens padded to one length.

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


class Job(NamedTuple):
    """One microbatch of a pipeline step: one micro-step of one member, with its tensors."""

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


class StepRows(Protocol):
    """The microbatches of one pipeline step."""

    def inputs(self) -> list[Microbatch]:
        """What each stage takes, all of one shape."""

    def tap_shapes(self) -> list[tuple[int, int]] | None:
        """Leading dimensions of each microbatch's taps; `None` if they are those of the inputs."""

    def forward_of(self, microbatch: int, layers: Sequence[int]) -> AbstractContextManager[Shard | None]:
        """What a stage's forward of a microbatch, with these layers, runs in."""

    def label_arguments(self, microbatch: int, labels: torch.Tensor) -> dict[str, Any]:
        """How the policy's fused head takes the labels among `inputs`."""

    def scores(self, microbatch: int, output: torch.Tensor) -> Scores:
        """Log-probs and entropies of a whole microbatch from the last stage's output."""

    def keep_states(self, microbatch: int, hidden: torch.Tensor) -> torch.Tensor:
        """The hidden states of a microbatch without what was added to bring it to one shape."""

    def packed(self, microbatch: int) -> PackedMicrobatch | None:
        """How a microbatch is split over ranks; `None` if it is whole."""


class WholeRows:
    """
    Padded rows. A [`StepRows`].

    Positions are those of the columns that a microbatch has without the padding that is added, as in a plain run. Rotary
    embeddings that follow the length are those of that many columns on every stage, whatever its rank ran before.

    Args:
        jobs (`Sequence[Job]`):
            The microbatches.
        pad_token_id (`int`):
            Id of added columns.
        rotary (`Sequence[nn.Module]`):
            What follows the length in the policy: see [`~cp.rotary.rotary_by_length`].
    """

    def __init__(self, jobs: Sequence[Job], pad_token_id: int, rotary: Sequence[torch.nn.Module] = ()):
        self.jobs, self.rotary = jobs, rotary
        rows = [PaddedMicrobatch(job.input_ids, job.attention_mask, job.completion_shape[1]) for job in jobs]
        self.padded = pad_microbatches(rows, pad_token_id=pad_token_id)

    def inputs(self) -> list[Microbatch]:
        return [self._inputs(number) for number in range(len(self.jobs))]

    def _inputs(self, number: int) -> Microbatch:
        rows, job = self.padded[number], self.jobs[number]
        columns = torch.arange(rows.input_ids.shape[1], device=rows.input_ids.device)
        positions = (columns - self._added_left(number)).clamp(0, job.attention_mask.shape[1] - 1)
        labels = rows.input_ids.masked_fill(rows.attention_mask == 0, IGNORED)
        labels[:, : -rows.completion_length] = IGNORED
        return {
            "input_ids": rows.input_ids,
            "attention_mask": rows.attention_mask,
            "position_ids": positions.expand_as(rows.input_ids),
            "labels": labels,
        }

    def _added_left(self, number: int) -> int:
        """Columns that were added before the prompt."""
        rows = self.padded[number]
        return rows.input_ids.shape[1] - rows.completion_length - self.jobs[number].tensors["prompt_ids"].shape[1]

    def tap_shapes(self) -> None:
        return None

    @contextmanager
    def forward_of(self, microbatch: int, layers: Sequence[int]) -> Iterator[None]:
        with decided_by_length(self.rotary, self.jobs[microbatch].attention_mask.shape[1]):
            yield None

    def label_arguments(self, microbatch: int, labels: torch.Tensor) -> dict[str, Any]:
        return {"labels": labels}

    def scores(self, microbatch: int, output: torch.Tensor) -> Scores:
        num_rows, num_columns = self.jobs[microbatch].completion_shape
        # Log-probs of column `i + 1` lie at `i`; the completions are the last columns either way.
        own = output[:num_rows, -self.padded[microbatch].completion_length :][:, :num_columns]
        return Scores(own[..., 0], own[..., 1], None)

    def keep_states(self, microbatch: int, hidden: torch.Tensor) -> torch.Tensor:
        num_rows, num_columns = self.jobs[microbatch].attention_mask.shape
        first = self._added_left(microbatch)
        return hidden[:num_rows, first : first + num_columns]

    def packed(self, microbatch: int) -> None:
        return None


class ShardedRows:
    """
    This rank's shards. A [`StepRows`].

    Args:
        jobs (`Sequence[Job]`):
            The microbatches.
        sharding ([`~cp.sharding.ContextSharding`]):
            How each is split over the ranks that run the same stage.
        group ([`~group.LossGroup`]):
            Those ranks.
        policy ([`~transformers.PreTrainedModel`]):
            The policy.
    """

    def __init__(self, jobs: Sequence[Job], sharding: ContextSharding, group: LossGroup, policy: torch.nn.Module):
        self.jobs, self.sharding, self.group, self.policy = jobs, sharding, group, policy
        self.packs = [sharding.pack(job.input_ids, job.attention_mask, job.completion_shape[1]) for job in jobs]
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
        layout, columns = self.packs[microbatch].layout, self.jobs[microbatch].attention_mask.shape[1]
        with self.sharding.route(self.policy).forward_on(layout, columns, layers) as arguments:
            yield Shard(layout.num_rows, arguments)

    def label_arguments(self, microbatch: int, labels: torch.Tensor) -> dict[str, Any]:
        return {"shift_labels": labels[:, : self.packs[microbatch].layout.num_rows]}

    def scores(self, microbatch: int, output: torch.Tensor) -> Scores:
        pack = self.packs[microbatch]
        own = pack.layout.shard(pack.labels, offset=1, fill=IGNORED) != IGNORED
        values = output[0, : pack.layout.num_rows][own].T
        full = self.group.gather_shards(values, pack.positions(), tuple(self.jobs[microbatch].completion_shape))
        return Scores(full[0], full[1], None)

    def keep_states(self, microbatch: int, hidden: torch.Tensor) -> torch.Tensor:
        return hidden

    def packed(self, microbatch: int) -> PackedMicrobatch:
        return self.packs[microbatch]
