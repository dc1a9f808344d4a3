"""Fixtures of the rollout tests."""

from rollout.graphs_on_cpu import cuda_graphs  # noqa: F401
