"""
A picture of one step: a policy in a pipeline, its taps, and a draft that learns from them on the last rank.

The upper half is the trace of a real step of CPU processes. They share the machine's cores, so its times say in which
order things happen, not how fast they could be. The lower half is a simulation: the CPU times of the same operations,
each rank given a core of its own. The share of the draft's work that is hidden behind backwards of earlier stages is
simulated too.

Checked before anything is drawn: the draft's work starts after the last backward of its rank; no rank needs anything
of the draft to end its step (the draft waits until all have ended theirs in a first step); the taps make the draft
learn.

    python benchmarks/pipeline_timeline.py --output docs/pipeline_timeline.svg
"""

import argparse
import os
import statistics
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import matplotlib
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from measuring import machine
from transformers import LlamaConfig, LlamaForCausalLM

from trl_codraft.modeling.configuration_eagle3 import Eagle3DraftConfig
from trl_codraft.modeling.modeling_eagle3 import Eagle3DraftModel
from trl_codraft.modeling.packing import pack_rows
from trl_codraft.modeling.teacher import PolicyHead
from trl_codraft.pp import GlooTransport, Tap, TapChannel, TapPlan
from trl_codraft.pp import pipeline as pp_schedule
from trl_codraft.pp.order import Action, action_ends, schedule_order
from trl_codraft.pp.pipeline import Pipeline
from trl_codraft.pp.stages.split import split_policy
from trl_codraft.training.draft_trainer import DraftTrainer, DraftTrainingArguments


PASSES = 3
COLORS = {"forward": "#8fb8de", "backward": "#3b6ea5", "draft": "#e08e45", "taps": "#b23a48"}


class Trace:
    """What this rank did: (kind, microbatch, start, end, CPU time), with the clock that all processes share."""

    def __init__(self):
        self.events = []

    def record(self, kind, microbatch, work):
        start, cpu = time.monotonic(), time.thread_time()
        result = work()
        self.events.append((kind, microbatch, start, time.monotonic(), time.thread_time() - cpu))
        return result


class TracedStage(pp_schedule._TappedStage):
    """Records forwards and backwards."""

    trace = Trace()

    def forward_one_chunk(self, number, *arguments, **named):
        run = super().forward_one_chunk
        return self.trace.record("forward", number, lambda: run(number, *arguments, **named))

    def backward_one_chunk(self, number, *arguments, **named):
        run = super().backward_one_chunk
        return self.trace.record("backward", number, lambda: run(number, *arguments, **named))


def score(policy, arguments, extras):
    logits = policy(**arguments).logits[:, :-1].float()
    return logits.log_softmax(-1).gather(-1, extras["input_ids"][:, 1:, None])[..., 0]


def tap_layers(args):
    num_layers = args.layers * args.ranks
    return [1, num_layers // 2, num_layers - 1]


def build(args, rank):
    """This rank's pipeline; on the last rank also the draft's trainer."""
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=args.hidden,
        intermediate_size=2 * args.hidden,
        num_hidden_layers=args.layers * args.ranks,
        num_attention_heads=args.hidden // 64,
        num_key_value_heads=args.hidden // 64,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    policy = LlamaForCausalLM(config).train()
    num_layers = config.num_hidden_layers
    draft_config = Eagle3DraftConfig.from_policy(config, tap_layers=tap_layers(args))
    stage = split_policy(policy, [args.layers] * args.ranks, rank, score)
    taps = [Tap(layer, layer // args.layers, args.hidden, torch.float32) for layer in draft_config.tap_layers]
    # The teacher reads what the head reads: it stays on the last stage, as one more tap.
    taps.append(Tap(num_layers + 1, args.ranks - 1, args.hidden, torch.float32))
    plan = TapPlan(tuple(taps), tuple(range(args.ranks)), args.microbatches)
    channel_group, group = (dist.new_group(list(range(args.ranks)), backend="gloo") for _ in range(2))
    channel = TapChannel(plan, rank, GlooTransport(channel_group), timeout=60.0)
    if stage.is_last:
        channel.hook(num_layers + 1, policy.model.norm, output=True)
    settings = {"hidden_size": args.hidden, "dtype": torch.float32, "device": torch.device("cpu")}
    pipeline = Pipeline([stage], group, channel=channel, **settings)
    trainer = None
    if stage.is_last:
        torch.manual_seed(1)
        arguments = DraftTrainingArguments(num_passes=PASSES, warmup_steps=0)
        trainer = DraftTrainer(Eagle3DraftModel(draft_config), PolicyHead(policy), arguments, num_training_steps=100)
    return pipeline, channel, trainer


def run_step(pipeline, channel, trainer, inputs, trace, wait):
    """A step of the policy, then of the draft. With `wait`, the draft does not start before all ranks ended theirs."""
    pipeline.step(inputs, lambda number, output: output.mean())
    if wait:
        dist.barrier()
    if trainer is None:
        return None
    for number, rows in enumerate(inputs):
        ids, mask = rows["input_ids"], rows["attention_mask"]

        def learn(number=number, ids=ids, mask=mask):
            *taps, last_hidden = channel.take(number)
            trainer.accumulate(pack_rows(ids, mask, mask, taps, last_hidden, PASSES))

        trace.record("draft", number, learn)
    return trainer.step()["draft/loss"]


def measure(rank, args, folder):
    torch.set_num_threads(1)
    store = dist.FileStore(os.path.join(folder, "store"), args.ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=args.ranks, timeout=timedelta(seconds=120))
    pp_schedule._TappedStage = TracedStage
    pipeline, channel, trainer = build(args, rank)
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(3, 512, (args.rows, args.length), generator=generator)
    inputs = [{"input_ids": ids.roll(k, 1), "attention_mask": torch.ones_like(ids)} for k in range(args.microbatches)]
    steps, losses = [], []
    for step in range(args.steps):
        trace = TracedStage.trace = Trace()
        dist.barrier()
        losses.append(run_step(pipeline, channel, trainer, inputs, trace, wait=step == 0))
        steps.append(trace.events)
    torch.save((steps, losses), os.path.join(folder, f"{rank}.pt"))
    channel.close()
    dist.barrier()
    dist.destroy_process_group()


def operation_times(traces):
    """Median CPU time by (rank, kind), over microbatches and steps after the first."""
    times = {}
    for rank, (steps, _) in enumerate(traces):
        for kind in ("forward", "backward", "draft"):
            values = [event[4] for events in steps[1:] for event in events if event[0] == kind]
            times[rank, kind] = statistics.median(values) if values else 0.0
    return times


def simulate(args, times):
    """
    Bars (rank, kind, microbatch, start, end) of a step on a core per rank, and the share of the draft that is hidden.
    """
    order = schedule_order("1F1B", args.ranks, args.ranks, args.microbatches)
    time_of = lambda action: times[action.stage, "backward" if action.backward else "forward"]  # noqa: E731
    ends = action_ends(order, args.ranks, time_of)
    bars = [
        (action.stage, "backward" if action.backward else "forward", action.microbatch, end - time_of(action), end)
        for action, end in ends.items()
    ]
    last = args.ranks - 1
    start = ends[Action(last, args.microbatches - 1, backward=True)]
    draft = times[last, "draft"]
    bars += [(last, "draft", k, start + k * draft, start + (k + 1) * draft) for k in range(args.microbatches)]
    return bars, min(1.0, (max(ends.values()) - start) / (args.microbatches * draft))


def draw(args, real, simulated, path):
    matplotlib.use("agg")
    matplotlib.rcParams["svg.fonttype"] = "none"  # text stays text
    from matplotlib import pyplot

    sources = {layer // args.layers for layer in tap_layers(args)} - {args.ranks - 1}
    figure, axes = pyplot.subplots(2, 1, figsize=(11, 5.5), constrained_layout=True)
    titles = (
        f"trace of one step, {args.ranks} processes on {os.cpu_count()} shared cores",
        "simulation with the CPU times of the same operations, a core per process",
    )
    for axis, bars, title in zip(axes, (real, simulated), titles, strict=True):
        origin = min(bar[3] for bar in bars)
        for rank, kind, number, start, end in bars:
            axis.barh(rank, 1e3 * (end - start), left=1e3 * (start - origin), color=COLORS[kind], edgecolor="white")
            axis.text(5e2 * (start + end - 2 * origin), rank, number, ha="center", va="center", fontsize=7)
            if kind == "forward" and rank in sources:
                axis.plot(1e3 * (end - origin), rank - 0.44, marker="v", color=COLORS["taps"], markersize=4)
        axis.set_yticks(range(args.ranks), [f"rank {rank}" for rank in range(args.ranks)])
        axis.invert_yaxis()
        axis.set_title(title, fontsize=9)
        axis.set_xlabel("ms", fontsize=8)
    handles = [pyplot.Rectangle((0, 0), 1, 1, color=COLORS[kind]) for kind in ("forward", "backward", "draft")]
    handles.append(pyplot.Line2D([], [], marker="v", color=COLORS["taps"], linestyle=""))
    axes[0].legend(handles, ("forward", "backward", "draft", "taps leave"), fontsize=7, loc="upper right", ncols=4)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = {"ranks": 4, "layers": 4, "hidden": 256, "rows": 2, "length": 96, "microbatches": 8, "steps": 4}
    for name, value in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=value, help="per stage" if name == "layers" else None)
    parser.add_argument("--output", type=Path, help="where the figure goes; none is drawn without")
    args = parser.parse_args()
    print(f"{machine()}, {args.ranks} processes, 1F1B")
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(measure, args=(args, folder), nprocs=args.ranks)
        traces = [torch.load(os.path.join(folder, f"{rank}.pt")) for rank in range(args.ranks)]
    steps, losses = traces[-1]
    for events in steps:
        started = min(event[2] for event in events if event[0] == "draft")
        assert started >= max(event[3] for event in events if event[0] == "backward")
    assert losses[-1] < losses[0]
    print(
        f"the draft starts after its rank's last backward in all {args.steps} steps; "
        f"its loss: {losses[0]:.3f} -> {losses[-1]:.3f}"
    )
    print("in step 0 the draft waited until every rank had ended its step: none needs anything of it")
    times = operation_times(traces)
    for rank in range(args.ranks):
        print(
            f"rank {rank}: "
            + ", ".join(f"{kind} {1e3 * times[rank, kind]:.1f} ms" for kind in COLORS if times.get((rank, kind)))
        )
    bars, hidden = simulate(args, times)
    print(f"simulated: {hidden:.0%} of the draft's work is hidden behind backwards of earlier stages")
    if args.output:
        real = [
            (rank, *event[:4]) for rank, (rank_steps, _) in enumerate(traces) for event in rank_steps[args.steps // 2]
        ]
        draw(args, real, bars, args.output)


if __name__ == "__main__":
    main()
