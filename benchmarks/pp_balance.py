"""
Whether layers of a pipeline should be balanced with the draft counted, as the policy's head is. The draft learns on the last
stage after its last backward, so fewer layers there let it begin sooner, and make other stages slower. Simulated for 1F1B with
the orders of `trl_codraft/pp/order.py`, nothing is run: a layer's forward takes 1, its backward 2, messages no time.

Printed, over many shapes: the time of a step with the draft counted, in part or whole, and with the best number of layers on
the last stage, over that with the head alone counted.

    python benchmarks/pp_balance.py
"""

import statistics
from itertools import product

from trl_codraft.pp import Action, balance_layers, schedule_order
from trl_codraft.pp.order import BACKWARD_TIME, FORWARD_TIME, Order, action_ends


RANKS = (2, 4, 8, 16)
ROUNDS = (1, 2, 4)  # microbatches for each rank
LAYERS = (28, 36, 64, 88)
# In units of a layer: the head, and the draft's learning from a microbatch.
HEADS, DRAFTS = (0.3, 1.0, 3.0), (0.5, 1.0, 2.0, 4.0, 7.0)


def step_time(order: Order, layers: tuple[int, ...], head: float, draft: float) -> float:
    """From the first forward until all backwards have run and the draft has learned from every microbatch."""
    last = len(layers) - 1
    costs = [*layers[:-1], layers[-1] + head]
    ends = action_ends(
        order, len(layers), lambda action: costs[action.stage] * (BACKWARD_TIME if action.backward else FORWARD_TIME)
    )
    count = sum(action.backward for action in order[last])
    learned = ends[Action(last, count - 1, backward=True)] + count * draft * (FORWARD_TIME + BACKWARD_TIME)
    return max(learned, *ends.values())


def main() -> None:
    ratios: dict[str, list[float]] = {"half of the draft counted": [], "the draft counted": [], "best": []}
    for ranks, rounds, layers, head, draft in product(RANKS, ROUNDS, LAYERS, HEADS, DRAFTS):
        order = schedule_order("1F1B", ranks, ranks, rounds * ranks)

        def time_of(split, order=order, head=head, draft=draft):
            return step_time(order, split, head, draft)

        own = balance_layers(layers, ranks, head_cost=head)
        alone = time_of(own)
        for name, share in (("half of the draft counted", 0.5), ("the draft counted", 1.0)):
            split = balance_layers(layers, ranks, head_cost=head, draft_cost=share * draft)
            ratios[name].append(time_of(split) / alone)
        others = [(*balance_layers(layers - count, ranks - 1), count) for count in range(1, own[-1] + 1)]
        ratios["best"].append(min(map(time_of, [own, *others])) / alone)
    print(f"simulated, {len(ratios['best'])} shapes: time of a step over that with the head alone counted")
    for name, values in ratios.items():
        print(f"{name:26} mean {statistics.mean(values):.3f}, from {min(values):.3f} to {max(values):.3f}")


if __name__ == "__main__":
    main()
