"""Ranks of `test_pp_mutations.py`: pipelines and channels with a piece of the library broken, in the ranks only."""

import os
import sys
import threading
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pipeline_worker
import torch
from channel_worker import changing_shapes
from forked_ranks import watch_ranks
from mutations import Mutation
from torch import distributed as dist

from trl_codraft.pp import TapChannel, TapPlan, pipeline
from trl_codraft.pp.pipeline import _TappedStage
from trl_codraft.pp.stages import split
from trl_codraft.pp.taps import gloo
from trl_codraft.pp.taps.pinned import PinnedTransport
from trl_codraft.pp.taps.symmetric import SymmetricTransport


class ScaledGradients:
    """Schedules of torch that divide gradients by the number of microbatches."""

    def __init__(self, kind):
        self.kind = kind

    def __call__(self, *arguments, **named):
        return self.kind(*arguments, **{**named, "scale_grads": True})


def inexact_pass(self, hidden, *arguments, **named):
    return hidden * (1 + 1e-6) if hidden.is_floating_point() else hidden


def microbatches_mixed_up(self, number, inputs, named, original=_TappedStage.forward_one_chunk, **more):
    return original(self, number, inputs, {**named, "attention_mask": named["attention_mask"].roll(number, 0)}, **more)


def slot_given_back_before_it_is_copied(self, stage, timeout, original=gloo.GlooTransport.receive):
    content, payload = original(self, stage, timeout)
    payload.zero_()  # what the source may do to a slot that it has back
    return content, payload


def all_at_the_start(self, stage, rows, payload):
    return {
        tap.layer: payload[: tap.num_bytes(rows)].view(tap.dtype).view(tap.shape(rows)) for tap in self.taps_of(stage)
    }


def slot_of_fewer(self, rank, header, original=SymmetricTransport._slot):
    return original(self, rank, replace(header, sequence=header.sequence % self._lanes[header.stage].slots))


def unawaited_copy(self, target, source, header, after=None, original=PinnedTransport._copy):
    if after is None:
        return original(self, target, source, header)
    threading.Timer(0.02, original, (self, target, source.clone(), header, after)).start()


def late_copy(self, target, source, header, after=None, original=PinnedTransport._copy):
    if after is None:
        time.sleep(0.02)
    original(self, target, source, header, after)


def late_post(self, original=gloo._Sink.post):
    time.sleep(0.02)  # or what was sent would mostly be gone
    original(self)


# By case of a pipeline, and by transport of a channel.
USUAL = "1F1B, 2 ranks"
PIPELINES = {
    "tap of the next layer": Mutation(
        USUAL,
        TapChannel,
        "hook",
        lambda self, layer, module, output=False, original=TapChannel.hook: original(self, layer, module, True),
    ),
    "scaled gradients": Mutation(
        USUAL, pipeline, "CLASSES", {name: ScaledGradients(kind) for name, kind in pipeline.CLASSES.items()}
    ),
    "tied gradients apart": Mutation("gemma2", pipeline_worker, "sum_tied_gradients", lambda *arguments: None),
    "inexact pass": Mutation(USUAL, split.PassThrough, "forward", inexact_pass),
    "microbatches mixed up": Mutation(USUAL, _TappedStage, "forward_one_chunk", microbatches_mixed_up),
}
CHANNELS = {
    "slot given back too early": Mutation("gloo", gloo.GlooTransport, "receive", slot_given_back_before_it_is_copied),
    "taps overlap": Mutation("gloo", TapPlan, "views", all_at_the_start),
    "staging reused": Mutation(
        "gloo", gloo, "SourceEnd", type("Reused", (gloo.SourceEnd,), {"slot": 0, "has_free_slot": True})
    ),
    "header before its copy": Mutation("symmetric", PinnedTransport, "_copy", unawaited_copy),
    "as many landing slots as receives": Mutation("symmetric", SymmetricTransport, "_slot", slot_of_fewer),
}


LATE_COPY = Mutation("symmetric", PinnedTransport, "_copy", late_copy)
# Without these what is broken would mostly go well, by the name of what is broken.
SLOWED = {"SourceEnd": [Mutation("gloo", gloo._Sink, "post", late_post)], "_slot": [LATE_COPY]}
CHANNELS["nothing but late copies"] = LATE_COPY


def run_pipeline(rank, world_size, mutation):
    with mutation.applied():
        pipeline_worker.run_case(rank, world_size, pipeline_worker.CASES[mutation.case])


def run_channel(rank, world_size, mutation):
    # The probe, too, would notice.
    SymmetricTransport._require_known_bytes = lambda self: None
    with ExitStack() as broken:
        for change in (mutation, *SLOWED.get(mutation.name, ())):
            broken.enter_context(change.applied())
        changing_shapes(rank, dist.new_group(list(range(world_size)), backend="gloo"), mutation.case)


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    outcomes = {}
    for run, mutations in ((run_pipeline, PIPELINES), (run_channel, CHANNELS)):
        for name, mutation in mutations.items():
            os.environ["CASE_FOLDER"] = str(folder / name)
            outcomes[name] = watch_ranks(run, 2, folder / name, mutation, timeout=60)
    torch.save(outcomes, folder / "outcomes.pt")
