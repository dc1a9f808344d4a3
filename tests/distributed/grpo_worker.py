"""Ranks of `test_grpo_two_processes.py`: `python grpo_worker.py OUT` trains on two of them and saves what each saw."""

import sys
from pathlib import Path

import torch
from forked_ranks import fork_ranks
from grpo_runs import codraft_trainer, plain_trainer, policy_logs, prompt_dataset, weights


def see_shared(out, **config):
    """
    As `drafting`, the ranks sharing the state of the draft's optimizer: a whole run, and from its checkpoint with and
    without.
    """
    config |= {"save_strategy": "steps", "save_steps": 2}
    whole = codraft_trainer(out / "shared", draft_shard_optimizer=True, **config)
    whole.train()
    checkpoint = out / "shared" / "checkpoint-2"
    seen = {"shared": ended(whole)}
    for name, shares in (("shared, resumed", True), ("resumed without", False)):
        trainer = codraft_trainer(out / name, draft_shard_optimizer=shares, **config)
        trainer.train(resume_from_checkpoint=str(checkpoint))
        seen[name] = ended(trainer)
    whole.state.best_model_checkpoint = str(checkpoint)
    whole._load_best_model()
    ones = torch.ones(3)
    seen["summed in place"] = whole.learner.sum_over_ranks(ones) is ones and ones.tolist()
    seen["best"] = whole.draft_trainer.state_dict()
    seen["saved"] = torch.load(checkpoint / "draft" / "draft_state.pt")["draft_trainer"]
    return seen


def ended(trainer):
    """What a run ends with: the draft, what was logged, and elements of moments on this rank."""
    moments = [state["exp_avg"] for state in trainer.draft_trainer.optimizer.state.values()]
    elements = sum(moment.untyped_storage().nbytes() for moment in moments) / 4
    draft = {name: weight.clone() for name, weight in trainer.draft_model.state_dict().items()}
    return {"draft": draft, "logs": trainer.state.log_history, "elements": elements}


def see(rank, world_size, out):
    config = {"ddp_timeout": 60, "eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 2}
    data = {"eval_dataset": prompt_dataset(copies=1).select(range(2))}
    plain = plain_trainer(out / "plain", trainer=data, **config)
    plain.train()
    quiet = codraft_trainer(
        out / "quiet",
        trainer=data,
        speculative_rollouts="false",
        draft_pretrain_steps=2,
        draft_vocab_size=48,
        **config,
    )
    quiet.train()
    drafting = codraft_trainer(
        out / "drafting", trainer=data, draft_pretrain_steps=1, save_strategy="steps", save_steps=3, **config
    )
    drafting.train()
    return {
        **see_shared(out, trainer=data, draft_pretrain_steps=1, **config),
        "drafting": ended(drafting),
        "world_size": plain.accelerator.num_processes,
        "plain": (weights(plain), policy_logs(plain)),
        "quiet": (weights(quiet), policy_logs(quiet)),
        "quiet_draft": quiet.draft_model.state_dict(),
        "drafting_draft": drafting.draft_model.state_dict(),
        "drafting_logs": drafting.state.log_history,
        "drafting_files": sorted(path.name for path in (out / "drafting" / "checkpoint-3" / "draft").iterdir()),
        "speculated": drafting.rollouts.possible,
    }


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    fork_ranks(see, 2, folder, folder, timeout=None)
