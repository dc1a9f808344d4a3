"""Ranks of `test_pp_mutations.py`: pipelines and channels with a piece of the library broken, in the ranks only."""

import sys
from pathlib import Path

import pipeline_worker
import torch
from channel_worker import changing_shapes
from forked import fork_ranks
from torch import distributed as dist

from trl_codraft.pp import TapChannel
from trl_codraft.pp import pipeline as schedule
from trl_codraft.pp.stages import split
from trl_codraft.pp.taps import gloo, plan, shared_memory


def tap_of_the_next_layer():
    original = TapChannel.hook
    TapChannel.hook = lambda self, layer, module, output=False: original(self, layer, module, True)


def scaled_gradients():
    for kind in schedule.CLASSES.values():
        original = kind.__init__

        def scaled(self, *arguments, original=original, **named):
            original(self, *arguments, **{**named, "scale_grads": True})

        kind.__init__ = scaled


def tied_gradients_apart():
    pipeline_worker.sum_tied_gradients = lambda *arguments: None


def inexact_pass():
    split.PassThrough.forward = lambda self, hidden, *arguments, **named: (
        hidden * (1 + 1e-6) if hidden.is_floating_point() else hidden
    )


def microbatches_mixed_up():
    original = schedule._TappedStage.forward_one_chunk
    schedule._TappedStage.forward_one_chunk = lambda self, number, inputs, named, **more: original(
        self, number, inputs, {**named, "attention_mask": named["attention_mask"].roll(number, 0)}, **more
    )


def slot_given_back_before_it_is_copied():
    original = shared_memory.SharedMemoryTransport.receive

    def hasty(self, stage, timeout):
        content, payload = original(self, stage, timeout)
        payload.zero_()  # what the source may do to a slot that it has back
        return content, payload

    shared_memory.SharedMemoryTransport.receive = hasty


def taps_overlap():
    def all_at_the_start(self, stage, rows, payload):
        parts = {tap: payload[: tap.num_bytes(rows)] for tap in self.taps_of(stage)}
        return {tap.layer: part.view(tap.dtype).view(tap.shape(rows)) for tap, part in parts.items()}

    plan.TapPlan.views = all_at_the_start


def staging_reused_at_once():
    gloo.SourceEnd.slot = property(lambda self: 0)
    gloo.SourceEnd.has_free_slot = property(lambda self: True)


PIPELINES = {
    "tap of the next layer": (tap_of_the_next_layer, "1F1B, 2 ranks"),
    "scaled gradients": (scaled_gradients, "1F1B, 2 ranks"),
    "tied gradients apart": (tied_gradients_apart, "gemma2"),
    "inexact pass": (inexact_pass, "1F1B, 2 ranks"),
    "microbatches mixed up": (microbatches_mixed_up, "1F1B, 2 ranks"),
    "nothing": (lambda: None, "1F1B, 2 ranks"),
}
CHANNELS = {
    "slot given back too early": (slot_given_back_before_it_is_copied, "shared memory"),
    "taps overlap": (taps_overlap, "shared memory"),
    "staging reused": (staging_reused_at_once, "gloo"),
    "nothing": (lambda: None, "gloo"),
}


def run_pipeline(rank, world_size, mutation):
    mutate, case = PIPELINES[mutation]
    mutate()
    return pipeline_worker.run_case(rank, world_size, pipeline_worker.CASES[case])


def run_channel(rank, world_size, mutation):
    mutate, transport = CHANNELS[mutation]
    mutate()
    return changing_shapes(rank, dist.new_group(list(range(world_size)), backend="gloo"), transport)


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    outcomes = {}
    for mutation in PIPELINES:
        outcomes["pipeline", mutation] = fork_ranks(run_pipeline, 2, folder / f"p {mutation}", mutation, timeout=60)
    for mutation in CHANNELS:
        outcomes["channel", mutation] = fork_ranks(run_channel, 2, folder / f"c {mutation}", mutation, timeout=60)
    torch.save(outcomes, folder / "outcomes.pt")
