"""
What co-training buys: along one recorded policy trajectory per seed, how well do drafts keep up that are frozen, that
go on learning from the *base* policy's rollouts (control), and that learn from the policy as it moves (co-trained)?

The draft is first trained on the base policy until its accept length stops growing. Then, per seed, GRPO runs once
with plain rollouts and is recorded; every arm replays it. At each step the accept length of each arm's draft is taken
on rollouts of the current policy that it has not trained on yet; then the arm makes one update, as the trainer does.
Real rollouts are timed for all arms and for no draft at three points, in turns, in processor time of one thread.

Two cases: `demo`, SmolLM2-135M on the demo's word problems; `switch`, a tiny policy trained from scratch whose task
changes midway, so that it provably moves far.

    OMP_NUM_THREADS=1 python benchmarks/cotraining_value.py --case switch --seeds 0 1 2 --steps 120
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import torch
from measuring import machine


sys.path.insert(0, str(Path(__file__).resolve().parent))
from cotraining.cases import CASES, Case
from cotraining.replay import (
    Policy,
    accept_length,
    base_rollouts,
    make_arms,
    prompt_stream,
    starting_point,
)
from cotraining.trajectory import record_trajectory
from demo.report import compare_rollouts

from trl_codraft import Eagle3DraftModel


TIMED_ARMS = ("frozen", "control", "co-trained")


def say(line: str) -> None:
    print(line, flush=True)


def load_weights(policy: Policy, weights: dict[str, torch.Tensor]) -> None:
    named = dict(policy.model.named_parameters())
    with torch.no_grad():
        for name, weight in weights.items():
            named[name].copy_(weight)


def divergence(log_probs: torch.Tensor, base_log_probs: torch.Tensor, mask: torch.Tensor) -> float:
    """KL divergence of the policy from the base policy per token, estimated on the policy's own rollouts, in nats."""
    return float(((log_probs - base_log_probs) * mask).sum() / mask.sum())


def replay_seed(case: Case, seed: int, folder: Path, draft: Eagle3DraftModel | None, rates: list[float]) -> dict:
    """One trajectory: what was measured per step, and the timed rollouts. A finished one is read from its file."""
    finished = folder / f"seed{seed}.json"
    if len(rates) == 1 and finished.exists():
        return json.loads(finished.read_text())
    files = record_trajectory(case, seed, folder / f"seed{seed}")
    base, current = Policy(case, case.policy(seed)), Policy(case, case.policy(seed))
    torch.manual_seed(1000 + seed)
    start_file = folder / ("start.pt" if case.one_policy else f"start-seed{seed}.pt")
    start = starting_point(base, draft, seed, start_file, say)
    torch.manual_seed(2000 + seed)
    arms = make_arms(start, current, base, start.num_updates + len(files), rates)
    prompts = prompt_stream(case, 100 + seed)
    timed_at = {0, len(files) // 2, len(files) - 1} if len(rates) == 1 else set()
    steps, timings = [], {}
    for index, file in enumerate(files):
        record = torch.load(file)
        load_weights(current, record["weights"])
        packed = [current.pack(rollout) for rollout in record["microbatches"]]
        fresh = [batch for batch, _ in packed]
        drift = [
            divergence(log_probs, base.pack(rollout)[1], rollout["completion_mask"])
            for rollout, (_, log_probs) in zip(record["microbatches"], packed, strict=True)
        ]
        lengths = {arm.name: accept_length(arm.draft, current.head, fresh, case.num_passes) for arm in arms}
        steps.append({"reward": record["reward"], "divergence": statistics.mean(drift), **lengths})
        if index in timed_at:
            timings[str(index)] = time_rollouts(case, current, arms)
        control = []
        if any(arm.trainer is not None and not arm.on_policy for arm in arms):
            control = [base.pack(rollout)[0] for rollout in base_rollouts(base, prompts, case.rows)]
        for arm in arms:
            if arm.trainer is not None:
                arm.update(fresh if arm.on_policy else control)
        shown = ", ".join(f"{name} {length:.3f}" for name, length in lengths.items())
        say(
            f"[{case.name} seed {seed}] step {index}: reward {record['reward']:.2f}, "
            f"KL {steps[-1]['divergence']:.3f}, accept length {shown}"
        )
    result = {"steps": steps, "timings": timings}
    if len(rates) == 1:
        finished.write_text(json.dumps(result, indent=1))
    return result


def time_rollouts(case: Case, current: Policy, arms: list) -> dict:
    """Real rollouts of held-out prompts with no draft and with each timed arm, in turns."""
    result = compare_rollouts(
        current.model,
        case.tokenizer,
        {arm.name: arm.draft for arm in arms if arm.name in TIMED_ARMS},
        case.test_prompts,
        num_draft_tokens=case.num_draft_tokens,
        max_new_tokens=case.grpo["max_completion_length"],
        seconds=0,
        **case.comparison,
    )
    return {arm["name"]: arm for arm in result["arms"]}


def mean(values: list[float]) -> str:
    """Mean and standard error over seeds."""
    spread = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else float("nan")
    return f"{statistics.mean(values):.3f} +- {spread:.3f}"


def report(case: Case, results: list[dict]) -> None:
    """Tables over seeds: accept length over the thirds of the trajectory, and timed rollouts."""
    names = [name for name in results[0]["steps"][0] if name not in ("reward", "divergence")]
    total = len(results[0]["steps"])
    cuts = [0, total // 3, 2 * total // 3, total]
    print(f"\n{case.name}: {len(results)} seeds, {total} steps; mean +- standard error over seeds")
    header = "".join(f"{f'steps {a}-{b - 1}':>20}" for a, b in zip(cuts, cuts[1:], strict=False))
    print(f"{'accept length, simulated':<32}{header}{'lowest, last half':>20}")
    for name in names:
        thirds = [
            [statistics.mean(step[name] for step in result["steps"][a:b]) for result in results]
            for a, b in zip(cuts, cuts[1:], strict=False)
        ]
        lowest = [min(step[name] for step in result["steps"][total // 2 :]) for result in results]
        print(f"{name:<32}" + "".join(f"{mean(values):>20}" for values in [*thirds, lowest]))
    for name in ("reward", "divergence"):
        ends = [[result["steps"][index][name] for result in results] for index in (0, total // 2, total - 1)]
        print(f"{name + ' at start, middle, end':<32}" + "".join(f"{mean(values):>20}" for values in ends))
    if not results[0]["timings"]:
        return
    gains = [
        statistics.mean(step["co-trained"] - step["frozen"] for step in result["steps"][total // 2 :])
        for result in results
    ]
    over_control = [
        statistics.mean(step["co-trained"] - step["control"] for step in result["steps"][total // 2 :])
        for result in results
    ]
    print(f"second half: co-trained - frozen {mean(gains)}, co-trained - control {mean(over_control)}")
    print("\nreal rollouts: ratio of tokens per processor second to no draft (accept length)")
    for index in results[0]["timings"]:
        line = f"step {index}: "
        for name in TIMED_ARMS:
            ratios = [result["timings"][index][name]["ratio"] for result in results]
            lengths = [result["timings"][index][name]["accept_length"] for result in results]
            line += f"{name} {mean(ratios)} ({statistics.mean(lengths):.2f})   "
        timed = [result["timings"][index] for result in results]
        gains = ", ".join(f"{arms['co-trained']['ratio'] - arms['frozen']['ratio']:.3f}" for arms in timed)
        print(f"{line}co-trained - frozen by seed {gains}")


def plot(case: Case, results: list[dict], path: Path) -> None:
    """Accept length per step, mean over seeds with each seed behind it."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5), layout="constrained")
    axis = figure.subplots()
    for color, name in enumerate(TIMED_ARMS):
        curves = [[step[name] for step in result["steps"]] for result in results]
        for curve in curves:
            axis.plot(curve, color=f"C{color}", alpha=0.2, linewidth=0.8)
        axis.plot([statistics.mean(values) for values in zip(*curves, strict=True)], color=f"C{color}", label=name)
    axis.set_xlabel("GRPO step")
    axis.set_ylabel("simulated accept length on fresh rollouts")
    axis.set_title(f"{case.name}: {len(results)} seeds")
    axis.grid(alpha=0.3)
    axis.legend()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[1])
    parser.add_argument("--case", choices=sorted(CASES), default="switch")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=120, help="GRPO steps of a trajectory")
    parser.add_argument("--learning_rates", type=float, nargs="+", help="the draft's; several compare rates only")
    parser.add_argument("--draft", help="folder of a draft to start from, instead of a fresh one")
    parser.add_argument("--folder", type=Path, default=Path("outputs/cotraining"), help="recorded trajectories")
    parser.add_argument("--results", type=Path, default=Path(__file__).with_name("results"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    case = CASES[args.case](args.steps)
    began, results = time.process_time(), []
    for seed in args.seeds:
        draft = Eagle3DraftModel.from_pretrained(args.draft) if args.draft else None
        rates = args.learning_rates or [case.learning_rate]
        results.append(replay_seed(case, seed, args.folder / f"{case.name}-{args.steps}", draft, rates))
    print(f"{machine()}, {time.process_time() - began:.0f} CPU s")
    report(case, results)
    args.results.mkdir(exist_ok=True)
    if results[0]["timings"]:
        plot(case, results, args.results / f"cotraining_{case.name}.png")
    (args.folder / f"{case.name}-{args.steps}" / "results.json").write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
