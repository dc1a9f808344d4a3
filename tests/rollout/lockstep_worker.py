"""One rank of the lockstep test: FSDP2-sharded policy, ranks whose rows end at different times."""

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from rollout.drafts import ragged_prompts, random_draft
from tiny import tiny_policy
from torch.distributed.fsdp import fully_shard

from trl_codraft.rollout.speculative import SpeculativeDecoder


def main(rank, store):
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=timedelta(seconds=60)
    )
    policy = tiny_policy("llama", dtype=torch.float64, scale=3.0, num_hidden_layers=2)
    draft = random_draft(policy, scale=1.5)
    ids, mask = ragged_prompts([5, 2, 7][: 2 + rank], seed=rank)
    calls = []
    for k, new_tokens in ((2, 4 + 11 * rank), (0, 9 - 5 * rank), ("auto", 6 + 8 * rank), (3, 1 + 5 * rank)):
        calls.append((k, {"attention_mask": mask, "do_sample": False, "max_new_tokens": new_tokens}))
    expected = [policy.generate(ids, **kwargs) for _, kwargs in calls]

    for layer in policy.model.layers:
        fully_shard(layer)
    fully_shard(policy)
    forwards = []
    policy.register_forward_pre_hook(lambda *args: forwards.append(1))
    for (k, kwargs), plain in zip(calls, expected, strict=True):
        forwards.clear()
        decoder = SpeculativeDecoder(policy, draft, num_draft_tokens=k)
        assert torch.equal(decoder.bind(policy.generate)(ids, **kwargs), plain), (rank, k)
        decoder.close()
        counts = [None, None]
        dist.all_gather_object(counts, len(forwards))
        assert counts[0] == counts[1] == decoder.stats.policy_forwards, counts
    dist.destroy_process_group()
    print("rank", rank, "ok")


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
