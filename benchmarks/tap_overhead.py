"""
What the tap channel costs a pipeline, against no taps at all, against taps that ride on the activations from stage to
stage, and against sends that are waited for before the next forward. All arms run in turn on the same stages in the
same processes.

First, the taps of every microbatch are checked to be equal in all arms. Then, per rank and step: CPU time of packing
and copying, time blocked, bytes sent. Fails if one of the first two exceeds 1% of the step's CPU time over the
channel, or if the bytes are not `B * S * H * taps * itemsize` per microbatch. Wall times are printed, not judged: the
processes share cores.

    python benchmarks/tap_overhead.py --ranks 3
"""

import argparse
import os
import statistics
import tempfile
import time
from collections import deque
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from measuring import machine
from transformers import LlamaConfig, LlamaForCausalLM

from trl_codraft.pp import GlooTransport, TapChannel, TapPlan
from trl_codraft.pp import pipeline as pp_schedule
from trl_codraft.pp.pipeline import Pipeline
from trl_codraft.pp.shape import PipelineShape
from trl_codraft.pp.stages.split import split_policy


ARMS = ("off", "gloo", "relay", "blocking")
LIMIT = 0.01  # of the step's CPU time


class CountingStage(pp_schedule._TappedStage):
    """Counts the bytes of activations and of their gradients that a stage sends."""

    sent = 0

    def get_fwd_send_ops(self, number):
        return self.counted(super().get_fwd_send_ops(number))

    def get_bwd_send_ops(self, number):
        return self.counted(super().get_bwd_send_ops(number))

    @staticmethod
    def counted(operations):
        CountingStage.sent += sum(operation.tensor.nbytes for operation in operations)
        return operations


class CpuMeter:
    """CPU time of this thread inside the methods of a channel that pack, send, receive and copy."""

    def __init__(self, channel):
        self.seconds, self.depth = 0.0, 0
        for name in ("capture", "_finish", "begin_step", "end_step"):
            setattr(channel, name, self.metered(getattr(channel, name)))

    def metered(self, method):
        def run(*arguments):
            self.depth += 1
            start = time.thread_time()
            try:
                return method(*arguments)
            finally:
                self.depth -= 1
                if self.depth == 0:
                    self.seconds += time.thread_time() - start

        return run


class BlockingChannel(TapChannel):
    """The same interface over plain sends, each waited for before the stage's next forward."""

    def __init__(self, plan, stage, group):
        super().__init__(plan, stage, _Unconnected(group), timeout=60.0)
        self.group, self.pending = group, deque()

    def _space_for(self, forward, rows):
        self._timed(self.wait_pending)
        if forward.stage == self.plan.sink:
            return super()._space_for(forward, rows)
        self.buffer = torch.empty(self.plan.message_bytes(forward.stage, rows), dtype=torch.uint8)
        return self.plan.views(forward.stage, rows, self.buffer)

    def wait_pending(self):
        while self.pending:
            self.pending.popleft().wait()

    def _finish(self, step, forward):
        stage, rows = forward.stage, step.shapes[forward.microbatch]
        step.captured.add((stage, forward.microbatch))
        if stage in self._sequence and forward.seen:
            sink = self.plan.lanes[0].sink
            self.pending.append(dist.isend(self.buffer, group=self.group, group_dst=sink, tag=stage))
            self.bytes_sent += sum(tap.num_bytes(rows) for tap in self.plan.taps_of(stage))
        if stage == self.plan.sink:
            for lane in self.plan.lanes:
                message = torch.empty(self.plan.message_bytes(lane.stage, rows), dtype=torch.uint8)
                self._timed(self.receive, message, lane)
                self._queue.setdefault(forward.microbatch, {}).update(self.plan.views(lane.stage, rows, message))
            step.drained += 1

    def receive(self, message, lane):
        dist.recv(message, group=self.group, group_src=lane.source, tag=lane.stage)

    def end_step(self):
        self._timed(self.wait_pending)
        self._step = None


class _Unconnected:
    """Stands for a transport where none is used."""

    device = torch.device("cpu")

    def __init__(self, group):
        self.rank = dist.get_rank(group)

    def connect(self, lanes, fingerprint, timeout):
        pass

    def begin_step(self, sizes, digest, timeout):
        pass

    def dead_ranks(self):
        return []

    def fail(self, text):
        pass


class RelayStage(torch.nn.Module):
    """A stage that takes the taps so far with its activations and hands them on with its own."""

    def __init__(self, stage, plan):
        super().__init__()
        self.stage, self.index, self.num_stages = stage, stage.index, stage.num_stages
        self.is_first, self.is_last, self.layers = stage.is_first, stage.is_last, stage.layers
        self.active, self.taps, self.arrived = False, [], []
        for tap in plan.taps_of(stage.index):
            self.layers[tap.layer].register_forward_pre_hook(self.keep)

    def keep(self, module, arguments):
        if self.active:
            self.taps.append(arguments[0].detach())

    def forward(self, inputs, **named):
        self.active, self.taps = True, []
        width = self.stage.policy.config.hidden_size
        hidden, brought = (inputs, None) if self.is_first else (inputs[..., :width], inputs[..., width:].detach())
        output = self.stage(hidden, **named)
        self.active = False
        taps = ([] if brought is None else list(brought.split(width, -1))) + self.taps
        if self.is_last:
            self.arrived.append(taps)
            return output
        return torch.cat([output, *taps], -1)


class RelayPipeline(Pipeline):
    """Activations as wide as the taps that ride on them make them."""

    def _build(self, num_microbatches, shape, training):
        def wide(stages_before):
            width = self.hidden_size * (1 + sum(tap.stage < stages_before for tap in self.plan.taps))
            return torch.empty(*shape, width, dtype=self.dtype, device="meta", requires_grad=True)

        module = self.stages[0]
        first = torch.empty(shape, dtype=torch.long, device="meta")
        inputs = first if module.is_first else wide(module.index)
        settings = {"input_args": inputs, "output_args": wide(module.index + 1), "group": self.group}
        stage = CountingStage(module, module.index, self.num_stages, self.device, **settings)

        def loss_of(output, rows):
            return self._loss(int(rows[0]) // shape[0], output)

        schedule = pp_schedule.CLASSES["1F1B"](stage, num_microbatches, loss_fn=loss_of, scale_grads=False)
        return pp_schedule._Prepared([stage], schedule)


def build(args, rank):
    """This rank's stage, the plan, and a pipeline (and channel) per arm."""
    per_stage = [args.layers // args.ranks] * args.ranks
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=args.hidden,
        intermediate_size=2 * args.hidden,
        num_hidden_layers=args.layers,
        num_attention_heads=args.hidden // 64,
        num_key_value_heads=args.hidden // 64,
    )
    torch.manual_seed(0)
    stage = split_policy(LlamaForCausalLM(config).train(), per_stage, rank, score)
    # One in each stage: the input of its second layer, or of its only one.
    taps = [sum(per_stage[:number]) + (per_stage[0] > 1) for number in range(args.ranks)]
    shape = PipelineShape(per_stage, args.ranks, args.microbatches)
    plan = TapPlan.for_layers(taps, shape, args.hidden, torch.float32)
    ranks = list(range(args.ranks))
    settings = {"hidden_size": args.hidden, "dtype": torch.float32, "device": torch.device("cpu")}
    pipelines = {}
    for arm in ARMS:
        groups = [dist.new_group(ranks, backend="gloo", timeout=timedelta(seconds=120)) for _ in range(2)]
        if arm == "relay":
            pipelines[arm] = RelayPipeline([RelayStage(stage, plan)], groups[0], **settings)
            pipelines[arm].plan = plan
            continue
        channel = None
        if arm == "gloo":
            channel = TapChannel(plan, rank, GlooTransport(groups[1]), timeout=60.0)
        elif arm == "blocking":
            channel = BlockingChannel(plan, rank, groups[1])
        pipelines[arm] = Pipeline([stage], groups[0], channel=channel, **settings)
        if channel is not None:
            channel.meter = CpuMeter(channel)
    return stage, plan, pipelines


def score(policy, arguments, extras):
    logits = policy(**arguments).logits[:, :-1].float()
    return logits.log_softmax(-1).gather(-1, extras["input_ids"][:, 1:, None])[..., 0]


def run_step(pipeline, arm, inputs):
    """One step; the taps on the last rank."""
    if arm == "relay" and pipeline.has_last:
        pipeline.stages[0].arrived.clear()
    pipeline.step(inputs, lambda number, output: output.mean())
    if not pipeline.has_last or arm == "off":
        return None
    if arm == "relay":
        return list(pipeline.stages[0].arrived)
    return [pipeline.channel.take(number) for number in range(len(inputs))]


def totals(pipeline):
    """CPU time, wall time, CPU time in the channel, time blocked, tap bytes, other bytes, so far."""
    channel = pipeline.channel
    own = (channel.meter.seconds, channel.seconds_blocked, channel.bytes_sent) if channel else (0.0, 0.0, 0)
    return (time.process_time(), time.perf_counter(), *own, CountingStage.sent)


def measure(rank, args, folder):
    torch.set_num_threads(1)
    pp_schedule._TappedStage = CountingStage
    store = dist.FileStore(os.path.join(folder, "store"), args.ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=args.ranks, timeout=timedelta(seconds=120))
    stage, plan, pipelines = build(args, rank)
    generator = torch.Generator().manual_seed(1)
    inputs = []
    for _ in range(args.microbatches):
        ids = torch.randint(3, 512, (args.rows, args.length), generator=generator)
        inputs.append({"input_ids": ids, "attention_mask": torch.ones_like(ids)})
    taps = {arm: run_step(pipelines[arm], arm, inputs) for arm in ARMS}
    if pipelines["off"].has_last:
        for arm in ARMS[2:]:
            for got, expected in zip(taps[arm], taps["gloo"], strict=True):
                assert len(got) == args.ranks
                assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True)), arm
    records = {arm: [] for arm in ARMS}
    for _ in range(args.steps):
        for arm in ARMS:
            dist.barrier()
            before = totals(pipelines[arm])
            run_step(pipelines[arm], arm, inputs)
            after = totals(pipelines[arm])
            records[arm].append([b - a for a, b in zip(before, after, strict=True)])
    planned = {
        lane.stage: sum(tap.num_bytes((args.rows, args.length)) for tap in plan.taps_of(lane.stage))
        for lane in plan.lanes
    }
    records["formula"] = args.microbatches * planned.get(rank, 0)
    torch.save(records, os.path.join(folder, f"{rank}.pt"))
    dist.barrier()
    dist.destroy_process_group()


def report(args, results):
    """Prints the table and returns what is wrong."""
    wrong = []
    print(
        f"{'rank':>4} {'arm':14} {'step CPU ms':>11} {'taps CPU':>9} {'blocked':>9} {'tap MB':>8} "
        f"{'formula':>8} {'other MB':>9}"
    )
    for rank, records in enumerate(results):
        step_cpu = statistics.median(record[0] for record in records["off"])
        for arm in ARMS:
            cpu, _, taps_cpu, blocked, _, _ = (statistics.median(values) for values in zip(*records[arm], strict=True))
            sent, other = records[arm][-1][4:]
            formula = records["formula"] if arm not in ("off", "relay") else 0
            print(
                f"{rank:4} {arm:14} {1e3 * cpu:11.1f} {taps_cpu / step_cpu:9.2%} {blocked / step_cpu:9.2%} "
                f"{sent / 1e6:8.2f} {formula / 1e6:8.2f} {other / 1e6:9.2f}"
            )
            if sent != formula:
                wrong.append(f"rank {rank}, {arm}: {sent} bytes sent, {formula} by the formula")
            if arm == "gloo":
                for name, seconds in (("packing and copying", taps_cpu), ("blocked", blocked)):
                    if seconds > LIMIT * step_cpu:
                        wrong.append(
                            f"rank {rank}, {arm}: {name} takes {seconds / step_cpu:.2%} of the step's CPU time"
                        )
    walls = {
        arm: statistics.median(
            max(step) for step in zip(*([r[1] for r in records[arm]] for records in results), strict=True)
        )
        for arm in ARMS
    }
    print(
        "wall time over 'off' (processes share cores): "
        + ", ".join(f"{arm} {walls[arm] / walls['off']:.2f}" for arm in ARMS[1:])
    )
    relayed = sum(records["relay"][-1][5] - records["off"][-1][5] for records in results)
    direct = sum(records["gloo"][-1][4] for records in results)
    print(
        f"bytes of taps per step: {direct / 1e6:.2f} MB by the channel, {relayed / 1e6:.2f} MB on "
        "activations and gradients"
    )
    return wrong


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (
        ("ranks", 3),
        ("layers", 3),
        ("hidden", 768),
        ("rows", 2),
        ("length", 256),
        ("microbatches", 4),
        ("steps", 5),
    ):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--output", type=Path, help="file for what each step took, by rank and arm")
    args = parser.parse_args()
    print(f"{machine()}, {args.ranks} processes of one thread")
    print(
        f"{args.layers} layers of {args.hidden}, {args.microbatches} microbatches of {args.rows} x {args.length}, "
        f"1F1B, a tap per stage: B * S * H * itemsize = {args.rows * args.length * args.hidden * 4} bytes each, "
        f"medians of {args.steps} steps"
    )
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(measure, args=(args, folder), nprocs=args.ranks)
        results = [torch.load(os.path.join(folder, f"{rank}.pt")) for rank in range(args.ranks)]
    print("taps of all arms are equal")
    wrong = report(args, results)
    if args.output:
        torch.save(results, args.output)
    for line in wrong:
        print(f"FAILED: {line}")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
