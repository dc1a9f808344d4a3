"""The draft's trainer: normalisation, schedule, resume, rollout copy, and what it must leave alone."""

import copy
import math

import pytest
import torch
from modeling.dense_reference import dense_loss
from modeling.draft_cases import NOTHING_TRAINED, RAGGED, draft_case, microbatch
from transformers import get_scheduler

from trl_codraft.modeling.packing import DraftBatch, PackedLayout
from trl_codraft.modeling.teacher import PolicyHead
from trl_codraft.training.draft_trainer import DraftTrainer, DraftTrainingArguments


K = 3
ARGS = {"num_passes": K, "decay": 0.7, "loss_chunk_size": 7, "learning_rate": 1e-2, "warmup_steps": 0}


def trainer_of(draft, head, num_training_steps=100, reduce_sum=lambda tensor: tensor, **overrides):
    args = DraftTrainingArguments(**{**ARGS, **overrides})
    return DraftTrainer(draft, head, args, reduce_sum=reduce_sum, num_training_steps=num_training_steps)


def split_documents(batch, sizes):
    """The same documents as several microbatches, `sizes` documents each."""
    pieces, doc, row = [], 0, 0
    for size in sizes:
        lens = batch.layout.doc_lens[doc : doc + size]
        roots = batch.layout.first_valid_root[doc : doc + size]
        rows = slice(row, row + sum(lens))
        tensors = [getattr(batch, name)[rows] for name in ("input_ids", "taps", "last_hidden", "trained")]
        pieces.append(DraftBatch(*tensors, PackedLayout(lens, roots)))
        doc, row = doc + size, row + sum(lens)
    return pieces


def weights(draft):
    return {name: parameter.detach().clone() for name, parameter in draft.named_parameters()}


def assert_same(actual, expected, tolerance=0.0):
    for name, value in expected.items():
        torch.testing.assert_close(
            actual[name], value, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )


def dense_update(draft, head, documents, args, steps):
    """AdamW on the dense loss divided by `sum_s a_s N_s`, clipped: what the trainer has to do, in plain torch."""
    parameters = {name: p.detach().clone().requires_grad_() for name, p in draft.named_parameters()}
    groups = [
        {"params": [p for p in parameters.values() if p.dim() > 1], "weight_decay": args.weight_decay},
        {"params": [p for p in parameters.values() if p.dim() == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=args.learning_rate, betas=(0.9, 0.95))
    table, own_head = head.policy.get_input_embeddings().weight, head.policy.get_output_embeddings().weight
    for _ in range(steps):
        loss, counters = dense_loss(
            parameters,
            draft.config,
            documents,
            lambda hidden: hidden @ own_head.detach().T,
            table.detach(),
            num_passes=K,
            decay=args.decay,
            target_ids=torch.arange(draft.config.vocab_size)[draft.t2d],
        )
        denominator = sum(args.decay**s * rows for s, rows in enumerate(counters["rows"]))
        optimizer.zero_grad()
        (loss / denominator).backward()
        norm = torch.nn.utils.clip_grad_norm_(parameters.values(), args.max_grad_norm)
        optimizer.step()
    metrics = {
        "draft/loss": loss.item() / denominator,
        "draft/grad_norm": norm.item(),
        "draft/learning_rate": args.learning_rate,
        "draft/rows": sum(counters["rows"]),
        "draft/masked_rows": counters["masked_rows"],
        "draft/vocab_coverage": counters["coverage"] / counters["positions"],
        "draft/accept_length_sim": 1 + sum(counters["accept"]) / counters["accept_roots"],
    }
    for s in range(K):
        metrics[f"draft/loss_pass_{s}"] = counters["loss"][s] / counters["rows"][s]
        metrics[f"draft/top1_pass_{s}"] = counters["top1"][s] / counters["rows"][s]
    return parameters, metrics


def test_updates_and_metrics_equal_plain_adamw_on_the_dense_loss():
    draft, head = draft_case(reduced=True)
    batch, documents = microbatch(draft.config, *RAGGED, K)
    args = DraftTrainingArguments(**ARGS, weight_decay=0.1, max_grad_norm=0.5)
    expected, expected_metrics = dense_update(draft, head, documents, args, steps=3)
    trainer = DraftTrainer(draft, head, args, num_training_steps=100)
    for _ in range(3):
        trainer.accumulate(batch)
        metrics = trainer.step()
    assert_same(weights(draft), expected, 1e-9)
    assert metrics == pytest.approx(expected_metrics, rel=1e-9)
    assert metrics["draft/grad_norm"] > 0.5  # clipping was at work


def test_split_over_microbatches_equals_one_call():
    results = []
    for sizes in ([6], [1, 2, 3]):
        draft, head = draft_case(reduced=True)
        batch, _ = microbatch(draft.config, *RAGGED, K)
        trainer = trainer_of(draft, head)
        for piece in split_documents(batch, sizes):
            trainer.accumulate(piece)
        trainer.accumulate(None)
        results.append((trainer.step(), weights(draft)))
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-12)
    assert_same(results[1][1], results[0][1], 1e-12)


def test_reduction_is_one_call_and_skips_only_on_the_reduced_count():
    calls = []

    def double(tensor):  # a second rank with the same rows
        calls.append(tensor.numel())
        return tensor * 2

    draft, head = draft_case(reduced=True)
    batch, _ = microbatch(draft.config, *RAGGED, K)
    alone, twin = copy.deepcopy(draft), draft
    metrics = []
    for model, reduce_sum in ((alone, lambda tensor: tensor), (twin, double)):
        trainer = trainer_of(model, head, reduce_sum=reduce_sum)
        trainer.accumulate(batch)
        metrics.append(trainer.step())
    assert len(calls) == 1
    assert_same(weights(twin), weights(alone), 1e-12)
    for counted in ("draft/rows", "draft/masked_rows"):
        assert metrics[1].pop(counted) == 2 * metrics[0].pop(counted)
    assert metrics[1] == pytest.approx(metrics[0], rel=1e-12)

    # No rows here, but rows elsewhere: the update happens. No rows anywhere: it does not, and nothing advances.
    other = trainer_of(copy.deepcopy(draft), head)
    other.accumulate(batch)
    reduced_elsewhere = []

    def from_elsewhere(tensor):
        return tensor + reduced_elsewhere[0]

    other.reduce_sum = lambda tensor: reduced_elsewhere.append(tensor.clone()) or tensor
    expected = (other.step(), weights(other.draft))
    empty = trainer_of(copy.deepcopy(draft), head, reduce_sum=from_elsewhere)
    empty.accumulate(None)
    assert empty.step() == expected[0]
    assert_same(weights(empty.draft), expected[1])


def test_step_without_rows_anywhere_changes_nothing():
    draft, head = draft_case()
    trainer = trainer_of(draft, head, warmup_steps=5)
    before, rate = weights(draft), trainer.learning_rate
    nothing, _ = microbatch(draft.config, *NOTHING_TRAINED, K)
    for batch in (None, nothing):
        trainer.accumulate(batch)
        metrics = trainer.step()
        assert metrics == {"draft/rows": 0, "draft/masked_rows": 0}
    trainer.step()
    assert_same(weights(draft), before)
    assert trainer.learning_rate == rate
    assert trainer.num_updates == 0
    assert all(parameter.grad is None for parameter in draft.parameters())


def test_warmup_counts_pretraining_and_each_phase_has_its_peak():
    draft, head = draft_case()
    batch, _ = microbatch(draft.config, *RAGGED, K)
    trainer = trainer_of(draft, head, num_training_steps=8, warmup_steps=4, lr_scheduler_type="linear",
                         learning_rate=1e-3, pretrain_learning_rate=4e-3)  # fmt: skip
    rates = []
    with trainer.pretraining():
        for _ in range(2):
            trainer.accumulate(batch)
            rates.append(trainer.step()["draft/learning_rate"])
    moments = trainer.optimizer.state[draft.lm_head.weight]["exp_avg"].clone()
    for _ in range(4):
        trainer.accumulate(batch)
        rates.append(trainer.step()["draft/learning_rate"])
    assert rates == pytest.approx([0.0, 1e-3, 0.5e-3, 0.75e-3, 1e-3, 0.75e-3])
    assert (trainer.num_updates, trainer.num_pretrain_updates) == (6, 2)
    assert float(moments.abs().max()) > 0
    assert int(trainer.optimizer.state[draft.lm_head.weight]["step"]) == 6


@pytest.mark.parametrize("reduced", [False, True])
def test_resume_equals_the_uninterrupted_run_bit_for_bit(reduced, tmp_path):
    draft, head = draft_case(dtype=torch.float32, reduced=reduced)
    batches = [microbatch(draft.config, *RAGGED, K, dtype=torch.float32, seed=seed)[0] for seed in range(5)]
    kwargs = {"lr_scheduler_type": "cosine", "warmup_steps": 2, "num_training_steps": 6}

    def run(trainer, batches):
        logs = []
        for batch in batches:
            trainer.accumulate(batch)
            logs.append(trainer.step())
        return logs

    whole = trainer_of(copy.deepcopy(draft), head, **kwargs)
    with whole.pretraining():
        logs = run(whole, batches[:1])
    logs += run(whole, batches[1:])

    first = trainer_of(copy.deepcopy(draft), head, **kwargs)
    with first.pretraining():
        run(first, batches[:1])
    run(first, batches[1:2])
    torch.save(first.state_dict(), tmp_path / "draft_state.pt")
    other, _ = draft_case(dtype=torch.float32, reduced=reduced, seed=9)
    resumed = trainer_of(other, head, **kwargs)
    assert resumed.rollout_draft is not None
    resumed.load_state_dict(torch.load(tmp_path / "draft_state.pt"))
    assert_same(weights(resumed.rollout_draft), weights(first.draft))
    assert run(resumed, batches[2:]) == logs[2:]
    assert_same(weights(resumed.draft), weights(whole.draft))
    assert torch.equal(resumed.draft.target_ids, draft.target_ids)
    assert (resumed.num_updates, resumed.num_pretrain_updates) == (5, 1)


def test_state_is_refused_between_accumulate_and_step_and_for_another_vocabulary():
    draft, head = draft_case(reduced=True)
    batch, _ = microbatch(draft.config, *RAGGED, K)
    trainer = trainer_of(draft, head)
    trainer.accumulate(batch)
    with pytest.raises(RuntimeError, match="save after the step"):
        trainer.state_dict()
    trainer.step()
    full, _ = draft_case()
    with pytest.raises(ValueError, match="draft_vocab_size=40"):
        trainer_of(full, head).load_state_dict(trainer.state_dict())


def test_state_of_a_frozen_draft_has_no_moments_for_one_that_learns():
    """Frozen by `requires_grad_`: its optimizer has no weights, which torch refuses with an error of its own."""
    frozen, head = draft_case()
    state = trainer_of(frozen.requires_grad_(False), head).state_dict()
    batch, _ = microbatch(frozen.config, *RAGGED, K)
    trainer = trainer_of(draft_case(seed=9)[0], head)
    trainer.accumulate(batch)
    trainer.step()
    assert not trainer.load_state_dict(state)
    assert not trainer.optimizer.state
    assert_same(weights(trainer.draft), weights(frozen))
    assert trainer_of(frozen, head).load_state_dict(trainer.state_dict())  # which needs none


def test_rollout_draft_is_a_cast_copy_that_follows_every_step():
    draft, head = draft_case(dtype=torch.float32, reduced=True)
    draft.compute_dtype = torch.bfloat16
    batch, _ = microbatch(draft.config, *RAGGED, K, dtype=torch.float32)
    trainer = trainer_of(draft, head)
    rollout = trainer.rollout_draft
    for _ in range(2):
        before = weights(rollout)
        trainer.accumulate(batch)
        trainer.step()
        assert trainer.rollout_draft is rollout
        for name, parameter in draft.named_parameters():
            copied = dict(rollout.named_parameters())[name]
            assert copied.dtype == torch.bfloat16
            assert not copied.requires_grad
            assert torch.equal(copied, parameter.detach().bfloat16()), f"{name} is stale"
            assert not torch.equal(copied, before[name]), f"{name} did not move"
    assert rollout.compute_dtype == torch.bfloat16
    assert torch.equal(rollout.target_ids, draft.target_ids)
    assert {parameter.dtype for parameter in draft.parameters()} == {torch.float32}


def test_training_leaves_policy_random_state_and_autocast_alone():
    draft, head = draft_case(dtype=torch.float32)
    batch, _ = microbatch(draft.config, *RAGGED, K, dtype=torch.float32)
    policy_before = weights(head.policy)
    torch.manual_seed(0)
    state = torch.get_rng_state()
    plain, mixed = (trainer_of(copy.deepcopy(draft), head) for _ in range(2))
    plain.accumulate(batch)
    log = plain.step()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed.accumulate(batch)
        assert mixed.step() == log
    _ = plain.rollout_draft
    assert torch.equal(torch.get_rng_state(), state)
    assert_same(weights(mixed.draft), weights(plain.draft))
    assert_same(weights(head.policy), policy_before)
    assert all(parameter.grad is None for parameter in head.policy.parameters())


def test_frozen_draft_reports_metrics_and_does_not_move():
    draft, head = draft_case(reduced=True)
    batch, _ = microbatch(draft.config, *RAGGED, K)
    trained = trainer_of(copy.deepcopy(draft), head)
    trained.accumulate(batch)
    expected = trained.step()
    frozen = trainer_of(draft.requires_grad_(False), head)
    before = weights(draft)
    frozen.accumulate(batch)
    metrics = frozen.step()
    assert_same(weights(draft), before)
    assert metrics == {k: v for k, v in expected.items() if k not in ("draft/grad_norm", "draft/learning_rate")}


def test_update_with_a_gradient_that_is_not_finite_is_left_out_with_a_warning(caplog):
    draft, head = draft_case()
    batch, _ = microbatch(draft.config, *RAGGED, K)
    trainer = trainer_of(draft, head)
    before = weights(draft)
    batch.taps[0, 0] = math.inf
    trainer.accumulate(batch)
    metrics = trainer.step()
    assert not math.isfinite(metrics["draft/grad_norm"])
    assert "left out" in caplog.text
    assert_same(weights(draft), before)


def test_a_sharded_head_is_gathered_on_every_rank_also_without_tokens():
    class Counting(PolicyHead):
        entered = 0

        def _resolve(self, only=None):
            self.entered += only is None
            return super()._resolve(only)

    draft, head = draft_case()
    batch, _ = microbatch(draft.config, *RAGGED, K)
    counting = Counting(head.policy)
    trainer = trainer_of(draft, counting)
    for step, item in enumerate((batch, None, batch)):
        trainer.accumulate(item)
        assert counting.entered == step + 1


@pytest.mark.parametrize("kind", ["linear", "cosine", "cosine_with_restarts", "polynomial", "inverse_sqrt"])
@pytest.mark.parametrize("warmup_steps", [1, 2, 3, 5])
def test_every_schedule_lasts_until_the_last_step_however_long_the_warmup(kind, warmup_steps):
    draft, head = draft_case()
    batch, _ = microbatch(draft.config, *RAGGED, K)
    trainer = trainer_of(draft, head, lr_scheduler_type=kind, warmup_steps=warmup_steps, num_training_steps=3)
    rates = []
    for _ in range(3):
        trainer.accumulate(batch)
        rates.append(trainer.step()["draft/learning_rate"] / trainer.args.learning_rate)
    optimizer = torch.optim.SGD([torch.zeros(())], lr=1.0)
    plain = get_scheduler(kind, optimizer, num_warmup_steps=warmup_steps, num_training_steps=3).lr_lambdas[0]
    assert rates == pytest.approx([plain(step) for step in range(3)])


def test_clipping_to_zero_is_no_clipping():
    norms = {}
    for max_grad_norm in (0, 0.0, 1e9):
        draft, head = draft_case()
        batch, _ = microbatch(draft.config, *RAGGED, K)
        trainer = trainer_of(draft, head, max_grad_norm=max_grad_norm)
        trainer.accumulate(batch)
        norms[max_grad_norm] = trainer.step()["draft/grad_norm"], weights(draft)
    assert_same(norms[0][1], norms[1e9][1])
    assert norms[0][0] == norms[1e9][0] > 0


def test_half_precision_masters_are_refused():
    draft, head = draft_case()
    with pytest.raises(ValueError, match="Load it in float32"):
        trainer_of(draft.bfloat16(), head)
