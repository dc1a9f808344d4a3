"""
How many tokens to draft: a fixed number, or the number that commits most tokens per second by what was measured.

A choice depends on past rounds only, never on the tokens about to be verified, so it cannot bias what is sampled.
"""

from collections.abc import Sequence

from .stats import MAX_DRAFT_TOKENS


# Before anything is measured: acceptance per position, and the cost of one more drafted token in plain steps.
PRIOR_ACCEPTANCE = 0.6
PRIOR_TOKEN_COST = 0.12
SMOOTHING = 0.1  # weight of a new measurement
PROBE_EVERY = 24  # choices between two tries of another length


class FixedDraftLength:
    """Always the same number of draft tokens; nothing is measured, nothing saved."""

    def __init__(self, num_draft_tokens: int):
        self.max_draft_tokens = num_draft_tokens

    def choose(self, active_rows: int) -> int:
        return self.max_draft_tokens

    def observe(self, active_rows: int, counts: Sequence[int], kept: Sequence[int], seconds: float) -> None:
        pass

    def state_dict(self) -> dict:
        return {}

    def load_state_dict(self, state: dict) -> None:
        pass


class DraftLengthController:
    """
    The rule behind `num_draft_tokens="auto"`: for the number of active rows at hand, the `k` in `0..max_draft_tokens`
    with the largest `(1 + a_1 + a_1 a_2 + ...) / seconds(k)`.

    `a_i` are running means of the acceptance at position `i` given that it was reached. `seconds(k)` is a straight line
    through the running means of whole rounds (draft, verification and bookkeeping) measured at this number of rows,
    rounded up to a power of two; with one draft length measured, its slope comes from a prior. Every 24th choice tries
    a neighbouring length or plain decoding.

    Args:
        max_draft_tokens (`int`, *optional*, defaults to `6`):
            Largest number of draft tokens to consider.
    """

    def __init__(self, max_draft_tokens: int = 6):
        if not 1 <= max_draft_tokens <= MAX_DRAFT_TOKENS:
            raise ValueError(f"`max_draft_tokens` must lie in 1..{MAX_DRAFT_TOKENS}, got {max_draft_tokens}.")
        self.max_draft_tokens = max_draft_tokens
        self.acceptance = [PRIOR_ACCEPTANCE] * max_draft_tokens
        self.seconds: dict[int, dict[int, float]] = {}
        self._choices: dict[int, int] = {}

    def choose(self, active_rows: int) -> int:
        """Number of tokens to draft for each of `active_rows` rows."""
        bucket = _bucket(active_rows)
        count = self._choices[bucket] = self._choices.get(bucket, 0) + 1
        best = max(range(self.max_draft_tokens + 1), key=lambda k: self.tokens(k) / self.cost(bucket, k))
        if count % PROBE_EVERY == 0:
            alternatives = (best + 1, 0, max(best - 1, 1))
            return min(alternatives[count // PROBE_EVERY % 3], self.max_draft_tokens)
        return best

    def observe(self, active_rows: int, counts: Sequence[int], kept: Sequence[int], seconds: float) -> None:
        """Takes in a finished round: drafted and accepted tokens of each row, and its wall-clock seconds."""
        measured = self.seconds.setdefault(_bucket(active_rows), {})
        k = min(max(counts), self.max_draft_tokens)
        measured[k] = seconds if k not in measured else measured[k] + SMOOTHING * (seconds - measured[k])
        for position in range(k):
            reached = [a > position for n, a in zip(counts, kept, strict=True) if n > position and a >= position]
            if reached:
                weight = 1 - (1 - SMOOTHING / 4) ** len(reached)  # many rows weigh as many rounds of one
                self.acceptance[position] += weight * (sum(reached) / len(reached) - self.acceptance[position])

    def tokens(self, k: int) -> float:
        """Expected number of committed tokens of a row in a round with `k` drafted tokens."""
        expected, run = 1.0, 1.0
        for rate in self.acceptance[:k]:
            run *= rate
            expected += run
        return expected

    def cost(self, bucket: int, k: int) -> float:
        """Seconds of a round with `k` drafted tokens, in plain steps where nothing is measured yet."""
        measured = self.seconds.get(bucket, {})
        if k in measured:
            return measured[k]
        prior = 1 + PRIOR_TOKEN_COST * k
        if not measured:
            return prior
        nearest = sorted(measured, key=lambda other: abs(other - k))[:2]
        scaled = measured[nearest[0]] * prior / (1 + PRIOR_TOKEN_COST * nearest[0])
        if len(nearest) == 1:
            return scaled
        (k0, k1), (t0, t1) = nearest, (measured[nearest[0]], measured[nearest[1]])
        line = t0 + (t1 - t0) * (k - k0) / (k1 - k0)
        return max(line, 0.5 * scaled)  # two noisy points must not promise a round for nothing

    def state_dict(self) -> dict:
        """Measurements, as plain Python values."""
        seconds = {bucket: dict(measured) for bucket, measured in self.seconds.items()}
        return {"acceptance": list(self.acceptance), "seconds": seconds, "choices": dict(self._choices)}

    def load_state_dict(self, state: dict) -> None:
        """Restores what `state_dict` returned; a [`FixedDraftLength`] measured nothing, and nothing is restored."""
        if not state:
            return
        self.acceptance = list(state["acceptance"])
        self.seconds = {bucket: dict(measured) for bucket, measured in state["seconds"].items()}
        self._choices = dict(state["choices"])


def _bucket(rows: int) -> int:
    """The number of rows, rounded up to a power of two."""
    return 1 << max(rows - 1, 0).bit_length()
