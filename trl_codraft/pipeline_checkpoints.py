"""
The optimizer's state in checkpoints of a pipeline: a file per stage, by parameter name, so that a run resumes under
another number of stages, or without. The policy itself is whole on every rank and is saved as always.
"""

from pathlib import Path

import torch
from transformers import Trainer
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME

from .compatibility import base_policy
from .pipelined_loss import Pipelining
from .pp import (
    PolicyStage,
    has_stage_files,
    load_optimizer,
    load_whole_optimizer,
    remove_stage_files,
    save_optimizer,
)


class PipelineCheckpoints(Trainer):
    """
    A trainer's optimizer state, written and read by stages.

    Attributes:
        pipelining ([`~pipelined_loss.Pipelining`] or `None`):
            The pipeline of a run that has one.
    """

    pipelining: Pipelining | None

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        # An earlier run into the same folder may have left the other kind of files, which a resume would read.
        if self.pipelining is None:
            super()._save_optimizer_and_scheduler(output_dir)
            if self.args.should_save:
                remove_stage_files(output_dir)
            return
        if self.pipelining.saves:
            save_optimizer(
                self.optimizer,
                self.pipelining.stages,
                output_dir,
                self.pipelining.host_group,
                timeout=float(self.args.ddp_timeout),
            )
        if self.args.should_save:
            (Path(output_dir) / OPTIMIZER_NAME).unlink(missing_ok=True)
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / SCHEDULER_NAME)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        folder = Path(checkpoint)
        staged, whole = has_stage_files(folder), (folder / OPTIMIZER_NAME).is_file()
        if not staged and (self.pipelining is None or not whole):
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        stages = [PolicyStage(base_policy(self.model), 0, 1)] if self.pipelining is None else self.pipelining.stages
        if staged:
            load_optimizer(self.optimizer, stages, folder)
        else:
            load_whole_optimizer(self.optimizer, stages, folder / OPTIMIZER_NAME, self._names_in_whole_optimizer())
        self.lr_scheduler.load_state_dict(torch.load(folder / SCHEDULER_NAME, map_location="cpu", weights_only=True))

    def _names_in_whole_optimizer(self) -> list[list[str]]:
        """Parameters by group, in the order in which [`~transformers.Trainer`] hands them to a whole policy's optimizer."""
        decayed = self.get_decay_parameter_names(self.model)
        trained = self.pipelining.replica.trained_names
        names = {parameter: name for name, parameter in base_policy(self.model).named_parameters()}
        groups: list[list[str]] = [[], []]
        for name, parameter in self.model.named_parameters():
            if names[parameter] in trained:
                groups[name not in decayed].append(names[parameter])
        return groups
