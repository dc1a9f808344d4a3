"""
Ranks of `test_pp_trainer_life.py`: `python trainer_life_worker.py OUT` uses trainers with a pipeline of two ranks in other
ways than one run from its start to its end, without a pipeline too, and saves what each rank saw.
"""

import gc
import sys
from pathlib import Path

import torch
from forked_ranks import fork_ranks
from pp.trainer_worker import build, save_policies
from transformers import TrainerCallback

from trl_codraft import CoDraftGRPOTrainer


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
    if trainer.pipelining is not None:
        kept = trainer.pipelining.pipeline._loss, trainer._rows, trainer._window, trainer._last_hidden
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


def run(rank, world_size, out):
    seen = {size: stopped_and_again(out, world_size, size) for size in ("1", "2")}
    return {**seen, "files": [optimizer_files(out, world_size, size) for size in ("2", "1", "2")]}


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    save_policies(folder)
    fork_ranks(run, 2, folder, folder)
