"""
What it brings to count the draft where layers of a pipeline are balanced (`trl_codraft/pp/balance.py`). The draft learns on
the last rank after its last backward, so fewer layers there let it begin sooner, and make other stages slower. Simulated for
1F1B, nothing is run: a layer's forward takes 1, its backward 2, messages no time.

Printed, over many shapes, as time of a step over that with the head alone counted: with the draft counted as if it ran
inside the last stage; with the number of layers that the simulation finds; and with that number where the draft in truth
takes half of what it was taken for, as where prompts, of which later passes run nothing, are half of the tokens.

    python benchmarks/pp_balance.py
"""

import statistics
from functools import partial
from itertools import product

from trl_codraft.pp import balance_layers, fastest_layers, schedule_order, step_time


RANKS = (2, 4, 8, 16)
ROUNDS = (1, 2, 4)  # microbatches for each rank
LAYERS = (28, 36, 64, 88)
# In units of a layer: the head, and the draft's learning from a microbatch.
HEADS, DRAFTS = (0.3, 1.0, 3.0), (0.5, 1.0, 2.0, 4.0, 7.0)


def main() -> None:
    ratios: dict[str, list[float]] = {"inside the last stage": [], "simulated": [], "simulated, half as dear": []}
    for ranks, rounds, layers, head, draft in product(RANKS, ROUNDS, LAYERS, HEADS, DRAFTS):
        order = schedule_order("1F1B", ranks, ranks, rounds * ranks)
        alone = balance_layers(layers, ranks, head_cost=head)
        inside = balance_layers(layers, ranks, head_cost=head + draft)
        simulated = fastest_layers(layers, order, head_cost=head, draft_cost=draft)
        cases = (inside, draft), (simulated, draft), (simulated, draft / 2)
        for values, (split, cost) in zip(ratios.values(), cases, strict=True):
            time_of = partial(step_time, order, head_cost=head, draft_cost=cost)
            values.append(time_of(split) / time_of(alone))
    print(f"{len(ratios['simulated'])} shapes: time of a step over that with the head alone counted")
    for name, values in ratios.items():
        print(f"{name:24} mean {statistics.mean(values):.3f}, from {min(values):.3f} to {max(values):.3f}")


if __name__ == "__main__":
    main()
