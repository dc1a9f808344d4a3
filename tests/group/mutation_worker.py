"""
Ranks of `test_group_mutations.py`: `python mutation_worker.py OUT` breaks one thing at a time and trains, and saves
what the ranks of each broken run saw beside the plain run.
"""

import inspect
import sys
import textwrap
from pathlib import Path

from forked_ranks import fork_broken_ranks
from replay_cases import CASES
from replay_worker import run, save_policies

from trl_codraft.group import exchange, members
from trl_codraft.grpo import grouped_losses as grouped_loss


# Name -> case, owner of a function, its name, and pairs of what to replace in its source and by what.
MUTATIONS = {
    "metric pass left out": (
        "adaptive entropy",
        grouped_loss.GroupedLoss,
        "compute_loss",
        "value = super()._compute_loss(model, inputs)",
        "value = loss.detach()",
    ),
    "backward of the gather sums over ranks": (
        "dapo",
        exchange._GatherShards,
        "backward",
        "own = gradient",
        "dist.all_reduce(gradient.contiguous()); gradient = gradient * 2; own = gradient",
    ),
    "gradients reduced for every member": (
        "dapo",
        members,
        "backward_members",
        "no_sync()",
        "contextlib.nullcontext()",
    ),
    "metrics of members kept": (
        "dapo",
        grouped_loss.GroupedLoss,
        "_as_world_of_one",
        "_metrics={mode: defaultdict(list) for mode in self._metrics},",
        "",
    ),
    # Either alone is harmless: an update that is undone, or sums and counts that grow alike.
    "entropy controller updated for every member": (
        "adaptive entropy",
        grouped_loss.GroupedLoss,
        "_as_world_of_one",
        "**{name: getattr(self, name) for name in CONTROLLER_STATE},",
        "",
        "accelerator=MemberAccelerator(self.accelerator),",
        "",
    ),
    "entropy threshold of one member": (
        "entropy quantile and bonus",
        grouped_loss.GroupedLoss,
        "get_high_entropy_mask",
        "isinstance(self._entropy_mask, torch.Tensor)",
        "False",
    ),
    "metrics from the scores of another member": (
        "reference",
        grouped_loss.GroupedLoss,
        "compute_loss",
        "if member == self.loss_group.rank",
        "if member == 1 - self.loss_group.rank",
    ),
    "old log-probs of another member": (
        "dapo",
        members,
        "score_members",
        "if member == group.rank",
        "if member == 1 - group.rank",
    ),
    "backward of all but the last member left out": (
        "dapo",
        members,
        "backward_members",
        "backward(loss_of(member, group",
        "(loss_of(member, group",
    ),
}


def break_function(owner, name, *changes):
    """Replaces pieces of a function's source, in its owner and where the trainer imported it."""
    attribute = inspect.getattr_static(owner, name)
    function = attribute.__func__ if isinstance(attribute, staticmethod) else attribute
    function = inspect.unwrap(function)
    source = textwrap.dedent(inspect.getsource(function))
    for old, new in zip(changes[::2], changes[1::2], strict=True):
        assert source.count(old) == 1, f"{old!r} occurs {source.count(old)} times in {name}"
        source = source.replace(old, new)
    # A method that calls `super()` without arguments needs the class cell that only a class body provides.
    source = source.replace("super()", f"super({getattr(owner, '__name__', '')}, self)")
    exec("import contextlib\n" + source, function.__globals__)
    rebuilt = function.__globals__[name]
    if inspect.isclass(owner):
        setattr(owner, name, rebuilt)
    else:
        grouped_loss.__dict__[name] = rebuilt


def run_broken(rank, world_size, out, mutation):
    if mutation is None:
        cases = {case for case, *_ in MUTATIONS.values()}
        return {case: run(CASES[case], out, world_size, None) for case in cases}
    case, *change = MUTATIONS[mutation]
    break_function(*change)
    return run(CASES[case], out, world_size, 2)


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    save_policies(folder)
    fork_broken_ranks(run_broken, MUTATIONS, 2, folder)
