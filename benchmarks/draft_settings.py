"""
Quality of the draft per second of its training: which settings to train a draft with, on SmolLM2-135M-Instruct.

Every setting differs from the first in one thing, starts anew, sees the same completions of the policy in the same
order and may spend the same processor time on updates (evaluation not counted). What counts is the simulated accept
length on held-out completions, always with the same number of draft tokens; tokens outside a reduced vocabulary count
as rejected. The first setting runs twice, with another order of the completions: what the two differ by is noise.

    OMP_NUM_THREADS=1 python benchmarks/draft_settings.py --seconds 150
"""

import argparse
import random
import time
from dataclasses import replace

import torch
from measuring import machine
from trained_draft import UPDATE_ROWS, load_policy, packed, rollouts

from trl_codraft import Eagle3DraftConfig, Eagle3DraftModel
from trl_codraft.modeling.initialization import fill_at_random, tap_log_scales
from trl_codraft.modeling.losses import draft_loss
from trl_codraft.modeling.packing import DraftBatch, PackedLayout
from trl_codraft.modeling.taps import TapRecorder
from trl_codraft.modeling.teacher import PolicyHead
from trl_codraft.modeling.vocab import choose_draft_vocab
from trl_codraft.training.draft_trainer import DraftTrainer, DraftTrainingArguments


EVALUATED_TOKENS = 5
DEFAULTS = {"vocab": 4096, "start": "from the policy", "order": 0}
TRAINING = {"num_passes": 4, "decay": 0.8, "pretrain_learning_rate": 1e-3, "warmup_steps": 20}
SETTINGS: dict[str, dict] = {
    "defaults": {},
    "defaults, other order": {"order": 1},
    "learning rate 3e-4": {"pretrain_learning_rate": 3e-4},
    "learning rate 3e-3": {"pretrain_learning_rate": 3e-3},
    "no warm-up": {"warmup_steps": 0},
    "2 TTT passes": {"num_passes": 2},
    "6 TTT passes": {"num_passes": 6},
    "decay 0.6": {"decay": 0.6},
    "decay 1.0": {"decay": 1.0},
    "passes detached": {"detach_passes": True},
    "vocabulary 1,024": {"vocab": 1024},
    "vocabulary 16,384": {"vocab": 16384},
    "full vocabulary": {"vocab": 49152},
    "random start": {"start": "random"},
}


class Data:
    """Packed completions of the policy: what drafts train on, and held-out ones; `counts` of their tokens."""

    def __init__(self, policy, tokenizer, num_train: int, num_held_out: int, tap_layers, num_passes: int):
        pairs = rollouts(policy, tokenizer, num_train + num_held_out)
        recorder = TapRecorder(policy, tap_layers)
        groups = [pairs[i : i + UPDATE_ROWS] for i in range(0, len(pairs), UPDATE_ROWS)]
        batches = [packed(policy, recorder, group, num_passes) for group in groups]
        self.num_passes = num_passes
        recorder.close()
        cut = num_train // UPDATE_ROWS
        self.train, self.held_out = batches[:cut], batches[cut:]
        ids = torch.tensor([token for _, completion in pairs[:num_train] for token in completion])
        self.counts = torch.bincount(ids, minlength=policy.config.vocab_size)

    def training_batches(self, num_passes: int) -> list[DraftBatch]:
        """The batches as they are packed for fewer passes: later passes begin that much later (prompts are long)."""
        later = self.num_passes - num_passes
        return [
            replace(batch, layout=PackedLayout(layout.doc_lens, [root + later for root in layout.first_valid_root]))
            for batch, layout in ((batch, batch.layout) for batch in self.train)
        ]


def fresh_draft(policy, tokenizer, head: PolicyHead, data: Data, vocab: int, start: str) -> Eagle3DraftModel:
    """A draft before its first update."""
    config = Eagle3DraftConfig.from_policy(policy.config, draft_vocab_size=vocab)
    draft = Eagle3DraftModel(config)
    if vocab < config.vocab_size:
        draft.set_vocab(choose_draft_vocab(data.counts, vocab, tokenizer.all_special_ids))
    if start == "random":
        fill_at_random(draft.modules(), seed=0)
    else:
        taps, num_taps = data.train[0].taps, len(config.tap_layers)
        draft.initialize_from_policy(head, tap_scales=(tap_log_scales(taps, num_taps) / len(taps)).exp())
    return draft


@torch.no_grad()
def accept_length(draft: Eagle3DraftModel, head: PolicyHead, batches: list[DraftBatch]) -> float:
    """Simulated accept length at temperature 1 with `EVALUATED_TOKENS` draft tokens."""
    accepted = roots = 0.0
    for batch in batches:
        counters = draft_loss(draft, head, batch, num_passes=EVALUATED_TOKENS, decay=0.8, chunk_size=512).counters
        accepted += float(counters["accept"].sum())
        roots += float(counters["accept_roots"])
    return 1.0 + accepted / roots


def train(draft, head, data: Data, arguments: DraftTrainingArguments, order: int, marks: list[float]):
    """
    Updates within `marks[-1]` processor seconds; returns their number and `(updates, accept length)` at each mark.
    """
    trainer = DraftTrainer(draft, head, arguments, num_training_steps=1)
    shuffled, spent, updates, reached = random.Random(order), 0.0, 0, []
    batches = data.training_batches(arguments.num_passes)
    with trainer.pretraining():
        while len(reached) < len(marks):
            if updates % len(batches) == 0:
                shuffled.shuffle(batches)
            began = time.process_time()
            trainer.accumulate(batches[updates % len(batches)])
            trainer.step()
            spent += time.process_time() - began
            updates += 1
            if spent >= marks[len(reached)]:
                reached.append((updates, accept_length(draft, head, data.held_out)))
    return reached


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[1])
    parser.add_argument("--seconds", type=float, default=150, help="processor time of each setting's updates")
    parser.add_argument("--rollouts", type=int, default=256)
    parser.add_argument("--held_out", type=int, default=64)
    parser.add_argument("--only", nargs="+", choices=list(SETTINGS), default=list(SETTINGS))
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    policy, tokenizer = load_policy()
    head = PolicyHead(policy)
    tap_layers = Eagle3DraftConfig.from_policy(policy.config).tap_layers
    longest = max([EVALUATED_TOKENS, *(setting.get("num_passes", 0) for setting in SETTINGS.values())])
    data = Data(policy, tokenizer, args.rollouts, args.held_out, tap_layers, longest)
    marks = [args.seconds * share for share in (0.25, 0.5, 1.0)]
    print(
        f"{machine()}, 1 thread; {args.rollouts} completions, {UPDATE_ROWS} an update, "
        f"{int(data.counts.sum())} tokens; accept length on {args.held_out} held-out ones, "
        f"{EVALUATED_TOKENS} draft tokens"
    )
    print(f"{'setting':<24}" + "".join(f"{f'{mark:.0f} CPU s':>12}" for mark in marks) + f"{'updates':>10}")
    for name in args.only:
        changed = DEFAULTS | TRAINING | SETTINGS[name]
        vocab, start, order = (changed.pop(key) for key in DEFAULTS)
        draft = fresh_draft(policy, tokenizer, head, data, vocab, start)
        reached = train(draft, head, data, DraftTrainingArguments(**changed), order, marks)
        print(f"{name:<24}" + "".join(f"{length:12.3f}" for _, length in reached) + f"{reached[-1][0]:10}", flush=True)


if __name__ == "__main__":
    main()
