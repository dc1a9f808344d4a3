"""A checkpoint of a run with a pipeline goes on under another number of stages, or without, and the other way round."""

import pytest
from group.comparison import assert_close
from group.forked_ranks import run_script


TOLERANCE = (1e-4, 1e-6)
RUNS = {"2 ranks": (2, "2,1", 280), "4 ranks": (4, "2,1,4", 900)}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    seen = {}

    def ranks_of(line):
        if line not in seen:
            world_size, sizes, timeout = RUNS[line]
            out = tmp_path_factory.mktemp("resumed")
            seen[line] = run_script("resume_worker.py", out, world_size, sizes, timeout=timeout, folder="pp")
        return seen[line]

    return ranks_of


CASES = [
    pytest.param(line, start, size, lora, marks=marks, id=f"{line}, {start} then {size}{' lora' if lora else ''}")
    for line, marks in (("2 ranks", ()), ("4 ranks", (pytest.mark.slow, pytest.mark.timeout(1000))))
    for start in (2, 1)
    for size in map(int, RUNS[line][1].split(","))
    for lora in (False, True)
]


@pytest.mark.parametrize(("line", "start", "size", "lora"), CASES)
def test_a_resumed_run_ends_where_the_uninterrupted_one_does(runs, line, start, size, lora):
    for rank in runs(line):
        whole, resumed = rank[start, lora, None], rank[start, lora, size]
        assert len(whole["logs"]) == 4
        for ours, theirs in zip(resumed["logs"][-2:], whole["logs"][-2:], strict=True):
            for key in ("loss", "grad_norm", "learning_rate", "entropy", "draft/loss", "draft/grad_norm"):
                assert_close(ours[key], theirs[key], TOLERANCE, key)
        for name, weight in whole["weights"].items():
            assert_close(resumed["weights"][name], weight, TOLERANCE, name)


def test_the_momentum_of_every_parameter_is_on_the_rank_of_its_stage(runs):
    ranks = runs("2 ranks")
    plain = ranks[0][1, False, None]["momenta"]
    staged = [rank[1, False, 2]["momenta"] for rank in ranks]
    assert staged[0].keys().isdisjoint(staged[1].keys())
    assert {**staged[0], **staged[1]}.keys() == plain.keys()
    for name, momentum in {**staged[0], **staged[1]}.items():
        assert_close(momentum, plain[name], TOLERANCE, name)
        assert momentum.abs().max() > 0


def test_a_resumed_rank_loads_the_momentum_of_its_own_stage_alone(runs):
    # PEFT makes all adapters trainable on every rank when it loads them.
    for start, lora in ((2, False), (2, True), (1, True)):
        first, second = (rank[start, lora, 2]["momenta"] for rank in runs("2 ranks"))
        assert first
        assert second
        assert first.keys().isdisjoint(second.keys())


def test_a_checkpoint_holds_the_whole_policy_and_a_file_of_optimizer_state_per_stage(runs):
    files = runs("2 ranks")[0]["files", 2, False]
    assert {"model.safetensors", "config.json", "draft", "scheduler.pt"} <= set(files)
    assert [name for name in files if name.startswith("optimizer")] == [
        "optimizer-00001-of-00002.pt",
        "optimizer-00002-of-00002.pt",
    ]
    assert "adapter_model.safetensors" in runs("2 ranks")[0]["files", 2, True]
