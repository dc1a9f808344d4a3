"""
Arms that see the same recorded trajectory: each keeps a draft of its own, all start from the same one.

Nothing here changes the policy: its weights of each step are loaded from the record, as the second invariant allows
(the policy never feels the draft).
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel

from trl_codraft import Eagle3DraftConfig, Eagle3DraftModel
from trl_codraft.modeling.initialization import tap_log_scales
from trl_codraft.modeling.losses import draft_loss
from trl_codraft.modeling.packing import DraftBatch, pack_rows
from trl_codraft.modeling.taps import TapRecorder
from trl_codraft.modeling.teacher import PolicyHead
from trl_codraft.modeling.vocab import choose_draft_vocab
from trl_codraft.training.draft_trainer import DraftTrainer, DraftTrainingArguments

from .cases import Case


WARMUP = 10
# A fresh draft and its plateau phase: rollouts per window, and how often each is trained on.
WINDOW_ROWS, WINDOW_PASSES = 64, 2
PLATEAU_GAIN = 0.005


class Policy:
    """A policy with what a draft reads from it."""

    def __init__(self, case: Case, model: PreTrainedModel):
        self.case, self.model = case, model.eval()
        self.head = PolicyHead(model)
        self.draft_config = Eagle3DraftConfig.from_policy(model.config, **case.draft)
        self.recorder = TapRecorder(model, self.draft_config.tap_layers)

    @torch.no_grad()
    def pack(self, rollout: dict[str, torch.Tensor]) -> tuple[DraftBatch, torch.Tensor]:
        """What the draft learns from a microbatch, and the log-probability `(B, C)` of each completion token."""
        ids = torch.cat([rollout["prompt_ids"], rollout["completion_ids"]], dim=1)
        mask = torch.cat([rollout["prompt_mask"], rollout["completion_mask"]], dim=1)
        trained = torch.cat([torch.zeros_like(rollout["prompt_mask"]), rollout["completion_mask"]], dim=1)
        length = rollout["completion_ids"].shape[1]
        with self.recorder.record() as record:
            logits = self.model(input_ids=ids, attention_mask=mask, use_cache=False, logits_to_keep=length + 1).logits[
                :, :-1
            ]
        log_probs = logits.gather(-1, rollout["completion_ids"][..., None])[..., 0] - logits.logsumexp(-1)
        batch = pack_rows(ids, mask, trained.bool(), record.taps, record.last_hidden, self.case.num_passes)
        return batch, log_probs

    @torch.no_grad()
    def roll_out(self, prompts: list) -> dict[str, torch.Tensor]:
        """Plain rollouts at temperature 1, in the form of a recorded microbatch."""
        tokenizer, longest = self.case.tokenizer, self.case.grpo["max_completion_length"]
        if isinstance(prompts[0], list):
            prompts = tokenizer.apply_chat_template(prompts, add_generation_prompt=True, tokenize=False)
        inputs = tokenizer(prompts, add_special_tokens=False, padding=True, padding_side="left", return_tensors="pt")
        ids, mask = inputs["input_ids"], inputs["attention_mask"]
        sequences = self.model.generate(
            input_ids=ids,
            attention_mask=mask,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=longest,
            pad_token_id=tokenizer.pad_token_id,
        )
        completion = sequences[:, ids.shape[1] :]
        is_eos = (completion == tokenizer.eos_token_id).long()
        return {
            "prompt_ids": ids,
            "prompt_mask": mask,
            "completion_ids": completion,
            "completion_mask": (is_eos.cumsum(1) - is_eos == 0).long(),
        }


def accept_length(draft: Eagle3DraftModel, head: PolicyHead, batches: list[DraftBatch], num_passes: int) -> float:
    """Simulated accept length of a draft on rollouts, without training on them."""
    accepted, roots = 0.0, 0.0
    for batch in batches:
        with torch.no_grad():
            counters = draft_loss(draft, head, batch, num_passes=num_passes, decay=0.8, chunk_size=512).counters
        accepted += float(counters["accept"].sum())
        roots += float(counters["accept_roots"])
    return 1.0 + accepted / max(roots, 1.0)


@dataclass
class Arm:
    """
    One way of treating the draft along the trajectory.

    Args:
        name (`str`):
            Of the arm.
        draft ([`Eagle3DraftModel`]):
            Its own copy.
        trainer ([`DraftTrainer`], *optional*):
            `None` for a frozen draft.
        on_policy (`bool`):
            Whether it learns from the trajectory's rollouts (co-trained) or the base policy's (control).
    """

    name: str
    draft: Eagle3DraftModel
    trainer: DraftTrainer | None
    on_policy: bool

    def update(self, batches: list[DraftBatch]) -> None:
        """One update on the rollouts of one step."""
        for batch in batches:
            self.trainer.accumulate(batch)
        self.trainer.step()


def settings(case: Case, learning_rate: float, warmup: int) -> DraftTrainingArguments:
    return DraftTrainingArguments(
        num_passes=case.num_passes,
        learning_rate=learning_rate,
        pretrain_learning_rate=case.pretrain_learning_rate,
        warmup_steps=warmup,
    )


def make_arms(start: DraftTrainer, current: Policy, base: Policy, steps: int, rates: list[float]) -> list[Arm]:
    """
    A frozen draft; then a control and a co-trained one, each with the moments of pretraining carried on (what the
    trainer does), with a new optimizer that warms up, and with a new optimizer that does not. With several learning
    rates: a frozen draft and one co-trained as the trainer does at each rate.
    """
    case = current.case

    def arm(kind: str, rate: float, suffix: str, warmup: int = WARMUP, carried: bool = True) -> Arm:
        draft, policy = copy.deepcopy(start.draft), current if kind == "co-trained" else base
        trainer = DraftTrainer(draft, policy.head, settings(case, rate, warmup), num_training_steps=steps)
        if carried:
            trainer.load_state_dict(start.state_dict())
        return Arm(kind + suffix, draft, trainer, kind == "co-trained")

    arms = [Arm("frozen", copy.deepcopy(start.draft), None, False)]
    if len(rates) > 1:
        return arms + [arm("co-trained", rate, f", {rate:g}") for rate in rates]
    for kind in ("control", "co-trained"):
        arms.append(arm(kind, rates[0], ""))
        arms.append(arm(kind, rates[0], ", cold", 0, carried=False))
        arms.append(arm(kind, rates[0], ", cold with warm-up", carried=False))
    return arms


def prompt_stream(case: Case, seed: int):
    """Training prompts in a random order, for ever."""
    generator = torch.Generator().manual_seed(seed)
    prompts = list(case.train_set["prompt"])
    while True:
        for index in torch.randperm(len(prompts), generator=generator).tolist():
            yield prompts[index]


def base_rollouts(policy: Policy, prompts, num_rows: int) -> list[dict[str, torch.Tensor]]:
    """Microbatches of the base policy, as large as the trajectory's."""
    rows = policy.case.grpo["per_device_train_batch_size"]
    return [policy.roll_out([next(prompts) for _ in range(rows)]) for _ in range(num_rows // rows)]


def starting_point(
    policy: Policy, draft: Eagle3DraftModel | None, seed: int, file: Path, say: Callable[[str], None]
) -> DraftTrainer:
    """The trainer of a draft at its plateau on the base policy: from `file`, or trained and written there."""
    arguments = settings(policy.case, policy.case.learning_rate, WARMUP)
    if not file.exists():
        trainer = train_to_plateau(policy, draft, seed, arguments, say)
        file.parent.mkdir(parents=True, exist_ok=True)
        torch.save(trainer.state_dict(), file)
        return trainer
    draft = Eagle3DraftModel(policy.draft_config)
    trainer = DraftTrainer(draft, policy.head, arguments, num_training_steps=policy.case.plateau_updates)
    trainer.load_state_dict(torch.load(file))
    return trainer


def train_to_plateau(
    policy: Policy,
    draft: Eagle3DraftModel | None,
    seed: int,
    arguments: DraftTrainingArguments,
    say: Callable[[str], None],
) -> DraftTrainer:
    """
    Trains a draft on rollouts of the base policy until its accept length on held-out ones stops growing: a fresh one
    at the learning rate of pretraining first, then every one at that of co-training, so that a later gain is not
    merely that of a smaller rate.

    Args:
        policy ([`Policy`]):
            The base policy.
        draft ([`Eagle3DraftModel`], *optional*):
            Where to start from; a fresh draft if not given.
        seed (`int`):
            Seed of the rollouts.
        arguments ([`DraftTrainingArguments`]):
            Of the draft's trainer.
        say (`Callable`):
            Takes a line of progress.
    """
    case = policy.case
    prompts = prompt_stream(case, seed)
    held_out = [policy.pack(rollout)[0] for rollout in base_rollouts(policy, prompts, WINDOW_ROWS)]
    fresh = draft is None
    if fresh:
        draft = fresh_draft(policy, held_out[0], base_rollouts(policy, prompts, WINDOW_ROWS))
    trainer = DraftTrainer(draft, policy.head, arguments, num_training_steps=case.plateau_updates)
    if fresh:
        with trainer.pretraining():
            _train_while_it_helps(policy, trainer, held_out, prompts, say)
    _train_while_it_helps(policy, trainer, held_out, prompts, say)
    return trainer


def _train_while_it_helps(policy: Policy, trainer: DraftTrainer, held_out: list[DraftBatch], prompts, say) -> None:
    """Windows of fresh rollouts, each trained on a few times, until several in a row gain nothing."""
    case = policy.case
    per_update = case.rows // case.grpo["per_device_train_batch_size"]
    best = accept_length(trainer.draft, policy.head, held_out, case.num_passes)
    say(f"[plateau] accept length {best:.3f} before")
    updates = waited = 0
    while updates < case.plateau_updates and waited < case.plateau_patience:
        windows = [policy.pack(rollout)[0] for rollout in base_rollouts(policy, prompts, WINDOW_ROWS)]
        for _ in range(WINDOW_PASSES):
            for start in range(0, len(windows), per_update):
                for batch in windows[start : start + per_update]:
                    trainer.accumulate(batch)
                trainer.step()
                updates += 1
        reached = accept_length(trainer.draft, policy.head, held_out, case.num_passes)
        waited = 0 if reached > best * (1 + PLATEAU_GAIN) else waited + 1
        best = max(best, reached)
        say(f"[plateau] accept length {reached:.3f} after {updates} updates")
    say(f"[plateau] {'reached' if waited >= case.plateau_patience else 'not reached: budget spent'}")


def fresh_draft(policy: Policy, batch: DraftBatch, rollouts: list[dict]) -> Eagle3DraftModel:
    """A new draft with its vocabulary and starting weights."""
    config = policy.draft_config
    draft = Eagle3DraftModel(config)
    if config.draft_vocab_size < config.vocab_size:
        ids = torch.cat([rollout["completion_ids"].flatten() for rollout in rollouts])
        counts = torch.bincount(ids, minlength=config.vocab_size)
        draft.set_vocab(choose_draft_vocab(counts, config.draft_vocab_size, policy.case.tokenizer.all_special_ids))
    num_taps = len(config.tap_layers)
    scales = (tap_log_scales(batch.taps, num_taps) / len(batch.taps)).exp().float()
    draft.initialize_from_policy(policy.head, tap_scales=scales)
    return draft
