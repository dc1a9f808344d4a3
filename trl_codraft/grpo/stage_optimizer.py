"""Adapts the optimizer to a run whose ranks train the stages of a pipeline: shared state, norm, copies of weights."""

import torch
import torch.distributed as dist
from accelerate.optimizer import AcceleratedOptimizer

from ..pp.stages.gradients import clip_grad_norm
from ..pp.stages.shared_optimizer import shard_optimizer
from ..pp.stages.weights import send_embedding
from .pipelined_losses import Pipelining
from .run import Run
from .support import require_shareable_state


class StageOptimizer:
    """
    Adapts a trainer's optimizer to the stages of its rank.

    Args:
        run ([`~run.Run`]):
            The trainer.
        pipelining ([`Pipelining`]):
            Its pipeline.
    """

    def __init__(self, run: Run, pipelining: Pipelining):
        self.run, self.pipelining = run, pipelining

    def prepare(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """
        Shares the optimizer's state where the run wants that, and sends what a step changed to the other ranks.

        Raises:
            ValueError: if `pipeline_shard_optimizer` cannot make shares of this optimizer.
        """
        if isinstance(optimizer, AcceleratedOptimizer):
            # In a second run of the same trainer it is wrapped, and has the hook.
            return optimizer
        if self.run.args.pipeline_shard_optimizer and dist.get_world_size(self.pipelining.holders) > 1:
            optimizer = self._share_state(optimizer)
        optimizer.register_step_post_hook(self._send_changes)
        return optimizer

    def _share_state(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """The same optimizer with its state split over the ranks that hold the same stages."""
        run, pipelining = self.run, self.pipelining
        kind, settings = run.optimizer_cls_and_kwargs or run.get_optimizer_cls_and_kwargs(run.args, run.model)
        require_shareable_state(optimizer, kind, settings)
        return shard_optimizer(
            optimizer, lambda groups: kind(groups, **settings), pipelining.stages, pipelining.holders
        )

    def _send_changes(self, optimizer, args, kwargs) -> None:
        """Brings the other ranks' copies of this rank's weights up to date, after a step."""
        if self.pipelining.replica is not None:
            self.pipelining.replica.refresh()
        elif self.pipelining.sends_embedding:
            send_embedding(self.pipelining.stages[0].policy, self.pipelining.group)

    def clip_grad_norm(self) -> torch.Tensor:
        """Clips the gradients by the norm over all stages, and returns it."""
        return clip_grad_norm(self.pipelining.stages, self.run.args.max_grad_norm, self.pipelining.group)

    def grad_norm(self) -> torch.Tensor:
        """Returns the norm over all stages."""
        return clip_grad_norm(self.pipelining.stages, torch.inf, self.pipelining.group)
