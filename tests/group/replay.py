"""
Group machinery without any attention of its own: each rank runs the whole microbatch but owns only its tokens, so that
the group can be compared with plain data parallelism before anything is really split.
"""

import torch
import torch.distributed as dist
from fsdp2_on_cpu import whole
from torch.nn.parallel import DistributedDataParallel
from trl import GRPOTrainer

from trl_codraft import CoDraftGRPOConfig, CoDraftGRPOTrainer
from trl_codraft.group.exchange import LossGroup
from trl_codraft.group.members import ShardScores
from trl_codraft.group.mesh import RankMesh
from trl_codraft.grpo.agreement import common_settings
from trl_codraft.grpo.failures import HeldFailures
from trl_codraft.grpo.grouped_losses import GroupedLosses
from trl_codraft.grpo.member_passes import TRAVELLING_TENSORS


class WholeMicrobatch:
    """Sharding by replay. Completion tokens are dealt out unevenly, every third microbatch to member 0 alone."""

    def __init__(self, rank, size):
        self.rank, self.size = rank, size
        # How many microbatches left this rank without tokens, and how many were split.
        self.empty, self.split = 0, 0

    def count_tokens(self, attention_mask):
        return (int(attention_mask.sum()),) * self.size

    def owners(self, real):
        """Per position of `(B, C)` the member that owns it, -1 for padding."""
        rows, columns = real.shape
        row, column = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
        owners = (row * 5 + column * column) % self.size
        if real.sum() % 3 == 0:
            owners = torch.zeros_like(owners)
        return owners.masked_fill(real == 0, -1)

    def pack(self, input_ids, attention_mask, logits_to_keep):
        return input_ids, attention_mask, logits_to_keep

    def score(self, model, packed, compute_entropy, compute_aux_loss):
        input_ids, attention_mask, logits_to_keep = packed
        labels = input_ids.masked_fill(attention_mask == 0, -100)
        labels[:, :-logits_to_keep] = -100
        router = {"output_router_logits": True} if compute_aux_loss else {}
        outputs = model(input_ids, attention_mask=attention_mask, labels=labels, fused_lm_head=True, **router)
        owners = self.owners(attention_mask[:, -logits_to_keep:]).flatten()
        positions = [(owners == member).nonzero().flatten() for member in range(self.size)]
        self.empty += len(positions[self.rank]) == 0
        self.split += 0 < len(positions[self.rank]) < sum(map(len, positions))
        own = lambda values: values[:, -logits_to_keep:].flatten()[positions[self.rank]]  # noqa: E731
        aux_loss = None
        if compute_aux_loss:
            share = outputs.aux_loss / self.size
            aux_loss = share + (outputs.aux_loss - share).detach()
        return ShardScores(
            own(outputs.log_probs), own(outputs.entropy) if compute_entropy else None, aux_loss, positions
        )


class Rollouts:
    """A `rollout_func` that replays: completions of 1 to `longest` tokens drawn from (seed, rank, call) alone."""

    def __init__(self, longest=7, environment=False, ends=True):
        self.longest, self.environment, self.ends, self.calls = longest, environment, ends, 0

    def __call__(self, prompts, trainer):
        generator = torch.Generator().manual_seed(1000 * self.calls + trainer.accelerator.process_index)
        self.calls += 1
        draw = lambda low, high, n: torch.randint(low, high, (n,), generator=generator).tolist()  # noqa: E731
        lengths = draw(1, self.longest + 1, len(prompts))
        completions = [draw(8, 90, length) for length in lengths]
        for completion in completions[::2] if self.ends else []:
            completion[-1] = trainer.eos_token_ids[0]
        rollouts = {
            "prompt_ids": trainer.processing_class(text=prompts)["input_ids"],
            "completion_ids": completions,
            "logprobs": None,
        }
        if self.environment:
            rollouts["env_mask"] = [[int(t % 3 != 1) for t in range(length)] for length in lengths]
        return rollouts


def token_reward(completion_ids, **kwargs):
    """Differs between completions and is not monotonous in anything."""
    return [sum((7 * token + 3 * place) % 11 for place, token in enumerate(ids)) / 10 for ids in completion_ids]


class Observed(GRPOTrainer):
    """
    Keeps what a run does at each step: losses of microbatches, gradients, and DDP's gradient reductions (`None`
    without DDP).
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.seen = {"losses": [], "gradients": [], "reductions": 0}

    def training_step(self, model, inputs, num_items_in_batch):
        if self._step == 0 and isinstance(model, DistributedDataParallel):
            model.register_comm_hook(self, _count_reductions)
        elif self._step == 0 and self.accelerator.num_processes > 1:
            self.seen["reductions"] = None
        loss = super().training_step(model, inputs, num_items_in_batch)
        self.seen["losses"].append(loss.item())
        return loss

    def _clip_grad_norm(self, model):
        self.seen["gradients"].append(
            {name: whole(p.grad) for name, p in self.model.named_parameters() if p.grad is not None}
        )
        return super()._clip_grad_norm(model)


def _count_reductions(trainer, bucket):
    trainer.seen["reductions"] += 1
    flat = bucket.buffer().div_(trainer.accelerator.num_processes)
    return torch.distributed.all_reduce(flat, async_op=True).get_future().then(lambda future: future.value()[0])


class PlainTrainer(Observed):
    """Plain data-parallel TRL."""


class GroupedTrainer(Observed, CoDraftGRPOTrainer):
    """The same with losses computed in groups of `group_size`."""

    def __init__(self, *args, group_size, **kwargs):
        config = CoDraftGRPOConfig.from_grpo_config(kwargs.pop("args"))
        config.use_draft = False
        self._group_size = group_size
        super().__init__(*args, args=config, **kwargs)
        self.seen["sharding"] = self.losses.sharding

    def _join_group(self, parts):
        members = RankMesh(self.args.world_size, self._group_size).new_group(("pp", "cp"))
        group = LossGroup(members, dist.group.WORLD, self.accelerator.device, TRAVELLING_TENSORS)
        group.require_same(common_settings(self.args))
        self.failures = HeldFailures(self, super(CoDraftGRPOTrainer, self))
        sharding = WholeMicrobatch(group.rank, self._group_size)
        self.losses = GroupedLosses(self, group, sharding, self.failures)
