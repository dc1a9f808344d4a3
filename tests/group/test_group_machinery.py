"""The machinery without a trainer, on four gloo processes that run the checks of `machinery_worker.py`."""

from types import SimpleNamespace

import pytest
import torch
from forked_ranks import run_script
from machinery_worker import CHECKS
from torch import nn

from trl_codraft.group.header import MAX_TENSORS, Header, Phase, describe
from trl_codraft.group.members import MemberAccelerator, attributes_set, report_as
from trl_codraft.grpo.support import require_averaged_gradients


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return run_script("machinery_worker.py", tmp_path_factory.mktemp("machinery"), 4, timeout=200)


@pytest.mark.parametrize("name", [check.__name__ for check in CHECKS])
def test_on_four_ranks(ranks, name):
    assert len(ranks) == 4
    for rank, results in enumerate(ranks):
        assert results[name] is None, f"rank {rank}: {results[name]}"


def test_headers_survive_their_encoding_and_keep_their_length():
    names = tuple(f"tensor{i}" for i in range(MAX_TENSORS))
    header = Header(
        step=2**40,
        phase=Phase.ENTROPY_THRESHOLD,
        rows=3,
        prompt_length=262144,
        completion_length=5,
        chunk_rows=2,
        shard_tokens=(7, 0, 1),
        tensors=describe(
            {names[0]: torch.zeros(3, 5, dtype=torch.bfloat16), names[9]: torch.tensor(1), names[15]: torch.zeros(0)},
            names,
        ),
        error_bytes=12,
    )
    numbers = header.encode(names, 3)
    assert Header.decode(numbers, names, 3) == header
    assert len(Header(0, Phase.LOSS).encode((), 3)) == len(numbers)


def test_tensors_that_cannot_travel_are_named():
    with pytest.raises(ValueError, match="pixel_values.*context_parallel_size=1"):
        describe({"pixel_values": torch.zeros(1)}, ("ids",))
    with pytest.raises(ValueError, match=r"ids.*\(1, 1, 1\)"):
        describe({"ids": torch.zeros(1, 1, 1)}, ("ids",))
    assert describe({"pixel_values": None}, ("ids",)) == {}


class Accelerator:
    sync_gradients, num_processes, device = True, 8, "cpu"

    def gather(self, tensor):
        raise AssertionError("the accelerator of all ranks was used")

    gather_for_metrics = reduce = pad_across_processes = gather

    def autocast(self):
        return "autocast"


def test_stand_in_accelerator_communicates_nothing_and_delegates_the_rest():
    accelerator = MemberAccelerator(Accelerator())
    tensor = torch.arange(3)
    assert accelerator.gather(tensor) is tensor
    assert accelerator.gather_for_metrics(tensor) is tensor
    assert accelerator.reduce(tensor, reduction="sum") is tensor
    assert accelerator.pad_across_processes(tensor, dim=0, pad_index=-1e9) is tensor
    assert accelerator.sync_gradients is False
    assert accelerator.num_processes == 8
    assert accelerator.autocast() == "autocast"


def test_attributes_come_back_also_after_an_exception():
    owner = Accelerator()

    def fail_inside():
        with attributes_set(owner, num_processes=1, device=None):
            assert (owner.num_processes, owner.device) == (1, None)
            owner.device = "changed inside"
            raise KeyError

    pytest.raises(KeyError, fail_inside)
    assert (owner.num_processes, owner.device) == (8, "cpu")


def test_reported_loss_has_one_value_and_the_gradient_of_another():
    weight = torch.tensor(3.0, requires_grad=True)
    reported = report_as(weight.square(), torch.tensor(0.125))
    reported.backward()
    assert (reported.item(), weight.grad.item()) == (0.125, 6.0)


def test_several_ranks_do_not_train_a_policy_whose_gradients_nobody_averages():
    policy = nn.Linear(2, 2)
    with pytest.raises(RuntimeError, match=r"`evaluate\(\)` is called before `train\(\)`"):
        require_averaged_gradients(SimpleNamespace(num_processes=2, is_fsdp2=False), policy)
    require_averaged_gradients(SimpleNamespace(num_processes=1, is_fsdp2=False), policy)
    require_averaged_gradients(SimpleNamespace(num_processes=2, is_fsdp2=True), policy)
