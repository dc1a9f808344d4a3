"""
Ranks of `test_group_mutations.py`: `python mutation_worker.py OUT` breaks one thing at a time and trains, and saves
what the ranks of each broken run saw beside the plain run.
"""

import sys
from pathlib import Path

from forked_ranks import fork_broken_ranks
from mutations import in_source, runs_of
from replay_cases import CASES
from replay_worker import run, save_policies

from trl_codraft.group import exchange, members
from trl_codraft.grpo import grouped_losses, member_passes


MUTATIONS = {
    "metric pass left out": in_source(
        "adaptive entropy",
        grouped_losses.GroupedLosses,
        "compute",
        "value = run._compute_loss(model, inputs)",
        "value = loss.detach()",
    ),
    "backward of the gather sums over ranks": in_source(
        "dapo",
        exchange._GatherShards,
        "backward",
        "own = gradient",
        "dist.all_reduce(gradient.contiguous()); gradient = gradient * 2; own = gradient",
    ),
    "gradients reduced for every member": in_source(
        "dapo",
        members,
        "backward_members",
        "no_sync()",
        '__import__("contextlib").nullcontext()',
        also=(grouped_losses,),
    ),
    "metrics of members kept": in_source(
        "dapo",
        member_passes.MemberPasses,
        "gradient_pass",
        "_metrics={mode: defaultdict(list) for mode in self.run._metrics},",
        "",
    ),
    # Either alone is harmless: an update that is undone, or sums and counts that grow alike.
    "entropy controller updated for every member": in_source(
        "adaptive entropy",
        member_passes.MemberPasses,
        "gradient_pass",
        "**{name: getattr(self.run, name) for name in CONTROLLER_STATE},",
        "",
        "accelerator=MemberAccelerator(self.run.accelerator),",
        "",
    ),
    "entropy threshold of one member": in_source(
        "entropy quantile and bonus",
        member_passes,
        "_scored_by",
        'rows.get("entropy_mask") is not None',
        "False",
    ),
    "metrics from the scores of another member": in_source(
        "reference",
        grouped_losses.GroupedLosses,
        "compute",
        "if member == self.group.rank",
        "if member == 1 - self.group.rank",
    ),
    "old log-probs of another member": in_source(
        "dapo",
        members,
        "score_members",
        "if member == group.rank",
        "if member == 1 - group.rank",
        also=(grouped_losses,),
    ),
    "backward of all but the last member left out": in_source(
        "dapo",
        members,
        "backward_members",
        "backward(loss_of(member, group",
        "(loss_of(member, group",
        also=(grouped_losses,),
    ),
}


def run_case(case, out, world_size, mutation):
    return run(CASES[case], out, world_size, None if mutation is None else 2)


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    save_policies(folder)
    fork_broken_ranks(runs_of(MUTATIONS, run_case), MUTATIONS, 2, folder)
