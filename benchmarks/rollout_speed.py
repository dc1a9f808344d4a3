"""
Speculative rollouts of SmolLM2-135M-Instruct against `model.generate`, on one thread.

All times are processor time, all ratios come from runs that take turns in one process. First greedy tokens are checked
against `generate` (in fp32 a row may part at a tie: the two tokens' logits then differ by less than 1e-3). Sections:

    engine   speed-up with fixed draft lengths (0: the loop without drafting), of whole calls and of what follows the
             prefill, and how near the latter comes to `tokens / R`: tokens per row and policy forward, and R, a bare
             policy forward over `rows * (k + 1)` tokens and k bare draft steps, in bare plain steps. More than 1 is
             possible: rows that have ended leave our batch, and sampling is cheaper
    auto     `num_draft_tokens="auto"` with the trained draft and with a useless one (random weights): mean ratio and
             lower 95% bound over pairs; the controller lives through all pairs, as it does in a trainer

    OMP_NUM_THREADS=1 python benchmarks/rollout_speed.py --sections engine auto --batches 1 4 8 16
"""

import argparse
import copy
import math
import statistics
import time

import torch
from measuring import machine
from trained_draft import load_policy, prompts_of, tokenized, trained_draft
from transformers import DynamicCache

from trl_codraft import Eagle3DraftModel
from trl_codraft.modeling.teacher import PolicyHead
from trl_codraft.rollout.controller import DraftLengthController
from trl_codraft.rollout.speculative import SpeculativeDecoder


SAMPLING = {
    "greedy": {"do_sample": False},
    "T=1": {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0},
}
TIE = 1e-3  # difference of two logits that rounding may turn around
# One-sided 95% quantiles of Student's t, by degrees of freedom.
STUDENT = {1: 6.31, 2: 2.92, 3: 2.35, 4: 2.13, 5: 2.02, 7: 1.89, 9: 1.83, 14: 1.76, 19: 1.73, 29: 1.70}


def cpu(function, *args, **kwargs):
    """Result and processor seconds of a call."""
    start = time.process_time()
    result = function(*args, **kwargs)
    return result, time.process_time() - start


def real_tokens(ids, width: int, eos: int) -> int:
    """Completion tokens up to and including each row's end."""
    is_eos = ids[:, width:] == eos
    return int((is_eos.cumsum(1) - is_eos.long() == 0).sum())


class Bench:
    """Policy, drafts and prompts; every measurement takes the next prompts."""

    def __init__(self, args, rows_per_prompt: int = 1):
        self.policy, self.tokenizer = load_policy()
        self.draft, self.budget = trained_draft(self.policy, self.tokenizer, args.draft)
        self.useless = useless_draft(self.draft)
        self.new_tokens, self.copies = args.new_tokens, rows_per_prompt
        self.chats, self.taken = prompts_of("test"), 0
        self.prefilled: float | None = None
        self.unread = 0  # columns of the prompts of this call
        self.policy.register_forward_hook(self._after_forward, with_kwargs=True)

    def batch(self, rows: int):
        chats = [self.chats[(self.taken + row // self.copies) % len(self.chats)] for row in range(rows)]
        self.taken += -(-rows // self.copies)
        return tokenized(self.tokenizer, chats)

    def generate(self, generate, batch, kind: str, seed: int):
        """Tokens per processor second of the whole call and of what follows the prefill, and the ids."""
        torch.manual_seed(seed)
        call = {"max_new_tokens": self.new_tokens, "pad_token_id": self.tokenizer.pad_token_id, **SAMPLING[kind]}
        self.prefilled, self.unread = None, batch["input_ids"].shape[1]
        with torch.no_grad():
            ids, seconds = cpu(generate, **batch, **call)
            # A peer that calls the policy's layers itself shows no forward.
            decoding = time.process_time() - self.prefilled if self.prefilled is not None else math.nan
        eos, width = self.policy.generation_config.eos_token_id, batch["input_ids"].shape[1]
        tokens = ids[:, width:].numel() if eos is None else real_tokens(ids, width, eos)
        return tokens / seconds, (tokens - len(ids)) / decoding, ids

    def _after_forward(self, module, args, kwargs, output) -> None:
        """Notes when a call's prompts have been read: by `generate` in one forward, by our loop in one or two."""
        if self.prefilled is None:
            self.unread -= kwargs["input_ids"].shape[1]
            if self.unread <= 0:
                self.prefilled = time.process_time()

    def decoder(self, draft, num_draft_tokens):
        decoder = SpeculativeDecoder(self.policy, draft, num_draft_tokens=num_draft_tokens)
        if isinstance(decoder.controller, DraftLengthController):
            decoder.controller.clock = time.process_time  # optimise what is measured here
        return decoder


def useless_draft(draft: Eagle3DraftModel) -> Eagle3DraftModel:
    """A draft of the same size and vocabulary with random weights."""
    other = copy.deepcopy(draft)
    fresh = Eagle3DraftModel(draft.config)
    for parameter, random in zip(other.parameters(), fresh.parameters(), strict=True):
        parameter.data.copy_(random.data)
    return other


def check_greedy(bench: Bench, rows: int, draft, num_draft_tokens) -> str:
    """Asserts that greedy rollouts return the tokens of `generate`; ties are counted."""
    batch = bench.batch(rows)
    decoder = bench.decoder(draft, num_draft_tokens)
    plain = bench.generate(bench.policy.generate, batch, "greedy", 0)[2]
    ours = bench.generate(decoder.bind(bench.policy.generate), batch, "greedy", 0)[2]
    decoder.close()
    columns = min(plain.shape[1], ours.shape[1])
    ties = 0
    for row in range(rows):
        differs = (plain[row, :columns] != ours[row, :columns]).nonzero()
        if len(differs):
            at = int(differs[0])
            mask = batch["attention_mask"][row].bool()
            prefix = torch.cat((batch["input_ids"][row][mask], plain[row, len(mask) : at]))
            with torch.no_grad():
                logits = bench.policy(prefix[None], use_cache=False, logits_to_keep=1).logits[0, -1]
            gap = (logits[plain[row, at]] - logits[ours[row, at]]).abs().item()
            assert gap < TIE, f"row {row} parts from `generate` at column {at}, logits differ by {gap}"
            ties += 1
    return f"{rows - ties} of {rows} rows equal, {ties} part at a tie"


@torch.no_grad()
def bare_costs(bench: Bench, rows: int, lengths: list[int], repeats: int) -> tuple[dict[int, float], float]:
    """Processor seconds of bare policy forwards over `rows * (k + 1)` tokens by k, and of a bare draft step."""
    context = 128
    cache = DynamicCache(config=bench.policy.config)
    prompt = torch.randint(100, 40000, (rows, context), generator=torch.Generator().manual_seed(0))
    bench.policy(prompt, cache=cache, logits_to_keep=1)
    forwards: dict[int, list[float]] = {k: [] for k in {0, *lengths}}
    draft, head = bench.draft, PolicyHead(bench.policy)
    hidden = torch.randn(rows, 1, draft.config.hidden_size)
    draft_cache, steps = DynamicCache(), []
    draft.step(
        hidden.expand(-1, context, -1), head.embed(prompt), torch.arange(context)[None].expand(rows, -1), draft_cache
    )
    for _ in range(repeats):
        for k in forwards:
            _, seconds = cpu(bench.policy, prompt[:, : k + 1], cache=cache)
            forwards[k].append(seconds)
            cache.crop(-(k + 1))
        start = time.process_time()
        embeds = head.embed(prompt[:, :1])
        out = draft.step(hidden, embeds, torch.full((rows, 1), context), draft_cache)
        draft.compute_logits(out[:, 0]).argmax(-1)
        steps.append(time.process_time() - start)
        draft_cache.crop(-1)
    return {k: statistics.median(times) for k, times in forwards.items()}, statistics.median(steps)


def engine(bench: Bench, rows: int, lengths: list[int], repeats: int, ends: bool) -> None:
    print(f"\n== engine, batch {rows}: greedy {check_greedy(bench, rows, bench.draft, lengths[-1])}", flush=True)
    forwards, step = bare_costs(bench, rows, lengths, max(repeats, 5))
    shown = ", ".join(f"k={k} {1e3 * seconds:.0f}" for k, seconds in forwards.items())
    print(f"bare ms: policy forward {shown}; draft step {1e3 * step:.1f}")
    print(
        f"{'':8}{'k':>3}{'speed-up':>10}{'decoding':>10}{'AL':>7}{'tokens':>8}{'R':>7}{'tokens/R':>10}{'efficiency':>12}"
    )
    eos = bench.policy.generation_config.eos_token_id
    for kind in SAMPLING:
        # Greedy rows are the same in all arms and may end; sampled ones would end at different lengths in each.
        bench.policy.generation_config.eos_token_id = eos if ends or kind == "greedy" else None
        arms = {k: bench.decoder(bench.draft, k) for k in lengths}
        whole, decoding = ({k: [] for k in lengths} for _ in range(2))
        for turn in range(repeats):
            batch = bench.batch(rows)
            order = [None, *lengths] if turn % 2 == 0 else [*reversed(lengths), None]
            speed = {}
            for k in order:
                generate = bench.policy.generate if k is None else arms[k].bind(bench.policy.generate)
                speed[k] = bench.generate(generate, batch, kind, turn)
            for k in lengths:
                whole[k].append(speed[k][0] / speed[None][0])
                decoding[k].append(speed[k][1] / speed[None][1])
        for k in lengths:
            stats = arms[k].stats
            tokens, cost = stats.tokens_per_row_forward, (forwards[k] + k * step) / forwards[0]
            measured = statistics.median(decoding[k])
            print(
                f"{kind:8}{k:3}{statistics.median(whole[k]):10.2f}{measured:10.2f}{stats.accept_length:7.2f}{tokens:8.2f}"
                f"{cost:7.2f}{tokens / cost:10.2f}{measured / (tokens / cost):12.2f}",
                flush=True,
            )
            arms[k].close()
    bench.policy.generation_config.eos_token_id = eos


def bound(ratios: list[float]) -> tuple[float, float]:
    """Geometric mean, and the lower end of its one-sided 95% interval."""
    logs = [math.log(ratio) for ratio in ratios]
    mean = statistics.fmean(logs)
    if len(logs) < 2:
        return math.exp(mean), math.nan
    degrees = len(logs) - 1
    quantile = STUDENT[max(known for known in STUDENT if known <= degrees)]
    return math.exp(mean), math.exp(mean - quantile * statistics.stdev(logs) / math.sqrt(len(logs)))


def auto(bench: Bench, rows: int, kind: str, pairs: int, names: list[str], ends: bool) -> None:
    drafts = {"trained": bench.draft, "useless": bench.useless}
    arms = {name: bench.decoder(drafts[name], "auto") for name in names}
    ratios: dict[str, list[float]] = {name: [] for name in names}
    decoding: dict[str, list[float]] = {name: [] for name in names}
    eos = bench.policy.generation_config.eos_token_id
    if not ends:
        bench.policy.generation_config.eos_token_id = None
    for turn in range(pairs):
        batch = bench.batch(rows)
        order = [None, *names] if turn % 2 == 0 else [*reversed(names), None]
        speed = {}
        for name in order:
            generate = arms[name].bind(bench.policy.generate) if name else bench.policy.generate
            speed[name] = bench.generate(generate, batch, kind, turn)
        for name in names:
            ratios[name].append(speed[name][0] / speed[None][0])
            decoding[name].append(speed[name][1] / speed[None][1])
    bench.policy.generation_config.eos_token_id = eos
    for name in names:
        (mean, low), (mean_decoding, low_decoding) = bound(ratios[name]), bound(decoding[name])
        stats, report = arms[name].stats, arms[name].controller.report.metrics()
        print(
            f"auto, batch {rows}, {kind}, {name} draft, {pairs} pairs of "
            f"{'ragged' if ends else 'equal'} lengths: ratio {mean:.3f}, lower 95% bound {low:.3f}; "
            f"without prefills {mean_decoding:.3f}, {low_decoding:.3f}; "
            f"first pair {ratios[name][0]:.2f}; {stats.num_draft_tokens:.1f} draft tokens in "
            f"{stats.verifications / max(stats.row_forwards, 1):.0%} of row forwards, accept length "
            f"{stats.accept_length:.2f}; own report: predicted {report.get('rollout/predicted_speedup', 0):.2f}, "
            f"measured {report.get('rollout/measured_speedup', 0):.2f}",
            flush=True,
        )
        arms[name].close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[1])
    parser.add_argument("--sections", nargs="+", default=["engine", "auto"], choices=["engine", "auto"])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 4, 8, 16])
    parser.add_argument("--lengths", nargs="+", type=int, default=[0, 2, 3, 5], help="fixed draft lengths")
    parser.add_argument("--repeats", type=int, default=3, help="turns of the engine section")
    parser.add_argument("--pairs", type=int, default=20, help="turns of the auto section")
    parser.add_argument("--kinds", nargs="+", default=["T=1"], choices=list(SAMPLING), help="of the auto section")
    parser.add_argument("--drafts", nargs="+", default=["trained", "useless"], choices=["trained", "useless"])
    parser.add_argument("--no_ends", action="store_true", help="sampled rows run to the limit, for less noise")
    parser.add_argument("--new_tokens", type=int, default=64)
    parser.add_argument("--rows_per_prompt", type=int, default=1, help="completions of each prompt, as in GRPO")
    parser.add_argument("--draft", default=None, help="folder of a draft; default: trained and cached by the script")
    args = parser.parse_args()
    torch.set_num_threads(1)
    bench = Bench(args, args.rows_per_prompt)
    print(f"{machine()}, 1 thread, fp32, {args.new_tokens} new tokens, {args.rows_per_prompt} rows per prompt")
    print(f"draft: {bench.budget}")
    for rows in args.batches:
        if "engine" in args.sections:
            engine(bench, rows, args.lengths, args.repeats, not args.no_ends)
        if "auto" in args.sections:
            for kind in args.kinds:
                auto(bench, rows, kind, args.pairs, args.drafts, not args.no_ends)


if __name__ == "__main__":
    main()
