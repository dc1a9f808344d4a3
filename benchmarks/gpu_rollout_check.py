"""
Rollouts on a GPU with and without CUDA graphs: first that they return the same tokens, then what a round costs.

Policy and draft have random weights of realistic sizes, so almost nothing is accepted: what is measured is the time of
a round, `time / policy forwards`, not a speed-up. A round of `k` drafted tokens pays if the accept length is larger
than its time in steps of `generate`, the last column. Recording is part of the time, as it is in a rollout. Without a
GPU, or with `--device cpu`, the same code runs small and without graphs.

    python benchmarks/gpu_rollout_check.py
"""

import argparse
import statistics
import sys
import time

import torch
from measuring import machine
from transformers import LlamaConfig, LlamaForCausalLM

from trl_codraft import Eagle3DraftConfig, Eagle3DraftModel, speculative_generate


SIZES = {  # hidden, MLP, layers, heads, key heads
    "cpu": (64, 128, 4, 4, 2),
    "0.5B": (1024, 4096, 24, 16, 8),
    "8B": (4096, 14336, 32, 32, 8),
}


def models(size: str, device: str, dtype: torch.dtype):
    """A random policy without an end token, and a random draft with a vocabulary of its own."""
    hidden, inner, layers, heads, kv_heads = SIZES[size]
    config = LlamaConfig(
        vocab_size=1024 if size == "cpu" else 32768,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=8192,
        eos_token_id=None,
        bos_token_id=None,
    )
    torch.manual_seed(0)
    with torch.device(device):
        policy = LlamaForCausalLM(config).to(dtype).eval()
        draft = Eagle3DraftModel(Eagle3DraftConfig.from_policy(config, draft_vocab_size=config.vocab_size // 4))
    return policy, draft.to(device, dtype).eval()


def prompts(policy, rows: int, columns: int = 64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rows)
    return torch.randint(10, policy.config.vocab_size, (rows, columns), generator=generator).to(policy.device)


def same_tokens(policy, draft, graphs: bool, new_tokens: int) -> bool:
    """Greedy tokens against `generate`, sampled ones against live forwards, with rows of unequal prompts."""
    ids = prompts(policy, rows=5)
    mask = torch.ones_like(ids)
    for row, pads in enumerate((0, 40, 3, 63, 20)):
        mask[row, :pads] = 0
    call = {"attention_mask": mask, "max_new_tokens": new_tokens, "pad_token_id": 0}
    free = policy.generate(ids, do_sample=False, **call)[:, ids.shape[1] :]
    call["eos_token_id"] = [int(free[row, row * new_tokens // 5]) for row in (1, 2, 3)]  # rows end apart
    plain, equal = policy.generate(ids, do_sample=False, **call), True
    for k in (0, 1, 4, "auto"):
        ours = speculative_generate(
            policy, draft, ids, num_draft_tokens=k, cuda_graphs=graphs, do_sample=False, **call
        )
        shown = [("greedy rows equal `generate`", plain, ours.sequences)]
        if k != "auto":  # whose samples follow the clock
            runs = []
            for wanted in (False, graphs):
                torch.manual_seed(1)
                runs.append(
                    speculative_generate(
                        policy, draft, ids, num_draft_tokens=k, cuda_graphs=wanted, do_sample=True, **call
                    ).sequences
                )
            shown.append(("sampled rows equal live forwards", *runs))
        for what, one, other in shown:
            rows = int((one == other).all(-1).sum()) if one.shape == other.shape else 0
            print(f"k={k}: {rows} of 5 {what}")
            equal &= rows == 5
    return equal


def seconds(function, device: str) -> tuple[float, object]:
    """Wall time of a call, and what it returned."""
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    result = function()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start, result


def compare_rounds(policy, draft, rows: int, lengths: list[int], new_tokens: int, repeats: int, device: str) -> None:
    """Milliseconds per round, live and recorded, in turns."""
    ids = prompts(policy, rows)
    call = {"attention_mask": torch.ones_like(ids), "max_new_tokens": new_tokens, "pad_token_id": 0, "do_sample": True}
    policy.generate(ids, **{**call, "max_new_tokens": 4})
    arms = [("generate", None, False)]
    arms += [("live", k, False) for k in lengths]
    arms += [("graphs", k, True) for k in lengths if device == "cuda"]
    times = {arm: [] for arm in arms}
    for _ in range(repeats):
        for arm in arms:
            _, k, graphs = arm
            if k is None:
                spent, _ = seconds(lambda: policy.generate(ids, **call), device)
                rounds = new_tokens
            else:
                spent, output = seconds(
                    lambda k=k, graphs=graphs: speculative_generate(
                        policy, draft, ids, num_draft_tokens=k, cuda_graphs=graphs, **call
                    ),
                    device,
                )
                rounds = output.stats.policy_forwards
            times[arm].append(1000 * spent / rounds)
    plain = statistics.median(times[arms[0]])
    for (kind, k, _), samples in times.items():
        middle = statistics.median(samples)
        drafted = "" if k is None else f"k={k}"
        print(
            f"{rows:4} rows {kind:>9} {drafted:>4}: {middle:8.2f} ms a round, {middle / plain:6.2f} steps of generate"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cuda", "cpu"))
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES))
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--lengths", type=int, nargs="+", default=[0, 1, 3, 5])
    parser.add_argument("--new_tokens", type=int)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    small = args.device == "cpu"
    if small:
        torch.set_num_threads(1)
    print(machine(*[] if small else [torch.cuda.get_device_name()]))
    # In float64 nothing is decided by how a kernel rounds.
    if not same_tokens(*models("cpu", args.device, torch.float64), graphs=not small, new_tokens=24 if small else 300):
        sys.exit("Tokens differ: the times below would mean nothing.")
    for size in args.sizes or (["cpu"] if small else ["0.5B", "8B"]):
        print(f"== {size}")
        policy, draft = models(size, args.device, torch.float32 if small else torch.bfloat16)
        for rows in args.rows:
            new_tokens = args.new_tokens or (16 if small else 256)
            compare_rounds(policy, draft, rows, args.lengths, new_tokens, args.repeats, args.device)


if __name__ == "__main__":
    main()
