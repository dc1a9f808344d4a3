"""
TRL's loss code run for the members of a group of ranks, and the headers that announce each piece of the group's work.

A microbatch takes two kinds of passes. A *gradient pass* computes the loss of one member: TRL's code runs under an
accelerator whose collectives do nothing, with throwaway metrics. The *metric pass* then runs TRL's code once on this
rank's own rows, without gradient and with the log-probs kept from the gradient passes: it gives the returned loss,
every metric and the one update of the entropy controller, as in plain data parallelism.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ..group.exchange import LossGroup
from ..group.header import Header, Phase, describe
from ..group.members import MemberAccelerator, Scores, attributes_set
from .failures import HeldFailures
from .run import Run


# Tensors that `GRPOTrainer._compute_loss` reads from its inputs, the ids and mask of a call that only scores, and the
# mask of high-entropy tokens, which needs all ranks and is therefore made before the loss.
TRAVELLING_TENSORS = (
    "prompt_ids",
    "prompt_mask",
    "completion_ids",
    "completion_mask",
    "advantages",
    "num_items_in_batch",
    "old_per_token_logps",
    "ref_per_token_logps",
    "importance_sampling_ratio",
    "sampling_per_token_logps",
    "tool_mask",
    "entropy_mask",
    "input_ids",
    "attention_mask",
)

# The adaptive entropy controller: attributes that `GRPOTrainer._compute_loss` writes to besides its metrics.
CONTROLLER_STATE = ("entropy_coef", "_last_world_entropy", "_entropy_window_stats")


class MemberPasses:
    """
    Runs TRL's loss for members of a group.

    Args:
        run ([`~run.Run`]):
            The trainer.
        group ([`~group.exchange.LossGroup`]):
            Made with the names `TRAVELLING_TENSORS`.
        failures ([`HeldFailures`]):
            Holds exceptions of this rank until the next header.
        count_tokens (`Callable`, *optional*):
            Given an attention mask `(B, P+C)`, the number of tokens that each member runs of it, for headers. `None`
            announces none.
    """

    def __init__(self, run: Run, group: LossGroup, failures: HeldFailures, count_tokens: Callable | None = None):
        self.run, self.group, self.failures, self.count_tokens = run, group, failures, count_tokens

    def announce(
        self, phase: Phase, rows: dict[str, torch.Tensor], completion_length: int, chunk_rows: int = 0
    ) -> list[Header]:
        """
        Exchanges headers.

        Args:
            phase ([`~group.header.Phase`]):
                Which work begins.
            rows (`dict[str, torch.Tensor]`):
                This rank's tensors, with `attention_mask` `(B, P+C)` or the masks of prompt and completion.
            completion_length (`int`):
                `C`.
            chunk_rows (`int`, *optional*, defaults to `0`):
                Largest number of rows per forward, 0 for all of them.

        Returns:
            `list[Header]`: the headers of the group's members.

        Raises:
            RuntimeError: on all ranks alike, saying what went wrong on one of them since the last time.
        """
        failure = self.failures.take()
        tensors = {}
        try:
            tensors = describe(rows, self.group.names)
        except ValueError as error:
            failure = failure or error
        attention_mask = rows.get("attention_mask")
        if attention_mask is None:
            attention_mask = torch.cat([rows["prompt_mask"], rows["completion_mask"]], dim=1)
        header = Header(
            step=self.run._step,
            phase=phase,
            rows=len(attention_mask),
            prompt_length=attention_mask.shape[1] - completion_length,
            completion_length=completion_length,
            chunk_rows=chunk_rows,
            shard_tokens=() if self.count_tokens is None else self.count_tokens(attention_mask),
            tensors=tensors,
        )
        return self.group.exchange(header, failure)

    def announce_rollout(self) -> None:
        """Exchanges headers before the first collective of a rollout, and so finds a rank that generates alone."""
        self.group.exchange(Header(self.run._step, Phase.ROLLOUT))

    @contextmanager
    def gradient_pass(self, rows: dict[str, torch.Tensor], score: Callable[..., Scores]) -> Iterator[None]:
        """
        Within it, TRL's loss sees one member's rows as a world of one.

        Args:
            rows (`dict[str, torch.Tensor]`):
                The member's rows.
            score (`Callable`):
                Stands in for `_get_per_token_logps_and_entropies`, without its first argument.
        """
        with attributes_set(
            self.run,
            accelerator=MemberAccelerator(self.run.accelerator),
            _metrics={mode: defaultdict(list) for mode in self.run._metrics},
            **{name: getattr(self.run, name) for name in CONTROLLER_STATE},
            **_scored_by(rows, score),
        ):
            yield

    @contextmanager
    def metric_pass(self, rows: dict[str, torch.Tensor], scores: Scores) -> Iterator[None]:
        """
        Within it, TRL's loss gives this rank's metrics, without gradient.

        Args:
            rows (`dict[str, torch.Tensor]`):
                This rank's own rows.
            scores ([`~group.members.Scores`]):
                Kept from the gradient passes.
        """
        with torch.no_grad(), attributes_set(self.run, **_scored_by(rows, lambda *rows, **settings: scores)):
            yield

    def with_high_entropy_mask(self, inputs: dict[str, Any], score: Callable[..., Scores]) -> dict[str, Any]:
        """
        Adds which of this rank's tokens lie above the entropy threshold of all ranks, which takes a pass of its own.

        Args:
            inputs (`dict[str, Any]`):
                This rank's rows.
            score (`Callable`):
                Scores this rank's rows; called with the phase, the model and the arguments of TRL's method.
        """
        if self.run.top_entropy_quantile == 1.0:
            return inputs
        mask = inputs["completion_mask"]
        if inputs.get("tool_mask") is not None:
            mask = mask * inputs["tool_mask"]
        with torch.no_grad():
            scores = score(
                Phase.ENTROPY_THRESHOLD,
                self.run.model,
                torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1),
                torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1),
                inputs["completion_ids"].shape[1],
                compute_entropy=True,
            )
            threshold = 1 - self.run.top_entropy_quantile
            return {**inputs, "entropy_mask": self.run.get_high_entropy_mask(scores.entropies, mask, threshold)}


def _scored_by(rows: dict[str, torch.Tensor], score: Callable[..., Scores]) -> dict[str, Callable]:
    """Returns what stands in for the methods of TRL that run the policy, or look at all ranks, inside its loss."""
    methods = {"_get_per_token_logps_and_entropies": lambda model, *rows, **settings: score(*rows, **settings)}
    if rows.get("entropy_mask") is not None:
        methods["get_high_entropy_mask"] = lambda entropies, mask, threshold: rows["entropy_mask"]
    return methods
