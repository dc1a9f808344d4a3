"""
The kernels of sharded attention on a GPU, and rings emulated on it: what can be checked of context parallelism with
one device, before several are at hand. Without a GPU, or with `--device cpu`, the same code runs small, with the CPU's
kernels.

1. Kernels against plain torch in float32, forward and backward: queries that are a suffix of their document, keys seen
   without a mask, windows, shared key heads, head dims that are padded, values of another width.
2. Rings: the rows of one document split zigzag over `c` ranks; each rank's blocks computed in the order in which a
   ring brings them, without the messages. Output and gradients against one flash call over the whole document, and the
   time of the slowest rank against a `c`-th of that call's: what splitting alone costs.

Prints one line per check and exits with 1 if an error is out of bounds.

    python benchmarks/gpu_cp_check.py                        # on a GPU: 32K to 256K tokens, bfloat16
    python benchmarks/gpu_cp_check.py --device cpu           # 1K and 2K tokens, float32
"""

import argparse
import statistics
import sys
import time

import torch
from measuring import machine

from trl_codraft.cp.gathered import GatheredTrunk, TrunkStore
from trl_codraft.cp.kernels import choose_shard_kernel
from trl_codraft.cp.layout import ContextLayout
from trl_codraft.cp.planner import plan_document
from trl_codraft.cp.ring import travelling_block
from trl_codraft.modeling.flash_operators import installed_flash
from trl_codraft.modeling.kernel_call import Attended, Documents, Mask


# Query and key rows per document; the last three queries of the first see keys that others do not.
PACKS = {
    "square": ([300, 1, 77], [300, 1, 77]),
    "suffix": ([100, 1, 30], [300, 5, 77]),
    "one document": ([257], [257]),
}
# Query heads, key heads, key dim, value dim.
HEADS = [(8, 2, 64, 64), (4, 4, 40, 40), (6, 2, 96, 64), (8, 1, 128, 128)]
WINDOWS = [None, 3, 50]
# Largest error over the largest entry of the reference.
BOUNDS = {torch.bfloat16: 2e-2, torch.float32: 2e-5}


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=default, choices=("cuda", "cpu"))
    parser.add_argument("--lengths", type=int, nargs="+", help="tokens of the document")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    small = arguments.device == "cpu"
    if small:
        arguments.heads, arguments.kv_heads, arguments.head_dim = 4, 2, 64
        torch.set_num_threads(1)
    arguments.lengths = arguments.lengths or ([1024, 2048] if small else [32768, 65536, 131072, 262144])
    arguments.dtype = torch.float32 if small else torch.bfloat16
    return arguments


def draw(generator, *shape, device, dtype):
    return torch.randn(shape, generator=generator, device=device).to(dtype)


def relative_error(ours, theirs):
    return ((ours.float() - theirs.float()).abs().max() / theirs.float().abs().max().clamp(min=1e-6)).item()


def check_kernels(device, dtype):
    """Worst error of every combination."""
    generator = torch.Generator(device=device).manual_seed(0)
    failed = False
    for name, (q_lens, k_lens) in PACKS.items():
        for heads, kv_heads, key_dim, value_dim in HEADS:
            for window in WINDOWS:
                for causal in (True, False) if window is None else (True,):
                    q = draw(generator, sum(q_lens), heads, key_dim, device=device, dtype=dtype)
                    k = draw(generator, sum(k_lens), kv_heads, key_dim, device=device, dtype=dtype)
                    v = draw(generator, sum(k_lens), kv_heads, value_dim, device=device, dtype=dtype)
                    dout = draw(generator, sum(q_lens), heads, value_dim, device=device, dtype=dtype)
                    errors = kernel_errors(q, k, v, dout, q_lens, k_lens, causal, window)
                    worst = max(errors.values())
                    verdict = "ok" if worst <= BOUNDS[dtype] else "OUT OF BOUNDS"
                    failed |= verdict != "ok"
                    print(
                        f"kernel {name:12} heads {heads}/{kv_heads} dims {key_dim}/{value_dim} window {window} causal "
                        f"{causal}: "
                        + ", ".join(f"{key} {error:.1e}" for key, error in errors.items())
                        + f"  {verdict}"
                    )
    return failed


def kernel_errors(q, k, v, dout, q_lens, k_lens, causal, window):
    settings = {"causal": causal, "scale": q.shape[-1] ** -0.5}
    kernel = choose_shard_kernel(q, v, None if window is None else window - 1)
    documents, mask = Documents(q_lens, k_lens), Mask(**settings)
    out, lse = kernel.forward(q, k, v, documents, mask)
    ours = out, lse, *kernel.backward(dout, q, k, v, Attended(out, lse), documents, mask)
    theirs = dense(q, k, v, dout, q_lens, k_lens, window=window, **settings)
    names = ("out", "lse", "dq", "dk", "dv")
    return {name: relative_error(one, other) for name, one, other in zip(names, ours, theirs, strict=True)}


def dense(q, k, v, dout, q_lens, k_lens, *, causal, scale, window):
    """One softmax per document in float32, its mask from positions, gradients by autograd."""
    q, k, v = (tensor.float().requires_grad_() for tensor in (q, k, v))
    outs, lses = [], []
    for queries, keys, values in zip(q.split(q_lens), k.split(k_lens), v.split(k_lens), strict=True):
        groups = queries.shape[1] // keys.shape[1]
        keys, values = (tensor.repeat_interleave(groups, dim=1) for tensor in (keys, values))
        scores = torch.einsum("qhd,khd->hqk", queries, keys) * scale
        if causal:
            own = torch.arange(len(keys) - len(queries), len(keys), device=q.device).unsqueeze(1)
            distance = own - torch.arange(len(keys), device=q.device)
            hidden = (distance < 0) | (distance >= (window or len(keys)))
            scores = scores.masked_fill(hidden, -torch.inf)
        outs.append(torch.einsum("hqk,khd->qhd", scores.softmax(dim=-1), values))
        lses.append(scores.logsumexp(dim=-1).T)
    out = torch.cat(outs)
    return out.detach(), torch.cat(lses).detach(), *torch.autograd.grad(out, (q, k, v), dout.float())


class EmulatedRank:
    """One rank of a ring: its rows, and the blocks of the others in the order in which they would come."""

    def __init__(self, length, shards, rank, q, k, v, dout):
        self.layouts = [ContextLayout([length], shards, rank=r, device=q.device) for r in range(len(shards))]
        self.layout = self.layouts[rank]
        self.q, self.k, self.v, self.dout = (self.layout.shard(tensor) for tensor in (q, k, v, dout))
        size = len(shards)
        self.sources = [(rank - step) % size for step in range(1, size)]
        blocks = [
            (source, travelling_block(self.layouts[source], *(self.layouts[source].shard(x) for x in (k, v))))
            for source in self.sources
        ]
        self.store = TrunkStore(self.k, self.v, blocks)
        self.trunk = GatheredTrunk(self.layout, choose_shard_kernel(q, v), 0, q.shape[-1] ** -0.5, self.store)

    def run(self):
        """Output, and the gradients of queries, of visitors' and of own keys and values."""
        self.store.grads = None
        out, lse = self.trunk.forward(self.q, self.k, self.v)
        out = out.to(self.q.dtype)
        dq, _, _ = self.trunk.backward(self.dout, self.q, self.k, self.v, Attended(out, lse), True)
        return out, dq, self.store.grads


def ring_errors(length, size, q, k, v, dout, whole):
    """Output and gradients put together from all emulated ranks, against one call over the whole document."""
    shards = plan_document([length], size)
    parts = [torch.zeros_like(tensor, dtype=torch.float32) for tensor in whole]
    for rank in range(size):
        emulated = EmulatedRank(length, shards, rank, q, k, v, dout)
        out, dq, (*visitors, dk, dv) = emulated.run()
        rows = emulated.layout.rows
        for total, part in zip(parts, (out, dq, dk, dv), strict=True):
            total[rows] += part.float()
        for source, block in zip(emulated.sources, visitors, strict=True):
            rows = emulated.layouts[source].rows
            keys, values = block.split([len(rows) * k[0].numel(), len(rows) * v[0].numel()])
            parts[2][rows] += keys.view(len(rows), *k.shape[1:]).float()
            parts[3][rows] += values.view(len(rows), *v.shape[1:]).float()
    names = ("out", "dq", "dk", "dv")
    return {name: relative_error(ours, theirs) for name, ours, theirs in zip(names, parts, whole, strict=True)}


def seconds(call, repeats, device):
    """Median time of a call: wall clock on a GPU, CPU time on a CPU."""
    call()
    times = []
    for _ in range(repeats):
        if device == "cuda":
            torch.cuda.synchronize()
            start = time.perf_counter()
            call()
            torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
        else:
            start = time.process_time()
            call()
            times.append(time.process_time() - start)
    return statistics.median(times)


def check_rings(arguments):
    device, dtype = arguments.device, arguments.dtype
    failed = False
    for length in arguments.lengths:
        generator = torch.Generator(device=device).manual_seed(1)
        q, dout = (
            draw(generator, length, arguments.heads, arguments.head_dim, device=device, dtype=dtype) for _ in range(2)
        )
        k, v = (
            draw(generator, length, arguments.kv_heads, arguments.head_dim, device=device, dtype=dtype)
            for _ in range(2)
        )
        kernel = choose_shard_kernel(q, v)
        call = Documents([length], [length]), Mask(causal=True, scale=arguments.head_dim**-0.5)

        def whole(q=q, k=k, v=v, dout=dout, kernel=kernel, call=call):
            out, lse = kernel.forward(q, k, v, *call)
            return out, *kernel.backward(dout, q, k, v, Attended(out, lse), *call)

        reference, whole_seconds = whole(), seconds(whole, arguments.repeats, device)
        for size in arguments.ranks:
            errors = ring_errors(length, size, q, k, v, dout, reference)
            verdict = "ok" if max(errors.values()) <= BOUNDS[dtype] else "OUT OF BOUNDS"
            failed |= verdict != "ok"
            shards = plan_document([length], size)
            slowest = max(
                seconds(EmulatedRank(length, shards, rank, q, k, v, dout).run, arguments.repeats, device)
                for rank in range(size)
            )
            print(
                f"ring {length} tokens, {size} ranks: "
                + ", ".join(f"{name} {error:.1e}" for name, error in errors.items())
                + f"  {verdict}; slowest rank {slowest * 1e3:.2f} ms, whole call / {size} = "
                f"{whole_seconds / size * 1e3:.2f} ms, ratio {slowest * size / whole_seconds:.2f}",
                flush=True,
            )
    return failed


def main():
    arguments = parse_arguments()
    name = [torch.cuda.get_device_name()] if arguments.device == "cuda" else []
    print(f"{machine(*name)}, {arguments.dtype}, flash by {type(installed_flash()).__name__}")
    failed = check_kernels(arguments.device, arguments.dtype)
    sys.exit(int(check_rings(arguments) or failed))


if __name__ == "__main__":
    main()
