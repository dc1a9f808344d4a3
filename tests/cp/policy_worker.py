"""
Ranks of `test_policy_on_shards.py`: `python policy_worker.py OUT WORLD_SIZE` scores microbatches on shards, family
after family, and saves values and gradient sums beside the plain forward's on padded rows.
"""

import copy
import sys
import warnings

import torch
import torch.distributed as dist
from forked_ranks import fork_ranks
from tiny import tiny_policy
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers.utils import logging
from trl.trainer.utils import add_fused_lm_head

from trl_codraft.cp import ContextLayout
from trl_codraft.cp.probe import disagreement_with_plain
from trl_codraft.cp.sharding import ContextSharding
from trl_codraft.group.exchange import LossGroup
from trl_codraft.group.members import score_together


LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 4,
    "long_factor": [2.0, 3.0, 4.0, 5.0],
    "original_max_position_embeddings": 12,
    "factor": 4.0,
}
EXPERTS = {"dtype": torch.float32, "num_local_experts": 4, "num_experts_per_tok": 2}
FAMILIES = {
    "llama": {},
    "qwen3": {},
    "mistral": {"sliding_window": 4},
    "gemma3_text": {"sliding_window": 3, "layer_types": ["sliding_attention", "full_attention"] * 2},
    "gemma4_text": {},
    "phi3": {"max_position_embeddings": 64, "original_max_position_embeddings": 12, "rope_parameters": LONGROPE},
    "gpt_neox": {},
    # Values of another width than keys.
    "deepseek_v3": {
        "head_dim": 4,
        "kv_lora_rank": 8,
        "q_lora_rank": 8,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 6,
        "v_head_dim": 8,
        "num_key_value_heads": 4,
        "first_k_dense_replace": 4,
    },
    # Sinks, and windows in every other layer.
    "gpt_oss": {"sliding_window": 4, **EXPERTS},
    "mixtral": EXPERTS,
}

# First column and last + 1 of each row, of 26 columns; the last 16 are the completion.
MICROBATCHES = {
    "ragged": ((0, 26), (7, 12), (9, 19), (4, 10), (3, 24)),
    "tiny": ((9, 11), (9, 11)),
    "one": ((9, 11),),
}
COLUMNS, COMPLETION = 26, 16


def microbatch(name):
    rows = MICROBATCHES[name]
    mask = torch.zeros(len(rows), COLUMNS, dtype=torch.long)
    for row, (start, end) in enumerate(rows):
        mask[row, start:end] = 1
    generator = torch.Generator().manual_seed(len(rows))
    ids = torch.randint(3, 104, mask.shape, generator=generator)
    weights = torch.randn(2, len(rows), COMPLETION, generator=generator, dtype=torch.float64)
    return ids.masked_fill(mask == 0, 0), mask, weights


def build(family, **training):
    sizes = {"dtype": torch.float64, **FAMILIES[family]}
    policy = tiny_policy(family, scale=5.0, **sizes)
    add_fused_lm_head(policy, temperature=0.8, outputs=("log_probs", "entropy"))
    if training:
        policy.gradient_checkpointing_enable(gradient_checkpointing_kwargs=training)
    return policy.train()


def loss_of(log_probs, entropies, aux_loss, weights):
    loss = (weights[0] * log_probs + weights[1] * entropies).sum()
    return loss if aux_loss is None else loss + 3.0 * aux_loss


def outcome(policy, log_probs, entropies, aux_loss):
    values = {"log_probs": log_probs.detach(), "entropies": entropies.detach()}
    if aux_loss is not None:
        values["aux_loss"] = aux_loss.detach()
    gradients = {
        name: p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
        for name, p in policy.named_parameters()
        if p.grad is not None
    }
    return values, gradients


def plain(policy, name, has_experts):
    """The forward that the trainer makes without context parallelism."""
    ids, mask, weights = microbatch(name)
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, :-COMPLETION] = -100
    router = {"output_router_logits": True} if has_experts else {}
    out = policy(ids, attention_mask=mask, labels=labels, fused_lm_head=True, **router)
    log_probs, entropies = (values[:, -COMPLETION:] for values in (out.log_probs, out.entropy))
    loss_of(log_probs, entropies, out.aux_loss, weights).backward()
    return outcome(policy, log_probs, entropies, out.aux_loss)


def group_of_world():
    return LossGroup(dist.group.WORLD, dist.group.WORLD, torch.device("cpu"), ("input_ids", "attention_mask"))


def on_shards(policy, name, has_experts, mode, model=None):
    group = group_of_world()
    sharding = ContextSharding(group.members, lambda model: policy, mode)
    ids, mask, weights = microbatch(name)
    scores, _ = score_together(group, sharding, model or policy, ids, mask, COMPLETION, True, has_experts)
    loss_of(*scores, weights).backward()
    return outcome(policy, *scores)


def summed(gradients):
    for gradient in gradients.values():
        dist.all_reduce(gradient)
    return gradients


def compare(family, name, mode, **training):
    has_experts = family in ("mixtral", "gpt_oss")
    reference = build(family, **training)
    values, gradients = on_shards(build(family, **training), name, has_experts, mode)
    return (values, summed(gradients)), plain(reference, name, has_experts)


def interleaved():
    """Two forwards on different microbatches before either's backward: each recomputation needs its own layout."""
    policy, reference = build("llama", use_reentrant=False), build("llama")
    group, total = group_of_world(), 0
    for name, mode in (("ragged", "document"), ("tiny", "hybrid")):
        ids, mask, weights = microbatch(name)
        sharding = ContextSharding(group.members, lambda model: policy, mode)
        scores, _ = score_together(group, sharding, policy, ids, mask, COMPLETION, True, False)
        total = total + loss_of(*scores, weights)
        plain(reference, name, False)
    total.backward()
    gradients = {name: p.grad for name, p in policy.named_parameters()}
    return ({}, summed(gradients)), ({}, {name: p.grad for name, p in reference.named_parameters()})


def sharded_weights():
    """FSDP2 over the same ranks: it averages gradients, so their sum is a multiple."""
    policy = build("llama", use_reentrant=False)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in policy.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(policy, mesh=mesh)
    values, gradients = on_shards(policy, "ragged", False, "hybrid")
    gradients = {name: gradient * dist.get_world_size() for name, gradient in gradients.items()}
    return (values, gradients), plain(build("llama"), "ragged", False)


def implementation_stays(rank):
    """The user's attention is back after a forward, also where gradient checkpointing called attention again."""
    ids, mask, _ = microbatch("ragged")
    stays = []
    for reentrant in (False, True):
        policy = build("llama", use_reentrant=reentrant)
        before = policy(ids, attention_mask=mask).logits.detach()
        assert disagreement_with_plain(policy) is None
        for _ in range(2):  # each with a routing of its own
            on_shards(policy, "ragged", False, "document")
            stays.append(policy.config._attn_implementation == "sdpa")
            stays.append(torch.equal(policy(ids, attention_mask=mask).logits, before))
    return all(stays)


def broken():
    """What a classical mistake gives: labels taken from the next row of the shard."""
    original = ContextLayout.shard

    def shard(layout, values, offset=0, fill=None):
        taken = original(layout, values, offset, fill)
        return torch.where(taken == fill, taken, original(layout, values).roll(-1).clamp(min=0)) if offset else taken

    ContextLayout.shard = shard
    try:
        return compare("llama", "ragged", "document")
    finally:
        ContextLayout.shard = original


def work(rank, world_size):
    warnings.simplefilter("ignore")
    logging.set_verbosity_error()
    results = {}
    for family in FAMILIES:
        results[f"{family}, whole rows travel"] = compare(family, "ragged", "document")
    for name in MICROBATCHES:
        results[f"llama, {name}"] = compare("llama", name, "hybrid")
        results[f"mixtral, {name}"] = compare("mixtral", name, "hybrid")
    for reentrant in (False, True):
        for family in ("llama", "mistral", "gpt_oss"):
            results[f"{family}, reentrant {reentrant}"] = compare(
                family, "ragged", "document", use_reentrant=reentrant
            )
    results["interleaved"] = interleaved()
    results["fsdp2"] = sharded_weights()
    results["implementation stays"] = implementation_stays(rank)
    results["broken"] = broken()
    return copy.deepcopy(results)


if __name__ == "__main__":
    fork_ranks(work, int(sys.argv[2]), sys.argv[1])
