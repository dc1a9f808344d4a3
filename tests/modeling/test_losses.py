"""The fused loss against the dense reference: value, every gradient, every counter, and what it keeps in memory."""

import pytest
import torch
from modeling.dense_reference import dense_loss
from modeling.draft_cases import NOTHING_TRAINED, RAGGED, SHORT, draft_case, microbatch

from trl_codraft.modeling.losses import PASS_COUNTERS, SCALAR_COUNTERS, draft_loss, zero_counters


K = 3


def reference(draft, head, documents, **kwargs):
    """Dense loss, gradients by parameter name and counters, all in fp64."""
    weights = {name: p.detach().double().requires_grad_() for name, p in draft.named_parameters()}
    policy_head = head.policy.get_output_embeddings().weight.detach().double()
    documents = [{k: v.double() if v.is_floating_point() else v for k, v in doc.items()} for doc in documents]
    reduced = draft.config.draft_vocab_size < draft.config.vocab_size
    padded = len(policy_head) > draft.config.vocab_size
    target_ids = (
        torch.arange(draft.config.vocab_size)[draft.t2d if reduced else slice(None)] if reduced or padded else None
    )
    embedding = head.policy.get_input_embeddings().weight.detach().double()
    loss, counters = dense_loss(
        weights,
        draft.config,
        documents,
        lambda hidden: hidden @ policy_head.T,
        embedding,
        decay=0.7,
        target_ids=target_ids,
        **{"num_passes": K, **kwargs},
    )
    names = list(weights)
    if not torch.is_tensor(loss):
        return 0.0, {name: torch.zeros_like(w) for name, w in weights.items()}, counters
    grads = torch.autograd.grad(loss, [weights[name] for name in names], allow_unused=True)
    grads = [torch.zeros_like(weights[n]) if g is None else g for n, g in zip(names, grads, strict=True)]
    return loss.item(), dict(zip(names, grads, strict=True)), counters


def fused(draft, head, batch, chunk_size=7, factor=1.0, **kwargs):
    draft.zero_grad()
    result = draft_loss(draft, head, batch, decay=0.7, chunk_size=chunk_size, **{"num_passes": K, **kwargs})
    (result.loss_sum * factor).backward()
    return result, {name: p.grad for name, p in draft.named_parameters()}


def assert_close(actual, expected, tolerance, what):
    """Relative to the largest entry, as a gradient's zeros carry the rounding of their neighbours."""
    actual, expected = (torch.as_tensor(x, dtype=torch.float64) for x in (actual, expected))
    error = float((actual - expected).abs().max())
    assert error <= tolerance * max(1.0, float(expected.abs().max())), f"{what}: off by {error}"


def assert_matches(draft, head, batch, documents, tolerance, **kwargs):
    fused_kwargs = {k: kwargs.pop(k) for k in ("chunk_size", "factor") if k in kwargs}
    result, grads = fused(draft, head, batch, **fused_kwargs, **kwargs)
    loss, expected_grads, counters = reference(draft, head, documents, **kwargs)
    factor = fused_kwargs.get("factor", 1.0)
    assert_close(result.loss_sum.detach(), loss, tolerance, "loss_sum")
    for name, expected in expected_grads.items():
        assert_close(grads[name], factor * expected, tolerance, name)
    for name in PASS_COUNTERS + SCALAR_COUNTERS:
        assert result.counters[name].dtype == torch.float64
        assert not result.counters[name].requires_grad
        assert_close(result.counters[name], counters[name], tolerance, name)
    return result, grads


@pytest.mark.parametrize("reduced", [False, True])
@pytest.mark.parametrize("chunk_size", [1, 7, 1024])
def test_loss_gradients_and_counters_equal_dense_reference_in_fp64(reduced, chunk_size):
    draft, head = draft_case(reduced=reduced)
    batch, documents = microbatch(draft.config, *RAGGED, K)
    result, grads = assert_matches(draft, head, batch, documents, 1e-10, chunk_size=chunk_size)
    # The case is worth something only if every part of it is alive.
    assert all(float(grad.abs().max()) > 0 for grad in grads.values())
    assert (int(result.counters["masked_rows"]) > 0) == reduced
    assert float(result.counters["accept_roots"]) > 0
    assert float(result.counters["rows"].min()) > 0


@pytest.mark.parametrize("reduced", [False, True])
def test_loss_and_gradients_equal_dense_reference_in_fp32(reduced):
    draft, head = draft_case(dtype=torch.float32, reduced=reduced)
    batch, documents = microbatch(draft.config, *RAGGED, K, dtype=torch.float32)
    assert_matches(draft, head, batch, documents, 1e-5)


@pytest.mark.parametrize("case", [SHORT, NOTHING_TRAINED], ids=["short", "nothing_trained"])
@pytest.mark.parametrize("num_passes", [1, 4])
def test_loss_equals_dense_reference_on_packs_without_rows_in_some_pass(case, num_passes):
    draft, head = draft_case(reduced=True)
    batch, documents = microbatch(draft.config, *case, num_passes)
    result, grads = assert_matches(draft, head, batch, documents, 1e-10, num_passes=num_passes)
    if case is NOTHING_TRAINED:
        assert result.loss_sum.item() == 0
        assert all(float(grad.abs().max()) == 0 for grad in grads.values())


@pytest.mark.parametrize(("teacher", "rollout"), [(1.0, 0.6), (0.8, 1.0), (0.7, 0.7), (1.3, 0.5)])
@pytest.mark.parametrize("reduced", [False, True])
def test_temperatures_equal_dense_reference(teacher, rollout, reduced):
    draft, head = draft_case(reduced=reduced)
    batch, documents = microbatch(draft.config, *RAGGED, K)
    kwargs = {"teacher_temperature": teacher, "rollout_temperature": rollout}
    assert_matches(draft, head, batch, documents, 1e-10, **kwargs)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("reduced", [False, True])
def test_loss_equals_dense_reference_for_a_head_with_more_rows_than_the_vocabulary(reduced, tied):
    draft, head = draft_case(reduced=reduced, padded=True, tied=tied)
    batch, documents = microbatch(draft.config, *RAGGED, K)
    result, _ = assert_matches(draft, head, batch, documents, 1e-9)
    # Rows of the padding must be likely tokens, or they could be left out of the sum unnoticed.
    assert int(result.counters["masked_rows"]) > 0
    assert float(result.counters["coverage"]) < 0.99 * float(result.counters["positions"])


def test_gradients_are_exact_when_the_loss_is_scaled_and_weight_gradient_is_fp32():
    draft, head = draft_case(reduced=True)
    batch, documents = microbatch(draft.config, *RAGGED, K)
    assert_matches(draft, head, batch, documents, 1e-10, factor=-3.5)
    draft, head = draft_case(dtype=torch.float32)
    draft.compute_dtype = torch.bfloat16
    batch, _ = microbatch(draft.config, *RAGGED, K, dtype=torch.float32)
    _, grads = fused(draft, head, batch)
    assert {grad.dtype for grad in grads.values()} == {torch.float32}


def test_bf16_compute_stays_near_fp64_and_ignores_autocast():
    draft, head = draft_case(dtype=torch.float32)
    batch, documents = microbatch(draft.config, *RAGGED, K, dtype=torch.float32)
    loss, expected, _ = reference(draft, head, documents)
    draft.compute_dtype = torch.bfloat16
    result, grads = fused(draft, head, batch)
    assert result.loss_sum.item() == pytest.approx(loss, rel=0.03)
    for name, grad in grads.items():
        difference = (grad.double() - expected[name]).norm() / expected[name].norm()
        assert float(difference) < 0.15, name
    draft.compute_dtype = torch.float32
    plain, _ = fused(draft, head, batch)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        under_autocast, _ = fused(draft, head, batch)
    assert plain.loss_sum.item() == under_autocast.loss_sum.item()


def test_second_backward_raises_instead_of_scaling_twice():
    draft, head = draft_case()
    batch, _ = microbatch(draft.config, *RAGGED, K)
    loss_sum = draft_loss(draft, head, batch, num_passes=K, decay=0.7, chunk_size=7).loss_sum
    (2 * loss_sum).backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (2 * loss_sum).backward()


def test_nothing_flows_to_the_policy():
    draft, head = draft_case()
    batch, _ = microbatch(draft.config, *RAGGED, K)
    fused(draft, head, batch)
    assert all(parameter.grad is None for parameter in head.policy.parameters())


def test_loss_survives_a_teacher_with_no_mass_inside_the_draft_vocabulary():
    draft, head = draft_case(dtype=torch.float32, reduced=True)
    outside = (~draft.t2d).nonzero()[0, 0]
    with torch.no_grad():
        head.policy.get_output_embeddings().weight[outside] = 0
        head.policy.get_output_embeddings().weight[outside, 0] = 1e6
    batch, _ = microbatch(draft.config, *RAGGED, K, dtype=torch.float32)
    batch.last_hidden[:, 0] = 1.0
    result, grads = fused(draft, head, batch)
    assert float(result.counters["coverage"]) == 0
    assert float(result.counters["rows"].sum()) == 0
    assert all(bool((grad == 0).all()) for grad in grads.values())


def test_without_gradients_only_counters_are_computed():
    draft, head = draft_case()
    batch, _ = microbatch(draft.config, *RAGGED, K)
    expected, _ = fused(draft, head, batch)
    with torch.no_grad():
        result = draft_loss(draft, head, batch, num_passes=K, decay=0.7, chunk_size=7)
    assert not result.loss_sum.requires_grad
    assert all(torch.equal(result.counters[name], expected.counters[name]) for name in expected.counters)


def test_counters_of_microbatches_add_up():
    draft, head = draft_case(reduced=True)
    batch, _ = microbatch(draft.config, *RAGGED, K)
    whole, _ = fused(draft, head, batch)
    total = zero_counters(K, torch.device("cpu"))
    for low, high in ((0, 2), (2, 3), (3, 6)):
        lengths, trained = RAGGED[0][low:high], RAGGED[1][low:high]
        _, documents = microbatch(draft.config, *RAGGED, K)
        part = repack(draft.config, documents[low:high], lengths, trained)
        result, _ = fused(draft, head, part)
        total = {name: total[name] + result.counters[name] for name in total}
    for name in total:
        assert_close(total[name], whole.counters[name], 1e-12, name)


def repack(config, documents, lengths, trained):
    """The batch of some documents of another batch."""
    batch, _ = microbatch(config, lengths, trained, K)
    batch.input_ids = torch.cat([doc["input_ids"] for doc in documents])
    batch.taps = torch.cat([doc["taps"] for doc in documents])
    batch.last_hidden = torch.cat([doc["last_hidden"] for doc in documents])
    return batch
