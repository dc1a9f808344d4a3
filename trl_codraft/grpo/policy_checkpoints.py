"""
Writes and reads checkpoints of policies. In a pipeline the optimizer's state is in a file per stage, by parameter
name, so that a run resumes under another number of stages, or without. A policy that is whole on every rank is saved
as always; one that no rank has whole is written and read by stages, into the same files; one whose weights have other
names on disk is read as Transformers loads it.
"""

from pathlib import Path

import torch
import torch.distributed as dist
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import is_peft_model
from safetensors import safe_open
from safetensors.torch import save_file
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME
from trl import GRPOTrainer

from ..group.members import attributes_set
from ..modeling.policy import base_policy
from ..pp.stages.checkpoint import (
    has_stage_files,
    load_optimizer,
    load_whole_optimizer,
    remove_stage_files,
    save_optimizer,
    save_policy,
)
from ..pp.stages.shared_optimizer import SharedOptimizer
from ..pp.stages.split import PolicyStage
from ..pp.stages.weights import WholeStream, load_stage_weights
from .pipelined_losses import Pipelining
from .run import Run


class PolicyCheckpoints:
    """
    Writes and reads a run's policy and its optimizer's state.

    Args:
        run ([`~run.Run`]):
            The trainer.
        trl (`GRPOTrainer`):
            The same trainer without our overrides.
        pipelining ([`~pipelined_losses.Pipelining`], *optional*):
            The pipeline of a run that has one.
    """

    def __init__(self, run: Run, trl: GRPOTrainer, pipelining: Pipelining | None = None):
        self.run, self.trl, self.pipelining = run, trl, pipelining

    @property
    def _by_stages(self) -> bool:
        return self.pipelining is not None and self.pipelining.stage_weights is not None

    # The policy

    def save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        if not self._by_stages:
            self.trl._save(output_dir, state_dict)
            return
        output_dir = self.run.args.output_dir if output_dir is None else output_dir
        if is_peft_model(self.run.model):
            self.trl._save(output_dir)
            self._save_adapters(Path(output_dir))
            return
        if self.pipelining.saves:
            timeout = float(self.run.args.ddp_timeout)
            save_policy(self.pipelining.stages, output_dir, self.pipelining.host_group, timeout=timeout)
        # TRL writes the other files beside the policy.
        with attributes_set(self.run.model, save_pretrained=lambda *args, **kwargs: None):
            self.trl._save(output_dir)

    def _save_adapters(self, folder: Path) -> None:
        """Writes the adapters of all stages over PEFT's own file, which holds this stage's alone."""
        if not self.pipelining.saves:
            return
        from peft import get_peft_model_state_dict
        from peft.utils import SAFETENSORS_WEIGHTS_NAME

        for adapter in self.run.model.peft_config:
            own = get_peft_model_state_dict(self.run.model, adapter_name=adapter)
            own = [(name, tensor.cpu().contiguous()) for name, tensor in own.items()]
            whole = dict(WholeStream(own, self.pipelining.host_group, torch.device("cpu")).stream(own))
            if self.run.args.should_save:
                place = folder if adapter == "default" else folder / adapter
                save_file(whole, place / SAFETENSORS_WEIGHTS_NAME, metadata={"format": "pt"})

    def load(self, resume_from_checkpoint: str, model: torch.nn.Module | None = None) -> None:
        if self._reads_anew(resume_from_checkpoint):
            self._read_policy(resume_from_checkpoint)
        else:
            self.trl._load_from_checkpoint(resume_from_checkpoint, model)

    def load_best(self) -> None:
        if self._reads_anew(self.run.state.best_model_checkpoint):
            self._read_policy(self.run.state.best_model_checkpoint)
        else:
            self.trl._load_best_model()

    def _reads_anew(self, folder: str) -> bool:
        """
        Whether a checkpoint has to be read as `from_pretrained` reads it. Transformers, when a run resumes or takes
        its best model, leaves weights as they are whose names on disk are others than in memory, as those of experts,
        and warns. That is the one thing in which a run with `use_draft=False` is not TRL's.
        """
        if is_peft_model(self.run.model) or self.run.is_fsdp_enabled or self.run.is_deepspeed_enabled:
            return False
        return self._by_stages or bool(_names_on_disk(Path(folder)) - base_policy(self.run.model).state_dict().keys())

    def _read_policy(self, folder: str) -> None:
        policy = base_policy(self.run.model)
        dtypes = {parameter.dtype for parameter in policy.parameters()}
        # If there are several, take one that all of them fit into.
        dtype = dtypes.pop() if len(dtypes) == 1 else torch.float32
        keep = self.pipelining.stage_weights.cut if self._by_stages else lambda whole: []
        saved = load_stage_weights(type(policy), folder, keep, dtype=dtype)
        # The state includes buffers that checkpoints hold, such as the biases that balance experts.
        theirs = saved.state_dict()
        with torch.no_grad():
            for name, own in policy.state_dict().items():
                own.copy_(theirs[name])

    # The optimizer

    def save_optimizer(self, output_dir: str) -> None:
        # An earlier run into the same folder may have left the other kind of files, which a resume would read.
        if self.pipelining is None:
            self.trl._save_optimizer_and_scheduler(output_dir)
            if self.run.args.should_save:
                remove_stage_files(output_dir)
            return
        optimizer = self._own_optimizer()
        if self.pipelining.saves or isinstance(optimizer, SharedOptimizer):
            save_optimizer(
                optimizer,
                self.pipelining.stages,
                output_dir,
                self.pipelining.host_group,
                timeout=float(self.run.args.ddp_timeout),
            )
        if self.run.args.should_save:
            (Path(output_dir) / OPTIMIZER_NAME).unlink(missing_ok=True)
            torch.save(self.run.lr_scheduler.state_dict(), Path(output_dir) / SCHEDULER_NAME)

    def load_optimizer(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            self.trl._load_optimizer_and_scheduler(checkpoint)
            return
        folder = Path(checkpoint)
        staged, whole = has_stage_files(folder), (folder / OPTIMIZER_NAME).is_file()
        if not staged and (self.pipelining is None or not whole):
            self.trl._load_optimizer_and_scheduler(checkpoint)
            return
        stages = (
            [PolicyStage(base_policy(self.run.model), 0, 1)] if self.pipelining is None else self.pipelining.stages
        )
        optimizer = self._own_optimizer()
        if staged:
            load_optimizer(optimizer, stages, folder)
        else:
            load_whole_optimizer(optimizer, stages, folder / OPTIMIZER_NAME, self._names_in_whole_optimizer())
        self.run.lr_scheduler.load_state_dict(
            torch.load(folder / SCHEDULER_NAME, map_location="cpu", weights_only=True)
        )

    def _own_optimizer(self) -> torch.optim.Optimizer:
        """Returns the optimizer without Accelerate's wrapper."""
        return (
            self.run.optimizer.optimizer
            if isinstance(self.run.optimizer, AcceleratedOptimizer)
            else self.run.optimizer
        )

    def _names_in_whole_optimizer(self) -> list[list[str]]:
        """
        Parameters by group, in the order in which [`~transformers.Trainer`] hands them to a whole policy's optimizer.
        Collective in the pipeline.
        """
        decayed = set(self.run.get_decay_parameter_names(self.run.model))
        wrapped = {parameter: name for name, parameter in self.run.model.named_parameters()}
        own = {
            stage.index: [
                (name, wrapped[parameter] in decayed)
                for name, parameter in stage.named_own_parameters()
                if parameter.requires_grad
            ]
            for stage in self.pipelining.stages
        }
        by_rank = [own] * dist.get_world_size(self.pipelining.host_group)
        dist.all_gather_object(by_rank, own, self.pipelining.host_group)
        by_stage = {index: names for part in by_rank for index, names in part.items()}
        in_order = [pair for index in sorted(by_stage) for pair in by_stage[index]]
        return [[name for name, is_decayed in in_order if is_decayed == wanted] for wanted in (True, False)]


def _names_on_disk(folder: Path) -> set[str]:
    """Names of the tensors of a policy in a checkpoint."""
    names: set[str] = set()
    for path in folder.glob("model*.safetensors"):
        with safe_open(path, "pt") as file:
            names |= set(file.keys())
    return names
