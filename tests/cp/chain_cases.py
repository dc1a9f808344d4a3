"""Several passes over one trunk on a rank of a group: what they send, save and allocate."""

from datetime import timedelta

import torch
import torch.distributed as dist
from cp.attention_cases import MIXED, uneven_shards
from cp.groups import WireBytes
from modeling.allocations import LargestTensor, SavedBytes

from trl_codraft.cp import ContextLayout, ring_attention
from trl_codraft.cp.gathered import gather_trunk


LENGTH, NUM_HEADS, NUM_KV_HEADS, DIM = 240, 4, 2, 8
DOC_LENS = [LENGTH, 9, 9, 9, 9]
PASSES, WINDOW = 3, 20


def layout_of(mode, doc_lens, group):
    if mode == "uneven":
        return ContextLayout(
            doc_lens, uneven_shards(doc_lens, 1 if group is None else dist.get_world_size(group)), group
        )
    return ContextLayout.plan(doc_lens, group, mode=mode)


def leaves(layout, num_passes):
    """Queries of every pass, trunk keys and values, branch keys and values of passes after 0."""
    generator = torch.Generator().manual_seed(0)

    def leaf(num_heads):
        whole = torch.randn(sum(layout.doc_lens), num_heads, DIM, generator=generator)
        return whole[layout.rows].requires_grad_()

    queries = [leaf(NUM_HEADS) for _ in range(num_passes)]
    keys, values = ([leaf(NUM_KV_HEADS) for _ in range(num_passes)] for _ in range(2))
    return queries, keys, values


def passes(layout, queries, keys, values, trunk, window=None):
    """Outputs of all passes over one trunk, the first keys and values; the others are the branch."""
    (k, *branch_k), (v, *branch_v) = keys, values
    gathered = gather_trunk(k, v, layout) if trunk == "gather_once" else None
    outs = []
    for num_pass, q in enumerate(queries):
        branch = (branch_k[:num_pass], branch_v[:num_pass]) if num_pass else None
        outs.append(ring_attention(q, k, v, layout, branch=branch, window=window, trunk=gathered))
    return outs


def chain_costs(group):
    """Per layout and trunk: bytes sent forward and backward, saved bytes and largest tensor by number of passes."""
    costs = {}
    for mode in ("document", "hybrid", "uneven"):
        layout = layout_of(mode, DOC_LENS, group)
        for trunk in ("ring", "gather_once", "window"):
            num_passes, window = (1, WINDOW) if trunk == "window" else (PASSES, None)
            inputs = leaves(layout, num_passes)
            with WireBytes() as wire:
                outs = passes(layout, *inputs, trunk, window)
                forward, wire.sent = wire.sent, 0
                sum(out.sum() for out in outs).backward()
            costs[mode, trunk] = {"sent": (forward, wire.sent), "out": torch.cat(outs).detach()}
    layout = layout_of("document", [LENGTH], group)
    saved, largest = {}, {}
    for num_passes in (2, 4, 6):
        inputs = leaves(layout, num_passes)
        with SavedBytes() as kept, LargestTensor() as mode:
            outs = passes(layout, *inputs, "ring")
            sum(out.sum() for out in outs).backward()
        saved[num_passes], largest[num_passes] = kept.total, mode.numel
    costs["document", "ring"] |= {"saved": saved, "largest": largest}
    return costs


def one_row_gradients(group):
    """For each document, this rank's rows and `dv` of the sum of the output at the document's last row alone."""
    doc_lens = MIXED[0]
    layout = ContextLayout.plan(doc_lens, group, mode="document")
    results = []
    for start, length in zip(layout.doc_starts, doc_lens, strict=True):
        q, k, v = (torch.ones(layout.num_rows, 2, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
        out = ring_attention(q, k, v, layout)
        (dv,) = torch.autograd.grad(
            out, [v], (layout.rows == start + length - 1).double()[:, None, None].expand_as(out)
        )
        results.append((layout.rows, dv))
    return results


def unsharded(group):
    """This rank's rows, the whole pack it gets for them, and the gradient of a weighted sum of the whole."""
    layout = layout_of("uneven", MIXED[0], group)
    values = torch.stack([layout.rows, -layout.rows], dim=1).double().requires_grad_()
    whole = layout.unshard(values)
    (grad,) = torch.autograd.grad((whole * torch.arange(len(whole))[:, None]).sum(), [values])
    return layout.rows, whole.detach(), grad


def stalled_rank(group):
    """What the ranks of a group of four report when rank 1 does not make the call."""
    if dist.get_world_size(group) < 4:
        return None
    short = dist.new_group(timeout=timedelta(seconds=3))
    layout = ContextLayout.plan([64], short, mode="document")
    message = None
    if layout.rank != 1:
        q = torch.ones(layout.num_rows, 2, 4)
        try:
            ring_attention(q, q, q, layout)
        except RuntimeError as error:
            message = str(error)
    dist.barrier(group)
    return message
