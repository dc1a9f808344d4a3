"""
The draft on a rank's share of a pack: the unroll, and the loss against teacher rows that may lie on other ranks.

Token ids and masks are known everywhere, so the embedding of a later token costs no message. The teacher's rows are
hidden states: the `K` rows that follow a segment are fetched once, never logits.

Shapes: `B` rows of a microbatch of `P` + `C` columns, `S` rows of the whole pack, `T` rows of this rank, `Th` halo
rows of this rank, `K` TTT passes, `H` draft hidden size, `Ht` policy hidden size, `n` taps, `Hq` / `Hkv` query /
key-value heads, `D` head dim.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..modeling.losses import DraftLoss, LossRows, LossSettings, loss_over_rows
from ..modeling.modeling_eagle3 import Eagle3DraftModel
from ..modeling.packing import first_roots
from ..modeling.teacher import PolicyHead
from .attention import ring_attention
from .gathered import GatheredKeys, gather_trunk
from .layout import ContextLayout
from .planner import Segment


class RowsAhead:
    """
    The `reach` rows of the document after each of a rank's segments.

    *Extended* order has each segment's halo after its rows, so that the token `i <= reach` tokens after a row lies `i`
    places after it.

    Args:
        layout ([`ContextLayout`]):
            Who has which rows.
        reach (`int`):
            How far ahead rows look.

    Attributes:
        rows (`torch.LongTensor` of shape `(Th,)`): pack rows of the halo.
        places (`torch.LongTensor` of shape `(T,)`): place of each row of this rank in extended order, ascending.
    """

    def __init__(self, layout: ContextLayout, reach: int):
        halos = [
            [Segment(p.doc, p.end, min(p.end + reach, layout.doc_lens[p.doc])) for p in segments]
            for segments in layout.segments
        ]
        # Empty halos stay in the list: one per segment.
        self._exchange = layout.exchange(halos, "teacher rows after a segment")
        own, device = halos[layout.rank], layout.device
        places, rows, halo_places, sources = [], [], [], []
        place = row = 0
        for piece, halo in zip(layout.segments[layout.rank], own, strict=True):
            places.append(torch.arange(place, place + piece.num_rows))
            halo_places.append(torch.arange(place + piece.num_rows, place + piece.num_rows + halo.num_rows))
            sources.append(torch.arange(row, row + piece.num_rows))
            start = layout.doc_starts[piece.doc]
            rows.append(torch.arange(start + halo.start, start + halo.end))
            place += piece.num_rows + halo.num_rows
            row += piece.num_rows
        none = [torch.empty(0, dtype=torch.int64)]
        self.rows, self.places, self._halo_places = (
            torch.cat(none + parts).to(device) for parts in (rows, places, halo_places)
        )
        # Maps a place to the row of `cat([own rows, halo])`.
        self._stored = torch.empty(place, dtype=torch.int64, device=device)
        self._stored[self.places] = torch.arange(row, device=device)
        self._stored[self._halo_places] = row + torch.arange(place - row, device=device)

    def extend(self, values: torch.Tensor) -> torch.Tensor:
        """
        Fetches the halo of a tensor (a collective).

        Args:
            values (`torch.Tensor` of shape `(T, ...)`):
                Rows of this rank; detached.

        Returns:
            `torch.Tensor` of shape `(T + Th, ...)` in extended order.
        """
        return self.interleave(values, self._exchange.fetch(values))

    def interleave(self, values: torch.Tensor, halo: torch.Tensor) -> torch.Tensor:
        """`(T, ...)` rows and their `(Th, ...)` halo in extended order."""
        extended = values.new_empty(self._stored.shape[0], *values.shape[1:])
        extended[self.places], extended[self._halo_places] = values, halo
        return extended

    @property
    def follows_own_row(self) -> torch.Tensor:
        """
        `(T + Th,)` bool: whether the row before a place lies on this rank, in the same segment. Of a position that
        several ranks look at, exactly one says yes.
        """
        return (self._stored < self.places.shape[0]).roll(1)

    def look(self, values: torch.Tensor, halo: torch.Tensor, rows: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
        """Entries `steps` tokens after rows of this rank; `(T, ...)` values and their `(Th, ...)` halo."""
        stored = self._stored[self.places[rows] + steps]
        num_rows = self.places.shape[0]
        here = stored < num_rows
        if num_rows == 0:
            return values[:0]
        found = values[torch.where(here, stored, 0)]
        found[~here] = halo[stored[~here] - num_rows]
        return found


class DraftShard:
    """
    One rank's rows as [`Eagle3DraftModel.unroll`] reads a layout.

    Args:
        context ([`ContextLayout`]):
            The layout.
        ahead ([`RowsAhead`]):
            Rows after each segment, with a reach of at least the number of passes.
        halo_embeds (`torch.Tensor` of shape `(Th, H)`):
            Token embeddings of `ahead.rows`.

    Attributes:
        num_rows (`int`): `T`.
        position_ids (`torch.LongTensor` of shape `(T,)`): position of each row in its document.
    """

    def __init__(self, context: ContextLayout, ahead: RowsAhead, halo_embeds: torch.Tensor):
        self.context, self.ahead, self.halo_embeds = context, ahead, halo_embeds
        self.num_rows, self.position_ids, self.doc_lens = context.num_rows, context.position_ids, context.doc_lens

    def query_rows(self, num_pass: int) -> torch.Tensor:
        """See [`ContextLayout.query_rows`]."""
        return self.context.query_rows(num_pass)

    def query_lens(self, num_pass: int) -> list[int]:
        """See [`ContextLayout.query_lens`]."""
        return self.context.query_lens(num_pass)

    def shifted(self, values: torch.Tensor, offset: int, num_pass: int) -> torch.Tensor:
        """
        Token embeddings `offset` tokens after each row of a pass; past the end of a document its last one.

        Args:
            values (`torch.Tensor` of shape `(T, H)`):
                Token embeddings of this rank's rows.
            offset (`int`):
                At most the reach of `ahead`.
            num_pass (`int`):
                Pass `s` whose rows are wanted.

        Returns:
            `torch.Tensor` of shape `(Ts, H)`.
        """
        rows = self.query_rows(num_pass)
        left = self.context.last_rows[rows] - self.context.rows[rows]
        return self.ahead.look(values, self.halo_embeds, rows, left.clamp(max=offset))


class PassAttention:
    """
    [`ring_attention`] as the `attention` of one [`Eagle3DraftModel.unroll`].

    Args:
        trunk (`str`):
            `"ring"`: the trunk's keys travel in every pass. `"gather_once"`: they are gathered in pass 0 and reused.

    Raises:
        ValueError: on another word.
    """

    def __init__(self, trunk: str = "ring"):
        if trunk not in ("ring", "gather_once"):
            raise ValueError(f"The trunk travels by 'ring' or 'gather_once', got {trunk!r}.")
        self.gather = trunk == "gather_once"
        # One per layer, in the order of the layers; later passes go through them in turn.
        self.gathered: list[GatheredKeys] = []
        self.num_calls = 0

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layout: DraftShard,
        *,
        branch: tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]] | None = None,
        scale: float,
    ) -> torch.Tensor:
        """See [`ring_attention`]."""
        trunk = None
        if self.gather:
            if branch is None:
                self.gathered.append(gather_trunk(k, v, layout.context))
            # Counted, not looked up by the tensors: all ranks must agree, also one without rows.
            trunk = self.gathered[self.num_calls % len(self.gathered)] if branch is not None else self.gathered[-1]
            self.num_calls += branch is not None
        return ring_attention(q, k, v, layout.context, branch=branch, scale=scale, trunk=trunk)


@dataclass
class DraftBatchShard:
    """
    A [`~packing.DraftBatch`] split over a group: ids and masks lie on every rank, hidden states where they were made.

    Attributes:
        input_ids (`torch.LongTensor` of shape `(S,)`): token ids of the whole pack.
        trained (`torch.BoolTensor` of shape `(S,)`): tokens the draft is trained to predict.
        taps (`torch.Tensor` of shape `(T, n*Ht)`): tap layers of this rank's rows, detached.
        last_hidden (`torch.Tensor` of shape `(T, Ht)`): output of the policy's decoder for them, detached.
        layout ([`ContextLayout`]): who has which rows.
    """

    input_ids: torch.Tensor
    trained: torch.Tensor
    taps: torch.Tensor
    last_hidden: torch.Tensor
    layout: ContextLayout

    def valid(self, num_pass: int) -> torch.Tensor:
        """`(T,)` bool: rows whose target `x_{r+2+s}` lies in their document and is trained."""
        target = self.layout.rows + 2 + num_pass
        return (target <= self.layout.last_rows) & self.layout.shard(self.trained, offset=2 + num_pass)


def shard_rows(
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    trained_mask: torch.Tensor,
    taps: Sequence[torch.Tensor],
    last_hidden: torch.Tensor,
    num_passes: int,
    layout: ContextLayout,
) -> DraftBatchShard:
    """
    Packs a microbatch for the draft where the policy ran on shards; see [`~packing.pack_rows`].

    Args:
        input_ids (`torch.LongTensor` of shape `(S,)`):
            Token ids of the pack.
        attention_mask (`torch.Tensor` of shape `(B, P+C)`):
            Nonzero where a token is no padding, in the microbatch that was packed.
        trained_mask (`torch.Tensor` of shape `(B, P+C)`):
            Nonzero where the draft learns to predict the token; padding never counts.
        taps (`Sequence[torch.Tensor]` of shape `(1, T, Ht)`), last_hidden (`torch.Tensor` of shape `(1, T, Ht)`):
            Hidden states of the forward on this rank's rows.
        num_passes (`int`):
            TTT passes `K`; decides which rows the later passes need.
        layout ([`ContextLayout`]):
            Layout of that forward. Documents after the microbatch's own are not trained on.

    Returns:
        [`DraftBatchShard`]
    """
    keep = attention_mask.bool()
    trained = trained_mask.bool() & keep
    stand_ins = layout.doc_lens[len(keep) :]
    draft_layout = ContextLayout(
        layout.doc_lens,
        layout.segments,
        layout.group,
        first_valid_root=[*first_roots(trained, keep, num_passes).tolist(), *stand_ins],
        device=layout.device,
    )
    return DraftBatchShard(
        input_ids=input_ids,
        trained=torch.nn.functional.pad(trained[keep], (0, sum(stand_ins))),
        taps=torch.cat([tap[0] for tap in taps], dim=-1).detach(),
        last_hidden=last_hidden[0].detach(),
        layout=draft_layout,
    )


def sharded_draft_loss(
    draft: Eagle3DraftModel, head: PolicyHead, batch: DraftBatchShard, *, trunk: str = "ring", **settings: Any
) -> DraftLoss:
    """
    [`~losses.draft_loss`] of a pack that is split over a group: loss, counters and the draft's gradients are this
    rank's part, and sum over the group to the whole pack's. A collective, forward and backward: every rank of
    the group calls it and runs the backward of its `loss_sum`, also a rank without rows.

    Args:
        draft ([`Eagle3DraftModel`]), head ([`PolicyHead`]):
            Draft and teacher, the same on all ranks.
        batch ([`DraftBatchShard`]):
            This rank's share.
        trunk (`str`, *optional*, defaults to `"ring"`):
            `"ring"` or `"gather_once"`, see [`PassAttention`].
        settings:
            The fields of [`~losses.LossSettings`].

    Returns:
        [`DraftLoss`]
    """
    layout, settings = batch.layout, LossSettings(**settings)
    attention = PassAttention(trunk)
    with head.gathered(), torch.autocast(batch.taps.device.type, enabled=False):
        ahead = RowsAhead(layout, settings.num_passes)
        rows = LossRows(
            taps=batch.taps,
            embeds=head.embed(layout.shard(batch.input_ids)),
            layout=DraftShard(layout, ahead, head.embed(batch.input_ids[ahead.rows])),
            valid=batch.valid,
            # Extended order keeps the teacher shift of an unsplit pack (`teacher_positions`).
            places=ahead.places,
            last_hidden=ahead.extend(batch.last_hidden),
            counted=ahead.follows_own_row,
            attention=attention,
        )
        return loss_over_rows(draft, head, rows, settings)
