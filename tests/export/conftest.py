import pytest
from tiny import tiny_policy


@pytest.fixture(scope="session")
def policy():
    """8 layers: the servers' default taps are [2, 4, 5]."""
    return tiny_policy(num_hidden_layers=8)
