"""
Arms that see the same recorded trajectory: each keeps a draft of its own, all start from the same one.

Nothing here changes the policy: its weights of each step are loaded from the record, as the second invariant allows
(the policy never feels the draft).
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from trl_codraft import Eagle3DraftConfig, Eagle3DraftModel
from trl_codraft.modeling.initialization import tap_log_scales
from trl_codraft.modeling.losses import draft_loss
from trl_codraft.modeling.packing import DraftBatch, pack_rows
from trl_codraft.modeling.taps import TapRecorder
from trl_codraft.modeling.teacher import PolicyHead
from trl_codraft.modeling.vocab import choose_draft_vocab
from trl_codraft.training import DraftTrainer, DraftTrainingArguments

from .cases import Case


WARMUP = 10
# A fresh draft and its plateau phase: rollouts per window, and how often each is trained on.
WINDOW_ROWS, WINDOW_PASSES = 64, 4
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


def make_arms(
    start: DraftTrainer, current: Policy, base: Policy, steps: int, learning_rates: list[float]
) -> list[Arm]:
    """
    A frozen draft; then a control and a co-trained one, each with the moments of pretraining carried on (what the
    trainer does), with a new optimizer that warms up, and with a new optimizer that does not. With several learning
    rates the latter two are left out.
    """
    kinds = [("", WARMUP, True)]
    if len(learning_rates) == 1:
        kinds += [(", cold", 0, False), (", cold with warm-up", WARMUP, False)]
    arms = [Arm("frozen", copy.deepcopy(start.draft), None, False)]
    for rate in learning_rates:
        rate_suffix = "" if len(learning_rates) == 1 else f", {rate:g}"
        for kind, policy in (("control", base), ("co-trained", current)):
            for suffix, warmup, carried in kinds:
                draft = copy.deepcopy(start.draft)
                arguments = settings(current.case, rate, warmup)
                trainer = DraftTrainer(draft, policy.head, arguments, num_training_steps=steps)
                if carried:
                    trainer.load_state_dict(start.state_dict())
                arms.append(Arm(kind + rate_suffix + suffix, draft, trainer, kind == "co-trained"))
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


def train_to_plateau(
    policy: Policy, draft: Eagle3DraftModel | None, seed: int, say: Callable[[str], None]
) -> DraftTrainer:
    """
    Trains a draft on rollouts of the base policy until its accept length on held-out ones stops growing.

    Args:
        policy ([`Policy`]):
            The base policy.
        draft ([`Eagle3DraftModel`], *optional*):
            Where to start from; a fresh draft if not given.
        seed (`int`):
            Seed of the rollouts.
        say (`Callable`):
            Takes a line of progress.
    """
    case = policy.case
    prompts = prompt_stream(case, seed)
    held_out = [policy.pack(rollout)[0] for rollout in base_rollouts(policy, prompts, WINDOW_ROWS)]
    if draft is None:
        draft = fresh_draft(policy, held_out[0], base_rollouts(policy, prompts, WINDOW_ROWS))
    trainer = DraftTrainer(
        draft, policy.head, settings(case, case.learning_rate, WARMUP), num_training_steps=case.plateau_updates
    )
    best = accept_length(draft, policy.head, held_out, case.num_passes)
    say(f"[plateau] accept length {best:.3f} before")
    updates = waited = 0
    with trainer.pretraining():
        while updates < case.plateau_updates and waited < case.plateau_patience:
            windows = [policy.pack(rollout)[0] for rollout in base_rollouts(policy, prompts, WINDOW_ROWS)]
            per_update = case.rows // case.grpo["per_device_train_batch_size"]
            for _ in range(WINDOW_PASSES):
                for start in range(0, len(windows), per_update):
                    for batch in windows[start : start + per_update]:
                        trainer.accumulate(batch)
                    trainer.step()
                    updates += 1
            reached = accept_length(draft, policy.head, held_out, case.num_passes)
            waited = 0 if reached > best * (1 + PLATEAU_GAIN) else waited + 1
            best = max(best, reached)
            say(f"[plateau] accept length {reached:.3f} after {updates} updates")
    say(f"[plateau] {'reached' if waited >= case.plateau_patience else 'not reached: budget spent'}")
    return trainer


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
