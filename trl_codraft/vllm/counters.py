"""vLLM's counters of speculative decoding, from a running engine or from the text of a server's `/metrics`."""

import re
from collections.abc import Iterable
from typing import Any

from ..rollout.stats import MAX_DRAFT_TOKENS, SpeculativeStats


# Names without the `_total` of the Prometheus text format, and the fields of our statistics.
COUNTERS = {
    "vllm:spec_decode_num_drafts": "verifications",
    "vllm:spec_decode_num_draft_tokens": "drafted",
    "vllm:spec_decode_num_accepted_tokens": "accepted",
}
PER_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos"
_SAMPLE = re.compile(r"^(vllm:spec_decode_\w+?)_total(?:\{(.*)\})? (\S+)$", re.MULTILINE)
_POSITION = re.compile(r'position="(\d+)"')


def stats_from_metrics(metrics: Iterable[Any]) -> SpeculativeStats:
    """
    Counters of all engines of this process.

    Args:
        metrics (`Iterable`):
            The result of `LLM.get_metrics()`: objects with a `name`, and a `value` or (accepted by position) `values`.

    Returns:
        [`SpeculativeStats`]: with `verifications`, `drafted`, `accepted` and `accepted_per_position` set.
    """
    stats = SpeculativeStats()
    for metric in metrics:
        if metric.name in COUNTERS:
            _add(stats, COUNTERS[metric.name], metric.value)
        elif metric.name == PER_POSITION:
            for position, value in enumerate(metric.values[:MAX_DRAFT_TOKENS]):
                stats.accepted_per_position[position] += round(value)
    return stats


def stats_from_text(text: str) -> SpeculativeStats:
    """
    Counters of all engines of a server.

    Args:
        text (`str`):
            The body of `GET /metrics`, in the Prometheus text format.

    Returns:
        [`SpeculativeStats`]: as in [`stats_from_metrics`].
    """
    stats = SpeculativeStats()
    for name, labels, value in _SAMPLE.findall(text):
        if name in COUNTERS:
            _add(stats, COUNTERS[name], float(value))
        elif name == PER_POSITION:
            position = int(_POSITION.search(labels)[1])
            if position < MAX_DRAFT_TOKENS:
                stats.accepted_per_position[position] += round(float(value))
    return stats


def _add(stats: SpeculativeStats, field: str, value: float) -> None:
    setattr(stats, field, getattr(stats, field) + round(value))
