"""
Ranks of `test_pp_trainer.py`: `python trainer_worker.py OUT WORLD_SIZE SIZES CASE...` runs each case without a
pipeline and with pipelines of each of the sizes (`2,4,2x2`: ranks per pipeline, and per microbatch of a stage; with a
`p` at the end, such as `2p`, no rank has the whole policy), and saves what each rank saw.
"""

import sys
import zlib
from functools import partial
from pathlib import Path

import replay_worker
import torch
from cp.trainer_worker import DRAFT, POLICIES, ShardedTrainer
from pp.trainer_cases import CASES, IMPOSSIBLE
from replay_worker import prepare
from tiny import BALANCED_EXPERTS

from trl_codraft import CoDraftGRPOConfig, CoDraftGRPOTrainer, Eagle3DraftConfig, Eagle3DraftModel
from trl_codraft.grpo.pipelined_losses import PipelinedLosses


# Six layers, so that no stage of four is like another.
LAYERS = {"num_hidden_layers": 6}
# Taps of the first and the last stage, and of one between.
TAPS = [0, 3, 6]


class StagedTrainer(ShardedTrainer):
    """What `ShardedTrainer` keeps, of a run that no DDP wraps."""

    def training_step(self, model, inputs, num_items_in_batch):
        loss = CoDraftGRPOTrainer.training_step(self, model, inputs, num_items_in_batch)
        self.seen["losses"].append(loss.item())
        return loss


def change_policy(policy, frozen, disturbed):
    """Freezes the embedding and the first layers; moves the weights of every rank but the first."""
    if frozen:
        for module in (policy.model.embed_tokens, *policy.model.layers[:frozen]):
            module.requires_grad_(False)
    if disturbed:
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter += 0.1 * torch.distributed.get_rank()


def draw_adapters(trainer):
    """Weights of adapters that depend on their names alone: a part of a policy draws others than the whole."""
    for name, parameter in trainer.model.named_parameters():
        if "lora_" in name:
            numbers = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            parameter.data.copy_(torch.randn(parameter.shape, generator=numbers) / 4)


def build(case, out, world_size, size, classes=(ShardedTrainer, StagedTrainer), **overrides):
    """A trainer of a case with pipelines of a size, `"1"` for none."""
    trainer = _build(case, out, world_size, size, classes, **overrides)
    draw_adapters(trainer)
    return trainer


def _build(case, out, world_size, size, classes, **overrides):
    case = dict(case)
    replayed = not case.pop("speculates", False)
    pipeline = {name: case.pop(name) for name in ("pipeline_schedule", "layers_per_stage") if name in case}
    frozen, disturbed = case.pop("frozen_layers", 0), case.pop("disturbed", False)
    arguments, config = prepare(case, out, world_size, **overrides)
    change_policy(arguments["model"], frozen, disturbed)
    draft_model = None
    if not replayed:
        arguments["rollout_func"] = None
        config |= {**DRAFT, "draft_tap_layers": TAPS, **config}
    elif config.get("use_draft", True):
        config |= {**DRAFT, **config}
        shape = {"tap_layers": TAPS, "draft_vocab_size": config.get("draft_vocab_size", 104)}
        draft_model = Eagle3DraftModel(Eagle3DraftConfig.from_policy(arguments["model"].config, **shape))
        if "draft_vocab_size" in config:
            draft_model.set_vocab(torch.arange(0, 2 * config["draft_vocab_size"], 2))
    if size == "1":
        return classes[0](args=CoDraftGRPOConfig(**config), draft_model=draft_model, **arguments)
    p, _, c = size.removesuffix("p").partition("x")
    config |= {"pipeline_parallel_size": int(p), "context_parallel_size": int(c or 1), **pipeline}
    if size.endswith("p"):
        config["pipeline_replica"] = False
        if not frozen:
            # Loaded in parts; a policy that is an object is cut down.
            config["model_init_kwargs"] = {"dtype": arguments["model"].dtype}
            arguments["model"] = str(out / case.get("model_type", "llama"))
    return classes[1](args=CoDraftGRPOConfig(**config), draft_model=draft_model, **arguments)


def run(case, out, world_size, size):
    """One training run: what it saw at each step, its logs and its final weights."""
    trainer = build(case, out, world_size, size)
    trainer.train()
    weights = weights_here(trainer)
    window = trainer.args.gradient_accumulation_steps
    seen = {**trainer.seen, "window": window, "logs": trainer.state.log_history, "weights": weights}
    release(trainer)
    return seen


def weights_here(trainer):
    """Weights of policy and draft on this rank."""
    weights = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    if trainer.draft_model is not None:
        weights |= {f"draft.{name}": p.detach().clone() for name, p in trainer.draft_model.named_parameters()}
    return weights


def release(trainer):
    """Frees what a process has for one trainer: every process group keeps threads and connections."""
    if not isinstance(trainer.losses, PipelinedLosses):
        return
    pipelining = trainer.losses.pipelining
    if pipelining.pipeline.channel is not None:
        pipelining.pipeline.channel.close()
    groups = {trainer.losses.group.members, pipelining.group, pipelining.host_group, pipelining.holders}
    sharding = getattr(pipelining.policy.lay_out, "keywords", {}).get("sharding")
    for group in groups | (set() if sharding is None else {sharding.group}):
        torch.distributed.destroy_process_group(group)


MORE = {"tied": {"model_type": "llama", "tie_word_embeddings": True}, "glm4_moe": BALANCED_EXPERTS}
DEEPER = {name: {**LAYERS, **config} for name, config in {**POLICIES, **MORE}.items()}
save_policies = partial(replay_worker.save_policies, policies=DEEPER, scale=3.0)


if __name__ == "__main__":
    save_policies(Path(sys.argv[1]))
    replay_worker.run_all(run, CASES, impossible=IMPOSSIBLE)
