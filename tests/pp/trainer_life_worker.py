"""
Ranks of `test_pp_trainer_life.py`: `python trainer_life_worker.py OUT` uses trainers with a pipeline of two ranks in
other ways than one run from its start to its end, without a pipeline too, and saves what each rank saw.
"""

import gc
import shutil
import sys
import time
from pathlib import Path
from unittest import mock

import torch
from forked_ranks import fork_ranks
from pp.resume_worker import RolloutsOfStep
from pp.trainer_worker import TAPS, build, release, save_policies, weights_here
from transformers import AutoModelForCausalLM, TrainerCallback

from trl_codraft import CoDraftGRPOTrainer
from trl_codraft.grpo.pipelined_losses import PipelinedLosses
from trl_codraft.pp.memory import Holdings, plan_memory
from trl_codraft.pp.pipeline import _TappedStage
from trl_codraft.pp.shape import PipelineShape
from trl_codraft.training.draft_trainer import DraftTrainer


CLASSES = CoDraftGRPOTrainer, CoDraftGRPOTrainer


class StopInsideWindow(TrainerCallback):
    """Ends the first run after the first micro-step of its second window."""

    stopped = False

    def on_substep_end(self, args, state, control, **kwargs):
        if state.global_step == 1 and not self.stopped:
            self.stopped = control.should_training_stop = True


class CountGraphs(TrainerCallback):
    """After each step, tensors that are still part of an autograd graph, and gradients."""

    def __init__(self):
        self.counts = []

    def on_step_end(self, args, state, control, **kwargs):
        gc.collect()
        tensors = [found for found in gc.get_objects() if isinstance(found, torch.Tensor)]
        self.counts.append(sum(tensor.grad_fn is not None for tensor in tensors))


def stopped_and_again(out, world_size, size):
    """Weights after a second run, the first one having ended in the middle of an accumulation window."""
    case = {"steps_per_generation": 1, "gradient_accumulation_steps": 2, "max_steps": 3}
    counter = CountGraphs()
    trainer = build(case, out, world_size, size, CLASSES, callbacks=[StopInsideWindow(), counter])
    trainer.train()
    # TRL counts micro-steps to know where windows end.
    trainer._step, ended = 0, trainer.state.global_step
    trainer.train()
    seen = {"ended": ended, "graphs": counter.counts}
    if isinstance(trainer.losses, PipelinedLosses):
        losses, forwards = trainer.losses, trainer.losses.forwards
        kept = losses.pipelining.pipeline._loss, forwards._step, losses._window, forwards.last_hidden
        seen["kept"] = [str(thing) for thing in kept if thing]
    trainable = sum(parameter.numel() for parameter in trainer.model.parameters() if parameter.requires_grad)
    weights = {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}
    return {**seen, "trainable": trainable, "weights": weights}


def optimizer_files(out, world_size, size):
    """Of a checkpoint that a run writes where an earlier one may have written."""
    case = {"max_steps": 1, "save_strategy": "steps", "save_steps": 1, "dtype": "float32"}
    build(case, out, world_size, size, CLASSES).train()
    torch.distributed.barrier()
    return sorted(path.name for path in (out / "run" / "checkpoint-1").glob("optimizer*"))


def shared_state_of_the_draft(out, world_size):
    """
    Runs with the draft's AdamW, by name: ranks of a pipeline, whether they share its state, and whose checkpoint they
    start from.
    """
    case = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1, "dtype": "float32", "draft_weight_decay": 0.1}
    runs = {
        "alone": ("2", False, None),
        "shared": ("2", True, None),
        "shared from alone": ("2", True, "alone"),
        "alone from shared": ("2", False, "shared"),
        "shared in parts": ("2p", True, None),
        "shared in parts, resumed": ("2p", True, "shared in parts"),
    }
    seen = {}
    for name, (size, shares, start) in runs.items():
        settings = {**case, "draft_shard_optimizer": shares}
        trainer = build(settings, out, world_size, size, CLASSES, rollout_func=RolloutsOfStep())
        trainer.train(resume_from_checkpoint=start and str(out / start))
        torch.distributed.barrier()
        if start is None and torch.distributed.get_rank() == 0:
            shutil.copytree(out / "run" / "checkpoint-1", out / name)
        torch.distributed.barrier()
        weights = {key: weight for key, weight in weights_here(trainer).items() if key.startswith("draft.")}
        moments = [state["exp_avg"].numel() for state in trainer.draft_trainer.optimizer.state.values()]
        seen[name] = {"weights": weights, "elements": sum(moments), "logs": trainer.state.log_history[:-1]}
        release(trainer)
    return seen


def pushed(out, world_size, size):
    """
    What a run uploads to the Hub, at a checkpoint and at its end: files, and whether this rank's weights are among
    them.
    """
    uploads, api = [], mock.MagicMock()

    def upload(folder_path, **named):
        folder = Path(folder_path)
        files = [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()]
        saved = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
        equal = [torch.equal(saved[name], weight) for name, weight in trainer.model.named_parameters()]
        uploads.append((sorted(files), all(equal)))
        return mock.MagicMock()

    def init_hf_repo(trainer, *arguments, **named):
        trainer.hub_model_id, trainer.push_in_progress = "me/policy", None

    api.upload_folder.side_effect = upload
    if torch.distributed.get_rank() == 0:
        shutil.rmtree(out / "run", ignore_errors=True)
    torch.distributed.barrier()
    saves = {"save_strategy": "steps", "save_steps": 2, "push_to_hub": True, "hub_strategy": "every_save"}
    with (
        mock.patch("transformers.trainer.hf_api", return_value=api),
        mock.patch("transformers.trainer.Trainer.init_hf_repo", init_hf_repo),
    ):
        trainer = build({"max_steps": 2, "dtype": "float32", **saves}, out, world_size, size, CLASSES)
        trainer.train()
        trainer.push_to_hub()
    release(trainer)
    return uploads


def draft_in_the_drain(rank, world_size, out, size):
    """
    A run in which the last backward of the first stage does not begin before the draft has learned from the whole
    window: what each rank did in which order, and whether that backward gave up waiting. On the last stage also the
    bytes that waited for the draft, and the planned ones.
    """
    events, sizes, learned = [], [], out / f"learned {size}"
    case = {"gradient_accumulation_steps": 2, "max_steps": 1, "layers_per_stage": [3, 3]}
    trainer = build(case, out, world_size, size, CLASSES)
    losses = trainer.losses
    pipeline = losses.pipelining.pipeline
    count, parts = 2 * pipeline.num_ranks, [(0, 0)] * 2
    backward, accumulate, take_taps = _TappedStage.backward_one_chunk, DraftTrainer.accumulate, losses._take_taps

    def late_backward(self, number, *arguments, **named):
        if rank == 0 and number == count - 1:
            deadline = time.monotonic() + 20
            while not learned.exists() and time.monotonic() < deadline:
                time.sleep(0.01)
            events.append("waited" if learned.exists() else "gave up")
        events.append("backward")
        return backward(self, number, *arguments, **named)

    def seen_accumulate(self, *arguments):
        accumulate(self, *arguments)
        time.sleep(0.05)
        events.append("draft")
        if events.count("draft") == count:
            learned.touch()

    def measured_take(jobs, rows):
        if pipeline.has_last:
            hidden = losses.forwards.last_hidden[0]
            kept = pipeline.channel.queued_bytes + sum(state.nbytes for state in losses.forwards.last_hidden)
            plan, of_batch = pipeline.channel.plan, {"rows": hidden.shape[0], "columns": hidden.shape[1]}
            slots = sum(lane.slots * plan.message_bytes(lane.stage, hidden.shape[:2]) for lane in plan.lanes)
            held = Holdings(stage_weights=parts)
            shape = PipelineShape((3, 3), 2, len(jobs))
            planned = plan_memory(trainer.model, shape, tap_layers=TAPS, holdings=held, **of_batch).ranks[-1].taps
            sizes.append((kept, planned - slots))
        return take_taps(jobs, rows)

    with (
        mock.patch.object(_TappedStage, "backward_one_chunk", late_backward),
        mock.patch.object(DraftTrainer, "accumulate", seen_accumulate),
        mock.patch.object(losses, "_take_taps", measured_take),
    ):
        trainer.train()
    release(trainer)
    return {"events": events, "sizes": sizes, "seconds": trainer.state.log_history[0]["draft/time"]}


def run(rank, world_size, out):
    seen = {size: stopped_and_again(out, world_size, size) for size in ("1", "2")}
    seen["pushed"] = {size: pushed(out, world_size, size) for size in ("2", "2p")}
    seen["drain"] = {size: draft_in_the_drain(rank, world_size, out, size) for size in ("2", "2p")}
    seen["draft"] = shared_state_of_the_draft(out, world_size)
    return {**seen, "files": [optimizer_files(out, world_size, size) for size in ("2", "1", "2")]}


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    save_policies(folder)
    fork_ranks(run, 2, folder, folder)
