"""
Ranks of `test_cp_trainer.py`: `python trainer_worker.py OUT WORLD_SIZE SIZES CASE...` runs each case without context
parallelism and with each of the sizes (`2,4`; `2s`: the policy sharded with FSDP2), and saves what each rank saw.
"""

import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import replay_worker
import torch
from cp.trainer_cases import CASES, DRAFT_PASSES
from fsdp2_on_cpu import fsdp2_on_cpu, whole
from replay import Observed
from replay_worker import prepare

from trl_codraft import CoDraftGRPOConfig, CoDraftGRPOTrainer, Eagle3DraftConfig, Eagle3DraftModel
from trl_codraft.grpo.grouped_losses import GroupedLosses


DRAFT = {
    "draft_ttt_steps": DRAFT_PASSES,
    "draft_learning_rate": 0.1,
    "draft_warmup_steps": 0,
    "draft_max_grad_norm": 100.0,
}

POLICIES = {
    "llama": {},
    "mixtral": {},
    "mistral": {"sliding_window": 3},
    "dynamic": {
        "model_type": "llama",
        "max_position_embeddings": 8,
        "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0},
    },
    "phi3": {
        "max_position_embeddings": 64,
        "original_max_position_embeddings": 12,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "short_factor": [1.0] * 4,
            "long_factor": [2.0, 3.0, 4.0, 5.0],
            "original_max_position_embeddings": 12,
            "factor": 4.0,
        },
    },
}


class ShardedTrainer(Observed, CoDraftGRPOTrainer):
    """Keeps the draft's summed gradients too, whose optimizer is SGD: Adam makes full steps of rounding."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        if self.learner is not None:
            self._sum_over_ranks, self.learner.sum_over_ranks = self.learner.sum_over_ranks, self._seen_sum
        if isinstance(self.losses, GroupedLosses):
            self._score, self.losses._score = self.losses._score, self._seen_score

    def _start_draft(self):
        super()._start_draft()
        self.draft_trainer.optimizer = torch.optim.SGD(self.draft_trainer.parameters, lr=1.0)

    def _seen_sum(self, tensor):
        total = self._sum_over_ranks(tensor)
        if self.draft_trainer is not None and tensor is self.draft_trainer._flat:
            self.seen.setdefault("draft gradients", []).append(total.clone())
        return total

    def _seen_score(self, model, scored, *rows, **settings):
        scores = self._score(model, scored, *rows, **settings)
        layout, num_tokens = scored.packed.layout, scored.packed.num_tokens
        shards = self.seen.setdefault("shards", [])
        shards.append([layout.num_rows, sum(layout.rows < num_tokens).item(), layout.split_rows])
        return scores


def build(case, out, world_size, size, **overrides):
    """A trainer of a case, `size` ranks to a microbatch."""
    case = dict(case)
    replayed = not case.pop("speculates", False)
    arguments, config = prepare(case, out, world_size, **overrides)
    draft_model = None
    if not replayed:
        arguments["rollout_func"] = None
        config |= {**DRAFT, "draft_tap_layers": [0, 2], **config}
    elif config.get("use_draft", True):
        config |= {**DRAFT, **config}
        shape = {"tap_layers": [0, 2], "draft_vocab_size": config.get("draft_vocab_size", 104)}
        draft_config = Eagle3DraftConfig.from_policy(arguments["model"].config, **shape)
        draft_model = Eagle3DraftModel(draft_config)
        if "draft_vocab_size" in config:
            draft_model.set_vocab(torch.arange(0, 2 * config["draft_vocab_size"], 2))
    args = CoDraftGRPOConfig(context_parallel_size=size, **config)
    return ShardedTrainer(args=args, draft_model=draft_model, **arguments)


def run(case, out, world_size, size):
    """One training run: what it saw at each step, its logs and its final weights."""
    sharded = size.endswith("s")
    with fsdp2_on_cpu() if sharded else nullcontext():
        trainer = build(case, out, world_size, int(size.removesuffix("s")))
        trainer.train()
        assert trainer.accelerator.is_fsdp2 == sharded
    assert trainer.model.config._attn_implementation == "sdpa"
    weights = {name: whole(p) for name, p in trainer.model.named_parameters() if p.requires_grad}
    if trainer.draft_model is not None:
        weights |= {f"draft.{name}": p.detach().clone() for name, p in trainer.draft_model.named_parameters()}
    seen = {**trainer.seen, "logs": trainer.state.log_history, "weights": weights}
    if isinstance(trainer.losses, GroupedLosses):
        # A process group keeps threads and connections, and there are many runs.
        torch.distributed.destroy_process_group(trainer.losses.group.members)
    return seen


save_policies = partial(replay_worker.save_policies, policies=POLICIES)


if __name__ == "__main__":
    save_policies(Path(sys.argv[1]))
    replay_worker.run_all(run, CASES)
