"""
Ranks of `test_pp_trainer_mutations.py`: `python trainer_mutation_worker.py OUT` breaks one thing at a time and trains, and
saves what the ranks of each broken run saw beside the plain run.
"""

import sys
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import torch
from forked_ranks import fork_broken_ranks
from pp.trainer_cases import CASES
from pp.trainer_worker import StagedTrainer, run, save_policies

from trl_codraft.group.members import Scores
from trl_codraft.grpo import pipelined_losses as pipelined_loss
from trl_codraft.grpo.grouped_losses import GroupedLoss
from trl_codraft.grpo.pipeline_microbatches import WholeRows
from trl_codraft.pp.stages.replica import PolicyReplica


original_inputs = WholeRows._inputs
original_states = WholeRows.keep_states
original_loss = pipelined_loss.PipelinedLoss._loss_of_job
original_pipeline = pipelined_loss.PipelinedLoss._run_pipeline
original_forward = pipelined_loss.PipelinedLoss._forward_pipeline


def positions_of_added_columns(self, number):
    inputs = original_inputs(self, number)
    columns = torch.arange(inputs["input_ids"].shape[1]).expand_as(inputs["input_ids"])
    return {**inputs, "position_ids": columns}


def states_a_column_late(self, microbatch, hidden):
    return original_states(self, microbatch, hidden.roll(-1, dims=1))


def scores_of_the_next_rows(self, jobs):
    return [
        Scores(values.log_probs.roll(1, dims=0), values.entropies.roll(1, dims=0), None)
        for values in original_pipeline(self, jobs)
    ]


def own_norm(stages, max_norm, group):
    parameters = [parameter for stage in stages for _, parameter in stage.named_own_parameters()]
    return torch.nn.utils.clip_grad_norm_(parameters, max_norm)


def last_member_only(self, rows, taps, last_hidden):
    self._draft_batches.clear()
    original_keep(self, rows, taps, last_hidden)


original_keep = StagedTrainer._keep_for_draft

# Name -> case, owner of what is replaced, its name, and by what.
MUTATIONS = {
    "loss not divided": (
        "dapo",
        pipelined_loss.PipelinedLoss,
        "_loss_of_job",
        lambda self, job, scores: 2 * original_loss(self, job, scores),
    ),
    "other stages' weights stay old": ("dapo", PolicyReplica, "refresh", lambda self: None),
    "norm of the own stage": ("tight clipping", pipelined_loss, "clip_grad_norm", own_norm),
    "metrics of other rows": ("dapo", pipelined_loss.PipelinedLoss, "_run_pipeline", scores_of_the_next_rows),
    "controllers act in every micro-step": (
        "adaptive entropy",
        pipelined_loss.PipelinedLoss,
        "_end_of_window",
        lambda self, last: nullcontext(),
    ),
    "positions of added columns": ("longrope", WholeRows, "_inputs", positions_of_added_columns),
    "states a column late": ("dapo", WholeRows, "keep_states", states_a_column_late),
    "draft learns from the last microbatch": ("dapo", StagedTrainer, "_keep_for_draft", last_member_only),
    "gradients of one pipeline only": ("two pipelines", pipelined_loss, "reduce_gradients", lambda *a: None),
    "threshold of the member": (
        "entropy quantile",
        GroupedLoss,
        "_as_world_of_one",
        lambda self, rows, score, original=GroupedLoss._as_world_of_one: original(
            self, {name: rows[name] for name in rows if name != "entropy_mask"}, score
        ),
    ),
}
# The same where no rank has the whole policy.
IN_PARTS = {
    "reference is the policy": (
        "reference",
        pipelined_loss.PipelinedLoss,
        "_forward_pipeline",
        lambda self, model, jobs, for_draft=False: original_forward(self, self.pipelining.policy, jobs, for_draft),
    ),
    "embedding of the draft stays old": ("dapo", pipelined_loss, "send_embedding", lambda policy, group: None),
    "log-probs of another member": (
        "dapo",
        pipelined_loss.PipelinedLoss,
        "_forward_pipeline",
        lambda self, model, jobs, for_draft=False: [
            Scores(values.log_probs.roll(1, dims=0), values.entropies, None)
            for values in original_forward(self, model, jobs, for_draft)
        ],
    ),
}
EXTRA = {"tight clipping": {"max_grad_norm": 0.1}, "two pipelines": {}}


def run_broken(rank, world_size, out, mutation):
    cases, mutations = {**CASES, **EXTRA}, {**MUTATIONS, **IN_PARTS}
    if mutation is None:
        return {case: run(cases[case], out, world_size, "1") for case in {case for case, *_ in mutations.values()}}
    case, owner, name, replacement = mutations[mutation]
    with mock.patch.object(owner, name, replacement):
        return run(cases[case], out, world_size, "2p" if mutation in IN_PARTS else "2")


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    save_policies(folder)
    fork_broken_ranks(run_broken, {**MUTATIONS, **IN_PARTS}, 4, folder)
