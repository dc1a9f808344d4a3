"""
Ranks of `test_pp_trainer_mutations.py`: `python trainer_mutation_worker.py OUT` breaks one thing at a time and trains,
and saves what the ranks of each broken run saw beside the plain run.
"""

import sys
from contextlib import nullcontext
from pathlib import Path

import torch
from forked_ranks import fork_broken_ranks
from mutations import Mutation, runs_of
from pp.trainer_cases import CASES
from pp.trainer_worker import run, save_policies

from trl_codraft.group.members import Scores
from trl_codraft.grpo import pipelined_losses, stage_optimizer
from trl_codraft.grpo.member_passes import MemberPasses
from trl_codraft.grpo.pipeline_microbatches import PaddedStep
from trl_codraft.grpo.pipelined_losses import PipelinedLosses
from trl_codraft.pp.stages.replica import PolicyReplica


original_inputs = PaddedStep._inputs
original_states = PaddedStep.keep_states
original_loss = PipelinedLosses._loss_of
original_pipeline = PipelinedLosses._step
original_forward = PipelinedLosses._forward


def positions_of_added_columns(self, number):
    inputs = original_inputs(self, number)
    columns = torch.arange(inputs["input_ids"].shape[1]).expand_as(inputs["input_ids"])
    return {**inputs, "position_ids": columns}


def states_a_column_late(self, microbatch, hidden):
    return original_states(self, microbatch, hidden.roll(-1, dims=1))


def scores_of_the_next_rows(self, microbatches):
    return [
        Scores(values.log_probs.roll(1, dims=0), values.entropies.roll(1, dims=0), None)
        for values in original_pipeline(self, microbatches)
    ]


def log_probs_of_the_next_rows(self, model, microbatches, for_draft=False):
    scores, batches = original_forward(self, model, microbatches, for_draft)
    return [Scores(values.log_probs.roll(1, dims=0), values.entropies, None) for values in scores], batches


def own_norm(stages, max_norm, group):
    parameters = [parameter for stage in stages for _, parameter in stage.named_own_parameters()]
    return torch.nn.utils.clip_grad_norm_(parameters, max_norm)


def last_member_only(self, microbatches, rows):
    return original_take(self, microbatches, rows)[-1:]


original_take = PipelinedLosses._take_taps

MUTATIONS = {
    "loss not divided": Mutation(
        "dapo",
        PipelinedLosses,
        "_loss_of",
        lambda self, microbatch, scores: 2 * original_loss(self, microbatch, scores),
    ),
    "other stages' weights stay old": Mutation("dapo", PolicyReplica, "refresh", lambda self: None),
    "norm of the own stage": Mutation("tight clipping", stage_optimizer, "clip_grad_norm", own_norm),
    "metrics of other rows": Mutation("dapo", PipelinedLosses, "_step", scores_of_the_next_rows),
    "controllers act in every micro-step": Mutation(
        "adaptive entropy",
        PipelinedLosses,
        "_end_of_window",
        lambda self, last: nullcontext(),
    ),
    "positions of added columns": Mutation("longrope", PaddedStep, "_inputs", positions_of_added_columns),
    "states a column late": Mutation("dapo", PaddedStep, "keep_states", states_a_column_late),
    "draft learns from the last microbatch": Mutation("dapo", PipelinedLosses, "_take_taps", last_member_only),
    "gradients of one pipeline only": Mutation("two pipelines", pipelined_losses, "reduce_gradients", lambda *a: None),
    "threshold of the member": Mutation(
        "entropy quantile",
        MemberPasses,
        "gradient_pass",
        lambda self, rows, score, original=MemberPasses.gradient_pass: original(
            self, {name: rows[name] for name in rows if name != "entropy_mask"}, score
        ),
    ),
}
# Broken where no rank has the whole policy.
IN_PARTS = {
    "reference is the policy": Mutation(
        "reference",
        PipelinedLosses,
        "_forward",
        lambda self, model, microbatches, for_draft=False: original_forward(
            self, self.pipelining.policy, microbatches, for_draft
        ),
    ),
    "embedding of the draft stays old": Mutation(
        "dapo", stage_optimizer, "send_embedding", lambda policy, group: None
    ),
    "log-probs of another member": Mutation(
        "dapo",
        PipelinedLosses,
        "_forward",
        log_probs_of_the_next_rows,
    ),
}
ALL = {**MUTATIONS, **IN_PARTS}
EXTRA = {"tight clipping": {"max_grad_norm": 0.1}, "two pipelines": {}}


def run_case(case, out, world_size, mutation):
    size = "1" if mutation is None else "2p" if mutation in IN_PARTS else "2"
    return run({**CASES, **EXTRA}[case], out, world_size, size)


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    save_policies(folder)
    fork_broken_ranks(runs_of(ALL, run_case), ALL, 4, folder)
