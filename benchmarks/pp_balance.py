"""
What it brings to count the draft where layers of a pipeline are balanced (`trl_codraft/pp/balance.py`). The draft
learns on the last rank after its last backward, so fewer layers there let it begin sooner, and make other stages
slower. Simulated for 1F1B, nothing is run: a layer's forward takes 1, its backward 2, messages no time.

Printed, over many shapes, as time of a step over that with the head alone counted: with the draft counted as if it ran
inside the last stage; with the number of layers that the simulation finds; and with that number where the draft in
truth takes half of what it was taken for, as where prompts, of which later passes run nothing, are half of the tokens;
and by what share the largest stage grows. Then the same without the limit to that growth.

    python benchmarks/pp_balance.py
"""

import math
import statistics
from itertools import product

from measuring import commit

from trl_codraft.pp.balance import balance_layers, fastest_layers, step_time
from trl_codraft.pp.order import schedule_order


RANKS = (2, 4, 8, 16)
ROUNDS = (1, 2, 4)  # microbatches for each rank
LAYERS = (28, 36, 64, 88)
# In units of a layer: the head, and the draft's learning from a microbatch.
HEADS, DRAFTS = (0.3, 1.0, 3.0), (0.5, 1.0, 2.0, 4.0, 7.0)


def main() -> None:
    columns = "inside the last stage", "simulated", "the same, half as dear", "largest stage"
    columns += tuple(f"no limit: {name}" for name in columns[1:])
    ratios: dict[str, list[float]] = {name: [] for name in columns}
    for ranks, rounds, layers, head, draft in product(RANKS, ROUNDS, LAYERS, HEADS, DRAFTS):
        order = schedule_order("1F1B", ranks, ranks, rounds * ranks)
        alone = balance_layers(layers, ranks, head_cost=head)

        def compared(split, cost, order=order, alone=alone, head=head):
            costs = {"head_cost": head, "draft_cost": cost}
            return step_time(order, split, **costs) / step_time(order, alone, **costs)

        found = [compared(balance_layers(layers, ranks, head_cost=head + draft), draft)]
        for limit in ({}, {"most_growth": math.inf}):
            split = fastest_layers(layers, order, head_cost=head, draft_cost=draft, **limit)
            found += [compared(split, draft), compared(split, draft / 2), max(split) / max(alone)]
        for values, value in zip(ratios.values(), found, strict=True):
            values.append(value)
    print(
        f"commit {commit()}; {len(ratios['simulated'])} shapes: time of a step over that with the head alone counted"
    )
    for name, values in ratios.items():
        print(f"{name:33} mean {statistics.mean(values):.3f}, from {min(values):.3f} to {max(values):.3f}")


if __name__ == "__main__":
    main()
