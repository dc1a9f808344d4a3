"""
Declares the seam between the trainer and its parts: the attributes of a trainer that parts may touch ([`Run`]), and
the methods that parts offer each other. A part holds a [`Run`], never the trainer's class; nothing in `grpo/` imports
`trainer.py`.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from accelerate import Accelerator
from datasets import Dataset, IterableDataset
from torch import nn
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase, TrainerState

from ..config import CoDraftGRPOConfig
from ..cp.draft import DraftBatchShard
from ..cp.sharding import PackedMicrobatch
from ..group.members import Scores
from ..modeling.modeling_eagle3 import Eagle3DraftModel
from ..modeling.packing import DraftBatch
from ..modeling.taps import TapRecorder
from ..modeling.teacher import PolicyHead
from ..rollout.speculative import SpeculativeDecoder
from ..training.draft_trainer import DraftTrainer


Batch = DraftBatch | DraftBatchShard | None


class Losses(Protocol):
    """
    Computes a run's losses and log-probs: `losses.py`, `grouped_losses.py`, `pipelined_losses.py`.

    Attributes:
        draft_loss (`Callable`):
            The draft's loss on the batches that the learner keeps of these losses.
        rank_of_head (`int`):
            A rank of the run that has the policy's head.
        has_head (`bool`):
            Whether this rank has it.
    """

    draft_loss: Callable

    @property
    def rank_of_head(self) -> int: ...

    @property
    def has_head(self) -> bool: ...

    def compute(self, model: nn.Module, inputs: dict[str, Any]) -> torch.Tensor:
        """
        Computes the loss of a micro-step in training.

        Args:
            model (`nn.Module`):
                The policy as the training step gets it.
            inputs (`dict[str, Any]`):
                The micro-step's own rows, as TRL prepares them.

        Returns:
            `torch.Tensor` of shape `()`: the loss to report, with the graph that the training step backpropagates.
        """

    def score(self, model: nn.Module, *rows: Any, **settings: Any) -> Scores | tuple:
        """Returns log-probs and entropies `(B, C)` of this rank's rows, and the load-balancing loss, as TRL does."""

    def announce_rollout(self) -> None:
        """Tells the other ranks that this one is about to generate, where they wait for it."""

    def start_run(self) -> None:
        """Forgets what an earlier run of the same trainer left in the middle of a window."""

    def draft_batches_of(self, rows: dict[str, torch.Tensor]) -> list[Batch]:
        """Runs rows without gradient where no rank has the whole policy; returns what the draft learns from them."""


class Learner(Protocol):
    """The draft of a run and its training: `learner.py`."""

    draft: Eagle3DraftModel
    trainer: DraftTrainer | None
    head: PolicyHead
    recorder: TapRecorder
    is_fresh: bool
    resumes_from: Any
    pretraining_log: list[dict[str, float]]

    def recording(
        self, rows: dict[str, Any], packed: Callable[[], PackedMicrobatch | None] = ...
    ) -> AbstractContextManager[None]:
        """Within it, the policy's one forward of these rows leaves what the draft learns from them."""

    def pack(self, rows, taps, last_hidden, packed: PackedMicrobatch | None = None) -> Batch:
        """Packs what the draft learns from a microbatch."""

    def keep(self, batches: list[Batch]) -> None:
        """Keeps batches until the policy's backward has run."""

    def learn_from_kept(self) -> None:
        """Adds up the draft's gradients of the batches that were kept."""


class Rollouts(Protocol):
    """The rollouts of a run with a draft: `rollouts.py`."""

    decoder: SpeculativeDecoder

    @property
    def speculates(self) -> bool: ...


class Reports(Protocol):
    """The progress that this rank reports to the others: `progress.py`."""

    def note(self, stage: str) -> None:
        """Says that this rank has reached a stage."""


class Run(Protocol):
    """
    Lists all that the parts read of a trainer, or replace for a while.

    The first block holds the parts. The second is public in TRL, Transformers or Accelerate; the third is private
    there and may move with a release. `tests/test_house.py` compares the list with the code.
    """

    losses: Losses
    learner: Learner | None
    rollouts: Rollouts | None
    reports: Reports

    args: CoDraftGRPOConfig
    accelerator: Accelerator
    state: TrainerState
    model: nn.Module
    model_wrapped: nn.Module
    ref_model: PreTrainedModel | None
    train_dataset: Dataset | IterableDataset | None
    eval_dataset: Any
    optimizer: torch.optim.Optimizer | None
    lr_scheduler: Any
    optimizer_cls_and_kwargs: tuple[type, dict] | None
    reward_funcs: list
    rollout_func: Callable | None
    environment_factories: dict[str, Callable] | None
    eos_token_ids: list[int]
    temperature: float
    top_entropy_quantile: float
    entropy_coef: float
    min_p: float | None
    max_completion_length: int
    aux_loss_enabled: bool
    generation_config: GenerationConfig
    use_vllm: bool
    use_transformers_continuous_batching: bool
    vllm_generation: Any
    is_fsdp_enabled: bool
    is_deepspeed_enabled: bool
    hub_model_id: str | None
    push_in_progress: Any
    processing_class: Any
    tools: list

    def get_high_entropy_mask(self, entropies: torch.Tensor, mask: torch.Tensor, threshold: float) -> torch.Tensor: ...

    def get_optimizer_cls_and_kwargs(self, args: Any, model: Any = None) -> tuple[type, dict]: ...

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]: ...

    def is_world_process_zero(self) -> bool: ...

    _step: int
    _metrics: dict[str, dict[str, list]]
    _tokenizer: PreTrainedTokenizerBase
    _is_vlm: bool
    _multi_environment: bool
    _last_loaded_step: int
    _batch_environments: list[str | None]
    _last_world_entropy: float
    _entropy_window_stats: torch.Tensor | None

    def _compute_loss(self, model: nn.Module, inputs: dict[str, Any]) -> torch.Tensor: ...

    def _get_per_token_logps_and_entropies(self, model: nn.Module, *rows: Any, **settings: Any) -> tuple: ...

    def _tokenize_prompts(self, prompts: list) -> tuple: ...

    def _generate_single_turn(self, prompt_ids, images, multimodal_fields, num_generations) -> tuple: ...
