"""
A model, not a measurement: time of a draft's attention over K passes on GPUs that were not at hand.

The work of every rank and step of the ring is counted on the library's own layouts, so imbalance, empty steps and
whole documents are in it. Assumed and settable: achieved attention throughput, bandwidth of a link in one direction,
latency of a step, backward = 2.5 x the forward's FLOPs, messages under computing where there is any (a step lasts as
long as the longer of both; gathering hides behind nothing), all ranks wait for the slowest in every step. Not in it:
the kernels' loss of speed on small blocks, other traffic on the links, everything but attention.

The bytes are those of docs/parallelism.md, which a test counts on the wire.

    python benchmarks/cp_model.py --passes 4 --sizes 8 64        # 64 ranks: minutes of counting
"""

import argparse
from functools import lru_cache

from measuring import commit

from trl_codraft.cp.layout import ContextLayout
from trl_codraft.cp.planner import plan_document, plan_hybrid


LINKS = {"NVLink": 200e9, "400 Gb/s": 45e9}
PLANS = {"document": plan_document, "hybrid": plan_hybrid}


def packs(length):
    """One document, 16K documents, 2K documents."""
    return {"1 document": [length], "16K each": [16384] * (length // 16384), "2K each": [2048] * (length // 2048)}


@lru_cache
def steps(doc_lens, cp_size, plan):
    """Query-key pairs of each rank in each step of the ring, and travelling rows of each rank."""
    shards = PLANS[plan](doc_lens, cp_size)
    table = []
    for rank in range(cp_size):
        layout = ContextLayout(doc_lens, shards, rank=rank)
        pairs = [sum(length * (length + 1) // 2 for length in layout.local_lens(0)[1])]
        for step in range(1, cp_size):
            block = layout.remote_block((rank - step) % cp_size, 0)
            pairs.append(0 if block is None else sum(q * k for q, k in zip(block.q_lens, block.k_lens, strict=True)))
        table.append(pairs)
    return table, layout.split_rows


def model(args, doc_lens, cp_size, plan, bandwidth):
    """Seconds of K passes: perfect split without messages, `ring`, `gather_once`, K/V gathered in every pass."""
    table, rows = steps(tuple(doc_lens), cp_size, plan)
    row = args.kv_heads * 2 * args.head_dim
    largest = max(rows)
    hop = {"keys": largest * row * 2 / bandwidth, "gradients": largest * row * 4 / bandwidth}
    hop = {name: seconds + args.latency if seconds else 0.0 for name, seconds in hop.items()}
    compute = [
        max(pairs[step] for pairs in table) * 4 * args.heads * args.head_dim / args.flops for step in range(cp_size)
    ]
    forward = sum(max(seconds, hop["keys"]) for seconds in compute[:-1]) + compute[-1]
    both = hop["keys"] + hop["gradients"]
    backward = sum(max(2.5 * seconds, both) for seconds in compute[:-1]) + 2.5 * compute[-1]
    alone = 3.5 * sum(compute)
    gather, reduce = ((cp_size - 1) * hop[name] for name in ("keys", "gradients"))
    ideal = 3.5 * sum(map(sum, table)) / cp_size * 4 * args.heads * args.head_dim / args.flops
    return {
        "ideal": args.passes * ideal,
        "ring": args.passes * (forward + backward),
        "gather_once": args.passes * alone + gather + reduce,
        "gather": args.passes * (alone + gather + reduce),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--passes", type=int, default=4)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv_heads", type=int, default=8)
    parser.add_argument("--head_dim", type=int, default=128)
    parser.add_argument("--flops", type=float, default=400e12, help="achieved in attention")
    parser.add_argument("--latency", type=float, default=20e-6, help="seconds per step of a ring")
    parser.add_argument("--lengths", type=int, nargs="+", default=[2**18, 2**20])
    parser.add_argument("--sizes", type=int, nargs="+", default=[8])
    args = parser.parse_args()
    print(
        f"commit {commit()}; K = {args.passes}, heads {args.heads}/{args.kv_heads} x {args.head_dim}, bf16, "
        f"{args.flops:.0e} FLOP/s assumed"
    )
    print(
        f"{'tokens':>8} {'pack':10} {'cp':>3} {'layout':8} {'link':8} {'ideal s':>8}   "
        "x ideal: ring, gather_once, gather"
    )
    for length in args.lengths:
        for name, doc_lens in packs(length).items():
            for cp_size in args.sizes:
                for plan in PLANS:
                    for link, bandwidth in LINKS.items():
                        seconds = model(args, doc_lens, cp_size, plan, bandwidth)
                        ideal = seconds.pop("ideal")
                        ratios = ", ".join(f"{value / ideal:5.2f}" for value in seconds.values())
                        print(f"{length:8} {name:10} {cp_size:3} {plan:8} {link:8} {ideal:8.4f}   {ratios}")


if __name__ == "__main__":
    main()
