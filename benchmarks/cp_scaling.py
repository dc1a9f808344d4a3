"""
Draft attention over K passes, split over 1, 2 and 4 processes, against two baselines in the same run:

(a) dense: one process, keys of all passes concatenated and masked, as an unroll without a branch kernel does it;
(b) gather: split, the trunk's keys gathered anew in every pass.

First all arms are checked to give the same output and gradients. Then, per rank: bytes kept for the backward, bytes
sent, growth of the resident size, time. On a CPU the processes share the cores, so times say nothing about scaling,
only about overhead.

    python benchmarks/cp_scaling.py --length 2048 --passes 4
"""

import argparse
import os
import tempfile
import time
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from measuring import machine, reset_peak, resident_bytes
from torch.nn import functional as F

from trl_codraft.cp import ContextLayout, ring_attention
from trl_codraft.cp.gathered import gather_trunk


ARMS = ("ring", "gather_once", "gather")


def whole_inputs(args):
    """Queries, keys, values of every pass for the whole document: three `(K, S, heads, D)` tensors."""
    generator = torch.Generator().manual_seed(0)
    heads = (args.heads, args.kv_heads, args.kv_heads)
    return [torch.randn(args.passes, args.length, count, args.head_dim, generator=generator) for count in heads]


def split_attention(layout, queries, keys, values, arm):
    """Outputs of all passes on this rank's rows."""
    k, v = keys[0], values[0]
    trunk = gather_trunk(k, v, layout) if arm == "gather_once" else None
    outs = []
    for num_pass, q in enumerate(queries):
        branch = (keys[1 : num_pass + 1], values[1 : num_pass + 1]) if num_pass else None
        if arm == "gather":
            trunk = gather_trunk(k, v, layout)
        outs.append(ring_attention(q, k, v, layout, branch=branch, trunk=trunk))
    return outs


def dense_attention(queries, keys, values):
    """The same by one masked softmax per pass over the concatenated keys."""
    num_rows = queries[0].shape[0]
    causal, own = torch.ones(num_rows, num_rows, dtype=torch.bool).tril(), torch.eye(num_rows, dtype=torch.bool)
    outs = []
    for num_pass, q in enumerate(queries):
        mask = torch.cat([causal] + [own] * num_pass, dim=1)
        k, v = (torch.cat(list(tensors[: num_pass + 1])) for tensors in (keys, values))
        heads_first = (tensor.transpose(0, 1).unsqueeze(0) for tensor in (q, k, v))
        out = F.scaled_dot_product_attention(*heads_first, attn_mask=mask, enable_gqa=True)
        outs.append(out[0].transpose(0, 1))
    return outs


def measure(attend, inputs):
    """Outputs, gradients and costs of one forward and backward."""
    leaves = [[tensor.clone().requires_grad_() for tensor in tensors] for tensors in inputs]
    storages, sent = {}, [0]
    post = dist.batch_isend_irecv

    def counting(operations):
        sent[0] += sum(op.tensor.nbytes for op in operations if op.op is dist.isend)
        return post(operations)

    def keep(tensor):
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    dist.batch_isend_irecv = counting
    reset_peak()
    before, start = resident_bytes("VmRSS"), time.perf_counter()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        outs = attend(*leaves)
    sum((out * out).sum() for out in outs).backward()
    seconds = time.perf_counter() - start
    dist.batch_isend_irecv = post
    peak = resident_bytes("VmHWM") - before
    tensors = [torch.stack([out.detach() for out in outs])]
    tensors += [torch.stack([leaf.grad for leaf in group]) for group in leaves]
    costs = {"kept": sum(storages.values()), "sent": sent[0], "peak": peak, "seconds": seconds}
    return tensors, costs


def run_rank(rank, size, args, arm, folder):
    torch.set_num_threads(1)
    store = dist.FileStore(os.path.join(folder, f"store-{arm}-{size}"), size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=300))
    # Something small first, so that loading the kernels is not measured.
    warm = ContextLayout.plan([8 * size], dist.group.WORLD, mode="document")
    ring_attention(*(torch.ones(warm.num_rows, 1, 8, requires_grad=True) for _ in range(3)), warm).sum().backward()
    layout = ContextLayout.plan([args.length], dist.group.WORLD, mode="document")
    inputs = [tensor[:, layout.rows] for tensor in whole_inputs(args)]
    if arm == "dense":
        result = measure(dense_attention, inputs)
    else:
        result = measure(lambda *leaves: split_attention(layout, *leaves, arm), inputs)
    torch.save((layout.rows, *result), os.path.join(folder, f"{arm}-{size}-{rank}.pt"))
    dist.destroy_process_group()


def run(args, arm, size, folder):
    """Whole outputs and gradients, and the largest cost of any rank (bytes sent: the mean)."""
    mp.spawn(run_rank, args=(size, args, arm, folder), nprocs=size)
    parts = [torch.load(os.path.join(folder, f"{arm}-{size}-{rank}.pt")) for rank in range(size)]
    order = torch.cat([rows for rows, _, _ in parts]).argsort()
    tensors = [torch.cat(pieces, dim=1)[:, order] for pieces in zip(*(part for _, part, _ in parts), strict=True)]
    costs = {name: max(part[name] for _, _, part in parts) for name in ("kept", "peak", "seconds")}
    return tensors, costs | {"sent": sum(part["sent"] for _, _, part in parts) / size}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("length", 2048), ("passes", 4), ("heads", 8), ("kv_heads", 2), ("head_dim", 64)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 2, 4])
    args = parser.parse_args()
    print(f"{machine()}, gloo, float32")
    print(
        f"one document of {args.length} tokens, K = {args.passes}, "
        f"heads {args.heads}/{args.kv_heads} x {args.head_dim}"
    )
    with tempfile.TemporaryDirectory() as folder:
        expected, dense = run(args, "dense", 1, folder)
        print(
            f"{'arm':12} {'ranks':>5} {'kept MB':>8} {'peak MB':>8} {'sent MB':>8} {'s':>6}   "
            "kept / dense, sent / gather"
        )
        row = "{:12} {:5} {:8.1f} {:8.1f} {:8.2f} {:6.2f}   "
        scale = lambda costs: [costs[name] / 1e6 for name in ("kept", "peak", "sent")] + [costs["seconds"]]  # noqa: E731
        print(row.format("dense", 1, *scale(dense)))
        for size in args.sizes:
            results = {arm: run(args, arm, size, folder) for arm in ARMS}
            for arm, (tensors, costs) in results.items():
                for ours, theirs in zip(tensors, expected, strict=True):
                    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
                sent = f"{costs['sent'] / results['gather'][1]['sent']:.3f}" if size > 1 else "-"
                print(row.format(arm, size, *scale(costs)) + f"{costs['kept'] / dense['kept']:.3f}, {sent}")


if __name__ == "__main__":
    main()
