"""Two gloo processes against one process on the union of their rows."""

import pytest
import torch
import torch.distributed as dist
from cp.groups import run_in_groups
from modeling.draft_cases import NOTHING_TRAINED, RAGGED, draft_case, microbatch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from trl_codraft.training.draft_trainer import DraftTrainer, DraftTrainingArguments


K = 3
STEPS = 2

# Per case: what each rank accumulates, in order; None is a rank without tokens. Rows of a rank keep their number.
CASES = {
    "uneven": [[RAGGED, ([5], [[(2, 5)]])], [([4, 11], [[(3, 4)], [(1, 11)]]), ([3], [[(0, 3)]])]],
    "one rank untrained": [[RAGGED, NOTHING_TRAINED], [NOTHING_TRAINED, NOTHING_TRAINED]],
    "one rank empty": [[RAGGED, None], [None, None]],
    "nothing anywhere": [[NOTHING_TRAINED], [None]],
}


def microbatches(config, plan, rank):
    return [
        None if case is None else microbatch(config, *case, K, seed=10 * rank + index)[0]
        for index, case in enumerate(plan)
    ]


def train(reduce_sum, plans, reduced, shard=False):
    """Weights, gradient sums and metrics of `STEPS` steps over the microbatches of `plans` (rank, plan)."""
    draft, head = draft_case(reduced=reduced)
    if shard:
        fully_shard(head.policy, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        assert isinstance(head.policy.get_output_embeddings().weight, DTensor)
    args = DraftTrainingArguments(num_passes=K, decay=0.7, loss_chunk_size=7, learning_rate=1e-2, warmup_steps=0)
    gradients = []

    def recording(flat):
        flat = reduce_sum(flat)
        gradients.append(flat.clone())
        return flat

    trainer = DraftTrainer(draft, head, args, reduce_sum=recording, num_training_steps=10)
    for _ in range(STEPS):
        for rank, plan in plans:
            for batch in microbatches(draft.config, plan, rank):
                trainer.accumulate(batch)
        metrics = trainer.step()
    return {"weights": draft.state_dict(), "gradients": gradients, "metrics": metrics, "updates": trainer.num_updates}


def reduce_over_ranks(flat):
    dist.all_reduce(flat)
    return flat


def train_on_rank(group):
    """Results of this rank, for every case."""
    rank = dist.get_rank(group)
    results = {
        (case, reduced): train(reduce_over_ranks, [(rank, plans[rank])], reduced)
        for case, plans in CASES.items()
        for reduced in (False, True)
    }
    plan = CASES["one rank empty"][rank]
    results["sharded head"] = train(reduce_over_ranks, [(rank, plan)], reduced=True, shard=True)
    return results


@pytest.fixture(scope="module")
def results_of_ranks():
    """Results of both ranks; one pair of processes runs all cases, as starting it costs more than they do."""
    return run_in_groups(train_on_rank, ranks={2: [0, 1]}, timeout=60)[2]


def assert_equal(actual, expected, tolerance):
    for name, value in expected["weights"].items():
        torch.testing.assert_close(actual["weights"][name], value, rtol=tolerance, atol=tolerance)
    for mine, theirs in zip(actual["gradients"], expected["gradients"], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance)
    assert actual["metrics"] == pytest.approx(expected["metrics"], rel=tolerance)
    assert actual["updates"] == expected["updates"]


@pytest.mark.parametrize("reduced", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_two_processes_equal_one_on_the_union_of_rows(results_of_ranks, case, reduced):
    first, second = (results[case, reduced] for results in results_of_ranks)
    union = train(lambda flat: flat, list(enumerate(CASES[case])), reduced)
    assert_equal(first, union, 1e-11)
    assert_equal(second, first, 0.0)
    assert union["updates"] == (0 if case == "nothing anywhere" else STEPS)


def test_a_policy_sharded_by_fsdp2_teaches_the_same_also_with_an_empty_rank(results_of_ranks):
    union = train(lambda flat: flat, list(enumerate(CASES["one rank empty"])), reduced=True)
    assert_equal(results_of_ranks[0]["sharded head"], union, 1e-11)
    assert_equal(results_of_ranks[1]["sharded head"], results_of_ranks[0]["sharded head"], 0.0)
