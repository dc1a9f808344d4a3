"""
Training of the draft: gradient sums over microbatches and ranks, one optimizer of its own.

The policy never takes part: the draft has its own backward, optimizer, schedule and clipping, and nothing here draws
from a random generator.
"""

import copy
import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.lr_scheduler import LambdaLR

from ..modeling.losses import PASS_COUNTERS, SCALAR_COUNTERS, DraftLoss, draft_loss, zero_counters
from ..modeling.modeling_eagle3 import Eagle3DraftModel
from ..modeling.teacher import PolicyHead
from .bounds import Flag, Number, Whole, check_all
from .schedule import build_schedule, check_schedule
from .sharded_adamw import ShardedAdamW


logger = logging.getLogger(__name__)

# Bounds of the settings of the draft's training; a run that names them otherwise has the same bounds.
TRAINING_BOUNDS = {
    "num_passes": Whole(least=1),
    "decay": Number(above=0, most=1, advice="1 weighs all passes alike."),
    "detach_passes": Flag(),
    "teacher_temperature": Number(above=0),
    "rollout_temperature": Number(above=0),
    "learning_rate": Number(above=0),
    "pretrain_learning_rate": Number(above=0),
    "warmup_steps": Whole(least=0),
    "weight_decay": Number(least=0),
    "max_grad_norm": Number(least=0, advice="0 leaves gradients as they are."),
    "loss_chunk_size": Whole(least=1),
}


@dataclass
class DraftTrainingArguments:
    """
    Settings of [`DraftTrainer`].

    Args:
        num_passes (`int`, *optional*, defaults to `4`):
            TTT passes.
        decay (`float`, *optional*, defaults to `0.8`):
            Pass `s` is weighted by `decay ** s`.
        detach_passes (`bool`, *optional*, defaults to `False`):
            Whether gradients stop between passes.
        teacher_temperature (`float`, *optional*, defaults to `1.0`):
            Temperature of the distillation.
        rollout_temperature (`float`, *optional*, defaults to `1.0`):
            Sampling temperature of the rollouts, for the simulated accept length.
        learning_rate (`float`, *optional*, defaults to `2e-4`):
            Peak learning rate.
        pretrain_learning_rate (`float`, *optional*, defaults to `1e-3`):
            Peak learning rate of steps inside [`DraftTrainer.pretraining`].
        lr_scheduler_type (`str`, *optional*, defaults to `"constant_with_warmup"`):
            A schedule of `transformers.get_scheduler` that follows from the number of the step alone.
        warmup_steps (`int`, *optional*, defaults to `20`):
            Draft steps of warm-up, pretraining included.
        weight_decay (`float`, *optional*, defaults to `0.0`):
            AdamW's weight decay, for matrices only.
        max_grad_norm (`float`, *optional*, defaults to `1.0`):
            Gradient norm to clip to; 0 leaves gradients as they are.
        loss_chunk_size (`int`, *optional*, defaults to `128`):
            Draft rows whose logits exist at a time.

    Raises:
        ValueError: naming a setting that is out of bounds, or a schedule that depends on more than the step.
    """

    num_passes: int = 4
    decay: float = 0.8
    detach_passes: bool = False
    teacher_temperature: float = 1.0
    rollout_temperature: float = 1.0
    learning_rate: float = 2e-4
    pretrain_learning_rate: float = 1e-3
    lr_scheduler_type: str = "constant_with_warmup"
    warmup_steps: int = 20
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    loss_chunk_size: int = 128

    def __post_init__(self):
        check_all(self, TRAINING_BOUNDS)
        check_schedule("lr_scheduler_type", self.lr_scheduler_type)


def _identity(tensor: torch.Tensor) -> torch.Tensor:
    """The reduction of a single process."""
    return tensor


class DraftTrainer:
    """
    Accumulates the draft's gradient sums and steps its optimizer.

    The loss of an optimizer step is `sum_s a_s * sum_rows CE / sum_s a_s * N_s`, `a_s = decay ** s`, with sums over
    all microbatches and ranks and `N_s` the rows of pass `s` that count. `accumulate` therefore adds up unnormalised
    gradients, and `step` sums them over ranks, together with the counters, in one flat all-reduce before dividing.
    Every rank calls `accumulate` and `step` equally often, with `None` where it has no tokens.

    Args:
        draft ([`Eagle3DraftModel`]):
            The draft, with float32 (or float64) parameters, equal on all ranks. With `requires_grad_(False)` on all of
            them it is frozen: metrics are computed, nothing is updated.
        head ([`PolicyHead`]):
            The policy's head.
        args ([`DraftTrainingArguments`]):
            Settings.
        reduce_sum (`Callable`, *optional*):
            Sums a tensor over the ranks and returns it, in place or not. The default is that of a single process.
        num_training_steps (`int`):
            Draft steps in all, pretraining included; what decaying schedules end at.
        sharers (`ProcessGroup`, *optional*):
            Ranks that share the optimizer's state ([`ShardedAdamW`]): those that `reduce_sum` sums over. If `None`,
            each keeps all of it.

    Raises:
        ValueError: if parameters are in a half precision.
    """

    def __init__(
        self,
        draft: Eagle3DraftModel,
        head: PolicyHead,
        args: DraftTrainingArguments,
        *,
        reduce_sum: Callable[[torch.Tensor], torch.Tensor] = _identity,
        num_training_steps: int,
        sharers: dist.ProcessGroup | None = None,
    ):
        self.draft = draft
        self.head = head
        self.args = args
        self.reduce_sum = reduce_sum
        self.parameters = [parameter for parameter in draft.parameters() if parameter.requires_grad]
        dtypes = {parameter.dtype for parameter in draft.parameters()}
        if len(dtypes) != 1 or not dtypes <= {torch.float32, torch.float64}:
            raise ValueError(
                f"The draft's parameters are {sorted(map(str, dtypes))}; AdamW updates would be lost to rounding. "
                "Load it in float32 and set `compute_dtype` for its matmuls."
            )
        matrices = [parameter for parameter in self.parameters if parameter.dim() > 1]
        vectors = [parameter for parameter in self.parameters if parameter.dim() <= 1]
        groups = [{"params": matrices, "weight_decay": args.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        # The schedule runs on a base rate of 1: its factor multiplies whichever rate the current step uses.
        settings = {"lr": 1.0, "betas": (0.9, 0.95)}
        # A frozen draft has no state to share.
        self.shares_state = sharers is not None and bool(self.parameters)
        self.optimizer = (
            ShardedAdamW(groups, sharers, **settings) if self.shares_state else torch.optim.AdamW(groups, **settings)
        )
        self.scheduler = self._schedule(num_training_steps)
        self.num_updates = 0
        self.num_pretrain_updates = 0
        self._pretraining = False
        self._flat: torch.Tensor | None = None
        self._counters = self._zero_counters()
        self._rollout_draft: Eagle3DraftModel | None = None

    def _schedule(self, num_training_steps: int) -> LambdaLR:
        return build_schedule(
            self.args.lr_scheduler_type,
            self.optimizer,
            warmup_steps=self.args.warmup_steps,
            num_training_steps=num_training_steps,
        )

    def restart(self, num_training_steps: int) -> None:
        """
        Prepares another training run with the same draft: a new schedule, as the policy gets, and nothing left of a
        window that an error broke off. Weights, moments and counts of updates carry on.

        Args:
            num_training_steps (`int`):
                Draft steps of that run.
        """
        for group in self.optimizer.param_groups:
            group["lr"] = 1.0
        self.scheduler = self._schedule(num_training_steps)
        self._discard()

    def _discard(self) -> None:
        """Forgets what has accumulated since the last step."""
        self._flat = None
        for parameter in self.parameters:
            parameter.grad = None
        self._counters = self._zero_counters()

    @property
    def learning_rate(self) -> float:
        """Learning rate of the next update."""
        peak = self.args.pretrain_learning_rate if self._pretraining else self.args.learning_rate
        return peak * self.scheduler.lr_lambdas[0](self.scheduler.last_epoch)

    @contextmanager
    def pretraining(self) -> Iterator[None]:
        """Steps inside use `pretrain_learning_rate`; moments and warm-up carry on afterwards."""
        self._pretraining = True
        try:
            yield
        finally:
            self._pretraining = False

    def accumulate(self, batch: Any, loss_function: Callable[..., DraftLoss] = draft_loss) -> None:
        """
        Adds the gradient sums and counters of one microbatch.

        Args:
            batch ([`DraftBatch`] or what `loss_function` takes, *optional*):
                The packed microbatch, or None if this rank has nothing. A sharded policy head is gathered either way,
                so ranks stay in step.
            loss_function (`Callable`, *optional*, defaults to [`~losses.draft_loss`]):
                Computes the loss of this rank's part of the batch; called like [`~losses.draft_loss`].
        """
        if self._flat is None:
            self._allocate_gradients()
        with self.head.gathered(), torch.set_grad_enabled(bool(self.parameters)):
            if batch is None:
                return
            loss = loss_function(
                self.draft,
                self.head,
                batch,
                num_passes=self.args.num_passes,
                decay=self.args.decay,
                chunk_size=self.args.loss_chunk_size,
                teacher_temperature=self.args.teacher_temperature,
                rollout_temperature=self.args.rollout_temperature,
                detach_passes=self.args.detach_passes,
            )
        if self.parameters:
            with torch.autocast(batch.taps.device.type, enabled=False):
                loss.loss_sum.backward()
        for name, value in loss.counters.items():
            self._counters[name] += value

    def step(self) -> dict[str, float]:
        """
        Reduces what has accumulated, updates the draft and refreshes the rollout copy.

        The update is left out if no rank has a row that counts: the decision uses the reduced count, so ranks agree.
        It is also left out, with a warning, if the reduced gradient is not finite.

        Returns:
            `dict[str, float]`: metrics, equal on all ranks; those without a denominator are absent.
        """
        if self._flat is None:
            self._allocate_gradients()
        counters = self._reduce()
        metrics = self._metrics(counters)
        denominator = sum(self.args.decay**s * rows for s, rows in enumerate(counters["rows"]))
        if denominator > 0 and self.parameters:
            self._flat.div_(denominator)
            max_norm = self.args.max_grad_norm if self.args.max_grad_norm > 0 else math.inf
            grad_norm = float(torch.nn.utils.clip_grad_norm_(self.parameters, max_norm))
            metrics["draft/grad_norm"] = grad_norm
            metrics["draft/learning_rate"] = self.learning_rate
            if math.isfinite(grad_norm):
                self._update()
            else:
                logger.warning("The draft's gradient norm is %s; this draft update is left out.", grad_norm)
        self._discard()
        return metrics

    @property
    def rollout_draft(self) -> Eagle3DraftModel:
        """A copy with parameters in the compute dtype, refreshed by every `step` and `load_state_dict`."""
        if self._rollout_draft is None:
            self._rollout_draft = copy.deepcopy(self.draft).requires_grad_(False).eval()
            for parameter in self._rollout_draft.parameters():
                parameter.data = parameter.data.to(self.draft.compute_dtype)
        return self._rollout_draft

    @torch.no_grad()
    def refresh_rollout_draft(self) -> None:
        """Copies weights and vocabulary into the rollout copy; needed only after changing the draft by hand."""
        if self._rollout_draft is None:
            return
        source = dict(self.draft.named_parameters()) | dict(self.draft.named_buffers())
        copies = dict(self._rollout_draft.named_parameters()) | dict(self._rollout_draft.named_buffers())
        for name, tensor in copies.items():
            tensor.copy_(source[name])

    def state_dict(self, keep: bool = True, moments: bool = True, mid_window: bool = False) -> dict:
        """
        Everything an exact resume needs: weights and vocabulary, moments, schedule, step counters. The same whether or
        not ranks share the optimizer's state; if they do, all of them make this call.

        Args:
            keep (`bool`, *optional*, defaults to `True`):
                Whether this rank wants it. Without, moments that it does not have are left out.
            moments (`bool`, *optional*, defaults to `True`):
                Whether the moments of AdamW are in it: without, `optimizer` is None.
            mid_window (`bool`, *optional*, defaults to `False`):
                Whether it may be made between `accumulate` and `step`. It is then that of the last step; what has
                accumulated since is not in it, and is not lost here.

        Raises:
            RuntimeError: between `accumulate` and `step`, unless `mid_window`: gradients are not in it.
        """
        if self._flat is not None and not mid_window:
            raise RuntimeError("The draft has accumulated gradients that no `step()` has used; save after the step.")
        return {
            "draft": self.draft.state_dict(),
            "target_ids": self.draft.target_ids.cpu(),
            "optimizer": self._moments(keep) if moments else None,
            "scheduler": self.scheduler.state_dict(),
            "num_updates": self.num_updates,
            "num_pretrain_updates": self.num_pretrain_updates,
        }

    def _moments(self, keep: bool) -> dict:
        return self.optimizer.state_dict(keep) if self.shares_state else self.optimizer.state_dict()

    def load_state_dict(self, state: dict) -> bool:
        """
        Restores what `state_dict` returned, vocabulary included. The settings of the optimizer stay this run's.

        Returns:
            `bool`: whether the moments are the saved ones. They are fresh if the state was saved without them, or by a
            run that trained other weights of the draft, such as none.

        Raises:
            ValueError: if the saved draft has another vocabulary size.
        """
        saved, own = state["target_ids"].numel(), self.draft.target_ids.numel()
        if saved != own:
            raise ValueError(
                f"The saved draft has {saved} tokens, this one {own}. Set `draft_vocab_size={saved}` to resume."
            )
        self.draft.load_state_dict(state["draft"])
        has_moments = self._load_moments(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        self.num_updates = state["num_updates"]
        self.num_pretrain_updates = state["num_pretrain_updates"]
        self._discard()
        self.refresh_rollout_draft()
        return has_moments

    def load_weights(self, weights: dict[str, torch.Tensor]) -> None:
        """
        Takes weights and vocabulary of a draft alone: moments start anew, the schedule stays.

        Args:
            weights (`dict[str, torch.Tensor]`):
                The `state_dict` of an [`Eagle3DraftModel`] of this shape.
        """
        self.draft.load_state_dict(weights)
        self.optimizer.state.clear()
        self._discard()
        self.refresh_rollout_draft()

    def _load_moments(self, saved: dict | None) -> bool:
        """Whether they are there, of the weights that this run trains; if not, they start anew."""
        groups = self.optimizer.param_groups
        own = self.optimizer.sizes if self.shares_state else [len(group["params"]) for group in groups]
        if saved is None or own != [len(group["params"]) for group in saved["param_groups"]]:
            self.optimizer.state.clear()
            return not self.parameters
        decays = [group["weight_decay"] for group in groups]
        self.optimizer.load_state_dict(saved)
        for group, decay in zip(self.optimizer.param_groups, decays, strict=True):
            group["weight_decay"] = decay
        return True

    def _zero_counters(self) -> dict[str, torch.Tensor]:
        """Counters at zero, on the draft's device."""
        return zero_counters(self.args.num_passes, self.draft.lm_head.weight.device)

    def _allocate_gradients(self) -> None:
        """One flat zero buffer whose views are the gradients, so that reducing needs no copy."""
        total = sum(parameter.numel() for parameter in self.parameters)
        count = sum(value.numel() for value in self._counters.values())
        self._flat = self.draft.lm_head.weight.detach().new_zeros(total + count)
        offset = 0
        for parameter in self.parameters:
            parameter.grad = self._flat[offset : offset + parameter.numel()].view_as(parameter)
            offset += parameter.numel()

    def _reduce(self) -> dict[str, list[float] | float]:
        """Sums gradients and counters over ranks in one call; returns the counters."""
        names = PASS_COUNTERS + SCALAR_COUNTERS
        own = torch.cat([self._counters[name].reshape(-1) for name in names])
        start = self._flat.numel() - own.numel()
        self._flat[start:] = own
        reduced = self.reduce_sum(self._flat)
        if reduced is not self._flat:
            self._flat.copy_(reduced)
        values = self._flat[start:].tolist()
        self._flat = self._flat[:start]
        passes = self.args.num_passes
        counters = {name: values[i * passes : (i + 1) * passes] for i, name in enumerate(PASS_COUNTERS)}
        return counters | dict(zip(SCALAR_COUNTERS, values[len(PASS_COUNTERS) * passes :], strict=True))

    def _metrics(self, counters: dict) -> dict[str, float]:
        """The metrics that are ratios of counters."""
        metrics = {"draft/rows": sum(counters["rows"]), "draft/masked_rows": counters["masked_rows"]}
        weights = [self.args.decay**s for s in range(self.args.num_passes)]
        total = sum(weight * rows for weight, rows in zip(weights, counters["rows"], strict=True))
        if total > 0:
            loss = sum(weight * value for weight, value in zip(weights, counters["loss"], strict=True))
            metrics["draft/loss"] = loss / total
        for s, rows in enumerate(counters["rows"]):
            if rows > 0:
                metrics[f"draft/loss_pass_{s}"] = counters["loss"][s] / rows
                metrics[f"draft/top1_pass_{s}"] = counters["top1"][s] / rows
        if counters["positions"] > 0:
            metrics["draft/vocab_coverage"] = counters["coverage"] / counters["positions"]
        if counters["accept_roots"] > 0:
            metrics["draft/accept_length_sim"] = 1.0 + sum(counters["accept"]) / counters["accept_roots"]
        return metrics

    def _update(self) -> None:
        """One optimizer step at the current learning rate."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate
        self.optimizer.step()
        self.scheduler.step()
        self.num_updates += 1
        self.num_pretrain_updates += int(self._pretraining)
        self.refresh_rollout_draft()
