"""
What it saves to pretrain the draft on the hidden states of the rollout itself, on SmolLM2-135M-Instruct.

In turns, processor time of one thread: the plain loop on held-out prompts without and with its hidden states kept, and
the separate forward of the policy over the finished rows that keeping them replaces. Both must agree first, at every
token but a row's last, which the policy never reads.

    OMP_NUM_THREADS=1 python benchmarks/rollout_states.py --rows 8 --turns 3
"""

import argparse
import statistics

import torch
from measuring import machine
from rollout_speed import SAMPLING, Bench, cpu

from trl_codraft.modeling.taps import TapRecorder
from trl_codraft.rollout.speculative import SpeculativeDecoder


def rollout(bench: Bench, decoder: SpeculativeDecoder, batch, keep: bool, seed: int):
    """Ids, trace (None without `keep`) and processor seconds."""
    torch.manual_seed(seed)
    call = {"max_new_tokens": bench.new_tokens, "pad_token_id": bench.tokenizer.pad_token_id, **SAMPLING["T=1"]}
    generate = decoder.bind(bench.policy.generate)
    if not keep:
        ids, seconds = cpu(generate, **batch, **call)
        return ids, None, seconds
    with decoder.recording() as trace:
        ids, seconds = cpu(generate, **batch, **call)
    return ids, trace, seconds


@torch.no_grad()
def separate_forward(bench: Bench, recorder: TapRecorder, sequences, mask):
    """What the policy leaves behind on finished rows, and processor seconds."""
    with recorder.record() as record:
        _, seconds = cpu(bench.policy, input_ids=sequences, attention_mask=mask, use_cache=False, logits_to_keep=1)
    return torch.cat(record.taps, -1), record.last_hidden, seconds


def finished_rows(bench: Bench, ids, batch):
    """Right-padded rows up to their ends, and the mask."""
    width, eos = batch["input_ids"].shape[1], bench.tokenizer.eos_token_id
    rows = []
    for row, new in enumerate(ids[:, width:].tolist()):
        prompt = batch["input_ids"][row][batch["attention_mask"][row].bool()].tolist()
        rows.append(prompt + (new[: new.index(eos) + 1] if eos in new else new))
    longest = max(map(len, rows))
    sequences = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])
    return sequences, mask


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[1])
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--new_tokens", type=int, default=48)
    parser.add_argument("--draft", default=None)
    args = parser.parse_args()
    torch.set_num_threads(1)
    bench = Bench(args)
    recorder = TapRecorder(bench.policy, bench.draft.config.tap_layers)
    decoder = SpeculativeDecoder(bench.policy, bench.draft, num_draft_tokens=0, recorder=recorder)
    times: dict[str, list[float]] = {"without": [], "with": [], "forward": []}
    trace = None
    for turn in range(args.turns):
        batch = bench.batch(args.rows)
        for keep in (False, True) if turn % 2 == 0 else (True, False):
            ids, kept, seconds = rollout(bench, decoder, batch, keep, turn)
            times["with" if keep else "without"].append(seconds)
            trace = kept if keep else trace
        sequences, mask = finished_rows(bench, ids, batch)
        taps, last_hidden, seconds = separate_forward(bench, recorder, sequences, mask)
        times["forward"].append(seconds)
        for row, length in enumerate(mask.sum(1).tolist()):
            ours = trace.row(row, length)
            for mine, theirs in zip(ours, (taps, last_hidden), strict=True):
                error = (mine[:-1] - theirs[row, : length - 1]).norm() / theirs[row, : length - 1].norm()
                assert error < 1e-4, f"row {row}: relative difference {error}"
    recorder.close()
    median = {name: statistics.median(values) for name, values in times.items()}
    separate, traced = median["without"] + median["forward"], median["with"]
    print(f"{machine()}, 1 thread, {args.rows} rows, {args.new_tokens} new tokens, {args.turns} turns: equal states")
    print(
        f"rollout {median['without']:.1f} s, separate forward {median['forward']:.1f} s, "
        f"rollout that keeps its states {traced:.1f} s: {separate / traced:.2f}x"
    )


if __name__ == "__main__":
    main()
