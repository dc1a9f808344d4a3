"""
The draft's loss: soft cross-entropy against the policy in every TTT pass, without keeping logits.

Shapes: `T` packed tokens, `K` TTT passes, `N_s` valid rows of pass `s`, `N` their sum, `P` teacher positions, `c`
teacher positions of a chunk, `H` draft hidden size, `Ht` policy hidden size, `V` policy vocabulary, `Vd` draft
vocabulary.

[`~teacher.teacher_positions`] says which position teaches which row. Passes overlap in their teacher positions, so one
sweep over positions computes each teacher row once and serves all passes. Student logits, their gradient and the
head's gradient are finished inside the sweep (as in Liger's fused linear cross-entropy): no `(rows, V)` tensor
outlives a chunk, and the backward only scales.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .attention import branch_attention
from .modeling_eagle3 import Eagle3DraftModel
from .packing import DraftBatch, PackedLayout
from .teacher import PolicyHead, teacher_positions


@dataclass
class DraftLoss:
    """
    Loss of one microbatch.

    Attributes:
        loss_sum (`torch.Tensor`):
            Scalar `sum_s decay**s * sum_rows CE`, differentiable, not normalised.
        counters (`dict[str, torch.Tensor]`):
            Detached float64 sums that may be added over microbatches and ranks. Vectors over passes: `loss` (summed
            cross-entropy), `rows` (`N_s`, rows that count), `top1` (rows whose most likely token is the teacher's),
            `accept` (sum over roots of the product of acceptance rates up to this pass). Scalars: `accept_roots`,
            `coverage` (teacher mass inside the draft vocabulary), `positions` (teacher positions), `masked_rows` (rows
            left out because the teacher's most likely token is outside the draft vocabulary).
    """

    loss_sum: Tensor
    counters: dict[str, Tensor]


PASS_COUNTERS = ("loss", "rows", "top1", "accept")
SCALAR_COUNTERS = ("accept_roots", "coverage", "positions", "masked_rows")


def zero_counters(num_passes: int, device: torch.device) -> dict[str, Tensor]:
    """The counters of [`DraftLoss`] for a microbatch without rows."""
    counters = {name: torch.zeros(num_passes, dtype=torch.float64, device=device) for name in PASS_COUNTERS}
    return counters | {name: torch.zeros((), dtype=torch.float64, device=device) for name in SCALAR_COUNTERS}


@dataclass(frozen=True)
class LossSettings:
    """
    Settings of the draft's loss.

    Args:
        num_passes (`int`):
            TTT passes `K`.
        decay (`float`):
            Pass `s` is weighted by `decay ** s`.
        chunk_size (`int`):
            Draft rows per chunk: about this many rows of logits exist at a time.
        teacher_temperature (`float`, *optional*, defaults to `1.0`):
            Temperature of the distillation. Teacher and draft logits are both divided by it, so that a perfect draft
            has the policy's logits at any value.
        rollout_temperature (`float`, *optional*, defaults to `1.0`):
            Temperature of the simulated acceptance (metrics only).
        detach_passes (`bool`, *optional*, defaults to `False`):
            Whether hidden states and keys handed from pass to pass are cut from the graph.
    """

    num_passes: int
    decay: float
    chunk_size: int
    teacher_temperature: float = 1.0
    rollout_temperature: float = 1.0
    detach_passes: bool = False

    @property
    def pass_weights(self) -> list[float]:
        """Weight of each pass."""
        return [self.decay**s for s in range(self.num_passes)]


@dataclass
class LossRows:
    """
    A pack, or one rank's share of it, as [`loss_over_rows`] reads it. Hidden states that teach lie in an order of
    *places*: the token `i` tokens after a row lies `i` places after it. There may be more places than rows.

    Attributes:
        taps (`torch.Tensor` of shape `(T, n*Ht)`): tap layers side by side.
        embeds (`torch.Tensor` of shape `(T, H)`): the policy's embedding of each row's own token.
        layout ([`PackedLayout`] or the like): the rows, for [`Eagle3DraftModel.unroll`].
        valid (`Callable`): `(T,)` bool of a pass: rows whose target counts.
        places (`torch.LongTensor` of shape `(T,)`): place of each row, ascending.
        last_hidden (`torch.Tensor` of shape `(places, Ht)`): the policy's output at each place.
        counted (`torch.BoolTensor` of shape `(places,)`): places that count here among the teacher positions; one
            that several ranks look at counts on one of them.
        attention (`Callable`): attention of a pass, as in [`Eagle3DraftModel.unroll`].
    """

    taps: Tensor
    embeds: Tensor
    layout: PackedLayout
    valid: Callable[[int], Tensor]
    places: Tensor
    last_hidden: Tensor
    counted: Tensor
    attention: Callable[..., Tensor] = branch_attention


def draft_loss(draft: Eagle3DraftModel, head: PolicyHead, batch: DraftBatch, **settings: Any) -> DraftLoss:
    """
    Soft cross-entropy of a draft against the policy over all TTT passes, and the counters of the metrics.

    Args:
        draft ([`Eagle3DraftModel`]):
            The draft.
        head ([`PolicyHead`]):
            The policy's head; entered with `gathered()` once, whatever the batch holds.
        batch ([`DraftBatch`]):
            Packed rows with taps and last hidden states.
        settings:
            The fields of [`LossSettings`].

    Returns:
        [`DraftLoss`]
    """
    with head.gathered(), torch.autocast(batch.taps.device.type, enabled=False):
        rows = LossRows(
            taps=batch.taps,
            embeds=head.embed(batch.input_ids),
            layout=batch.layout,
            valid=batch.valid,
            places=batch.layout.query_rows(0),
            last_hidden=batch.last_hidden,
            counted=torch.ones_like(batch.trained),
        )
        return loss_over_rows(draft, head, rows, LossSettings(**settings))


def loss_over_rows(draft: Eagle3DraftModel, head: PolicyHead, rows: LossRows, settings: LossSettings) -> DraftLoss:
    """
    The loss of [`draft_loss`], of a whole pack or of one rank's rows. Called outside autocast, with the head gathered.

    Args:
        draft ([`Eagle3DraftModel`]), head ([`PolicyHead`]):
            Draft and teacher.
        rows ([`LossRows`]):
            The rows to learn from.
        settings ([`LossSettings`]):
            See there.

    Returns:
        [`DraftLoss`]
    """
    passes = range(settings.num_passes)
    hidden = draft.unroll(
        rows.taps, rows.embeds, rows.layout, settings.num_passes, settings.detach_passes, rows.attention
    )
    roots = [rows.valid(s).nonzero().squeeze(-1) for s in passes]
    index = [torch.searchsorted(rows.layout.query_rows(s), roots[s]) for s in passes]
    students = [draft.norm(hidden[s][index[s]], draft.compute_dtype) for s in passes]
    sweep = _Sweep(
        head=head,
        last_hidden=rows.last_hidden,
        counted=rows.counted,
        plan=TeacherSweep.plan([rows.places[root] for root in roots], settings.chunk_size),
        target_ids=_target_ids(draft, head),
        compute_dtype=draft.compute_dtype,
        settings=settings,
    )
    return sweep.loss(students, draft.lm_head.weight)


def _target_ids(draft: Eagle3DraftModel, head: PolicyHead) -> Tensor | None:
    """
    `(Vd,)` policy ids of the draft's tokens, ascending; `None` if each row of the policy's head is one of them. A head
    may have more rows than the policy has tokens (padding): the draft has none for them, whatever its vocabulary.
    """
    return draft.target_ids if draft.config.draft_vocab_size < head.weight.shape[0] else None


@dataclass
class TeacherSweep:
    """
    Order of the work: chunks of teacher positions and, for every pass, the rows each chunk serves.

    Attributes:
        roots (`list[torch.LongTensor]`): per pass the valid roots, `(N_s,)`, ascending.
        positions (`torch.LongTensor`): `(P,)` distinct teacher positions `r + 1 + s`, ascending.
        teacher_rows (`list[torch.LongTensor]`): per pass, `(N_s,)` indices into `positions`, ascending.
        edges (`list[list[int]]`): row bounds of the chunks: of `positions` first, then of each pass.
    """

    roots: list[Tensor]
    positions: Tensor
    teacher_rows: list[Tensor]
    edges: list[list[int]]

    @classmethod
    def plan(cls, roots: list[Tensor], chunk_size: int) -> "TeacherSweep":
        """Plans the sweep for the valid roots of each pass; a chunk serves at most about `chunk_size` rows."""
        taught = [teacher_positions(root, s) for s, root in enumerate(roots)]
        positions = torch.unique(torch.cat(taught))
        teacher_rows = [torch.searchsorted(positions, position) for position in taught]
        step = max(1, chunk_size // len(roots))
        starts = torch.arange(0, positions.numel() + step, step, device=positions.device).clamp(max=positions.numel())
        edges = torch.stack([starts] + [torch.searchsorted(rows, starts) for rows in teacher_rows])
        return cls(roots, positions, teacher_rows, edges.tolist())

    def chunks(self) -> Iterator[tuple[slice, list[slice]]]:
        """Yields `(slice of positions, list of one slice of rows per pass)`."""
        bounds = list(zip(*self.edges, strict=True))
        for low, high in zip(bounds[:-1], bounds[1:], strict=True):
            if high[0] > low[0]:
                slices = [slice(start, stop) for start, stop in zip(low, high, strict=True)]
                yield slices[0], slices[1:]


class _GivenGradients(torch.autograd.Function):
    """A loss whose gradients, `(N, H)` and `(Vd, H)`, were computed along with it."""

    @staticmethod
    def forward(ctx: Any, loss_sum: Tensor, gradients: "_Gradients", weight: Tensor, *rows: Tensor) -> Tensor:
        ctx.save_for_backward(gradients.weight, *gradients.rows)
        return loss_sum.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        # The scaling is in place: a second backward through the same graph raises instead of scaling twice.
        weight_grad, *row_grads = (None if grad is None else grad.mul_(grad_output) for grad in ctx.saved_tensors)
        return None, None, weight_grad, *row_grads


@dataclass
class _Gradients:
    """
    Gradients of the loss, filled in chunk by chunk.

    Attributes:
        rows: of each pass's `(N_s, H)` outputs, in their dtype; `None` where none is needed.
        weight: of the head `(Vd, H)`, in float32 or float64; `None` where none is needed.
    """

    rows: list[Tensor | None]
    weight: Tensor | None

    @classmethod
    def wanted(cls, rows: list[Tensor], weight: Tensor, wide: torch.dtype) -> "_Gradients":
        """Room for the gradients that autograd asks for."""
        needs_rows = torch.is_grad_enabled() and any(row.requires_grad for row in rows)
        needs_weight = torch.is_grad_enabled() and weight.requires_grad
        return cls(
            [torch.empty_like(row) if needs_rows else None for row in rows],
            torch.zeros_like(weight, dtype=wide) if needs_weight else None,
        )

    def add(self, logits_grad: Tensor, slices: list[slice], student: Tensor, weight: Tensor) -> None:
        """Adds a chunk: the gradient of its logits, the rows of each pass in it, their outputs, and the head."""
        if self.rows[0] is not None:
            parts = (logits_grad @ weight).split([piece.stop - piece.start for piece in slices])
            for total, piece, part in zip(self.rows, slices, parts, strict=True):
                total[piece] = part.to(total.dtype)
        if self.weight is not None:
            _accumulate_outer(self.weight, logits_grad, student)


@dataclass
class _Sweep:
    """
    One sweep over the teacher positions.

    Attributes:
        head: the teacher.
        last_hidden, counted: as in [`LossRows`]; indexed by the positions of `plan`.
        plan: the order of the work.
        target_ids: see [`_target_ids`].
        compute_dtype: dtype of the matmuls with the draft's head.
        settings: see [`LossSettings`].
        counters: sums so far.
    """

    head: PolicyHead
    last_hidden: Tensor
    counted: Tensor
    plan: TeacherSweep
    target_ids: Tensor | None
    compute_dtype: torch.dtype
    settings: LossSettings

    def __post_init__(self):
        self.counters = zero_counters(self.settings.num_passes, self.last_hidden.device)

    def loss(self, rows: list[Tensor], weight: Tensor) -> DraftLoss:
        """
        The loss of `(N_s, H)` draft outputs after the final norm, at the roots of each pass, under the draft's head
        `(Vd, H)`; differentiable in both. The gradient of the head accumulates in float32.
        """
        wide = torch.promote_types(self.compute_dtype, torch.float32)
        gradients = _Gradients.wanted(rows, weight, wide)
        with torch.no_grad():
            loss_sum = self._run(rows, weight.to(self.compute_dtype), gradients).to(wide)
        return DraftLoss(_GivenGradients.apply(loss_sum, gradients, weight, *rows), self.counters)

    def _run(self, rows: list[Tensor], weight: Tensor, gradients: _Gradients) -> Tensor:
        """Returns the loss under the cast head `weight` and fills in the gradients."""
        alphas = [row.new_zeros(row.shape[0], dtype=torch.float64) for row in rows]
        for positions, slices in self.plan.chunks():
            # A call of its own, so that a chunk's logits are gone before the next chunk's are made.
            found = self._chunk(positions, slices, rows, weight, gradients)
            for alpha, piece, part in zip(alphas, slices, found, strict=True):
                alpha[piece] = part
        self._count_acceptance(alphas)
        weights = self.counters["loss"].new_tensor(self.settings.pass_weights)
        return (self.counters["loss"] * weights).sum()

    def _chunk(
        self, positions: slice, slices: list[slice], rows: list[Tensor], weight: Tensor, gradients: _Gradients
    ) -> list[Tensor]:
        """
        Sweeps one chunk of teacher positions and the rows it teaches, `slices` of each pass. Returns the acceptance
        rates of each pass's rows.
        """
        places = self.plan.positions[positions]
        teacher = _Teacher(self, self.head.logits(self.last_hidden[places]))
        counted = self.counted[places]
        self.counters["coverage"] += teacher.coverage.masked_fill(~counted, 0.0).sum(dtype=torch.float64)
        self.counters["positions"] += counted.sum()
        # All passes share one matmul with the head, and one each for the two gradients.
        student = torch.cat([row[piece] for row, piece in zip(rows, slices, strict=True)]).to(self.compute_dtype)
        logits = student @ weight.t()
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        parts = logits.split([piece.stop - piece.start for piece in slices])
        alphas = [
            self._pass(s, part, teacher, self.plan.teacher_rows[s][piece] - positions.start)
            for s, (part, piece) in enumerate(zip(parts, slices, strict=True))
        ]
        gradients.add(logits.to(self.compute_dtype), slices, student, weight)
        return alphas

    def _pass(self, s: int, logits: Tensor, teacher: "_Teacher", index: Tensor) -> Tensor:
        """Counts the rows of pass `s` in a chunk, turns `logits` into their gradient, returns the acceptance rates."""
        target, keep = teacher.probs[index], teacher.keep[index]
        top1 = logits.argmax(dim=-1)
        teacher_temperature, rollout_temperature = (
            self.settings.teacher_temperature,
            self.settings.rollout_temperature,
        )
        same_temperature = rollout_temperature == teacher_temperature
        if not same_temperature:
            alpha = teacher.acceptance(torch.softmax(logits / rollout_temperature, dim=-1), index)
        if teacher_temperature != 1.0:
            logits.div_(teacher_temperature)
        log_probs = logits.sub_(logits.logsumexp(dim=-1, keepdim=True))
        cross_entropy = -(target * log_probs).sum(dim=-1)
        self.counters["loss"][s] += (cross_entropy * keep).sum(dtype=torch.float64)
        self.counters["rows"][s] += keep.sum()
        self.counters["masked_rows"] += (~keep).sum()
        self.counters["top1"][s] += ((top1 == teacher.top1[index]) & keep).sum()
        probs = log_probs.exp_()
        if same_temperature:
            alpha = teacher.acceptance(probs, index)
        # d CE / d z = (q - p) / temperature, in place of the logits.
        scale = keep.to(probs.dtype) * (self.settings.pass_weights[s] / teacher_temperature)
        probs.sub_(target).mul_(scale[:, None])
        return alpha

    def _count_acceptance(self, alphas: list[Tensor]) -> None:
        """Sums the prefix products of the acceptance rates over the roots that are valid in every pass."""
        num_roots = self.last_hidden.shape[0]
        table = torch.zeros(len(alphas), num_roots, dtype=torch.float64, device=self.last_hidden.device)
        counts = torch.zeros(num_roots, dtype=torch.long, device=self.last_hidden.device)
        for s, (roots, alpha) in enumerate(zip(self.plan.roots, alphas, strict=True)):
            table[s, roots] = alpha
            counts[roots] += 1
        complete = counts == len(alphas)
        self.counters["accept"] += (table.cumprod(dim=0) * complete).sum(dim=1)
        self.counters["accept_roots"] += complete.sum()


class _Teacher:
    """
    Teacher distributions of one chunk of positions, `c` rows.

    `probs` is renormalised over the draft vocabulary, `rollout_probs` is not: a token outside counts as rejected.
    `keep` is False where the most likely token lies outside; `top1` is that token in the draft's ids.
    """

    def __init__(self, sweep: _Sweep, logits: Tensor):
        ids = sweep.target_ids
        inside = logits if ids is None else logits[:, ids]
        self.top1 = logits.argmax(dim=-1)
        self.keep = torch.ones_like(self.top1, dtype=torch.bool)
        if ids is not None:
            place = torch.searchsorted(ids, self.top1).clamp_(max=ids.numel() - 1)
            self.keep = ids[place] == self.top1
            self.top1 = place
        temperature, rollout_temperature = sweep.settings.teacher_temperature, sweep.settings.rollout_temperature
        self.probs, self.coverage = _probs_and_coverage(inside, logits, temperature)
        if rollout_temperature == temperature:
            probs, coverage = self.probs, self.coverage
        else:
            probs, coverage = _probs_and_coverage(inside, logits, rollout_temperature)
        self.rollout_probs = probs if ids is None else probs * coverage[:, None]

    def acceptance(self, student_probs: Tensor, index: Tensor) -> Tensor:
        """`sum_v min(p_v, q_v)`: the chance that speculative sampling accepts (arXiv 2211.17192, section 3.3)."""
        own = self.rollout_probs[index]
        return torch.minimum(student_probs, own, out=own).sum(dim=-1, dtype=torch.float64)


def _probs_and_coverage(inside: Tensor, logits: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Softmax over the columns `inside`, and their share of the softmax over all of `logits`."""
    if inside is logits:
        probs = torch.softmax(logits if temperature == 1.0 else logits / temperature, dim=-1)
        return probs, torch.ones_like(probs[:, 0])
    if temperature != 1.0:
        inside, logits = inside / temperature, logits / temperature
    # The sums stay in log space: the share may underflow, the renormalised probabilities must not.
    coverage = (inside.logsumexp(dim=-1) - logits.logsumexp(dim=-1)).exp_()
    return torch.softmax(inside, dim=-1), coverage


def _accumulate_outer(total: Tensor, grad: Tensor, student: Tensor) -> None:
    """`total += grad^T student`; below fp32 each product is rounded once and the sum stays wide."""
    if grad.dtype == total.dtype:
        total.addmm_(grad.t(), student)
    else:
        total += grad.t() @ student
