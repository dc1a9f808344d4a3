"""
Cases of sharded attention and the dense softmax they are held against. The reference knows nothing of ranks, segments
or row order: one softmax over all keys of the pack, its mask from documents and positions.
"""

import random
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
import torch.distributed as dist

from trl_codraft.cp import ContextLayout, ring_attention
from trl_codraft.cp.gathered import gather_trunk
from trl_codraft.cp.planner import Segment, plan_document, plan_hybrid
from trl_codraft.modeling.packing import PackedLayout


MIXED = ((37, 3, 64, 1, 19, 128, 5), (20, 0, 40, 1, 18, 100, 5))
TINY = ((1, 2, 3, 1, 5, 2), (0, 0, 1, 1, 3, 2))
SINGLES = ((1, 1), (0, 0))
HOLES = ((5, 0, 33, 0, 8), (2, 0, 0, 0, 8))


@dataclass(frozen=True)
class Case:
    pack: tuple = MIXED
    mode: str = "document"
    num_branches: int = 0
    window: int | None = None
    sinks: bool = False
    heads: tuple = (4, 2)
    head_dims: tuple = (6, 6)
    dtype: torch.dtype = torch.float64
    trunk: str = "ring"

    def full_layout(self):
        doc_lens, roots = self.pack
        return PackedLayout(doc_lens, roots)


DEFAULT_CASES = [
    *(
        Case(pack, mode, n)
        for pack in (MIXED, TINY, SINGLES, HOLES)
        for mode in ("document", "hybrid")
        for n in (0, 3)
    ),
    *(Case(MIXED, mode, n) for mode in ("uneven", "hybrid") for n in (1, 6)),
    *(Case(pack, "uneven", n) for pack in (TINY, SINGLES) for n in (0, 3)),
    *(Case(pack, "document", n, 7, sinks=n > 0) for pack in (MIXED, TINY, HOLES) for n in (0, 3)),
    *(Case(MIXED, mode, 3, window) for mode in ("uneven", "hybrid") for window in (1, 2, 4, 20)),
    *(Case(MIXED, "document", n, sinks=True) for n in (0, 3)),
    *(Case(MIXED, "document", 2, heads=heads) for heads in ((4, 1), (3, 3))),
    *(Case(MIXED, "document", 2, head_dims=dims) for dims in ((6, 4), (4, 10))),
    Case(MIXED, "document", 2, 7, head_dims=(6, 4)),
    *(
        Case(pack, mode, n, trunk="gather_once")
        for pack, mode in ((MIXED, "hybrid"), (TINY, "uneven"))
        for n in (0, 3)
    ),
    *(Case(MIXED, "document", n, window, dtype=torch.float32) for n in (0, 3) for window in (None, 7)),
    *(
        Case(MIXED, mode, 3, dtype=torch.float32, trunk=trunk)
        for mode, trunk in (("hybrid", "ring"), ("document", "gather_once"))
    ),
]
ALL_CASES = [
    Case(pack, mode, n, window, sinks, dtype=dtype, trunk=trunk)
    for pack in (MIXED, TINY, SINGLES, HOLES)
    for mode in ("document", "hybrid", "uneven")
    for n in range(7)
    for window, trunk in ((None, "ring"), (None, "gather_once"), (3, "ring"), (30, "ring"))
    for sinks in (False, True)
    for dtype in (torch.float64, torch.float32)
]  # fmt: skip


def random_cases(count, seed=0):
    """Cases over packs of random documents; each is one step of a run that must not hang."""
    rng = random.Random(seed)
    cases = []
    for _ in range(count):
        doc_lens = (rng.randint(1, 60), *(rng.choice([0, 1, 2, 3, 5, 11, 30, 90]) for _ in range(rng.randint(0, 6))))
        roots = tuple(rng.randint(0, length) for length in doc_lens)
        window = rng.choice([None, None, 1, 3, 15])
        trunk = "ring" if window else rng.choice(["ring", "gather_once"])
        mode = rng.choice(["document", "hybrid", "uneven"])
        cases.append(Case((doc_lens, roots), mode, rng.randint(0, 6), window, rng.random() < 0.5, trunk=trunk))
    return cases


BF16_CASES = [
    replace(Case(MIXED, mode, n, head_dims=(16, 16)), dtype=torch.bfloat16)
    for mode in ("document", "hybrid")
    for n in (0, 3)
]


def tensors(case):
    """All tensors of the whole pack, also for rows no pass computes, in the dtype of the case."""
    generator = torch.Generator().manual_seed(0)
    num_rows, (num_heads, num_kv_heads), (key_dim, value_dim) = sum(case.pack[0]), case.heads, case.head_dims
    shapes = {
        "q": (num_rows, num_heads, key_dim),
        "k": (num_rows, num_kv_heads, key_dim),
        "v": (num_rows, num_kv_heads, value_dim),
        "branch_k": (case.num_branches, num_rows, num_kv_heads, key_dim),
        "branch_v": (case.num_branches, num_rows, num_kv_heads, value_dim),
        "sinks": (num_heads,),
        "dout": (num_rows, num_heads, value_dim),
    }
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64).to(case.dtype)
        for name, shape in shapes.items()
    }


def uneven_shards(doc_lens, cp_size, seed=0):
    """Each document in up to five pieces on random ranks; the last rank of several gets nothing."""
    rng = random.Random(seed)
    shards = [[] for _ in range(cp_size)]
    for doc, length in enumerate(doc_lens):
        cuts = sorted({0, length, *(rng.randint(0, length) for _ in range(4))})
        for start, end in zip(cuts[:-1], cuts[1:], strict=True):
            shards[rng.randrange(max(1, cp_size - 1))].append(Segment(doc, start, end))
    return shards


def make_layout(case, group):
    """`group`: a process group, `None`, or `(rank, size)` of ranks that are threads."""
    doc_lens, roots = case.pack
    if not isinstance(group, tuple):
        rank, size = None, 1 if group is None else dist.get_world_size(group)
    else:
        (rank, size), group = group, None
    plans = {"document": plan_document, "hybrid": plan_hybrid, "uneven": uneven_shards}
    return ContextLayout(doc_lens, plans[case.mode](doc_lens, size), group, rank=rank, first_valid_root=roots)


def attend(case, group):
    """This rank's output and gradients, with the pack rows they belong to."""
    layout, whole = make_layout(case, group), tensors(case)
    rows = layout.rows
    queries = rows[layout.query_rows(1 if case.num_branches else 0)]
    own = {
        "q": whole["q"][queries],
        "k": whole["k"][rows],
        "v": whole["v"][rows],
        "branch_k": whole["branch_k"][:, queries],
        "branch_v": whole["branch_v"][:, queries],
        "sinks": whole["sinks"],
    }
    own = {name: tensor.requires_grad_() for name, tensor in own.items()}
    branch = (own["branch_k"], own["branch_v"]) if case.num_branches else None
    out = ring_attention(
        own["q"],
        own["k"],
        own["v"],
        layout,
        branch=branch,
        window=case.window,
        sinks=own["sinks"] if case.sinks else None,
        scale=0.4,
        trunk=gather_trunk(own["k"], own["v"], layout) if case.trunk == "gather_once" else None,
    )
    used = [name for name in own if (case.num_branches or "branch" not in name) and (case.sinks or name != "sinks")]
    grads = torch.autograd.grad(out, [own[name] for name in used], whole["dout"][queries])
    result = {"rows": rows, "queries": queries, "out": out.detach()}
    return result | {"d" + name: grad for name, grad in zip(used, grads, strict=True)}


def assemble(case, results):
    """Results of all ranks as tensors over the whole pack; every row must come from exactly one rank."""
    whole = tensors(case)
    total = {}
    for name in results[0]:
        if name in ("rows", "queries"):
            continue
        if name == "dsinks":
            total[name] = sum(result[name].double() for result in results)
            continue
        like = whole["dout" if name == "out" else name[1:]]
        axis = 1 if "branch" in name else 0
        rows = torch.cat([result["rows" if name in ("dk", "dv") else "queries"] for result in results])
        assert len(rows.unique()) == len(rows)
        total[name] = torch.zeros_like(like).index_copy_(axis, rows, torch.cat([r[name] for r in results], axis))
    return total


@lru_cache(maxsize=64)
def dense(case):
    """Output and gradients of one dense softmax in float64; rows that no pass computes are zero."""
    layout, whole = case.full_layout(), {name: tensor.double() for name, tensor in tensors(case).items()}
    leaves = {name: tensor.requires_grad_() for name, tensor in whole.items() if name != "dout"}
    num_rows, num_pass = layout.num_rows, case.num_branches
    docs = torch.arange(len(case.pack[0])).repeat_interleave(torch.tensor(case.pack[0]))
    row, window = torch.arange(num_rows), case.window or num_rows + num_pass
    distance = (row + num_pass).unsqueeze(1) - row
    trunk = (docs.unsqueeze(1) == docs) & (row.unsqueeze(1) >= row) & (distance < window)
    own = [torch.eye(num_rows, dtype=torch.bool) & (num_pass - b < window) for b in range(1, num_pass + 1)]
    mask = torch.cat([trunk, *own], dim=1)
    keys = torch.cat([leaves["k"], *leaves["branch_k"]])
    values = torch.cat([leaves["v"], *leaves["branch_v"]])
    group = case.heads[0] // case.heads[1]
    keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
    scores = (torch.einsum("qhd,khd->hqk", leaves["q"], keys) * 0.4).masked_fill(~mask, -torch.inf)
    if case.sinks:
        scores = torch.cat([scores, leaves["sinks"].view(-1, 1, 1).expand(-1, num_rows, 1)], dim=-1)
    probs = scores.softmax(-1)[..., : keys.shape[0]]
    out = torch.einsum("hqk,khd->qhd", probs, values)
    computed = torch.zeros(num_rows, 1, 1, dtype=torch.float64)
    computed[layout.query_rows(1 if num_pass else 0)] = 1.0
    out = out * computed
    grads = torch.autograd.grad(out, list(leaves.values()), whole["dout"], allow_unused=True)
    result = {"out": out.detach()}
    return result | {"d" + name: grad for name, grad in zip(leaves, grads, strict=True) if grad is not None}


def run_cases(group, cases):
    """`{case: result}` of this rank."""
    return {case: attend(case, group) for case in cases}
