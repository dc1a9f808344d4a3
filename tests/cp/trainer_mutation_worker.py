"""
Ranks of `test_cp_trainer_mutations.py`: `python trainer_mutation_worker.py OUT` breaks one thing at a time and trains,
and saves the records of each broken run beside the plain run's.
"""

import contextlib
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
from cp.trainer_cases import CASES
from cp.trainer_worker import run, save_policies
from forked_ranks import fork_broken_ranks
from mutations import Mutation, runs_of

from trl_codraft.cp import experts, probe
from trl_codraft.cp import routing as model
from trl_codraft.cp.layout import ContextLayout
from trl_codraft.cp.sharding import ContextSharding
from trl_codraft.group import exchange
from trl_codraft.grpo.learner import DraftLearner


original_shard = ContextLayout.shard
original_pack = ContextSharding.pack
original_backward = exchange._GatherShards.backward


def labels_of_the_next_row(layout, values, offset=0, fill=None):
    taken = original_shard(layout, values, offset, fill)
    if not offset or fill is None or fill is False:
        return taken
    return torch.where(taken == fill, taken, original_shard(layout, values).roll(-1).clamp(min=0))


def positions_counted_on_the_shard(self, *arguments):
    packed = original_pack(self, *arguments)
    packed.columns[packed.layout.rows] = torch.arange(packed.layout.num_rows)
    return packed


def slices_times_the_size_of_the_group(ctx, gradient):
    own, *rest = original_backward(ctx, gradient)
    return 2 * own, *rest


def drop_other_members(self):
    self._kept = self._kept[-1:]
    original_learn(self)


original_learn = DraftLearner.learn_from_kept

MUTATIONS = {
    "labels of the next row": Mutation("dapo", ContextLayout, "shard", labels_of_the_next_row),
    "positions counted on the shard": Mutation("dapo", ContextSharding, "pack", positions_counted_on_the_shard),
    "own slice times the size of the group": Mutation(
        "dapo",
        exchange._GatherShards,
        "backward",
        staticmethod(slices_times_the_size_of_the_group),
    ),
    "draft learns from one member": Mutation("dapo", DraftLearner, "learn_from_kept", drop_other_members),
    "load-balancing loss of the shard": Mutation(
        "checkpointed experts",
        experts,
        "dist",
        SimpleNamespace(all_reduce=lambda *a, **k: None),
    ),
    "length of the shard decides": Mutation(
        "dynamic", model, "decided_by_length", lambda *a: contextlib.nullcontext()
    ),
    "window left out": Mutation(
        "window",
        model,
        "ring_attention",
        lambda *a, window=None, attention=model.ring_attention, **k: attention(*a, **k),
    ),
}


def run_case(case, out, world_size, mutation):
    # The probe at construction would notice some.
    with mock.patch.object(probe, "HALF_TOLERANCE", 1e9), mock.patch.object(probe, "TOLERANCES", {}):
        return run(CASES[case], out, world_size, "1" if mutation is None else "2")


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    save_policies(folder)
    fork_broken_ranks(runs_of(MUTATIONS, run_case), MUTATIONS, 2, folder)
