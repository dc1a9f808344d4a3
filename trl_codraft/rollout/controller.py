"""
How many tokens to draft: a fixed number, or the number that commits most tokens per second by what was measured.

A choice depends on past rounds only, never on the tokens about to be verified, so it cannot bias what is sampled.

Costs are counted in *plain steps*: the time of a round without drafting, with the same rows and at the same moment.
Rounds grow dearer as contexts grow and cheaper as rows leave; the ratio between a round with `k` drafted tokens and a
plain one hardly moves, so it is the ratio that is remembered, and it is only measured between neighbouring rounds.
"""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field

import torch

from .acceptance_rates import AcceptanceRecord
from .stats import MAX_DRAFT_TOKENS


# Extra cost of each drafted token, in plain steps, before anything is measured.
PRIOR_TOKEN_COST = 0.1
# Cost of one draft step, in plain steps, where only the policy's part is known from other rounds.
PRIOR_DRAFT_STEP = 0.03
# Share of the time that may be spent on trying lengths other than the best one, and what a new controller may spend
# before it has earned anything, in plain steps.
EXPLORATION_SHARE = 0.01
INITIAL_CREDIT = 0.5
MAX_CREDIT = 3.0
# Predicted speed-up below which plain decoding is preferred.
MIN_GAIN = 1.03
# Tokens per round below which a length is not worth measuring, whatever it costs.
PROMISING = 1.15
# A measurement moves an average by at least its weight, and one outlier by at most a factor.
COST_WEIGHT, LEVEL_WEIGHT, MAX_SURPRISE = 0.2, 0.3, 1.5
# Rounds of one length after which a plain step tells something about their cost.
MIN_ROUNDS = 3


@dataclass
class Round:
    """
    What the loop reports about a finished round.

    Attributes:
        active_rows (`int`): rows that took part. drafted (`list[int]`): drafted tokens of each row. kept
        (`list[int]`): how many of them the verification kept. committed (`int`): tokens committed, over all rows.
        seconds (`float`): time of the round. unusual (`bool`): whether it took longer than such rounds do, because the
        draft had to read more than the previous
            round's tokens, or because forwards were recorded.
    """

    active_rows: int
    drafted: list[int]
    kept: list[int]
    committed: int
    seconds: float
    unusual: bool = False


class FixedDraftLength:
    """Always the same number of draft tokens; only acceptance is watched."""

    def __init__(self, num_draft_tokens: int):
        self.max_draft_tokens = num_draft_tokens
        self.clock = time.perf_counter
        self.acceptance = AcceptanceRecord(num_draft_tokens)
        self.report = SpeedReport()

    def begin(self) -> None:
        """A rollout starts."""

    def choose(self, active_rows: int) -> int:
        """Number of tokens to draft for each of `active_rows` rows."""
        return self.max_draft_tokens

    def observe(self, finished: Round) -> None:
        """Takes in a finished round."""
        self.acceptance.count(finished.drafted, finished.kept)

    def state_dict(self) -> dict:
        """Measurements, as plain Python values."""
        return {"acceptance": self.acceptance.state_dict()}

    def load_state_dict(self, state: dict) -> None:
        """Restores what `state_dict` of any kind of controller returned."""
        self.acceptance.load_state_dict(state["acceptance"])


@dataclass
class SpeedReport:
    """
    Sums that compare rounds with plain decoding. `plain_seconds` is what the committed tokens would have taken by the
    estimated time of a plain step, `predicted_seconds` what the controller expected of it when it chose.

    Attributes:
        seconds (`float`), plain_seconds (`float`), predicted_seconds (`float`): see above; all sums over rounds.
    """

    seconds: float = 0.0
    plain_seconds: float = 0.0
    predicted_seconds: float = 0.0

    def as_tensor(self) -> torch.Tensor:
        """`(3,)` float64, to be summed over ranks."""
        return torch.tensor([self.seconds, self.plain_seconds, self.predicted_seconds], dtype=torch.float64)

    @classmethod
    def from_tensor(cls, sums: torch.Tensor) -> "SpeedReport":
        """Inverse of [`~SpeedReport.as_tensor`]."""
        return cls(*sums.tolist())

    def metrics(self) -> dict[str, float]:
        """Predicted and measured speed-up of decoding (without prefills); nothing where nothing was measured."""
        if self.seconds == 0:
            return {}
        return {
            "rollout/predicted_speedup": self.predicted_seconds / self.seconds,
            "rollout/measured_speedup": self.plain_seconds / self.seconds,
        }


@dataclass
class _Ratio:
    """Running mean of a round's cost with one draft length, in plain steps."""

    value: float = 1.0
    count: int = 0

    def add(self, sample: float, weight: float) -> None:
        if self.count == 1 and sample < self.value / MAX_SURPRISE:
            self.count = 0  # the first was dear for other reasons: a kernel was loaded, a process ran beside
        if self.count:
            sample = min(max(sample, self.value / MAX_SURPRISE), self.value * MAX_SURPRISE)
        self.count += 1
        self.value += max(1 / self.count, weight) * (sample - self.value)


@dataclass
class _Rows:
    """
    What is known about rounds with one number of active rows.

    Attributes:
        ratios: cost by draft length `k >= 1`, in plain steps.
        plain: seconds of a plain step, a long memory for estimates at other numbers of rows.
        tried: number of the choice at which each length was last chosen.
        choices: number of choices.
        credit: plain steps that may be spent on trying.
    """

    ratios: dict[int, _Ratio] = field(default_factory=dict)
    plain: _Ratio = field(default_factory=_Ratio)
    tried: dict[int, int] = field(default_factory=dict)
    choices: int = 0
    credit: float = 0.0


class DraftLengthController:
    """
    The rule behind `num_draft_tokens="auto"`: for the number of active rows at hand, the `k` in `0..max_draft_tokens`
    with the largest `(1 + a_1 + a_1 a_2 + ...) / cost(k)`.

    `a_i` is the measured acceptance at draft position `i` given that it was reached. `cost(k)` is the time of a whole
    round relative to a plain one, measured between neighbouring rounds, per number of active rows (1, 2, 3, 4, 6, 8,
    12, 16, 24, ...). What was never measured is estimated: a round of `n` rows and `k` drafted tokens costs the policy
    about what a plain step of `n * (k + 1)` rows does. Other lengths are tried with 1% of the time, the one tried
    longest ago first.

    Args:
        max_draft_tokens (`int`, *optional*, defaults to `6`):
            Largest number of draft tokens to consider.
        clock (`Callable`, *optional*, defaults to `time.perf_counter`):
            Seconds, as the loop measures its rounds.

    Attributes:
        acceptance ([`~rollout.acceptance_rates.AcceptanceRecord`]): acceptance by position.
        report ([`SpeedReport`]): predicted and measured speed since it was last replaced.
    """

    def __init__(self, max_draft_tokens: int = 6, clock: Callable[[], float] = time.perf_counter):
        if not 1 <= max_draft_tokens <= MAX_DRAFT_TOKENS:
            raise ValueError(f"`max_draft_tokens` must lie in 1..{MAX_DRAFT_TOKENS}, got {max_draft_tokens}.")
        self.max_draft_tokens = max_draft_tokens
        self.clock = clock
        self.acceptance = AcceptanceRecord(max_draft_tokens)
        self.report = SpeedReport()
        self._rows: dict[int, _Rows] = {}
        self._credit = INITIAL_CREDIT
        self._leave()

    def begin(self) -> None:
        """A rollout starts: contexts are short again, so no time measured before is compared with what comes."""
        self._leave()

    def choose(self, active_rows: int) -> int:
        """Number of tokens to draft for each of `active_rows` rows."""
        bucket = row_bucket(active_rows)
        rows = self._enter(bucket)
        rows.choices += 1
        best, repeat = self._best(bucket), self._repeat
        self._repeat = None
        other = repeat if repeat is not None else self._try_another(bucket, rows, best)
        self._trying = other is not None
        choice = best if other is None else other
        if choice > 0 and choice not in rows.ratios and self._level.count == 0:
            choice = 0  # a plain step to compare with comes first
        rows.tried[choice] = rows.choices
        return choice

    def observe(self, finished: Round) -> None:
        """Takes in a finished round."""
        k = min(max(finished.drafted), self.max_draft_tokens)
        bucket = row_bucket(finished.active_rows)
        rows = self._enter(bucket)
        promised = self.gain(bucket, k)  # before the round itself has a say
        self.acceptance.count(finished.drafted, finished.kept)
        if finished.unusual:
            # What was done besides would not recur: measure this length in the next round instead.
            if self._trying or (k > 0 and k not in rows.ratios):
                self._repeat = k
        else:
            if self._previous is not None and self._previous != k:
                self._compare(bucket, k, finished.seconds)
                self._in_a_row = 0
            self._in_a_row += 1
            self._level.add(finished.seconds / self.cost(bucket, k), LEVEL_WEIGHT)
            if k == 0:
                rows.plain.add(finished.seconds, COST_WEIGHT)
            self._previous = k
        rows.credit = min(rows.credit + EXPLORATION_SHARE * self.cost(bucket, k), MAX_CREDIT)
        self._compare_with_plain(promised, finished)

    def gain(self, bucket: int, k: int) -> float:
        """Expected speed-up over plain decoding with `k` drafted tokens."""
        return self.acceptance.tokens(k) / self.cost(bucket, k)

    def cost(self, bucket: int, k: int) -> float:
        """Time of a round with `k` drafted tokens, in plain steps."""
        if k == 0:
            return 1.0
        rows = self._rows.get(bucket, _Rows())
        if k in rows.ratios:
            return rows.ratios[k].value
        if not rows.ratios:
            return self._guess(bucket, k)
        below = max((other for other in rows.ratios if other < k), default=0)
        above = min((other for other in rows.ratios if other > k), default=None)
        start = rows.ratios[below].value if below else 1.0
        if above is not None:
            return start + (rows.ratios[above].value - start) * (k - below) / (above - below)
        # Optimistic beyond what was measured, or a dear first token would hide cheap further ones.
        return start + PRIOR_TOKEN_COST * (k - below)

    def _guess(self, bucket: int, k: int) -> float:
        """`cost` where no round with drafting was measured at this number of rows."""
        own, wide = self._rows.get(bucket), self._rows.get(row_bucket(bucket * (k + 1)))
        if own is not None and wide is not None and own.plain.count and wide.plain.count:
            return max(wide.plain.value / own.plain.value, 1.0) + PRIOR_DRAFT_STEP * k
        measured = [other for other, rows in self._rows.items() if k in rows.ratios and other != bucket]
        if measured:
            return self._rows[min(measured, key=lambda other: max(other / bucket, bucket / other))].ratios[k].value
        return 1 + PRIOR_TOKEN_COST * k

    def _best(self, bucket: int) -> int:
        best = max(range(1, self.max_draft_tokens + 1), key=lambda k: self.gain(bucket, k))
        return best if self.gain(bucket, best) >= MIN_GAIN else 0

    def _try_another(self, bucket: int, rows: _Rows, best: int) -> int | None:
        """The length to try instead of the best one, if there is credit for what that is expected to lose."""
        if best > 0:
            others = {best - 1, best + 1, best + 2, 0}
        else:
            # One token tells whether acceptance is back; more of them only where they could pay if they cost nothing.
            others = {1} | {k for k in (2, 3, 4) if self.acceptance.tokens(k) >= PROMISING}
        others = sorted(k for k in others if 0 <= k <= self.max_draft_tokens and k != best)
        k = min(others, key=lambda other: rows.tried.get(other, 0))
        rate = max(self.gain(bucket, best), 1.0)
        # The draft reads what it missed in the first of two rounds, and is measured in the second.
        loss = self.cost(bucket, k) - self.acceptance.tokens(k) / rate
        # Never more than can be saved up, or what once looked dear would not be tried again, nor anything after it.
        loss = min(max(2 * loss if best == 0 else loss, 0.02), MAX_CREDIT)
        if loss > rows.credit + self._credit:
            return None
        spent_here = min(loss, rows.credit)
        rows.credit -= spent_here
        self._credit -= loss - spent_here
        return k

    def _compare(self, bucket: int, k: int, seconds: float) -> None:
        """Measures a ratio where the draft length has just changed."""
        # The newcomer's, or that of the length before it if the newcomer is a plain step.
        of, sample = k, seconds / self._level.value
        if k == 0:
            if self._in_a_row < MIN_ROUNDS:
                return  # they have hardly moved the level, so the ratio would confirm itself
            of, sample = self._previous, self._level.value * self.cost(bucket, self._previous) / seconds
        self._rows[bucket].ratios.setdefault(of, _Ratio()).add(sample, COST_WEIGHT)

    def _compare_with_plain(self, promised: float, finished: Round) -> None:
        """
        Adds a round of which a speed-up was promised to the report, as soon as the time of a plain step is known.
        """
        self._unreported.append((finished.seconds, finished.committed / finished.active_rows, promised))
        if self._level.count:
            for seconds, tokens, gain in self._unreported:
                self.report.seconds += seconds
                self.report.plain_seconds += tokens * self._level.value
                self.report.predicted_seconds += gain * seconds
            self._unreported = []

    def _enter(self, bucket: int) -> _Rows:
        """The knowledge about a number of rows; a change of it ends comparisons with earlier rounds."""
        if bucket != self._bucket:
            self._leave()
            self._bucket = bucket
        return self._rows.setdefault(bucket, _Rows())

    def _leave(self) -> None:
        """Forgets the time of the last rounds: what comes has other rows or another context."""
        self._bucket: int | None = None
        self._previous: int | None = None
        self._in_a_row = 0  # rounds with that length
        self._repeat: int | None = None
        self._trying = False
        self._level = _Ratio()  # seconds of a plain step now
        self._unreported: list[tuple[float, float, float]] = []

    def state_dict(self) -> dict:
        """Measurements, as plain Python values."""
        return {
            "acceptance": self.acceptance.state_dict(),
            "rows": {bucket: asdict(rows) for bucket, rows in self._rows.items()},
            "credit": self._credit,
        }

    def load_state_dict(self, state: dict) -> None:
        """Restores what `state_dict` of any kind of controller returned."""
        self.acceptance.load_state_dict(state["acceptance"])
        self._rows = {
            bucket: _Rows(
                ratios={k: _Ratio(**ratio) for k, ratio in rows["ratios"].items()},
                plain=_Ratio(**rows["plain"]),
                **{name: rows[name] for name in ("choices", "credit")},
                tried=dict(rows["tried"]),
            )
            for bucket, rows in state.get("rows", {}).items()
        }
        self._credit = state.get("credit", INITIAL_CREDIT)
        self._leave()


def row_bucket(rows: int) -> int:
    """The number of rows, rounded up to 1, 2, 3, 4, 6, 8, 12, 16, 24, ..."""
    power = 1 << max(rows - 1, 0).bit_length()
    return power * 3 // 4 if power >= 4 and rows <= power * 3 // 4 else power
