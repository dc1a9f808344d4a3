"""Generates a run's rollouts with the draft, and turns the counters of its loop into metrics."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from transformers.utils import logging

from ..modeling.policy import base_policy
from ..rollout.controller import SpeedReport
from ..rollout.prompts import refuse_empty_prompts
from ..rollout.speculative import SpeculativeDecoder
from ..rollout.stats import SpeculativeStats
from ..vllm.generation import DraftVLLMGeneration, stats_of
from .learner import DraftLearner
from .pretraining import preserved_random_state
from .run import Run
from .support import plain_rollout_reason, refuse_cuda_graphs_elsewhere
from .warnings import GOOD_ACCEPT_LENGTH, warn_about_collapse


logger = logging.get_logger(__name__)


class DraftRollouts:
    """
    Generates a run's rollouts with its draft, in the speculative loop or inside vLLM.

    Args:
        run ([`~run.Run`]):
            The trainer, after `GRPOTrainer.__init__`.
        learner ([`DraftLearner`]):
            Owns the draft.

    Attributes:
        decoder ([`~rollout.speculative.SpeculativeDecoder`]):
            The speculative loop, with its controller and counters.
        possible (`bool`):
            Whether the run's rollouts may use the draft: wanted, and supported.

    Raises:
        ValueError: with `speculative_rollouts="true"`, if the run does not support it.
    """

    def __init__(self, run: Run, learner: DraftLearner):
        self.run, self.learner = run, learner
        self.decoder = SpeculativeDecoder(
            base_policy(run.model),
            learner.draft,
            num_draft_tokens=run.args.num_draft_tokens,
            recorder=learner.recorder,
            cuda_graphs=run.args.rollout_cuda_graphs,
        )
        self.possible = self._resolve()
        if self.possible:
            refuse_cuda_graphs_elsewhere(run)
        if run.use_vllm:
            served = learner.draft if self.possible else None
            run.vllm_generation.start(served, run.args.num_draft_tokens, run.args.draft_vllm_server_sync)
        self._speculated_well = False
        self.reset()

    def _resolve(self) -> bool:
        """Decides whether rollouts use the draft, and says why they do not."""
        if self.run.args.speculative_rollouts == "false":
            return False
        # A `generate` that somebody wrapped may draw random numbers when it is asked.
        with preserved_random_state():
            reason = plain_rollout_reason(self.run)
        if reason is not None:
            self._roll_out_plainly(reason)
        return reason is None

    def _roll_out_plainly(self, reason: str) -> None:
        """Takes note that rollouts are plain, or one of them is; raises where they must not be."""
        self._was_plain, reason = True, reason.removesuffix(".")
        if self.run.args.speculative_rollouts == "true":
            raise ValueError(
                f"`speculative_rollouts='true'`, but rollouts cannot be speculative: {reason}. Change that, or set "
                "`speculative_rollouts='auto'` to train the draft and roll out without it."
            )
        logger.warning_once(f"Rollouts are plain, without the draft: {reason}.")

    @property
    def speculates(self) -> bool:
        """Whether rollouts go through our speculative loop now: possible, wanted, and the draft is there."""
        return self.uses_draft and not self.run.use_vllm

    @property
    def uses_draft(self) -> bool:
        """Whether rollouts use the draft now, in our loop or in vLLM."""
        elsewhere = self.run.use_vllm and not isinstance(self.run.vllm_generation, DraftVLLMGeneration)
        return self.learner.trainer is not None and self.possible and not elsewhere

    def generate(self, generate: Callable[[], tuple], prompt_ids: list[list[int]]) -> tuple:
        """Runs TRL's generation of a turn with the draft, and counts its tokens and seconds."""
        refuse_empty_prompts([len(ids) for ids in prompt_ids])
        start = time.perf_counter()
        with self._speculative_generate():
            completion_ids, logprobs = generate()
        self._seconds += time.perf_counter() - start
        self._tokens += sum(len(ids) for ids in completion_ids)
        return completion_ids, logprobs

    @contextmanager
    def _speculative_generate(self) -> Iterator[None]:
        """Makes the policy's `generate` run the speculative loop, whoever calls it."""
        if not self.speculates:
            yield
            return
        policy = base_policy(self.run.model)
        self.decoder.draft = self.learner.trainer.rollout_draft
        replaced = policy.__dict__.get("generate")
        policy.generate = self.decoder.bind(policy.generate, self._roll_out_plainly)
        try:
            yield
        finally:
            if replaced is None:
                del policy.generate
            else:
                policy.generate = replaced

    def log(self) -> None:
        """Sums the counters of all ranks, then divides. Tool loops end at different turns on different ranks."""
        run, device = self.run, self.run.accelerator.device
        if run.use_vllm:
            self.decoder.stats.add(stats_of(run.vllm_generation))
        tally = torch.tensor([self._tokens, self._seconds], dtype=torch.float64, device=device)
        report = self.decoder.controller.report.as_tensor().to(device)
        counters = torch.cat([tally[:1], report, self.decoder.stats.as_tensor().to(device)])
        counters = self.learner.sum_over_ranks(counters)
        seconds = run.accelerator.gather(tally[1:]).max().item()
        report, stats = counters[1:].split([len(report), len(counters) - 1 - len(report)])
        report, stats = SpeedReport.from_tensor(report), SpeculativeStats.from_tensor(stats)
        metrics = rollout_metrics(stats) | report.metrics()
        if run.use_vllm or not self._speculated_well:  # else our loop says so itself
            warn_about_collapse(stats, self.learner.simulated_accept_length, self._speculated_well)
        self._speculated_well |= stats.accept_length >= GOOD_ACCEPT_LENGTH
        metrics["rollout/tokens_per_second"] = counters[0].item() / max(seconds, 1e-9)
        metrics["rollout/speculation_on"] = float(self.uses_draft and not self._was_plain)
        for name, value in metrics.items():
            run._metrics["train" if run.model.training else "eval"][name].append(value)
        self.reset()

    def reset(self) -> None:
        """Forgets what was counted so far."""
        if self.run.use_vllm:
            stats_of(self.run.vllm_generation)
        self.decoder.stats.reset()
        self.decoder.controller.report = SpeedReport()
        self._tokens, self._seconds, self._was_plain = 0, 0.0, False


def rollout_metrics(stats: SpeculativeStats) -> dict[str, float]:
    """Returns the metrics of rollouts that are ratios of summed counters."""
    metrics = {
        "rollout/accept_length": stats.accept_length,
        "rollout/num_draft_tokens": stats.num_draft_tokens,
    }
    if stats.policy_forwards:  # vLLM does not count them
        metrics["rollout/tokens_per_row_forward"] = stats.tokens_per_row_forward
        metrics["rollout/policy_forwards"] = float(stats.policy_forwards)
    # Positions that were never accepted at the far end say nothing; position 0 always does.
    used = max([i + 1 for i, accepted in enumerate(stats.accepted_per_position) if accepted], default=1)
    for position, rate in enumerate(stats.accept_rate_per_position[:used]):
        metrics[f"rollout/accept_rate_pos_{position}"] = rate
    return metrics
