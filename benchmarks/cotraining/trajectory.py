"""A GRPO run of plain `trl.GRPOTrainer`, recorded: what the policy was before each step, and what it rolled out."""

from pathlib import Path

import torch
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from .cases import Case


ROLLOUT_TENSORS = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")


class Recorder(GRPOTrainer):
    """Writes `step_{t}.pt`: trained weights before step `t`, its rollouts (sampled by them) and its mean reward."""

    def __init__(self, *args, folder: Path, **kwargs):
        super().__init__(*args, **kwargs)
        self.folder, self.microbatches, self.weights = folder, [], {}
        self.add_callback(_AroundStep(self))

    def _compute_loss(self, model, inputs):
        self.microbatches.append({name: inputs[name].clone() for name in ROLLOUT_TENSORS})
        return super()._compute_loss(model, inputs)


class _AroundStep(TrainerCallback):
    def __init__(self, trainer: Recorder):
        self.trainer = trainer

    def on_step_begin(self, args, state, control, **kwargs):
        trainer = self.trainer
        for reward in trainer.reward_funcs:
            if hasattr(reward, "on_step"):
                reward.on_step(state.global_step)
        trainer.microbatches = []
        trainer.weights = {
            name: weight.detach().clone() for name, weight in trainer.model.named_parameters() if weight.requires_grad
        }

    def on_step_end(self, args, state, control, **kwargs):
        trainer = self.trainer
        record = {
            "weights": trainer.weights,
            "microbatches": trainer.microbatches,
            "reward": trainer._metrics["train"]["reward"][-1],
        }
        torch.save(record, trainer.folder / f"step_{state.global_step - 1:03d}.pt")


def record_trajectory(case: Case, seed: int, folder: Path) -> list[Path]:
    """
    Runs GRPO once with plain rollouts, or finds the run in `folder`.

    Returns:
        `list[Path]`: one file per step, in order.
    """
    complete = folder / "complete"
    if not complete.exists():
        folder.mkdir(parents=True, exist_ok=True)
        arguments = {
            "output_dir": str(folder / "trainer"),
            "use_cpu": True,
            "bf16": False,
            "gradient_checkpointing": False,
            "report_to": "none",
            "save_strategy": "no",
            "disable_tqdm": True,
            "logging_steps": 1,
            "temperature": 1.0,
            "beta": 0.0,
            "seed": seed,
            **case.grpo,
        }
        trainer = Recorder(
            model=case.policy(seed),
            reward_funcs=case.reward_funcs(),
            args=GRPOConfig(**arguments),
            train_dataset=case.train_set,
            processing_class=case.tokenizer,
            folder=folder,
        )
        trainer.train()
        complete.touch()
    return sorted(folder.glob("step_*.pt"))
