"""
A checkpoint of a run with a pipeline goes on under another number of stages, or without, and the other way round.
"""

import pytest
import torch
from forked_ranks import started_once
from group.comparison import assert_close


TOLERANCE = (1e-4, 1e-6)
# World size, pairs of sizes: ranks per pipeline when saving and when resuming, `p` where no rank has the whole policy,
# `z` where ranks share the optimizer's state.
RUNS = {
    "2 ranks": (2, ["2-2", "2-1", "1-2", "1-2p", "2p-1"], [], 280),
    "2 ranks, others": (2, ["1-1", "2p-2p", "2p-2", "2-2p"], [], 280),
    "4 ranks, shared state": (4, ["2zp-2zp", "2zp-1", "1-2zp", "2z-4p", "2-2z", "2zx2p-2"], [], 900),
    "4 ranks": (4, ["2-2", "2-1", "2-4", "1-2", "1-1", "1-4", "2p-4p", "4p-2p", "4p-1", "1-4p", "2x2p-2p"], [], 900),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return started_once(tmp_path_factory, RUNS, "resume_worker.py", folder="pp")


CASES = [
    pytest.param(line, *pair.split("-"), lora, marks=marks, id=f"{line}, {pair}{' lora' if lora else ''}")
    for line, (_, pairs, _, _) in RUNS.items()
    for marks in [() if line == "2 ranks" else (pytest.mark.slow, pytest.mark.timeout(1000))]
    for pair in pairs
    for lora in (False, True)
]


def weights_of_all_ranks(ranks, *run):
    """Final weights by name: of a policy in parts a rank has its own. What several ranks hold, they hold alike."""
    together = {}
    for rank in ranks:
        for name, weight in rank[run]["weights"].items():
            assert torch.equal(together.setdefault(name, weight), weight), name
    return together


@pytest.mark.parametrize(("line", "start", "size", "lora"), CASES)
def test_a_resumed_run_ends_where_the_uninterrupted_one_does(runs, line, start, size, lora):
    for rank in runs(line):
        whole, resumed = rank[start, lora, None]["logs"], rank[start, lora, size]["logs"]
        assert len(whole) == 4
        for ours, theirs in zip(resumed[-2:], whole[-2:], strict=True):
            for key in ("loss", "grad_norm", "learning_rate", "entropy", "draft/loss", "draft/grad_norm"):
                assert_close(ours[key], theirs[key], TOLERANCE, key)
    whole, resumed = (weights_of_all_ranks(runs(line), start, lora, end) for end in (None, size))
    assert resumed.keys() == whole.keys()
    for name, weight in whole.items():
        assert_close(resumed[name], weight, TOLERANCE, name)
    policy = {name for name in whole if not name.startswith("draft.")}
    layers = {name.partition("layers.")[2].partition(".")[0] for name in policy}
    assert layers == {"", *map(str, range(6))}
    assert any(name.endswith("norm.weight") and "layers" not in name for name in policy)


def test_the_momentum_of_every_parameter_is_on_the_rank_of_its_stage(runs):
    ranks = runs("2 ranks")
    plain = ranks[0]["1", False, None]["momenta"]
    staged = [rank["1", False, "2"]["momenta"] for rank in ranks]
    assert staged[0].keys().isdisjoint(staged[1].keys())
    assert {**staged[0], **staged[1]}.keys() == plain.keys()
    for name, momentum in {**staged[0], **staged[1]}.items():
        assert_close(momentum, plain[name], TOLERANCE, name)
        assert momentum.abs().max() > 0


def test_a_resumed_rank_loads_the_momentum_of_its_own_stage_alone(runs):
    # PEFT makes all adapters trainable on every rank when it loads them.
    for start, lora in (("2", False), ("2", True), ("1", True)):
        first, second = (rank[start, lora, "2"]["momenta"] for rank in runs("2 ranks"))
        assert first
        assert second
        assert first.keys().isdisjoint(second.keys())


def test_a_checkpoint_holds_the_whole_policy_and_a_file_of_optimizer_state_per_stage(runs):
    files = runs("2 ranks")[0]["files", "2", False]
    assert {"model.safetensors", "config.json", "draft", "scheduler.pt"} <= set(files)
    assert [name for name in files if name.startswith("optimizer")] == [
        "optimizer-00001-of-00002.pt",
        "optimizer-00002-of-00002.pt",
    ]
    assert "adapter_model.safetensors" in runs("2 ranks")[0]["files", "2", True]


@pytest.mark.slow
@pytest.mark.timeout(1000)
def test_ranks_that_share_a_stage_have_the_momenta_of_it_between_them(runs):
    ranks = runs("4 ranks, shared state")
    plain = ranks[0]["1", False, None]["momenta"]
    shared = [rank["2zp", False, None]["momenta"] for rank in ranks]
    assert sum(len(momenta) for momenta in shared) == len(plain)
    sizes = [sum(momentum.numel() for momentum in momenta.values()) for momenta in shared]
    # Of each stage its two ranks have a half, as far as whole parameters allow.
    for one, other in ((0, 2), (1, 3)):
        largest = max(momentum.numel() for rank in (one, other) for momentum in shared[rank].values())
        assert abs(sizes[one] - sizes[other]) <= largest
    for momenta in shared:
        for name, momentum in momenta.items():
            assert_close(momentum, plain[name], TOLERANCE, name)
    files = ranks[0]["files", "2zp", False]
    assert sum(name.startswith("optimizer-") for name in files) == 4
