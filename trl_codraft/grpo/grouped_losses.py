"""
TRL's GRPO trainer with its losses computed by groups of ranks (`group/`).

TRL keeps seeing plain data parallelism: rollouts, rewards, advantages and gathers are untouched. What changes is who
runs the policy: log-probs of a microbatch come from all ranks of a group, and each rank backpropagates its share of
every member's loss. The mean over all ranks that DDP and FSDP2 take is then the data-parallel gradient.

Shapes: `B` rows, `P` prompt columns, `C` completion columns.
"""

from collections import defaultdict
from contextlib import contextmanager, nullcontext

import torch
from accelerate import Accelerator
from accelerate.utils import gather
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from trl import GRPOTrainer

from ..group.exchange import LossGroup
from ..group.header import Header, Phase, describe
from ..group.members import (
    MemberAccelerator,
    Scores,
    Sharding,
    attributes_set,
    backward_members,
    report_as,
    score_members,
    score_together,
)
from .agreement import common_settings
from .progress import KnownProgress


# What `GRPOTrainer._compute_loss` reads from its inputs, plus the ids and mask of a call that only scores, and the
# mask of high-entropy tokens, which needs all ranks and is therefore made before the loss.
TRAVELLING_TENSORS = (
    "prompt_ids",
    "prompt_mask",
    "completion_ids",
    "completion_mask",
    "advantages",
    "num_items_in_batch",
    "old_per_token_logps",
    "ref_per_token_logps",
    "importance_sampling_ratio",
    "sampling_per_token_logps",
    "tool_mask",
    "entropy_mask",
    "input_ids",
    "attention_mask",
)

# What `GRPOTrainer._compute_loss` writes to besides its metrics: the adaptive entropy controller.
CONTROLLER_STATE = ("entropy_coef", "_last_world_entropy", "_entropy_window_stats")


class GroupedLoss(KnownProgress):
    """
    Computes losses and log-probs in groups of ranks. Without a `loss_group` it is [`~trl.GRPOTrainer`].

    A microbatch takes two kinds of passes. The *gradient passes* compute and backpropagate the loss of every member of
    the group in turn; TRL's code runs under an accelerator whose collectives do nothing, with throwaway metrics. The
    *metric pass* then runs TRL's code once on this rank's own rows, without gradient and with the log-probs kept from
    the gradient passes: it gives the returned loss, every metric and the one update of the entropy controller, as in
    plain data parallelism.

    Attributes:
        loss_group ([`~group.LossGroup`] or `None`):
            The ranks that share this rank's losses.
        sharding ([`~group.Sharding`] or `None`):
            How a microbatch is split over them.
    """

    loss_group: LossGroup | None = None
    sharding: Sharding | None = None
    _failure: Exception | None = None
    # Inside a gradient or metric pass: what stands in for the scores and for the mask of high-entropy tokens.
    _score_rows = None
    _entropy_mask: torch.Tensor | None = None

    def join_loss_group(self, loss_group: LossGroup, sharding: Sharding | None) -> None:
        """
        Computes losses in a group from now on. Collective: all ranks of the run call it before training.

        Args:
            loss_group ([`~group.LossGroup`]):
                Made with the names `TRAVELLING_TENSORS`.
            sharding ([`~group.Sharding`] or `None`):
                How the tokens of a microbatch are split over the group; `None` if they are not.

        Raises:
            ValueError: on all ranks, if their arguments differ.
        """
        loss_group.require_same(common_settings(self.args))
        self.loss_group, self.sharding = loss_group, sharding
        if self.accelerator.is_fsdp2:
            # Each backward reduces and frees its gradients: otherwise whole gradients pile up over micro-steps too.
            self.accelerator.gradient_state.plugin_kwargs["sync_each_batch"] = True

    # Losses

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        if self.loss_group is None or not self.model.training:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        require_averaged_gradients(self.accelerator, model)
        if self.top_entropy_quantile < 1.0:
            inputs = {**inputs, "entropy_mask": self._high_entropy_mask(inputs)}
        headers = self._announce(Phase.LOSS, inputs, inputs["completion_ids"].shape[1])
        own_scores = []

        def loss_of(member, rows):
            with self._gradient_pass(model, rows, own_scores if member == self.loss_group.rank else None):
                return self._compute_loss(model, rows)

        loss = backward_members(
            self.loss_group,
            headers,
            inputs,
            loss_of=loss_of,
            backward=self.accelerator.backward,
            no_sync=lambda: self._no_sync(model),
        )
        with torch.no_grad(), self._metric_pass(inputs, *own_scores):
            value = super()._compute_loss(model, inputs)
        return report_as(loss, value)

    @contextmanager
    def _gradient_pass(self, model, rows, keep):
        """A member's loss on all ranks of the group; `keep` takes the scores, without their graph."""

        def score(*rows, **settings):
            scores = self._score_together(model, *rows, **settings)
            if keep is not None:
                keep.append(scores.detach())
            return scores

        with self._as_world_of_one(rows, score):
            yield

    def _as_world_of_one(self, rows, score):
        """Within it, TRL's loss sees one member's rows as a world of one and gets its scores from `score`."""
        return attributes_set(
            self,
            accelerator=MemberAccelerator(self.accelerator),
            _metrics={mode: defaultdict(list) for mode in self._metrics},
            _score_rows=score,
            _entropy_mask=rows.get("entropy_mask"),
            **{name: getattr(self, name) for name in CONTROLLER_STATE},
        )

    def _metric_pass(self, inputs, scores):
        return attributes_set(
            self, _score_rows=lambda *rows, **settings: scores, _entropy_mask=inputs.get("entropy_mask")
        )

    def _no_sync(self, model):
        # FSDP2: see `join_loss_group`.
        return nullcontext() if self.accelerator.is_fsdp2 else self.accelerator.no_sync(model)

    def _high_entropy_mask(self, inputs):
        """Which of this rank's tokens are above the entropy threshold of all ranks: needs a pass of its own."""
        mask = inputs["completion_mask"]
        if inputs.get("tool_mask") is not None:
            mask = mask * inputs["tool_mask"]
        with torch.no_grad():
            entropies = self._score_own_rows(
                Phase.ENTROPY_THRESHOLD,
                self.model,
                torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1),
                torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1),
                inputs["completion_ids"].shape[1],
                compute_entropy=True,
            ).entropies
            return super().get_high_entropy_mask(entropies, mask, 1 - self.top_entropy_quantile)

    def get_high_entropy_mask(self, entropies, mask, threshold):
        # TRL's own tests call it on something that is no trainer.
        if isinstance(self._entropy_mask, torch.Tensor):
            return self._entropy_mask
        return GRPOTrainer.get_high_entropy_mask(self, entropies, mask, threshold)

    # Scores

    def _get_per_token_logps_and_entropies(self, model, *rows, **settings):
        if self.loss_group is None:
            return super()._get_per_token_logps_and_entropies(model, *rows, **settings)
        if self._score_rows is not None:
            return self._score_rows(*rows, **settings)
        phase = Phase.LOG_PROBS if self.model.training else Phase.EVALUATION
        return self._score_own_rows(phase, model, *rows, **settings)

    def _score_own_rows(
        self,
        phase,
        model,
        input_ids,
        attention_mask,
        logits_to_keep,
        batch_size=None,
        compute_entropy=False,
        compute_aux_loss=False,
        **images,
    ) -> Scores:
        """Scores this rank's rows outside the gradient passes: the group goes through the rows of each member."""
        rows = {"input_ids": input_ids, "attention_mask": attention_mask}
        # Images cannot travel: announcing them raises.
        headers = self._announce(phase, {**rows, **images}, logits_to_keep, chunk_rows=batch_size or 0)

        def score(ids, mask, completion_length):
            return self._score_together(
                model,
                ids,
                mask,
                completion_length,
                compute_entropy=compute_entropy,
                compute_aux_loss=compute_aux_loss,
            )

        return score_members(self.loss_group, headers, rows, score)

    def _score_together(self, model, *rows, compute_entropy=False, compute_aux_loss=False, **images) -> Scores:
        # Without images: see `_score_own_rows`.
        with self.accelerator.autocast():
            return score_together(self.loss_group, self.sharding, model, *rows, compute_entropy, compute_aux_loss)

    # Headers

    def _announce(self, phase, rows, completion_length, chunk_rows=0):
        """Exchanges headers; raises on all ranks what went wrong on one of them since the last time."""
        failure, self._failure = self._failure, None
        tensors = {}
        try:
            tensors = describe(rows, self.loss_group.names)
        except ValueError as error:
            failure = failure or error
        attention_mask = rows.get("attention_mask")
        if attention_mask is None:
            attention_mask = torch.cat([rows["prompt_mask"], rows["completion_mask"]], dim=1)
        header = Header(
            step=self._step,
            phase=phase,
            rows=len(attention_mask),
            prompt_length=attention_mask.shape[1] - completion_length,
            completion_length=completion_length,
            chunk_rows=chunk_rows,
            shard_tokens=self._tokens_per_shard(attention_mask),
            tensors=tensors,
        )
        return self.loss_group.exchange(header, failure)

    def _tokens_per_shard(self, attention_mask):
        return self.sharding.count_tokens(attention_mask)

    def _generate_and_score_completions(self, inputs):
        # Before the first collective of a rollout: a rank that generates while others do not is told apart here.
        if self.loss_group is not None:
            self.loss_group.exchange(Header(self._step, Phase.ROLLOUT))
        return super()._generate_and_score_completions(inputs)

    def _generate(self, prompts):
        """An exception of one rank waits for the next header, while stand-ins keep the collectives in step."""
        try:
            return super()._generate(prompts)
        except Exception as error:  # of the user's rollout function, tools or model: any
            if self.loss_group is None:
                raise
            self._failure = error
        # A server that failed is not asked again: TRL pushes weights to it for a rollout function too.
        pushed = {"_last_loaded_step": self.state.global_step} if self.use_vllm else {}
        with attributes_set(self, rollout_func=_stand_in_rollouts, **pushed):
            return super()._generate(prompts)

    def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
        try:
            return super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        except Exception as error:  # of the user's reward functions or models: any
            if self.loss_group is None:
                raise
            self._failure = self._failure or error
        return gather(torch.full((len(prompts), len(self.reward_funcs)), torch.nan, device=self.accelerator.device))


def require_averaged_gradients(accelerator: Accelerator, model: nn.Module) -> None:
    """
    Refuses to train a policy that nothing wraps: each rank would step with the gradients of its own tokens.

    Args:
        accelerator (`Accelerator`):
            That of the run.
        model (`nn.Module`):
            The policy as the training step gets it.

    Raises:
        RuntimeError: if neither DDP nor FSDP2 averages its gradients over the ranks.
    """
    if accelerator.num_processes > 1 and not accelerator.is_fsdp2 and not isinstance(model, DistributedDataParallel):
        raise RuntimeError(
            "The policy is not wrapped for data parallelism, so its gradients would not be averaged over ranks. Accelerate "
            "does so when `evaluate()` is called before `train()`. Set `eval_on_start=True` instead, or evaluate with a "
            "trainer of its own."
        )


def _stand_in_rollouts(prompts, trainer):
    """One end-of-sequence token per prompt."""
    token = [trainer.eos_token_ids[0]]
    return {
        "prompt_ids": [token for _ in prompts],
        "completion_ids": [token for _ in prompts],
        "logprobs": [[0.0] for _ in prompts] if trainer.use_vllm else None,
    }
