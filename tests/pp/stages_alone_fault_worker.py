"""
Ranks of `test_stages_alone_faults.py`: `python stages_alone_fault_worker.py OUT FAULT...` lets something fail on one
of two ranks that have parts or shards of a policy, fault after fault, and saves how all of them ended.
"""

import sys
import threading
import time
from contextlib import nullcontext
from itertools import islice
from pathlib import Path

import torch.distributed as dist
from faults import TIMEOUT, save_endings, strike
from fsdp2_on_cpu import fsdp2_on_cpu
from pp.stages_alone_worker import SERVED, FakeClient, serve_with
from pp.trainer_worker import build, save_policies
from replay import token_reward

from trl_codraft.vllm import generation as vllm_rollouts
from trl_codraft.vllm.generation import DraftVLLMGeneration


# A run in which every rank has the whole policy, and nothing of ours generates.
WHOLE = "raised in generate, no draft"
CASE = {**SERVED, "max_steps": 3, "ddp_timeout": TIMEOUT, "steps_per_generation": 1, "draft_pretrain_steps": 0}
# Before the server has ever been told of the policy's tensors.
FIRST = "raised in a draft's push, before the first of shards"
# Where each rank has a shard of every tensor: the size.
SHARDS = {"raised late in a push of shards": "1", FIRST: "1x2"}
# Of 57 tensors, the first rank has the first 28.
TAKEN = {
    "raised before a push": 0,
    "raised late in a push": 40,
    "silent in a push": 40,
    "raised late in a push of shards": 40,
}


class FaultyClient(FakeClient):
    """A server that fails from the second step on."""

    fault: str
    out: Path
    trainer = None

    @classmethod
    def fails(cls):
        return cls.trainer is not None and cls.trainer.state.global_step >= 1

    def generate(self, prompts, n, max_tokens, **settings):
        if "raised in generate" in self.fault and self.fails():
            strike(self.out, self.fault)
        return super().generate(prompts, n, max_tokens, **settings)

    def update_named_params(self, metadata, named_params):
        if self.receives is self.drafts and self.fault == FIRST:
            strike(self.out, self.fault)
        if self.receives is self.pushes and self.fault in TAKEN and self.fails():
            assert len(list(islice(named_params, TAKEN[self.fault]))) == TAKEN[self.fault]
            if self.fault.startswith("silent"):
                (self.out / "struck").write_text(str(time.time()))
                threading.Event().wait()
            strike(self.out, self.fault)
        super().update_named_params(metadata, named_params)


def train(rank, world_size, out, fault):
    serve_with(FaultyClient)
    FaultyClient.fault, FaultyClient.out, FaultyClient.pushes, FaultyClient.drafts = fault, out, [], []
    # It answers all the same.
    vllm_rollouts.server_answers, DraftVLLMGeneration.health_interval = lambda client: True, 0.2

    send = dist.send

    def faulty_send(tensor, **settings):
        if rank == 1 and fault == "raised in a layer that is pushed" and FaultyClient.fails() and next(sent) == 7:
            strike(out, fault)
        send(tensor, **settings)

    sent = iter(range(10**6))
    dist.send = faulty_send

    def reward(completion_ids, trainer_state, **kwargs):
        if rank == 1 and fault == "raised in a reward" and trainer_state.global_step >= 1:
            strike(out, fault)
        return token_reward(completion_ids)

    case, size = CASE, "2p"
    if fault == WHOLE:
        case = {name: value for name, value in CASE.items() if "draft" not in name} | {"use_draft": False}
        case, size = {**case, "speculates": True}, "2"
    with fsdp2_on_cpu() if fault in SHARDS else nullcontext():
        trainer = build(case, out, world_size, SHARDS.get(fault, size), rollout_func=None, reward_funcs=reward)
        FaultyClient.trainer = trainer
        trainer.train()


if __name__ == "__main__":
    save_policies(Path(sys.argv[1]))
    save_endings(train, sys.argv[2:])
