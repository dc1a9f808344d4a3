"""
Ranks of `test_pipeline.py`: `python pipeline_worker.py FOLDER CASES...` runs policies under a pipeline, taps over a
channel, and each rank compares with the whole policy in its own process: taps to the bit, losses, gradients.
"""

import os
import random
import signal
import sys
import traceback
import weakref
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from channel_cases import TRANSPORTS
from forked_ranks import watch_ranks
from tiny import tiny_policy

from trl_codraft.modeling.configuration_eagle3 import Eagle3DraftConfig
from trl_codraft.modeling.modeling_eagle3 import Eagle3DraftModel
from trl_codraft.modeling.packing import pack_rows
from trl_codraft.modeling.taps import TapRecorder
from trl_codraft.modeling.teacher import PolicyHead
from trl_codraft.pp import GlooTransport, Tap, TapChannel, TapPlan
from trl_codraft.pp.padding import PaddedMicrobatch, pad_microbatches
from trl_codraft.pp.pipeline import Pipeline
from trl_codraft.pp.shape import PipelineShape
from trl_codraft.pp.stages.split import split_policy, sum_tied_gradients
from trl_codraft.training.draft_trainer import DraftTrainer, DraftTrainingArguments


@dataclass(frozen=True)
class Case:
    num_ranks: int
    layers: tuple
    schedule: str = "1F1B"
    model: str = "llama"
    taps: tuple = (0, 1, 3, 4)
    microbatches: int = 4
    transport: str = "gloo"
    checkpointing: str | None = None
    slots: int | None = None
    dtype: torch.dtype = torch.float32
    overrides: tuple = ()
    steps: int = 2


LAYERS_4 = (1, 1, 1, 1)
ARCHITECTURES = {
    "llama": {"tie_word_embeddings": True},
    "qwen2": {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2},
    "qwen3": {},
    "mistral": {"sliding_window": 5},
    "gemma": {},
    "gemma2": {"sliding_window": 5},
    "gemma3_text": {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"] * 2},
    "smollm3": {},
    "phi3": {"sliding_window": 6},
    "olmo2": {},
}
CASES = {
    "1F1B, 2 ranks": Case(2, (2, 2)),
    "1F1B, 3 ranks, gloo": Case(3, (1, 2, 1), transport="gloo", taps=(1, 2, 3)),
    "1F1B, 4 ranks": Case(4, LAYERS_4),
    "GPipe, 2 ranks, gloo": Case(2, (2, 2), "GPipe", transport="gloo"),
    "GPipe, 4 ranks": Case(4, LAYERS_4, "GPipe", microbatches=3),
    "interleaved": Case(2, LAYERS_4, "Interleaved1F1B"),
    "interleaved, gloo, fewest slots": Case(2, LAYERS_4, "Interleaved1F1B", transport="gloo", slots=2),
    "one slot": Case(3, (1, 1, 2), slots=1, microbatches=5),
    "checkpointing": Case(2, (2, 2), checkpointing="non-reentrant"),
    "reentrant checkpointing": Case(2, (2, 2), checkpointing="reentrant"),
    "GPipe, checkpointing": Case(2, (2, 2), "GPipe", checkpointing="non-reentrant"),
    "GPipe, reentrant checkpointing": Case(2, (2, 2), "GPipe", checkpointing="reentrant"),
    "interleaved, checkpointing": Case(2, LAYERS_4, "Interleaved1F1B", checkpointing="non-reentrant"),
    "interleaved, reentrant checkpointing": Case(2, LAYERS_4, "Interleaved1F1B", checkpointing="reentrant"),
    "bf16": Case(2, (2, 2), dtype=torch.bfloat16),
    "100 steps, 3 ranks, gloo": Case(3, (1, 2, 1), transport="gloo", taps=(1, 2, 3), steps=100),
    "100 steps, interleaved": Case(2, LAYERS_4, "Interleaved1F1B", steps=100),
    **{
        name + ending: Case(
            2, (3, 1), model=name, microbatches=2, checkpointing=checkpointing, overrides=tuple(overrides.items())
        )
        for name, overrides in ARCHITECTURES.items()
        for ending, checkpointing in (("", None), (", checkpointing", "non-reentrant"))
    },
}
# A choice for every run of the tests; `test_pipeline.py` marks the others slow.
USUAL = [
    "1F1B, 2 ranks",
    "1F1B, 3 ranks, gloo",
    "GPipe, 4 ranks",
    "interleaved",
    "interleaved, gloo, fewest slots",
    "checkpointing",
    "reentrant checkpointing",
    "gemma2",
    "qwen2",
]


def policy_of(case):
    return tiny_policy(case.model, dtype=case.dtype, seed=3, scale=2.0, **dict(case.overrides)).train()


def ragged_microbatches(case, step):
    """Prompts padded on the left, completions on the right; other lengths in every microbatch and step."""
    draw = random.Random(step)
    batches = []
    for number in range(case.microbatches):
        prompt, completion = draw.randint(3, 9), draw.randint(3, 8)
        rows = 2 if number else 3
        ids, mask = torch.zeros(2, rows, prompt + completion, dtype=torch.long)
        for row in range(rows):
            start, end = draw.randint(0, prompt - 1), prompt + draw.randint(1, completion)
            mask[row, start:end] = 1
            ids[row, start:end] = torch.tensor([draw.randint(3, 103) for _ in range(end - start)])
        batches.append(PaddedMicrobatch(ids, mask, completion))
    return batches


def score(policy, arguments, extras):
    """Log-probs of the completion columns, as many as the padded microbatches have."""
    keep = extras["keep"].shape[1]
    logits = policy(**arguments, logits_to_keep=keep + 1).logits[:, :-1].float()
    return logits.log_softmax(-1).gather(-1, extras["input_ids"][:, -keep:, None])[..., 0]


def inputs_of(rows):
    keep = torch.zeros(len(rows.input_ids), rows.completion_length, dtype=torch.uint8)
    return {"input_ids": rows.input_ids, "attention_mask": rows.attention_mask, "keep": keep}


def loss_of(batches, padded):
    """The loss of a microbatch: a weighted mean over its own completion tokens."""

    def loss(number, output):
        own = batches[number]
        rows, columns = own.input_ids.shape[0], own.completion_length
        mask = own.attention_mask[:, -columns:]
        weights = torch.linspace(-1, 1, rows)[:, None] * mask
        return (output[:rows, :columns] * weights).sum() / mask.sum()

    return loss


def whole_step(policy, recorder, batches, padded):
    """The same in one process: taps of every microbatch, losses; gradients stay in the policy."""
    loss, taps, losses = loss_of(batches, padded), [], []
    for number, rows in enumerate(padded):
        arguments = inputs_of(rows)
        with recorder.record() as record:
            model_inputs = {"input_ids": rows.input_ids, "attention_mask": rows.attention_mask, "use_cache": False}
            value = loss(number, score(policy, model_inputs, arguments))
        value.backward()
        taps.append(record.taps)
        losses.append(value.detach())
    return taps, losses


def set_checkpointing(policy, how):
    if how is not None:
        policy.gradient_checkpointing_enable({"use_reentrant": how == "reentrant"})
        if how == "reentrant":
            policy.enable_input_require_grads()


def build(rank, case, groups):
    stages = []
    for index in range(rank, len(case.layers), case.num_ranks):
        policy = policy_of(case)
        stages.append(split_policy(policy, case.layers, index, score))
        set_checkpointing(policy, case.checkpointing)
    plan = TapPlan.for_layers(
        case.taps,
        PipelineShape(case.layers, case.num_ranks, case.microbatches, case.schedule),
        policy.config.hidden_size,
        case.dtype,
        slots=case.slots,
    )
    numbers = [stage.index for stage in stages]
    channel = TapChannel(plan, numbers, TRANSPORTS[case.transport](groups[1]), timeout=20.0)
    pipeline = Pipeline(
        stages,
        groups[0],
        hidden_size=policy.config.hidden_size,
        dtype=case.dtype,
        device=torch.device("cpu"),
        schedule=case.schedule,
        channel=channel,
    )
    return stages, channel, pipeline


def require_gradients(stages, whole):
    """Gradients of this rank's parameters are those of the whole policy."""
    expected = {name: parameter.grad for name, parameter in whole.named_parameters()}
    for stage in stages:
        for name, parameter in stage.policy.named_parameters():
            difference = (parameter.grad - expected[name]).abs().max()
            assert difference <= 1e-6 * expected[name].abs().max().clamp(min=1), name


def run_case(rank, world_size, case):
    groups = [dist.new_group(list(range(world_size)), backend="gloo") for _ in range(2)]
    stages, channel, pipeline = build(rank, case, groups)
    whole = policy_of(case)
    recorder = TapRecorder(whole, case.taps)
    width, lanes = whole.config.hidden_size * case.dtype.itemsize, channel.plan.lanes
    taps_sent = sum(len(channel.plan.taps_of(lane.stage)) for lane in lanes if lane.source == rank)
    differences = []
    for step in range(case.steps):
        batches = ragged_microbatches(case, step)
        padded = pad_microbatches(batches, bucket=8 if step else 32)
        inputs = [inputs_of(rows) for rows in padded]
        # An evaluation in between, of another number of microbatches, which the channel must not notice.
        evaluated = pipeline.forward(inputs[:2])
        differences += [
            f"evaluation {number}"
            for number, output in enumerate(evaluated)
            if not torch.equal(output, whole_forward(whole, inputs[number]))
        ]
        if step == 0:
            differences += taps_of_forward(pipeline, channel, whole, recorder, inputs)
        sent = channel.bytes_sent
        losses = pipeline.step(inputs, loss_of(batches, padded))
        taps, expected_losses = whole_step(whole, recorder, batches, padded)
        shape = padded[0].input_ids.shape
        if channel.bytes_sent - sent != len(inputs) * taps_sent * shape[0] * shape[1] * width:
            differences.append(f"{channel.bytes_sent - sent} bytes")
        if pipeline.has_last:
            pairs = [(channel.take(number), taps[number]) for number in range(len(inputs))]
            differences += [f"taps {number}" for number, (got, own) in enumerate(pairs) if not same_taps(got, own)]
            assert len(losses) == case.microbatches
            differences += [
                f"loss {a} instead of {b}" for a, b in zip(losses, expected_losses, strict=True) if abs(a - b) > 1e-6
            ]
    # The gradients of all steps have accumulated.
    last = (len(case.layers) - 1) % case.num_ranks
    if whole.config.tie_word_embeddings and rank in (0, last):
        tied = stages[0 if rank == 0 else -1].policy.get_input_embeddings().weight
        sum_tied_gradients(tied, 0, last, groups[0])
    names = [[]] * world_size
    dist.all_gather_object(names, [name for stage in stages for name in stage.policy.state_dict()])
    channel.close()
    # Now nobody waits for this rank any more.
    assert not differences, differences
    assert pipeline.has_last == (rank == last)
    assert len(case.layers) == 1 or lanes
    assert set().union(*names) == set(whole.state_dict())
    require_gradients(stages, whole)


def whole_forward(whole, inputs):
    arguments = {name: inputs[name] for name in ("input_ids", "attention_mask")}
    with torch.no_grad():
        return score(whole, {**arguments, "use_cache": False}, inputs)


def same_taps(got, expected):
    return all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(got, expected, strict=True))


def taps_of_forward(pipeline, channel, whole, recorder, inputs):
    """Differences of a forward of one microbatch more than a step has, with taps, to one process."""
    more = [*inputs, {**inputs[0], "input_ids": inputs[0]["input_ids"].flip(0)}]
    outputs, differences = pipeline.forward(more, with_taps=True), []
    assert len(outputs) == (len(more) if pipeline.has_last else 0)
    for number, output in enumerate(outputs):
        with recorder.record() as record:
            expected = whole_forward(whole, more[number])
        if not same_taps([output, *channel.take(number)], [expected, *record.taps]):
            differences.append(f"forward {number} with taps")
    return differences


def without_channel(rank, world_size):
    """
    A pipeline alone refuses on both ranks alike and goes on, keeps three shapes at most and none after an exception,
    and no output of a stage after a step or a forward.
    """
    case = CASES["1F1B, 2 ranks"]
    group = dist.new_group([0, 1], backend="gloo")
    stage = split_policy(policy_of(case), case.layers, rank, score)
    settings = {"hidden_size": 32, "dtype": torch.float32, "device": torch.device("cpu"), "max_shapes": 3}
    pipeline = Pipeline([stage], group, **settings)
    inputs = [inputs_of(rows) for rows in pad_microbatches(ragged_microbatches(case, 0))]
    loss, outputs = loss_of(ragged_microbatches(case, 0), None), []
    handle = stage.register_forward_hook(lambda module, args, output: outputs.append(weakref.ref(output)))
    for run in (lambda: pipeline.step(inputs, loss), lambda: pipeline.forward(inputs)):
        run()
        assert not any(output() is not None for output in outputs)
    assert len(outputs) == 2 * len(inputs)
    handle.remove()
    narrow = {name: value[:, :8] for name, value in inputs[0].items()}
    with pytest.raises(ValueError, match="one shape, but number 3 has"):
        pipeline.step([*inputs[:3], narrow], loss)
    assert not pipeline._prepared
    with pytest.raises(ValueError, match="at least as many microbatches as stages, got 1"):
        pipeline.step(inputs[:1], loss)
    with pytest.raises(ValueError, match=r"`position_ids` of shape \(1, 64\) needs 3 rows"):
        pipeline.forward([{**inputs[0], "position_ids": torch.arange(64)[None]}])
    for schedule, message in (("ZBVZeroBubble", "is not supported"), ("Interleaved1F1B", "at least twice as many")):
        with pytest.raises(ValueError, match=message):
            Pipeline([stage], group, schedule=schedule, **settings)
    other = split_policy(policy_of(case), case.layers, 1 - rank, score)
    with pytest.raises(ValueError, match=rf"Rank {rank} of 2 was given the stages \[{1 - rank}\]"):
        Pipeline([other], group, **settings)
    kept = []
    for step in range(5):
        batches = ragged_microbatches(case, step)
        padded = pad_microbatches(batches, bucket=1)
        pipeline.step([inputs_of(rows) for rows in padded], loss_of(batches, padded))
        kept.append(len(pipeline._prepared))
    assert max(kept) == 3
    whole = policy_of(case)
    recorder = TapRecorder(whole, case.taps)
    for step, bucket in ((0, 64), *((step, 1) for step in range(5))):
        batches = ragged_microbatches(case, step)
        whole_step(whole, recorder, batches, pad_microbatches(batches, bucket=bucket))
    require_gradients([stage], whole)


def draft_of(policy, case):
    """A draft with its trainer, the same whoever makes it."""
    config = Eagle3DraftConfig.from_policy(policy.config, tap_layers=list(case.taps))
    torch.manual_seed(11)
    draft = Eagle3DraftModel(config)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.copy_(torch.randn(parameter.shape) / 4 + (parameter.dim() == 1))
    return DraftTrainer(draft, PolicyHead(policy), DraftTrainingArguments(num_passes=2), num_training_steps=10)


def draft_gradients(rank, world_size):
    """The draft learns on the last rank, when all ranks have ended the step: same gradients as in one process."""
    case = replace(CASES["gemma2"], layers=(2, 2), taps=(1, 2, 4))
    groups = [dist.new_group([0, 1], backend="gloo") for _ in range(2)]
    policy = policy_of(case)
    stage = split_policy(policy, case.layers, rank, score)
    # The teacher reads what the head reads: one more tap, which stays on the last stage.
    last = len(case.layers) + 100
    taps = [Tap(layer, int(layer >= 2), 32, torch.float32) for layer in case.taps] + [Tap(last, 1, 32, torch.float32)]
    channel = TapChannel(TapPlan(tuple(taps), (0, 1), case.microbatches), rank, GlooTransport(groups[1]))
    if stage.is_last:
        channel.hook(last, policy.model.norm, output=True)
    settings = {"hidden_size": 32, "dtype": torch.float32, "device": torch.device("cpu")}
    pipeline = Pipeline([stage], groups[0], **settings, channel=channel)
    batches = ragged_microbatches(case, 0)
    padded = pad_microbatches(batches, bucket=8)
    pipeline.step([inputs_of(rows) for rows in padded], loss_of(batches, padded))
    dist.barrier()  # nobody needs anything of the draft to end its step
    if rank == 0:
        return
    trainer, whole = draft_of(policy, case), policy_of(case)
    expected, recorder = draft_of(whole, case), TapRecorder(whole, case.taps)
    for number, rows in enumerate(padded):
        mask = rows.attention_mask
        *got, hidden = channel.take(number)
        trainer.accumulate(pack_rows(rows.input_ids, mask, mask, got, hidden, 2))
        with recorder.record() as record:
            whole(input_ids=rows.input_ids, attention_mask=mask, use_cache=False)
        expected.accumulate(pack_rows(rows.input_ids, mask, mask, record.taps, record.last_hidden, 2))
    pairs = list(zip(trainer.draft.parameters(), expected.draft.parameters(), strict=True))
    assert len(pairs) > 8
    for own, other in pairs:
        largest = other.grad.abs().max()
        assert largest > 0
        assert (own.grad - other.grad).abs().max() <= 1e-6 * largest.clamp(min=1.0)


def run_rank(rank, world_size, cases):
    """By case, the traceback of what failed, or `None`."""
    failures = dict.fromkeys(cases)
    for case in cases:
        try:
            run_case(rank, world_size, CASES[case])
        except AssertionError:
            failures[case] = traceback.format_exc()
    return failures


def failing_pipeline(rank, world_size, fault):
    """
    Three ranks; in the second step one of them fails while the others wait for it, in the pipeline or the channel.
    """
    case = CASES["one slot"]
    timeout = timedelta(seconds=20)
    groups = [dist.new_group([0, 1, 2], backend="gloo", timeout=timeout) for _ in range(2)]
    stages, channel, pipeline = build(rank, case, groups)
    batches = ragged_microbatches(case, 0)
    padded = pad_microbatches(batches, bucket=8)
    inputs = [inputs_of(rows) for rows in padded]
    pipeline.step(inputs, loss_of(batches, padded))
    channel.discard()
    if rank == 1:
        layer = stages[0].layers[1]
        calls = iter(range(100))

        def hook(module, args):
            if next(calls) == 2:
                if fault == "killed":
                    os.kill(os.getpid(), signal.SIGKILL)
                raise ZeroDivisionError("layer 1 is broken")

        layer.register_forward_pre_hook(hook)
    pipeline.step(inputs, loss_of(batches, padded))


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    chosen = {"usual": USUAL, "others": [case for case in CASES if case not in USUAL]}.get(sys.argv[2], sys.argv[2:])
    outcomes = {}
    # Cases of as many ranks run one after the other in the same processes.
    for size in sorted({CASES[case].num_ranks for case in chosen}):
        cases = [case for case in chosen if CASES[case].num_ranks == size]
        ranks = watch_ranks(run_rank, size, folder / f"{size}-ranks", cases, timeout=600)
        for case in cases:
            outcomes[case] = [replace(rank, result=(rank.result or {}).get(case)) for rank in ranks]
    if chosen is USUAL:
        outcomes["draft"] = watch_ranks(draft_gradients, 2, folder / "draft")
        outcomes["without channel"] = watch_ranks(without_channel, 2, folder / "without-channel")
        for fault in ("killed", "broken"):
            outcomes[fault] = watch_ranks(failing_pipeline, 3, folder / fault, fault, timeout=60)
    torch.save(outcomes, folder / "outcomes.pt")
