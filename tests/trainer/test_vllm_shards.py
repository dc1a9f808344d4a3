"""Pushes of a policy that FSDP2 shards."""

import copy

import pytest
import torch
import torch.distributed as dist
from tiny import tiny_policy
from torch.distributed import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from trl_codraft.vllm.refit import reshard


@pytest.fixture
def mesh():
    # Runs of other tests leave theirs.
    own = not dist.is_initialized()
    if own:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    if own:
        dist.destroy_process_group()


def whole(policy):
    return {name for name, parameter in policy.named_parameters() if not isinstance(parameter, DTensor)}


def test_what_forwards_leave_whole_is_sharded_before_a_push_and_trains_as_before(mesh):
    policy = tiny_policy("llama", num_hidden_layers=2)
    plain, ids = copy.deepcopy(policy), torch.arange(12).view(2, 6)
    for module in (policy.model.embed_tokens, *policy.model.layers):
        fully_shard(module, mesh=mesh, reshard_after_forward=True)
    # As Accelerate does.
    fully_shard([policy.model.norm, policy.lm_head], mesh=mesh, reshard_after_forward=False)
    fully_shard(policy, mesh=mesh)
    with torch.no_grad():
        policy(ids)
        assert whole(policy) == {"model.norm.weight", "lm_head.weight"}
        reshard(policy)
        assert not whole(policy)
        policy.model(ids)  # what a draft reads needs no head
        assert whole(policy) == {"model.norm.weight", "lm_head.weight"}
        reshard(policy)
        assert not whole(policy)
    for model in (policy, plain):
        model(ids, labels=ids).loss.backward()
    for (name, parameter), own in zip(policy.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(parameter.full_tensor(), own, rtol=0, atol=0, msg=name)
        torch.testing.assert_close(parameter.grad.full_tensor(), own.grad, rtol=1e-5, atol=1e-7, msg=name)
