"""What two training runs must have in common."""

import math

import torch


# Relative and absolute, of gradients that were computed in float64 throughout (`float64_loss.py`).
EXACT = (1e-9, 1e-12)
# Logged values that depend on the clock.
CLOCK = ("runtime", "per_second", "step_time", "total_flos", "draft/time", "speedup")


def assert_close(actual, expected, tolerance, what):
    actual, expected = (torch.as_tensor(value, dtype=torch.float64) for value in (actual, expected))
    message = lambda text: f"{what}: {text}"  # noqa: E731
    torch.testing.assert_close(actual, expected, rtol=tolerance[0], atol=tolerance[1], equal_nan=True, msg=message)


def assert_same_training(ours, plain, tolerance):
    """Losses, gradients, every logged value and the final weights of one rank."""
    assert_close(ours["losses"], plain["losses"], tolerance, "losses of microbatches")
    assert len(ours["gradients"]) == len(plain["gradients"])
    for step, (mine, theirs) in enumerate(zip(ours["gradients"], plain["gradients"], strict=True)):
        assert mine.keys() == theirs.keys()
        for name in theirs:
            bound = EXACT if theirs[name].dtype == torch.float64 else tolerance
            assert_close(mine[name], theirs[name], bound, f"gradient of {name} at step {step}")
    assert len(ours["logs"]) == len(plain["logs"])
    for mine, theirs in zip(ours["logs"], plain["logs"], strict=True):
        assert mine.keys() == theirs.keys()
        for key, value in theirs.items():
            if not any(word in key for word in CLOCK):
                unknown = value is None or math.isnan(value)
                assert_close(
                    math.nan if mine[key] is None else mine[key], math.nan if unknown else value, tolerance, key
                )
    for name, weight in plain["weights"].items():
        assert_close(ours["weights"][name], weight, tolerance, name)
    assert ours["reductions"] == plain["reductions"]
