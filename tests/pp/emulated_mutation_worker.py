"""
Ranks of `test_emulated_mutations.py`: takes single waits out of the transports of GPUs and runs a case on emulated ones.

A mutation replaces one piece of a method's source, which must occur exactly once.
"""

import inspect
import sys
import textwrap
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from emulated_worker import changing_shapes, taken_at_once
from forked import fork_ranks, side_by_side

from trl_codraft.pp.taps.cuda import CudaTransport
from trl_codraft.pp.taps.pinned import PinnedTransport, _Publisher
from trl_codraft.pp.taps.side_copies import SideCopies, Staging


def without(owner, name, old, new="pass"):
    """Replaces a piece of a method."""
    method = getattr(owner, name)
    source = textwrap.dedent(inspect.getsource(method))
    assert source.count(old) == 1, f"{old!r} occurs {source.count(old)} times in {name}"
    scope = {**method.__globals__, owner.__name__: owner}
    source = source.replace(old, new).replace("super()", f"super({owner.__name__}, self)")
    exec(compile(source, f"<mutated {name}>", "exec"), scope)
    setattr(owner, name, scope[name])


LATE_SINK = partial(taken_at_once, late_sink=True)
FEW_SLOTS = partial(changing_shapes, schedule="GPipe", slots=1)
MUTATIONS = {
    "nothing": ("CUDA", FEW_SLOTS, lambda: None),
    "nothing, taken at once": ("CUDA", taken_at_once, lambda: None),
    "nothing, late": ("CUDA", LATE_SINK, lambda: None),
    "nothing, pinned": ("pinned, gloo", LATE_SINK, lambda: None),
    "the side stream does not wait for the forward": (
        "CUDA",
        taken_at_once,
        lambda: without(Staging, "leave", "self.calls.side.wait_event(self.packed[index])"),
    ),
    "the end of packing is not recorded": (
        "CUDA",
        taken_at_once,
        lambda: without(Staging, "leave", "self.packed[index].record(self.calls.current())"),
    ),
    "the forward does not wait for its staging buffer": (
        "CUDA",
        FEW_SLOTS,
        lambda: without(Staging, "room", "self.calls.current().wait_event(self.copied[index])"),
    ),
    "the source does not wait until the slot is empty": (
        "CUDA",
        LATE_SINK,
        lambda: without(CudaTransport, "publish", "calls.side.wait_event(self._emptied[stage][index])"),
    ),
    "a filled slot is not recorded": (
        "CUDA",
        FEW_SLOTS,
        lambda: without(CudaTransport, "publish", "self._filled[stage][index].record(calls.side)"),
    ),
    "the draft's rank does not wait until the slot is filled": (
        "CUDA",
        FEW_SLOTS,
        lambda: without(CudaTransport, "collect", "calls.side.wait_event(self._filled[stage][payload])"),
    ),
    "an emptied slot is not recorded": (
        "CUDA",
        LATE_SINK,
        lambda: without(CudaTransport, "collect", "self._emptied[stage][payload].record(calls.side)"),
    ),
    "taking does not wait for the copy": (
        "CUDA",
        taken_at_once,
        lambda: without(
            SideCopies,
            "hand_over",
            "current.wait_event(self._arrived.pop((stage, microbatch)))",
            "self._arrived.pop((stage, microbatch))",
        ),
    ),
    "taken memory is not kept for the taker": (
        "CUDA",
        taken_at_once,
        lambda: without(SideCopies, "hand_over", "self.calls.hand_over(message, current)"),
    ),
    "a ring that was replaced is not freed": (
        "CUDA",
        taken_at_once,
        lambda: without(CudaTransport, "_offer_ring", "append(self._rings.get(stage))", "append(None)"),
    ),
    "pinned: published before it is copied": (
        "pinned, shared memory",
        FEW_SLOTS,
        lambda: without(
            PinnedTransport, "_publish", 'self._await_copy(copied, header, time.monotonic() + timeout, "to")'
        ),
    ),
    "pinned: the side stream does not wait for the forward": (
        "pinned, gloo",
        taken_at_once,
        lambda: without(Staging, "leave", "self.calls.side.wait_event(self.packed[index])"),
    ),
    "pinned: staging is used again at once": (
        "pinned, gloo",
        FEW_SLOTS,
        lambda: without(PinnedTransport, "reserve", "lane.pending.popleft().result()", "lane.pending.popleft()"),
    ),
    "pinned: the thread does not say which GPU its calls are of": (
        "pinned, shared memory",
        FEW_SLOTS,
        lambda: without(_Publisher, "run", "self._calls.enter_thread()"),
    ),
    "pinned: taking does not wait for the copy": (
        "pinned, gloo",
        LATE_SINK,
        lambda: without(
            SideCopies,
            "hand_over",
            "current.wait_event(self._arrived.pop((stage, microbatch)))",
            "self._arrived.pop((stage, microbatch))",
        ),
    ),
}


def run_rank(rank, world_size, mutation, probed):
    transport, case, mutate = MUTATIONS[mutation]
    if not probed:
        CudaTransport._probe = lambda self, timeout: None
    mutate()
    return case(rank, dist.new_group(list(range(world_size)), backend="gloo"), transport)


def run_mutation(mutation, probed):
    return fork_ranks(run_rank, 2, folder / mutation / str(probed), mutation, probed, timeout=60)


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    # The probe, too, would notice most of them: once with it, once without.
    runs = [(name, probed) for name in MUTATIONS for probed in (False, True) if "pinned" not in name or not probed]
    torch.save(side_by_side(run_mutation, runs), folder / "outcomes.pt")
