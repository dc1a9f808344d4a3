"""
Our rollouts against other ways of speculating on unmodified Hugging Face models: the same policy, the same trained
draft, the same prompts, the same number of draft tokens; tokens per second of processor time, one thread, in turns.

    economize    batched EAGLE-3 (PyPI `economize`, Apache-2.0; `pip install economize`, this package does not).
                 `decode_batch` is called directly, its own `generate` does not accept transformers 5.24's arguments
    lookup       prompt lookup of Transformers, which only knows batch 1

Greedy outputs must be equal to `generate`'s (up to ties) before anything is timed.

    OMP_NUM_THREADS=1 python benchmarks/rollout_vs_peers.py --batches 1 4 8
"""

import argparse
import importlib.metadata
import importlib.util
import statistics

import torch
from measuring import machine
from rollout_speed import SAMPLING, TIE, Bench, real_tokens
from trained_draft import cache_dir


def economize_arm(bench: Bench, folder: str, num_draft_tokens: int):
    """`economize` with the draft in `folder`, called like `generate`."""
    import economize

    model = economize.load(bench.policy, folder)
    eos, pad = bench.tokenizer.eos_token_id, bench.tokenizer.pad_token_id

    def generate(input_ids, attention_mask, max_new_tokens, do_sample, **_):
        prompts = [ids[mask.bool()] for ids, mask in zip(input_ids, attention_mask, strict=True)]
        selector = economize.TopPSampler(temperature=1.0, top_p=1.0, seed=0) if do_sample else None
        decoding = economize.DecodeConfig(
            cycle_length=num_draft_tokens + 1, verifier="rejection" if do_sample else None
        )
        results = model.decode_batch(prompts, max_new_tokens, decoding=decoding, selector=selector, stop=eos)
        tokens = [result.tokens for result in results]
        out = torch.full((len(prompts), max(map(len, tokens))), pad)
        for row, new in enumerate(tokens):
            out[row, : len(new)] = new
        return torch.cat((input_ids, out), 1)

    return generate


def parts_at(plain, other, width: int, eos: int):
    """Rows and columns where greedy outputs first differ."""
    for row in range(len(plain)):
        ours, theirs = (
            ids[row, width : width + real_tokens(ids[row : row + 1], width, eos)].tolist() for ids in (plain, other)
        )
        for column, pair in enumerate(zip(ours, theirs, strict=False)):
            if pair[0] != pair[1]:
                yield row, column, pair
                break
        else:
            assert len(ours) == len(theirs), f"row {row} has {len(theirs)} tokens, `generate` {len(ours)}"


@torch.no_grad()
def assert_equal_up_to_ties(bench: Bench, name: str, batch, plain, other) -> int:
    """Number of rows that part from `generate` at a tie; fails at any other difference."""
    width, ties = batch["input_ids"].shape[1], 0
    for row, column, (token, other_token) in parts_at(plain, other, width, bench.tokenizer.eos_token_id):
        mask = batch["attention_mask"][row].bool()
        prefix = torch.cat((batch["input_ids"][row][mask], plain[row, width : width + column]))
        logits = bench.policy(prefix[None], use_cache=False, logits_to_keep=1).logits[0, -1]
        gap = (logits[token] - logits[other_token]).abs().item()
        assert gap < TIE, f"{name}: row {row} parts from `generate` at column {column}, logits differ by {gap}"
        ties += 1
    return ties


def arms_of(bench: Bench, rows: int, args, folder: str) -> dict:
    arms = {"generate": bench.policy.generate}
    ours = bench.decoder(bench.draft, args.length)
    arms[f"ours, k={args.length}"] = ours.bind(bench.policy.generate)
    arms["ours, auto"] = bench.decoder(bench.draft, "auto").bind(bench.policy.generate)
    if importlib.util.find_spec("economize") is not None:
        arms[f"economize, k={args.length}"] = economize_arm(bench, folder, args.length)
    if rows == 1:
        arms["prompt lookup"] = lambda **call: bench.policy.generate(prompt_lookup_num_tokens=args.length, **call)
    return arms


def compare(bench: Bench, rows: int, args, folder: str) -> None:
    arms = arms_of(bench, rows, args, folder)
    batch = bench.batch(rows)
    plain = bench.generate(arms["generate"], batch, "greedy", 0)[2]
    for name, generate in arms.items():
        if name != "generate":
            ties = assert_equal_up_to_ties(bench, name, batch, plain, bench.generate(generate, batch, "greedy", 0)[2])
            print(f"batch {rows}, {name}: greedy equal to `generate`, {ties} of {rows} rows up to a tie", flush=True)
    for kind in SAMPLING:
        ratios: dict[str, list[float]] = {name: [] for name in arms}
        for turn in range(args.repeats):
            batch = bench.batch(rows)
            order = list(arms) if turn % 2 == 0 else list(reversed(arms))
            speed = {name: bench.generate(arms[name], batch, kind, turn)[0] for name in order}
            for name in arms:
                ratios[name].append(speed[name] / speed["generate"])
        shown = ", ".join(f"{name} {statistics.median(values):.2f}" for name, values in ratios.items())
        print(
            f"batch {rows}, {kind}, {args.repeats} turns, tokens per CPU second against generate: {shown}", flush=True
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[1])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 4, 8])
    parser.add_argument("--length", type=int, default=3, help="draft tokens")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--new_tokens", type=int, default=48)
    parser.add_argument("--draft", default=None)
    args = parser.parse_args()
    torch.set_num_threads(1)
    bench = Bench(args)
    versions = {
        name: importlib.metadata.version(name)
        for name in ("torch", "transformers", "economize")
        if importlib.util.find_spec(name) is not None
    }
    print(f"{machine()}, 1 thread, fp32, {args.new_tokens} new tokens, {versions}")
    print(f"draft: {bench.budget}")
    for rows in args.batches:
        compare(bench, rows, args, args.draft or str(cache_dir() / "rollout-draft"))


if __name__ == "__main__":
    main()
