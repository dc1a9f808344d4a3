"""AdamW whose state ranks share, against `torch.optim.AdamW` of one process, which keeps all of it."""

import io
import math

import pytest
import torch
import torch.distributed as dist
from cp.groups import RANKS, run_in_groups
from modeling.draft_cases import RAGGED, draft_case, microbatch

from trl_codraft.pp.memory import draft_memory
from trl_codraft.training.draft_trainer import DraftTrainer, DraftTrainingArguments
from trl_codraft.training.sharded_adamw import ShardedAdamW, cut_weights


# By case, shapes of the weights with and without decay. One weight is cut for all, or there are more ranks than
# elements.
SHAPES = {
    "many": ([(7, 5), (3, 4, 2), (11, 6)], [(13,), (1,), (6,)]),
    "one large": ([(64, 3)], [(2,)]),
    "fewer than ranks": ([(1, 1)], [(1,)]),
    "one group empty": ([(5, 5)], []),
}
RATES = [1e-2, 3e-2, 0.0, 1e-3, 2e-2]
SETTINGS = {"lr": 1.0, "betas": (0.9, 0.95)}
# The step of the draft whose gradient is not finite, and how many come before the checkpoint.
LEFT_OUT, SAVED, STEPS = 2, 4, 7
K = 3


def random(shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def groups_of(case):
    decayed, others = SHAPES[case]
    weights = [torch.nn.Parameter(random(shape, number)) for number, shape in enumerate(decayed + others)]
    return [
        {"params": weights[: len(decayed)], "weight_decay": 0.3},
        {"params": weights[len(decayed) :], "weight_decay": 0.0},
    ], weights


def run_optimizer(case, optimizer_class, **arguments):
    """The optimizer and its weights after a step at each rate, by the way given other memory."""
    groups, weights = groups_of(case)
    optimizer = optimizer_class(groups, **arguments, **SETTINGS)
    for step, rate in enumerate(RATES):
        if step == 2:  # as a module does that is moved
            for weight in weights:
                weight.data = weight.data.clone()
        for number, weight in enumerate(weights):
            weight.grad = random(weight.shape, 100 * step + number) * 10.0 ** (number - 2)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
    return optimizer, [weight.detach() for weight in weights]


def state_bytes(optimizer):
    """Of the storages behind its moments."""
    tensors = [value for state in optimizer.state.values() for value in state.values() if value.dim()]
    return sum({tensor.data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}.values())


def trainer_of(**arguments):
    draft, head = draft_case(dtype=torch.float32, reduced=True)
    args = DraftTrainingArguments(
        num_passes=K, loss_chunk_size=7, learning_rate=1e-2, pretrain_learning_rate=3e-2, warmup_steps=2,
        lr_scheduler_type="cosine", weight_decay=0.3, max_grad_norm=0.5,
    )  # fmt: skip
    return DraftTrainer(draft, head, args, num_training_steps=STEPS, **arguments)


def train(trainer, steps, learns=True):
    """What the steps log. A rank that does not learn has no rows."""
    logs = []
    for step in steps:
        batch, _ = microbatch(trainer.draft.config, *RAGGED, K, dtype=torch.float32, seed=step)
        if step == LEFT_OUT:
            batch.taps[0, 0] = math.inf
        trainer.accumulate(batch if learns else None)
        logs.append(trainer.step())
    return logs


def weights_of(trainer):
    return {name: parameter.detach() for name, parameter in trainer.draft.named_parameters()}


def loaded(state):
    """A state as it comes from a file."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def run_on_rank(group):
    """What this rank sees of the optimizer in every case, and of drafts that it trains, saves and goes on with."""
    learns = dist.get_rank(group) == 0
    seen = {}
    for case in SHAPES:
        optimizer, weights = run_optimizer(case, ShardedAdamW, sharers=group)
        gradients = [view.grad for param_group in optimizer.param_groups for view in param_group["params"]]
        seen[case] = {"weights": weights, "bytes": state_bytes(optimizer), "state": optimizer.state_dict(keep=learns)}
        assert gradients == [None] * len(gradients)

    def reduce_sum(flat):
        dist.all_reduce(flat, group=group)
        return flat

    def sharing():
        return trainer_of(reduce_sum=reduce_sum, sharers=group)

    def ended(trainer, logs):
        return {
            "weights": weights_of(trainer),
            "logs": logs,
            "bytes": state_bytes(trainer.optimizer),
            "updates": (trainer.num_updates, trainer.num_pretrain_updates),
        }

    trainer = sharing()
    seen["before a step"] = trainer.state_dict(keep=learns)["optimizer"]["state"]
    with trainer.pretraining():
        logs = train(trainer, range(1), learns)
    logs += train(trainer, range(1, SAVED), learns)
    # Saved on all ranks: every one of them resumes.
    state = loaded(trainer.state_dict())
    seen["state"] = state
    seen["whole"] = ended(trainer, logs + train(trainer, range(SAVED, STEPS), learns))
    resumed = sharing()
    resumed.load_state_dict(state)
    seen["resumed"] = ended(resumed, train(resumed, range(SAVED, STEPS), learns))
    plain, _ = plain_run()
    resumed = sharing()
    resumed.load_state_dict(loaded(plain.state_dict()))
    seen["resumed from one process"] = ended(resumed, train(resumed, range(SAVED, STEPS), learns))
    return seen


def plain_run():
    """One process up to the checkpoint."""
    trainer = trainer_of()
    with trainer.pretraining():
        logs = train(trainer, range(1))
    return trainer, logs + train(trainer, range(1, SAVED))


@pytest.fixture(scope="module")
def ranks_by_size():
    return run_in_groups(run_on_rank, timeout=60)


@pytest.fixture(scope="module")
def plain():
    """The uninterrupted run of one process: its state at the checkpoint, its logs and its weights."""
    trainer, logs = plain_run()
    state = loaded(trainer.state_dict())
    return state, logs + train(trainer, range(SAVED, STEPS)), trainer


def assert_close(actual, expected):
    assert actual.dtype == expected.dtype
    torch.testing.assert_close(actual, expected, rtol=1e-7, atol=1e-7 * float(expected.abs().max()))


def assert_same_state(actual, expected):
    """Of optimizers, as `torch.optim.AdamW` writes it."""
    assert actual["param_groups"] == expected["param_groups"]
    assert actual["state"].keys() == expected["state"].keys()
    for number, moments in expected["state"].items():
        assert actual["state"][number].keys() == moments.keys()
        for name, value in moments.items():
            assert_close(actual["state"][number][name], value)


@pytest.mark.parametrize("case", SHAPES)
@pytest.mark.parametrize("size", RANKS)
def test_weights_and_state_equal_those_of_one_process(ranks_by_size, size, case):
    optimizer, expected = run_optimizer(case, torch.optim.AdamW)
    ranks = [rank[case] for rank in ranks_by_size[size]]
    for rank in ranks:
        for weight, other, plain_weight in zip(rank["weights"], ranks[0]["weights"], expected, strict=True):
            assert torch.equal(weight, other)
            assert_close(weight, plain_weight)
    assert_same_state(ranks[0]["state"], optimizer.state_dict())
    # Those that do not keep it have nothing of it.
    assert [rank["state"]["state"] for rank in ranks[1:]] == [{}] * (size - 1)


@pytest.mark.parametrize("case", SHAPES)
@pytest.mark.parametrize("size", RANKS)
def test_each_rank_has_the_moments_of_its_share(ranks_by_size, size, case):
    total = sum(math.prod(shape) for group in SHAPES[case] for shape in group)
    elements = [rank[case]["bytes"] / 2 / 4 for rank in ranks_by_size[size]]
    assert sum(elements) == total
    assert all(abs(count - total / size) < 1 for count in elements)


@pytest.mark.parametrize("size", RANKS)
def test_a_rank_has_the_moments_that_are_planned(ranks_by_size, size, plain):
    draft = plain[2].draft
    weights = sum(parameter.nbytes for parameter in draft.parameters())
    most = max(rank["whole"]["bytes"] for rank in ranks_by_size[size])
    # Up to an element, of each of the moments.
    assert abs(draft_memory(draft, sharers=size) - (2 * weights + most)) <= 8


def test_shares_cover_every_element_once():
    for sizes in ([5, 1, 9, 2], [1], [100], [1, 1, 1]):
        weights = [torch.empty(size) for size in sizes]
        for num_ranks in range(1, 8):
            pieces = cut_weights(weights, num_ranks)
            covered = [(piece.number, element) for piece in pieces for element in range(piece.start, piece.stop)]
            assert covered == [(number, element) for number, size in enumerate(sizes) for element in range(size)]
            assert [piece.owner for piece in pieces] == sorted(piece.owner for piece in pieces)


@pytest.mark.parametrize("size", RANKS)
def test_a_draft_learns_what_it_does_in_one_process(ranks_by_size, size, plain):
    """With a pretraining rate, a schedule, decay and clipping, and an update that is left out."""
    state, logs, trainer = plain
    assert [math.isfinite(entry["draft/grad_norm"]) for entry in logs] == [step != LEFT_OUT for step in range(STEPS)]
    for rank in ranks_by_size[size]:
        whole = rank["whole"]
        assert whole["updates"] == (trainer.num_updates, trainer.num_pretrain_updates) == (STEPS - 1, 1)
        for ours, theirs in zip(whole["logs"], logs, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-6, nan_ok=True)
        for name, weight in weights_of(trainer).items():
            assert torch.equal(whole["weights"][name], ranks_by_size[size][0]["whole"]["weights"][name])
            assert_close(whole["weights"][name], weight)
        assert rank["before a step"] == {}
        assert_same_state(rank["state"]["optimizer"], state["optimizer"])


@pytest.mark.parametrize("size", RANKS)
def test_a_resumed_draft_repeats_the_uninterrupted_run(ranks_by_size, size, plain):
    for rank in ranks_by_size[size]:
        whole = rank["whole"]
        assert rank["resumed"]["logs"] == whole["logs"][SAVED:]
        for name, weight in whole["weights"].items():
            assert torch.equal(rank["resumed"]["weights"][name], weight)
            assert_close(rank["resumed from one process"]["weights"][name], weight)
        # A share keeps nothing of the file's whole moments.
        assert rank["resumed"]["bytes"] == rank["resumed from one process"]["bytes"] == whole["bytes"]


@pytest.mark.parametrize("size", RANKS)
def test_one_process_goes_on_from_what_ranks_have_saved(ranks_by_size, size, plain):
    _, logs, whole = plain
    resumed = trainer_of()
    resumed.load_state_dict(ranks_by_size[size][0]["state"])
    for ours, theirs in zip(train(resumed, range(SAVED, STEPS)), logs[SAVED:], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-6)
    for name, weight in weights_of(whole).items():
        assert_close(weights_of(resumed)[name], weight)


@pytest.fixture
def alone(tmp_path):
    """A world of this process."""
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_settings_are_those_of_the_state_as_with_any_optimizer(alone):
    saved = run_optimizer("many", torch.optim.AdamW)[0].state_dict()
    saved["param_groups"][0]["weight_decay"] = 0.7
    optimizer = ShardedAdamW(groups_of("many")[0], alone, **SETTINGS)
    optimizer.load_state_dict(saved)
    assert_same_state(optimizer.state_dict(), saved)


def test_the_state_of_another_draft_is_refused(alone):
    optimizer = ShardedAdamW(groups_of("many")[0], alone, **SETTINGS)
    other, _ = run_optimizer("one large", torch.optim.AdamW)
    with pytest.raises(ValueError, match=r"has \[1, 1\] weights in its groups, this one \[3, 3\]"):
        optimizer.load_state_dict(other.state_dict())


def test_weights_that_are_not_contiguous_are_refused(alone):
    groups, weights = groups_of("many")
    weights[0].data = weights[0].data.t().contiguous().t()
    with pytest.raises(ValueError, match="not contiguous"):
        ShardedAdamW(groups, alone, **SETTINGS)


def test_moments_in_another_order_in_memory_are_taken_over(alone):
    saved = run_optimizer("many", torch.optim.AdamW)[0].state_dict()
    turned = {name: value.t().contiguous().t() if value.dim() else value for name, value in saved["state"][0].items()}
    optimizer = ShardedAdamW(groups_of("many")[0], alone, **SETTINGS)
    optimizer.load_state_dict({**saved, "state": {**saved["state"], 0: turned}})
    assert_same_state(optimizer.state_dict(), saved)
