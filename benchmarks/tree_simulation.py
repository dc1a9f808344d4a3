"""
Would draft trees beat draft chains? A simulation from logged acceptance and measured costs.

The policy's own completions of held-out prompts are logged with their hidden states. At every position and depth, with
the draft fed by the true tokens before it, the simulation notes which of its candidates would have been kept:
greedily, whether the policy's token is the draft's first, second, ... choice; at temperature 1, whether the first,
second, ... of candidates drawn from the draft without replacement survives when each is accepted with probability
`min(1, p / q)` and `p` becomes `norm(max(p - q, 0))` after a refusal (recursive rejection sampling, exact like our
chains).

From these rates the best static tree of N nodes is grown (always the node with the largest probability of being kept;
a chain is the tree with one candidate everywhere). A round costs the measured forward over `rows * (N + 1)` tokens and
a measured draft step per level. The best tree and the best chain of each batch size are compared.

    OMP_NUM_THREADS=1 python benchmarks/tree_simulation.py
"""

import argparse
import heapq

import torch
from measuring import machine
from rollout_speed import SAMPLING, Bench, bare_costs

from trl_codraft.modeling.packing import PackedLayout
from trl_codraft.modeling.teacher import PolicyHead
from trl_codraft.rollout.speculative import SpeculativeDecoder


DEPTH, CANDIDATES = 5, 4
NODES = (1, 2, 3, 4, 5, 7, 9, 11, 15)


@torch.no_grad()
def logged_rows(bench: Bench, kind: str, count: int):
    """Completions of held-out prompts: `(ids, prompt length, taps, last hidden)` of each."""
    decoder = SpeculativeDecoder(bench.policy, bench.draft, num_draft_tokens=0)
    batch = bench.batch(count)
    with decoder.recording() as trace:
        ids = bench.generate(decoder.bind(bench.policy.generate), batch, kind, 0)[2]
    decoder.close()
    width, rows = batch["input_ids"].shape[1], []
    for row, new in enumerate(ids[:, width:].tolist()):
        eos = bench.tokenizer.eos_token_id
        prompt = batch["input_ids"][row][batch["attention_mask"][row].bool()].tolist()
        new = new[: new.index(eos) + 1] if eos in new else new
        rows.append((torch.tensor(prompt + new), len(prompt), *trace.row(row, len(prompt) + len(new))))
    return rows


@torch.no_grad()
def kept_by_rank(bench: Bench, rows, kind: str) -> tuple[torch.Tensor, float]:
    """
    `(DEPTH, CANDIDATES)`: how often each candidate is the one kept, given that its parent was; and the acceptance of a
    chain at the first depth computed as `sum min(p, q)` (greedy: top-1 agreement), as a check.
    """
    draft, head = bench.draft, PolicyHead(bench.policy)
    generator = torch.Generator().manual_seed(0)
    hits, reached, check = torch.zeros(DEPTH, CANDIDATES), torch.zeros(DEPTH), []
    for ids, prompt, taps, last_hidden in rows:
        length = len(ids)
        # Teacher at position t - 1 predicts token t; the root r of depth s predicts t = r + 2 + s.
        p_all = head.logits(last_hidden[prompt - 1 : length - 1]).float().softmax(-1)  # tokens prompt .. length - 1
        outputs = unrolled(draft, head, ids, taps)
        alive = torch.ones(length)
        for depth, hidden in enumerate(outputs):
            roots = torch.arange(max(prompt - 2, 0), length - 2 - depth)
            if len(roots) == 0:
                break
            targets = roots + 2 + depth
            q = torch.zeros(len(roots), p_all.shape[1])
            q[:, draft.target_ids] = draft.compute_logits(hidden[roots]).softmax(-1)
            p = p_all[targets - prompt]
            if kind == "greedy":
                kept = (q.topk(CANDIDATES).indices == ids[targets][:, None]).float()
                check_now = kept[:, 0]
            else:
                kept, check_now = recursive_rejection(p, q, generator), torch.minimum(p, q).sum(-1)
            # Weighted by the probability that a chain gets here, since trees go on where chains do.
            weight = alive[roots]
            hits[depth] += (kept * weight[:, None]).sum(0)
            reached[depth] += weight.sum()
            alive = torch.zeros(length).index_copy_(0, roots, weight * check_now)
            if depth == 0:
                check.append(check_now)
    return hits / reached[:, None].clamp(min=1e-9), torch.cat(check).mean().item()


def unrolled(draft, head, ids, taps) -> list[torch.Tensor]:
    """Output of every depth at every root, `(length, H)` each, fed with the true tokens."""
    return draft.unroll(taps, head.embed(ids), PackedLayout([len(ids)]), DEPTH)


def recursive_rejection(p: torch.Tensor, q: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """`(N, CANDIDATES)`: 1 at the candidate that is kept, drawn without replacement from `q`."""
    p, q = p.clone(), q.clone()
    kept, open_rows = torch.zeros(len(p), CANDIDATES), torch.ones(len(p), dtype=torch.bool)
    for candidate in range(CANDIDATES):
        token = torch.multinomial(q.clamp(min=1e-12), 1, generator=generator)
        uniform = torch.rand(len(p), 1, generator=generator)
        accept = (uniform * q.gather(1, token) < p.gather(1, token)).squeeze(1) & open_rows
        kept[:, candidate] = accept.float()
        open_rows &= ~accept
        rest = (p - q).clamp(min=0)
        mass = rest.sum(-1, keepdim=True)
        p = torch.where(mass > 0, rest / mass.clamp(min=1e-30), p)
        q = q.scatter(1, token, 0.0)
        q = q / q.sum(-1, keepdim=True).clamp(min=1e-30)
    return kept


def best_tree(rates: torch.Tensor, nodes: int) -> tuple[float, int, list[int]]:
    """Tokens per round, depth and nodes per level of the static tree that keeps most tokens."""
    table = rates.tolist()
    heap = [(-table[0][0], 0, 0, 1.0)]  # minus path probability, depth, rank, parent's probability
    expected, levels = 1.0, [0] * DEPTH
    for _ in range(nodes):
        if not heap:
            break
        value, depth, rank, parent = heapq.heappop(heap)
        expected -= value
        levels[depth] += 1
        if rank + 1 < CANDIDATES:
            heapq.heappush(heap, (-parent * table[depth][rank + 1], depth, rank + 1, parent))
        if depth + 1 < DEPTH:
            heapq.heappush(heap, (value * table[depth + 1][0], depth + 1, 0, -value))
    used = [level for level in levels if level]
    return expected, len(used), used


def chain(rates: torch.Tensor, length: int) -> float:
    return 1.0 + rates[:length, 0].cumprod(0).sum().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[1])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 4, 8, 16])
    parser.add_argument("--rows", type=int, default=32, help="logged completions of each kind")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--new_tokens", type=int, default=64)
    parser.add_argument("--draft", default=None)
    args = parser.parse_args()
    torch.set_num_threads(1)
    bench = Bench(args)
    print(f"{machine()}, 1 thread; {args.rows} logged completions of each kind")
    print(f"draft: {bench.budget}")
    rates = {}
    for kind in SAMPLING:
        rates[kind], check = kept_by_rank(bench, logged_rows(bench, kind, args.rows), kind)
        print(f"\n{kind}: share kept by candidate (columns) and depth (rows); exact first acceptance {check:.3f}")
        print("\n".join("  " + " ".join(f"{rate:.3f}" for rate in row) for row in rates[kind].tolist()))
    for rows in args.batches:
        forwards, step = bare_costs(bench, rows, list(NODES), args.repeats)
        for kind in SAMPLING:
            lengths = [k for k in NODES if k <= DEPTH]
            chains = {k: chain(rates[kind], k) * forwards[0] / (forwards[k] + k * step) for k in lengths}
            trees = {}
            for nodes in NODES:
                tokens, depth, levels = best_tree(rates[kind], nodes)
                # A draft step costs the same for all nodes of a level: optimistic for trees.
                trees[nodes] = tokens * forwards[0] / (forwards[nodes] + depth * step), tokens, levels
            k, n = max(chains, key=chains.get), max(trees, key=lambda nodes: trees[nodes][0])
            print(
                f"batch {rows:2}, {kind:6}: best chain k={k} {chains[k]:.2f}x ({chain(rates[kind], k):.2f} tokens); "
                f"best tree {n} nodes, levels {trees[n][2]} {trees[n][0]:.2f}x ({trees[n][1]:.2f} tokens); "
                f"tree / chain {trees[n][0] / max(chains[k], 1.0):.3f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
