"""The mesh of ranks against numpy's own cut of `range(world)` along three axes."""

import re

import numpy as np
import pytest

from trl_codraft.group.mesh import RankMesh


MESHES = [(dp, pp, cp) for dp in (1, 2, 3) for pp in (1, 2, 4) for cp in (1, 2, 3)]


@pytest.mark.parametrize("sizes", MESHES)
def test_every_place_and_group_is_that_of_the_axes_dp_pp_cp(sizes):
    dp, pp, cp = sizes
    mesh = RankMesh(dp * pp * cp, pp, cp)
    grid = np.arange(mesh.world_size).reshape(sizes)
    assert (mesh.num_replicas, mesh.group_size) == (dp, pp * cp)
    for place, rank in np.ndenumerate(grid):
        replica, stage, shard = place
        assert mesh.place_of(rank) == place
        assert mesh.loss_group(rank) == grid[replica].flatten().tolist()
        assert mesh.pipeline(rank) == grid[replica, :, shard].tolist()
        assert mesh.context_group(rank) == grid[replica, stage].tolist()
        assert mesh.holders(rank) == grid[:, stage].flatten().tolist()
        assert mesh.place_of(mesh.loss_group(rank)[mesh.rank_of_last]).pp == pp - 1


@pytest.mark.parametrize("sizes", MESHES)
def test_groups_of_a_kind_hold_every_rank_once(sizes):
    dp, pp, cp = sizes
    mesh = RankMesh(dp * pp * cp, pp, cp)
    for ranks_of in (mesh.loss_group, mesh.pipeline, mesh.context_group, mesh.holders):
        groups = {tuple(ranks_of(rank)) for rank in range(mesh.world_size)}
        assert sorted(rank for group in groups for rank in group) == list(range(mesh.world_size))


@pytest.mark.parametrize(
    ("world", "pipeline", "context", "message"),
    [
        (3, 2, 1, "`pipeline_parallel_size=2` with 3 process(es): ranks that share a microbatch come in groups of 2."),
        (2, 1, 4, "`torchrun --nproc_per_node 4`; on CPU "
                  "with `ACCELERATE_USE_CPU=true`), or set `context_parallel_size=1`"),
        (6, 2, 2, "or set `pipeline_parallel_size=1` and `context_parallel_size=1`."),
        (4, 0, 1, "`pipeline_parallel_size=0` is not a number of ranks. Set 1 or more."),
        (4, 1, -2, "`context_parallel_size=-2` is not a number of ranks."),
    ],
)  # fmt: skip
def test_ranks_that_do_not_split_are_refused_by_setting(world, pipeline, context, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        RankMesh(world, pipeline, context)


def test_only_context_groups_that_cross_nodes_warn(caplog):
    for context in (1, 2, 4, 8):
        RankMesh(8, 1, context).warn_if_crossing_nodes(4)
    RankMesh(6, 1, 3).warn_if_crossing_nodes(4)
    assert [record.message.split()[0] for record in caplog.records] == [
        "`context_parallel_size=8`",
        "`context_parallel_size=3`",
    ]
