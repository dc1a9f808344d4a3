"""
How a microbatch is split over a context-parallel group: packed without padding, planned, shifted, and only then cut.

Shapes: `B` rows, `P` prompt columns, `C` completion columns, `S` packed tokens, `T` rows of this rank, `n` completion
tokens of one rank.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel

from ..group.members import ShardScores
from .experts import router_logits_of, shared_load_balancing_loss
from .layout import ContextLayout
from .planner import Segment, plan_document, plan_hybrid
from .routing import RoutedPolicy


IGNORED = -100


@dataclass
class PackedMicrobatch:
    """
    A microbatch without its padding, and who runs which part of it.

    A rank without tokens runs one that stands in: a document of a single token after the others, without a label, so
    that the hooks of every parameter fire on every rank.

    Attributes:
        input_ids (`torch.LongTensor` of shape `(S,)`): all tokens, stand-ins last.
        columns (`torch.LongTensor` of shape `(S,)`): column of each token in the padded microbatch.
        scored (`torch.LongTensor` of shape `(S,)`): place in the flattened `(B, C)` of each completion token, else -1.
        num_tokens (`int`): tokens of the microbatch itself.
        num_columns (`int`): columns of the padded microbatch, `P+C`.
        layout ([`ContextLayout`]): who has which rows.
    """

    input_ids: torch.Tensor
    columns: torch.Tensor
    scored: torch.Tensor
    num_tokens: int
    num_columns: int
    layout: ContextLayout

    @property
    def labels(self) -> torch.Tensor:
        """`(S,)` ids of the completion tokens, `IGNORED` elsewhere."""
        return self.input_ids.masked_fill(self.scored < 0, IGNORED)

    def positions(self) -> list[torch.Tensor]:
        """Per rank, the place in `(B, C)` of the completion tokens that its rows predict, in the order of the rows."""
        places = [_next_of(self.scored, self.layout, rank) for rank in range(self.layout.cp_size)]
        return [place[place >= 0] for place in places]


class ContextSharding:
    """
    Runs this rank's tokens of a microbatch through the policy, attention reaching the tokens of the other ranks.

    A [`~group.members.Sharding`].

    Args:
        group (`dist.ProcessGroup`):
            The ranks that split a microbatch.
        unwrap (`Callable[[nn.Module], PreTrainedModel]`):
            Finds the causal language model inside the wrappers of DDP and PEFT.
        mode (`str`, *optional*, defaults to `"hybrid"`):
            `"document"` or `"hybrid"`, see [`ContextLayout.plan`].
    """

    def __init__(self, group: dist.ProcessGroup, unwrap: Callable[[nn.Module], PreTrainedModel], mode: str = "hybrid"):
        self.group, self.unwrap, self.mode = group, unwrap, mode
        # Policy and reference model.
        self._routed: dict[PreTrainedModel, RoutedPolicy] = {}

    def count_tokens(self, attention_mask: torch.Tensor) -> tuple[int, ...]:
        """See [`~group.members.Sharding`]."""
        doc_lens, shards = self._plan(attention_mask)
        return tuple(sum(piece.num_rows for piece in segments) for segments in shards)

    def score(
        self, model: nn.Module, packed: PackedMicrobatch, compute_entropy: bool, compute_aux_loss: bool
    ) -> ShardScores:
        """See [`~group.members.Sharding`]."""
        policy = self.unwrap(model)
        layout, positions = packed.layout, packed.positions()
        # Shifted before it is cut: the next token of a segment's last row lies on another rank.
        labels = layout.shard(packed.labels, offset=1, fill=IGNORED)
        arguments = {
            "input_ids": layout.shard(packed.input_ids).unsqueeze(0),
            "position_ids": layout.shard(packed.columns).unsqueeze(0),
            "shift_labels": labels.unsqueeze(0),
            "fused_lm_head": True,
        }
        aux_loss = None
        with self.route(policy).forward_on(layout, packed.num_columns) as route:
            if compute_aux_loss:
                with router_logits_of(policy.base_model) as router_logits:
                    outputs = model(**arguments, output_router_logits=True, **route)
                config, counted = policy.config.get_text_config(), layout.rows < packed.num_tokens
                sizes = config.num_experts, config.num_experts_per_tok
                aux_loss = shared_load_balancing_loss(router_logits, counted, *sizes, self.group)
            else:
                outputs = model(**arguments, **route)
        own = (labels != IGNORED).unsqueeze(0)
        entropies = outputs.entropy[own] if compute_entropy else None
        return ShardScores(outputs.log_probs[own], entropies, aux_loss, positions)

    def pack(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, logits_to_keep: int) -> PackedMicrobatch:
        """
        Packs a microbatch that all ranks hold.

        Args:
            input_ids (`torch.LongTensor` of shape `(B, P+C)`), attention_mask (`torch.Tensor` of shape `(B, P+C)`):
                Tokens and which of them are no padding.
            logits_to_keep (`int`):
                `C`.
        """
        doc_lens, shards = self._plan(attention_mask)
        layout = ContextLayout(doc_lens, shards, self.group, device=input_ids.device)
        keep = attention_mask.bool()
        (num_rows, num_columns), num_tokens = keep.shape, sum(doc_lens[: len(keep)])
        scored = torch.full_like(input_ids, -1)
        scored[:, -logits_to_keep:] = torch.arange(num_rows * logits_to_keep, device=keep.device).view(num_rows, -1)
        columns = torch.arange(num_columns, device=keep.device).expand(num_rows, -1)
        pad = (0, sum(doc_lens) - num_tokens)
        return PackedMicrobatch(
            input_ids=nn.functional.pad(input_ids[keep], pad, value=int(input_ids[keep][0])),
            columns=nn.functional.pad(columns[keep], pad),
            scored=nn.functional.pad(scored[keep], pad, value=-1),
            num_tokens=num_tokens,
            num_columns=num_columns,
            layout=layout,
        )

    def _plan(self, attention_mask: torch.Tensor) -> tuple[list[int], list[list[Segment]]]:
        """Lengths of the documents, and the segments of each rank; tokens that stand in included."""
        doc_lens, size = attention_mask.bool().sum(dim=1).tolist(), dist.get_world_size(self.group)
        shards = {"document": plan_document, "hybrid": plan_hybrid}[self.mode](doc_lens, size)
        for segments in shards:
            if not segments:
                segments.append(Segment(len(doc_lens), 0, 1))
                doc_lens.append(1)
        return doc_lens, shards

    def route(self, policy: PreTrainedModel) -> RoutedPolicy:
        """Where the forwards of a policy attend on shards."""
        if policy not in self._routed:
            self._routed[policy] = RoutedPolicy(policy)
        return self._routed[policy]


def _next_of(values: torch.Tensor, layout: ContextLayout, rank: int) -> torch.Tensor:
    """What lies one token after each row of a rank; -1 past the end of a document."""
    last = values.new_zeros(len(values), dtype=torch.bool)
    ends = [start + length - 1 for start, length in zip(layout.doc_starts, layout.doc_lens, strict=True) if length]
    last[ends] = True
    return torch.where(last, -1, values.roll(-1))[layout.pack_rows(rank)]
