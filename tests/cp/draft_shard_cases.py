"""Draft microbatches, whole and split over a group."""

from dataclasses import dataclass, field
from functools import lru_cache

from cp.attention_cases import Case, make_layout
from modeling.draft_cases import NOTHING_TRAINED, RAGGED, SHORT, draft_case, microbatch

from trl_codraft.cp.draft import DraftBatchShard, sharded_draft_loss
from trl_codraft.modeling.losses import draft_loss


LONG = ([31, 2, 17, 0, 9], [[(12, 20), (25, 31)], [(0, 2)], [(1, 17)], [], [(8, 9)]])


@dataclass(frozen=True)
class DraftCase:
    documents: tuple = field(default=LONG, compare=False, repr=False)
    name: str = "long"
    mode: str = "document"
    trunk: str = "ring"
    num_passes: int = 3
    reduced: bool = False
    detach: bool = False
    num_layers: int = 1
    norm_output: bool = False
    padded: bool = False
    tied: bool = False

    def settings(self):
        return {
            "num_passes": self.num_passes,
            "decay": 0.7,
            "chunk_size": 5,
            "teacher_temperature": 1.3,
            "rollout_temperature": 0.9,
            "detach_passes": self.detach,
        }

    def build(self):
        """Draft, teacher and the whole microbatch."""
        overrides = {"num_hidden_layers": self.num_layers, "norm_output": self.norm_output}
        draft, head = draft_case(reduced=self.reduced, padded=self.padded, tied=self.tied, **overrides)
        return draft, head, microbatch(draft.config, *self.documents, self.num_passes)[0]


CASES = [
    *(
        DraftCase(mode=mode, trunk=trunk)
        for mode in ("document", "hybrid", "uneven")
        for trunk in ("ring", "gather_once")
    ),
    DraftCase(mode="uneven", num_passes=6, reduced=True),
    *(
        DraftCase(RAGGED, "ragged", mode="uneven", reduced=reduced, padded=True, tied=tied)
        for reduced in (False, True)
        for tied in (False, True)
    ),
    DraftCase(num_passes=1),
    DraftCase(trunk="gather_once", num_layers=2, mode="uneven", reduced=True),
    DraftCase(trunk="gather_once", num_layers=2, detach=True),
    DraftCase(num_layers=2, detach=True, norm_output=True, mode="hybrid"),
    DraftCase(RAGGED, "ragged", reduced=True),
    DraftCase(RAGGED, "ragged", "uneven", "gather_once"),
    DraftCase(SHORT, "short"),
    DraftCase(SHORT, "short", "uneven", "gather_once"),
    DraftCase(NOTHING_TRAINED, "nothing trained", "hybrid"),
]


def outcome(draft, loss):
    """Loss, counters and the gradients of a draft."""
    loss.loss_sum.backward()
    gradients = {name: parameter.grad for name, parameter in draft.named_parameters()}
    return {
        "loss_sum": loss.loss_sum.detach(),
        **loss.counters,
        **{k: v for k, v in gradients.items() if v is not None},
    }


@lru_cache
def whole(case):
    """Outcome on one process."""
    draft, head, batch = case.build()
    return outcome(draft, draft_loss(draft, head, batch, **case.settings()))


def shard_batch(case, batch, group):
    """This rank's part of a whole microbatch."""
    layout = make_layout(Case((batch.layout.doc_lens, batch.layout.first_valid_root), case.mode), group)
    hidden = (layout.shard(tensor) for tensor in (batch.taps, batch.last_hidden))
    return DraftBatchShard(batch.input_ids, batch.trained, *hidden, layout)


def on_shard(case, group, built=None):
    """Outcome of this rank's part. Ranks that are threads bring what was built before: building sets global state."""
    draft, head, batch = built or case.build()
    shard = shard_batch(case, batch, group)
    return outcome(draft, sharded_draft_loss(draft, head, shard, trunk=case.trunk, **case.settings()))


def run_cases(group):
    return [on_shard(case, group) for case in CASES]
