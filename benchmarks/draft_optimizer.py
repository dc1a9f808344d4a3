"""
Memory of a rank for the draft's AdamW whose state ranks share (`draft_shard_optimizer`), against AdamW that is whole
on each:

    OMP_NUM_THREADS=1 python benchmarks/draft_optimizer.py

Gloo processes on this machine update the same random draft with the same gradients, in turns whole and shared, new
processes each time. Weights that they end with are compared: between both, and between ranks to the bit. Printed are
bytes of state, how far resident memory rises with the first update (moments are made then), the seconds of a later
one, and how far its peak rises while the state is gathered for a checkpoint, on the rank that keeps it (rank 0) and on
the others.
"""

import argparse
import statistics
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from measuring import machine, reset_peak, resident_bytes
from transformers import LlamaConfig

from trl_codraft import Eagle3DraftConfig, Eagle3DraftModel
from trl_codraft.training.sharded_adamw import ShardedAdamW


MIB = 2**20
SETTINGS = {"lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.1}


def make_draft(args: argparse.Namespace) -> Eagle3DraftModel:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=args.vocab_size,
        hidden_size=args.hidden_size,
        intermediate_size=11 * args.hidden_size // 4,
        num_hidden_layers=8,
        num_attention_heads=args.hidden_size // 64,
    )
    draft = Eagle3DraftModel(Eagle3DraftConfig.from_policy(config))
    for weight in draft.parameters():
        torch.nn.init.normal_(weight, std=0.02)
        weight.grad = torch.randn_like(weight)
    return draft


def run_rank(rank: int, args: argparse.Namespace, shared: bool, folder: str) -> None:
    """Saves what one optimizer takes on this rank; compares weights with those of a file, or writes it."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store of {shared}", args.ranks)
    timeout = timedelta(minutes=5)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=args.ranks, timeout=timeout)
    weights = list(make_draft(args).parameters())
    groups = [{"params": weights}]
    optimizer = ShardedAdamW(groups, dist.group.WORLD, **SETTINGS) if shared else torch.optim.AdamW(groups, **SETTINGS)
    before, seconds = resident_bytes(), []
    for step in range(args.steps):
        dist.barrier()
        start = time.perf_counter()
        optimizer.step()
        seconds.append(time.perf_counter() - start)
        if step == 0:
            rise = resident_bytes() - before
    dist.barrier()
    before = resident_bytes()
    reset_peak()
    keep = rank == 0
    saved = optimizer.state_dict(keep) if shared else optimizer.state_dict()
    gathered = resident_bytes("VmHWM") - before
    assert not keep or all(saved["state"][number]["exp_avg"].shape == w.shape for number, w in enumerate(weights))
    state = sum(value.nbytes for moments in optimizer.state.values() for value in moments.values())
    taken = {"state": state, "rise": rise, "seconds": statistics.median(seconds[1:]), "gathered": gathered}
    torch.save(taken, f"{folder}/{shared} {rank}.pt")
    reference = Path(folder, "weights.pt")
    if not shared and rank == 0:
        torch.save([weight.detach() for weight in weights], reference)
    if shared:
        for weight, expected in zip(weights, torch.load(reference), strict=True):
            torch.testing.assert_close(weight.detach(), expected, rtol=1e-6, atol=1e-8)
            dist.broadcast(first := weight.detach().clone(), src=0)
            assert torch.equal(weight, first)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[1])
    parser.add_argument("--hidden_size", type=int, default=1024)
    parser.add_argument("--vocab_size", type=int, default=32_768)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    taken: dict[tuple[int, bool], list[dict[str, float]]] = {}
    for _ in range(args.repeats):
        with tempfile.TemporaryDirectory() as folder:
            for shared in (False, True):
                mp.start_processes(run_rank, (args, shared, folder), nprocs=args.ranks, start_method="fork")
                for rank in range(args.ranks):
                    taken.setdefault((rank, shared), []).append(torch.load(f"{folder}/{shared} {rank}.pt"))
    size = sum(weight.nbytes for weight in make_draft(args).parameters())
    print(f"{machine()}, {args.ranks} processes, gloo, median of {args.repeats}")
    print(f"draft of {size / 4e6:.0f}M weights, {size / MIB:.0f} MiB; both end with the same weights")
    print(f"{'':<16}{'state MiB':>12}{'rise MiB':>12}{'update s':>12}{'gathering MiB':>16}")
    for (rank, shared), runs in sorted(taken.items()):
        values = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
        state, rise, gathered = (values[key] / MIB for key in ("state", "rise", "gathered"))
        label = f"rank {rank}, {'shared' if shared else 'whole'}"
        print(f"{label:<16}{state:>12.1f}{rise:>12.1f}{values['seconds']:>12.2f}{gathered:>16.1f}")
    most = {
        shared: max(runs[0]["state"] for (_, kind), runs in taken.items() if kind == shared)
        for shared in (False, True)
    }
    print(f"state of the fullest rank: {most[True] / most[False]:.4f} of the whole")


if __name__ == "__main__":
    main()
