"""
Ranks of `test_lockstep.py`: `python lockstep_worker.py OUT` shards a policy by FSDP2 over two ranks whose rows end at
different times.
"""

import sys

import torch
from forked_ranks import fork_ranks
from rollout.drafts import ragged_prompts, random_draft, shared_prompts
from tiny import tiny_policy
from torch.distributed.fsdp import fully_shard

from trl_codraft.rollout.speculative import SpeculativeDecoder


def generate(rank, world_size):
    """For each call the forwards that this rank ran, and those it counted."""
    policy = tiny_policy("llama", dtype=torch.float64, scale=3.0, num_hidden_layers=2)
    draft = random_draft(policy, scale=1.5)
    # Only the second rank's prompts have something in common, which alone would be worth a forward of its own.
    ids, mask = shared_prompts(70, [5, 2, 7]) if rank == 1 else ragged_prompts([5, 2])
    calls = []
    for k, new_tokens in ((2, 4 + 11 * rank), (0, 9 - 5 * rank), ("auto", 6 + 8 * rank), (3, 1 + 5 * rank)):
        calls.append((k, {"attention_mask": mask, "do_sample": False, "max_new_tokens": new_tokens}))
    expected = [policy.generate(ids, **kwargs) for _, kwargs in calls]

    for layer in policy.model.layers:
        fully_shard(layer)
    fully_shard(policy)
    forwards, counts = [], []
    policy.register_forward_pre_hook(lambda *args: forwards.append(1))
    for (k, kwargs), plain in zip(calls, expected, strict=True):
        forwards.clear()
        decoder = SpeculativeDecoder(policy, draft, num_draft_tokens=k)
        assert torch.equal(decoder.bind(policy.generate)(ids, **kwargs), plain), (rank, k)
        decoder.close()
        counts.append((len(forwards), decoder.stats.policy_forwards))
    return counts


if __name__ == "__main__":
    fork_ranks(generate, 2, sys.argv[1])
