"""Measures the share of drafted tokens that the policy keeps, position by position, and warns when it collapses."""

import logging
from collections.abc import Sequence


logger = logging.getLogger(__name__)

# Before anything is measured: the rate at the first position, and how many trials it counts for.
PRIOR_RATE, PRIOR_TRIALS = 0.5, 2.0
# Trials that are remembered at each position.
MEMORY = 150.0
# The alarm: first-position acceptance over this many trials, below LOW although it once reached GOOD.
ALARM_MEMORY, LOW, GOOD = 200.0, 0.05, 0.3


class AcceptanceRecord:
    """
    Measures acceptance at each draft position, given that it was reached; older trials fade.

    A position with few trials of its own is taken to be like the one before it.

    Args:
        num_positions (`int`):
            Draft positions to follow.
    """

    def __init__(self, num_positions: int):
        self.trials = [0.0] * num_positions
        self.hits = [0.0] * num_positions
        self._recent = [0.0, 0.0]  # trials and hits of the alarm
        self._peak = 0.0

    def count(self, drafted: Sequence[int], kept: Sequence[int]) -> None:
        """
        Adds a verification.

        Args:
            drafted (`Sequence[int]`):
                Drafted tokens of each row.
            kept (`Sequence[int]`):
                How many of them were kept.
        """
        for position in range(min(max(drafted, default=0), len(self.trials))):
            outcomes = [k > position for n, k in zip(drafted, kept, strict=True) if n > position and k >= position]
            if outcomes:
                fade = (1 - 1 / MEMORY) ** len(outcomes)
                self.trials[position] = fade * self.trials[position] + len(outcomes)
                self.hits[position] = fade * self.hits[position] + sum(outcomes)
                if position == 0:
                    self._watch(len(outcomes), sum(outcomes))

    def rates(self) -> list[float]:
        """Estimated acceptance of each position, given that it was reached."""
        rates, before = [], PRIOR_RATE
        for trials, hits in zip(self.trials, self.hits, strict=True):
            before = (hits + PRIOR_TRIALS * before) / (trials + PRIOR_TRIALS)
            rates.append(before)
        return rates

    def tokens(self, k: int) -> float:
        """Expected number of tokens that a row commits in a round with `k` drafted tokens."""
        expected, run = 1.0, 1.0
        for rate in self.rates()[:k]:
            run *= rate
            expected += run
        return expected

    def _watch(self, trials: int, hits: int) -> None:
        """Warns once when acceptance is gone although it was there, and again only after it came back."""
        fade = (1 - 1 / ALARM_MEMORY) ** trials
        self._recent = [fade * self._recent[0] + trials, fade * self._recent[1] + hits]
        if self._recent[0] < ALARM_MEMORY / 2:
            return
        rate = self._recent[1] / self._recent[0]
        self._peak = max(self._peak, rate)
        if rate < LOW and self._peak >= GOOD:
            logger.warning(
                "Acceptance of the draft has collapsed: the policy keeps %.0f%% of first drafted tokens, after %.0f%% "
                "at best. Rollouts are still exact, but the draft no longer speeds them up. Likely causes: the "
                "draft's weights were replaced, reset or not loaded on resume; the policy's weights, adapter or "
                "quantisation changed under it (or took a very large step); the taps are those of other layers; or a "
                "new sampling constraint excludes what the draft proposes. Compare `draft/accept_length_sim` of "
                "training with `rollout/accept_length`: if the first is good, the rollout reads other weights than "
                "training.",
                100 * rate,
                100 * self._peak,
            )
            self._peak = 0.0

    def state_dict(self) -> dict:
        """Counts, as plain Python values."""
        return {
            "trials": list(self.trials),
            "hits": list(self.hits),
            "recent": list(self._recent),
            "peak": self._peak,
        }

    def load_state_dict(self, state: dict) -> None:
        """Restores what `state_dict` returned; positions beyond this record's are dropped, missing ones stay empty."""
        size = len(self.trials)
        self.trials = (state["trials"] + [0.0] * size)[:size]
        self.hits = (state["hits"] + [0.0] * size)[:size]
        self._recent, self._peak = list(state["recent"]), state["peak"]
