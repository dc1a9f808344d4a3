"""
Ranks of `test_group_machinery.py`: `python machinery_worker.py OUT WORLD_SIZE` runs every check of this file on every
rank and saves, by name, the error of each or `None`. No TRL here: the machinery does not know it.
"""

import contextlib
import sys
import traceback
from datetime import timedelta

import torch
import torch.distributed as dist
from forked_ranks import fork_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from trl_codraft.group.exchange import LossGroup
from trl_codraft.group.header import Header, Phase, describe
from trl_codraft.group.members import ShardScores, backward_members, score_members, score_together
from trl_codraft.group.mesh import RankMesh


NAMES = ("flags", "ids", "half", "single", "double", "scalar", "input_ids", "attention_mask")
CPU = torch.device("cpu")
SHORT = timedelta(seconds=10)


def group_of(size):
    members = RankMesh(dist.get_world_size(), size).new_group(("pp", "cp"), timeout=SHORT)
    return LossGroup(members, dist.group.WORLD, CPU, NAMES)


def raised(error, call, *arguments):
    try:
        call(*arguments)
    except error as caught:
        return str(caught)
    raise AssertionError(f"{error.__name__} was not raised")


def headers_arrive_by_member(rank):
    group = group_of(2)
    header = Header(
        7, Phase.LOG_PROBS, rank, 3 + rank, 2, 2, (rank, 5), describe({"ids": torch.zeros(rank, 4)}, NAMES)
    )
    first = rank - rank % 2
    headers = group.exchange(header)
    assert [h.rows for h in headers] == [first, first + 1]
    assert headers[group.rank] == header


def one_failure_stops_all_ranks_with_its_message(rank):
    failure = ValueError("no reward today \u2603") if rank == 3 else None
    message = raised(RuntimeError, group_of(2).exchange, Header(1, Phase.LOSS), failure)
    assert "rank 3: ValueError: no reward today \u2603" in message
    assert "rank 0" not in message


def two_failures_are_both_named(rank):
    failure = KeyError("x" * 9000) if rank in (0, 2) else None
    message = raised(RuntimeError, group_of(2).exchange, Header(1, Phase.LOSS), failure)
    assert "rank 0: KeyError" in message
    assert "rank 2: KeyError" in message
    assert len(message) < 9000


def disagreement_stops_all_ranks(rank):
    group = group_of(2)
    message = raised(RuntimeError, group.exchange, Header(1, Phase.LOSS if rank != 2 else Phase.ROLLOUT))
    assert "phase: loss on rank 0, rollout on rank 2" in message
    message = raised(RuntimeError, group.exchange, Header(4 + (rank == 1), Phase.LOSS))
    assert "step: 4 on rank 0, 5 on rank 1" in message
    assert "beta is 0 on rank 0 and 1 on rank 2" in raised(
        ValueError, group.require_same, {"alpha": 1, "beta": rank // 2}
    )
    group.require_same({"alpha": 1})


def rows_travel_unchanged(rank):
    def rows_of(member):
        generator = torch.Generator().manual_seed(member)
        wide = torch.randn(5, 3 + member, generator=generator)
        return {
            "flags": wide > 0,
            "ids": (100 * wide).long().t(),  # not contiguous
            "half": wide.bfloat16()[:, 1],
            "single": None,
            "double": wide.double(),
            "scalar": torch.tensor(3.5 + member),
        }

    for size in (1, 2, 4):
        group = group_of(size)
        first = rank - rank % size
        own = rows_of(rank)
        headers = group.exchange(Header(0, Phase.LOSS, rows=5, tensors=describe(own, NAMES)))
        for member, header in enumerate(headers):
            expected = {name: value for name, value in rows_of(first + member).items() if value is not None}
            received = group.send_rows(own, header, member)
            assert list(received) == list(expected)
            for name, value in expected.items():
                assert torch.equal(received[name], value)
                assert received[name].dtype == value.dtype


def gathered_shards_are_whole_and_their_gradient_is_this_ranks(rank):
    group, shape = group_of(4), (3, 4)
    positions = [torch.tensor(p, dtype=torch.long) for p in ([5, 0, 7], [], [-1], [1, 2, 11, 6, -1])]
    everywhere = torch.arange(24.0, dtype=torch.float64).view(2, 12) + 1
    values = everywhere[:, positions[rank].clamp(min=0)].clone().requires_grad_()
    full = group.gather_shards(values, positions, shape)
    owned = torch.zeros(12, dtype=torch.bool)
    owned[torch.cat(positions)[torch.cat(positions) >= 0]] = True
    assert torch.equal(full, (everywhere * owned).view(2, *shape))
    weights = torch.randn(2, *shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    if rank == 2:
        return  # The backward does not communicate, so the others do not wait for this rank.
    (full * weights).sum().backward()
    expected = weights.view(2, 12)[:, positions[rank].clamp(min=0)] * (positions[rank] >= 0)
    assert torch.equal(values.grad, expected)


def nothing_to_gather(rank):
    values = torch.zeros(1, 0, requires_grad=True)
    full = group_of(2).gather_shards(values, [torch.zeros(0, dtype=torch.long)] * 2, (2, 3))
    full.sum().backward()
    assert torch.equal(full, torch.zeros(1, 2, 3))
    assert values.grad.shape == (1, 0)


class EveryOther:
    """Sharding of a toy policy `(vocabulary) -> score`: member `i` owns every `size`-th column."""

    def __init__(self, group):
        self.group = group

    def pack(self, input_ids, attention_mask, logits_to_keep):
        return input_ids, logits_to_keep

    def score(self, model, packed, compute_entropy, compute_aux_loss):
        input_ids, logits_to_keep = packed
        columns = torch.arange(input_ids[:, -logits_to_keep:].numel())
        positions = [(columns % self.group.size == member).nonzero().flatten() for member in range(self.group.size)]
        scores = model(input_ids[:, -logits_to_keep:]).flatten()[positions[self.group.rank]]
        return ShardScores(scores, 2 * scores, model.weight.sum() / self.group.size, positions)


class ToyPolicy(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(50, 3, generator=torch.Generator().manual_seed(5), dtype=torch.float64))

    def forward(self, ids):
        return self.weight[ids].square().sum(-1)


def rows_of_rank(rank, count):
    generator = torch.Generator().manual_seed(rank)
    ids = torch.randint(0, 50, (count, 5 + rank), generator=generator)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def every_rank_gets_the_scores_of_its_own_rows(rank):
    # Rank 1 has no rows, rank 2 an odd last chunk.
    count = (2, 0, 5, 1)[rank]
    policy = ToyPolicy()
    for size in (1, 2, 4):
        group = group_of(size)
        rows = rows_of_rank(rank, count)
        header = Header(0, Phase.EVALUATION, count, 2 + rank, 3, 2, (), describe(rows, NAMES))
        calls = []

        def score(ids, mask, length, group=group, calls=calls):
            calls.append(len(ids))
            return score_together(group, EveryOther(group), policy, ids, mask, length, True, True)[0]

        scores = score_members(group, group.exchange(header), rows, score)
        assert sum(calls) == sum((2, 0, 5, 1)[rank - rank % size :][:size])
        assert max(calls, default=0) <= 2
        expected = policy(rows["input_ids"][:, -3:])
        assert torch.equal(scores.log_probs, expected if count else torch.zeros(0, 3))
        if count:
            assert torch.equal(scores.entropies, 2 * expected)


def gradients(rank, size, count, policy, model, no_sync):
    """Gradients after the passes over all members, of the loss mean(score^2) of each rank's rows."""
    group = group_of(size)
    rows = rows_of_rank(rank, count)
    tensors = describe(rows, NAMES)
    headers = group.exchange(Header(0, Phase.LOSS, count, 2 + rank, 3, 0, (), tensors))
    passes = []

    def loss_of(member, rows):
        passes.append(member)
        ids, mask = rows["input_ids"], rows["attention_mask"]
        scores, _ = score_together(group, EveryOther(group), model, ids, mask, 3, False, False)
        return scores.log_probs.square().mean()

    backward_members(group, headers, rows, loss_of=loss_of, backward=torch.Tensor.backward, no_sync=no_sync).backward()
    assert passes == [member for member, header in enumerate(headers) if header.rows]
    gradient = policy.weight.grad
    return gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient


class ToyDDP(DistributedDataParallel):
    """`weight` of the module behind DDP, as `EveryOther` reads it."""

    @property
    def weight(self):
        return self.module.weight


def mean_of_rank_gradients(counts):
    """What data parallelism gives: the mean over all ranks of the gradients of their losses."""
    policy = ToyPolicy()
    losses = [policy(rows_of_rank(r, n)["input_ids"][:, -3:]).square().mean() for r, n in enumerate(counts) if n]
    (torch.stack(losses).sum() / len(counts)).backward()
    return policy.weight.grad


def gradients_are_those_of_data_parallelism_under_ddp(rank):
    for size, counts in (
        (1, (2, 1, 3, 2)),
        (2, (2, 1, 3, 2)),
        (4, (2, 1, 3, 2)),
        (2, (0, 1, 3, 0)),
        (4, (0, 1, 3, 0)),
    ):
        policy = ToyPolicy()
        model = ToyDDP(policy)
        gradient = gradients(rank, size, counts[rank], policy, model, model.no_sync)
        torch.testing.assert_close(gradient, mean_of_rank_gradients(counts), rtol=1e-13, atol=1e-13)


def gradients_are_those_of_data_parallelism_under_fsdp2(rank):
    for size in (2, 4):
        counts = (2, 1, 3, 2)
        policy = ToyPolicy()
        fully_shard(policy, mesh=init_device_mesh("cpu", (4,)))
        gradient = gradients(rank, size, counts[rank], policy, policy, contextlib.nullcontext)
        torch.testing.assert_close(gradient, mean_of_rank_gradients(counts), rtol=1e-13, atol=1e-13)


def a_group_without_rows_is_refused(rank):
    group = group_of(4)
    headers = group.exchange(Header(0, Phase.LOSS))
    message = raised(
        ValueError, lambda: backward_members(group, headers, {}, loss_of=None, backward=None, no_sync=None)
    )
    assert "per_device_train_batch_size" in message


def process_groups_are_those_of_the_mesh(rank):
    for pipeline, context in ((2, 2), (2, 1)):
        mesh = RankMesh(4, pipeline, context)
        groups = mesh.new_groups(SHORT)
        assert dist.get_process_group_ranks(groups.loss) == mesh.loss_group(rank)
        assert dist.get_process_group_ranks(groups.pipeline) == mesh.pipeline(rank)
        assert dist.get_process_group_ranks(groups.host) == mesh.pipeline(rank)
        assert dist.get_process_group_ranks(groups.holders) == mesh.holders(rank)
        if context == 1:
            assert groups.pipeline is groups.loss
            assert groups.context is None
        else:
            assert dist.get_process_group_ranks(groups.context) == mesh.context_group(rank)


CHECKS = [
    headers_arrive_by_member,
    one_failure_stops_all_ranks_with_its_message,
    two_failures_are_both_named,
    disagreement_stops_all_ranks,
    rows_travel_unchanged,
    gathered_shards_are_whole_and_their_gradient_is_this_ranks,
    nothing_to_gather,
    every_rank_gets_the_scores_of_its_own_rows,
    gradients_are_those_of_data_parallelism_under_ddp,
    gradients_are_those_of_data_parallelism_under_fsdp2,
    a_group_without_rows_is_refused,
    process_groups_are_those_of_the_mesh,
]


def run_checks(rank, world_size, names):
    results = {}
    for check in CHECKS:
        if not names or check.__name__ in names:
            results[check.__name__] = None
            try:
                check(rank)
            except Exception:
                results[check.__name__] = traceback.format_exc()
            dist.barrier()
    return results


if __name__ == "__main__":
    fork_ranks(run_checks, int(sys.argv[2]), sys.argv[1], sys.argv[3:])
