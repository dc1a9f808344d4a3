"""Ranks of `test_weights_faults.py`: one of two is killed in the middle of what sends weights from rank to rank."""

import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from forked_ranks import watch_ranks
from transformers import LlamaConfig, LlamaForCausalLM

from trl_codraft.pp.stages.replica import PolicyReplica
from trl_codraft.pp.stages.split import split_policy
from trl_codraft.pp.stages.weights import WholeStream, send_embedding


def tiny_policy():
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=32, num_hidden_layers=2, **sizes))


def kill():
    os.kill(os.getpid(), signal.SIGKILL)


def stream(rank, group):
    tensors = {f"weight {rank}.{k}": torch.zeros(4) for k in range(5)}
    whole = WholeStream(tensors.items(), group, torch.device("cpu"))

    def own():
        for name, tensor in tensors.items():
            if name == "weight 1.3":
                kill()
            yield name, tensor

    list(whole.stream(own()))


def embedding(rank, group):
    policy = tiny_policy()
    dist.barrier(group)
    if rank == 0:
        kill()
    send_embedding(policy, group)


def replica(rank, group, culprit):
    stage = split_policy(tiny_policy(), [1, 1], rank, lambda *arguments: None)
    whole = PolicyReplica([stage], group)
    dist.barrier(group)
    if rank == culprit:
        kill()
    whole.refresh()


CASES = {
    "stream (rank 1)": stream,
    "embedding (rank 0)": embedding,
    "replica (rank 1)": lambda rank, group: replica(rank, group, 1),
    "replica (rank 0)": lambda rank, group: replica(rank, group, 0),
}


def run_rank(rank, world_size, case):
    CASES[case](rank, dist.new_group([0, 1], backend="gloo"))


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    torch.save(
        {case: watch_ranks(run_rank, 2, folder / case, case, timeout=60) for case in CASES}, folder / "outcomes.pt"
    )
