"""
The order in which each rank of a pipeline runs its actions, and how many landing slots a tap channel beside it needs.

Letters: `p` ranks, `v` virtual stages per rank, `n` microbatches, stage `s` of `p * v`, on rank `s % p`.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple


SCHEDULES = ("GPipe", "1F1B", "Interleaved1F1B")

# Relative times of a forward and a backward, for the estimate of how far a source runs ahead.
FORWARD_TIME, BACKWARD_TIME = 1, 2


class Action(NamedTuple):
    """One forward or backward of one stage on one microbatch."""

    stage: int
    microbatch: int
    backward: bool = False


# By rank, the actions in the order in which it runs them.
Order = tuple[tuple[Action, ...], ...]


def schedule_order(schedule: str, num_ranks: int, num_stages: int, num_microbatches: int) -> Order:
    """
    The order of a pipeline schedule.

    Args:
        schedule (`str`):
            `"GPipe"` (all forwards, then all backwards), `"1F1B"` or `"Interleaved1F1B"` (arXiv 2104.04473, section
            2.2; rounds of at least `p` microbatches).
        num_ranks (`int`), num_stages (`int`), num_microbatches (`int`):
            Sizes. Stage `s` is on rank `s % num_ranks`.

    Returns:
        `tuple[tuple[Action, ...], ...]`: by rank.

    Raises:
        ValueError: if the schedule is unknown or cannot run with these sizes.
    """
    if schedule not in SCHEDULES:
        raise ValueError(
            f"Pipeline schedule {schedule!r} is not supported: choose one of {', '.join(SCHEDULES)}. Zero-bubble "
            "schedules split the backward in two, which counts a weight twice that is used twice (tied embeddings)."
        )
    if num_microbatches < 1:
        raise ValueError(f"A step needs at least one microbatch, got {num_microbatches}.")
    if schedule == "Interleaved1F1B":
        return _interleaved(num_ranks, num_stages, num_microbatches)
    if num_stages != num_ranks:
        raise ValueError(
            f"{schedule} runs one stage per rank, got {num_stages} stages on {num_ranks} ranks. Use "
            "'Interleaved1F1B' for several."
        )
    if schedule == "1F1B" and num_microbatches < num_stages:
        raise ValueError(
            f"1F1B needs at least as many microbatches as stages, got {num_microbatches} for {num_stages} stages. "
            "Raise `gradient_accumulation_steps` or use 'GPipe'."
        )
    ahead = [num_microbatches if schedule == "GPipe" else num_stages - rank for rank in range(num_ranks)]
    return tuple(_alternate([(s, k) for k in range(num_microbatches)], None, ahead[s]) for s in range(num_stages))


def _interleaved(num_ranks: int, num_stages: int, num_microbatches: int) -> Order:
    """Each rank takes its stages in turn, a round of microbatches at a time."""
    per_rank, rest = divmod(num_stages, num_ranks)
    if rest or per_rank < 2:
        raise ValueError(
            f"Interleaved1F1B needs a multiple of the ranks as stages, at least twice as many, got {num_stages} "
            f"stages on {num_ranks} ranks. Use '1F1B' for one stage per rank."
        )
    rounds = max(1, num_microbatches // num_ranks)
    if num_microbatches % rounds:
        raise ValueError(
            f"Interleaved1F1B runs rounds of equally many microbatches: {num_microbatches} do not split into {rounds} "
            f"rounds. Use a multiple of {num_ranks} microbatches, or fewer than {2 * num_ranks}."
        )
    length = num_microbatches // rounds
    orders = []
    for rank in range(num_ranks):
        stages = range(rank, num_stages, num_ranks)
        forwards = [
            (stage, start + offset)
            for start in range(0, num_microbatches, length)
            for stage in stages
            for offset in range(length)
        ]
        backwards = [
            (stage, start + offset)
            for start in range(0, num_microbatches, length)
            for stage in reversed(stages)
            for offset in range(length)
        ]
        # One more than the warm-up: the first forward of the steady phase comes before its backward.
        ahead = (per_rank - 1) * length + 2 * (num_ranks - 1 - rank) + 1
        orders.append(_alternate(forwards, backwards, ahead))
    return tuple(orders)


def _alternate(
    forwards: list[tuple[int, int]], backwards: list[tuple[int, int]] | None, ahead: int
) -> tuple[Action, ...]:
    """`ahead` forwards, then a backward and a forward in turn, then the backwards that are left."""
    backwards = forwards if backwards is None else backwards
    ahead = min(ahead, len(forwards))
    actions = [Action(*forward) for forward in forwards[:ahead]]
    for index, backward in enumerate(backwards):
        actions.append(Action(*backward, backward=True))
        if ahead + index < len(forwards):
            actions.append(Action(*forwards[ahead + index]))
    return tuple(actions)


def forwards_only(order: Order) -> Order:
    """The same without backwards: how an evaluation runs."""
    return tuple(tuple(action for action in actions if not action.backward) for actions in order)


def runs_through(order: Order, num_stages: int, slots: Mapping[int, int], sink: int) -> bool:
    """
    Whether a pipeline ends in which the forward of microbatch `k` on a source stage waits for a free landing slot:
    until the sink stage has taken microbatch `k - slots`, which it does in its own forward.

    Every action is enabled by others that only ever complete more, so one greedy run decides for all interleavings.

    Args:
        order (`tuple[tuple[Action, ...], ...]`):
            By rank.
        num_stages (`int`):
            Stages of the pipeline.
        slots (`Mapping[int, int]`):
            Landing slots by source stage.
        sink (`int`):
            Stage that takes the taps.
    """
    position = [0] * len(order)
    done: set[Action] = set()
    taken = 0
    progress = True
    while progress:
        progress = False
        for rank, actions in enumerate(order):
            while position[rank] < len(actions):
                action = actions[position[rank]]
                blocked = not action.backward and action.microbatch >= taken + slots.get(action.stage, len(actions))
                if blocked or not all(need in done for need in _needs(action, num_stages)):
                    break
                done.add(action)
                position[rank] += 1
                taken += action.stage == sink and not action.backward
                progress = True
    return all(position[rank] == len(actions) for rank, actions in enumerate(order))


def _needs(action: Action, num_stages: int) -> list[Action]:
    """Actions that come before one, on whatever rank."""
    stage, microbatch, backward = action
    if not backward:
        return [Action(stage - 1, microbatch)] if stage else []
    needs = [Action(stage, microbatch)]
    return needs if stage == num_stages - 1 else [*needs, Action(stage + 1, microbatch, backward=True)]


def required_slots(order: Order, num_stages: int, sources: Sequence[int], sink: int) -> int:
    """
    The smallest number of landing slots per lane with which the pipeline ends. With fewer it is certain to deadlock: a
    forward waits for a slot that is freed by a forward behind it.

    Args:
        order (`tuple[tuple[Action, ...], ...]`), num_stages (`int`), sink (`int`):
            As in [`runs_through`].
        sources (`Sequence[int]`):
            Stages that send.
    """
    most = 1 + max(action.microbatch for actions in order for action in actions)
    enough = (n for n in range(1, most) if runs_through(order, num_stages, dict.fromkeys(sources, n), sink))
    return next(enough, most)


def slots_ahead(order: Order, num_stages: int, source: int, sink: int) -> int:
    """
    The number of landing slots with which a source never waits if every forward takes as long as any other and every
    backward twice as long.
    """
    ends = action_ends(order, num_stages, lambda action: BACKWARD_TIME if action.backward else FORWARD_TIME)
    sent = sorted(end for action, end in ends.items() if action.stage == source and not action.backward)
    taken = [end for action, end in ends.items() if action.stage == sink and not action.backward]
    return max(index + 1 - sum(end <= now for end in taken) for index, now in enumerate(sent))


def action_ends(order: Order, num_stages: int, time_of: Callable[[Action], float]) -> dict[Action, float]:
    """
    When every action ends if each starts as soon as it can and messages take no time.

    Args:
        order (`tuple[tuple[Action, ...], ...]`), num_stages (`int`):
            As in [`runs_through`].
        time_of (`Callable`):
            How long an action takes.
    """
    ends: dict[Action, float] = {}
    position, clock = [0] * len(order), [0.0] * len(order)
    while any(position[rank] < len(actions) for rank, actions in enumerate(order)):
        for rank, actions in enumerate(order):
            while position[rank] < len(actions):
                action = actions[position[rank]]
                needs = _needs(action, num_stages)
                if not all(need in ends for need in needs):
                    break
                clock[rank] = ends[action] = max([clock[rank], *(ends[need] for need in needs)]) + time_of(action)
                position[rank] += 1
    return ends
