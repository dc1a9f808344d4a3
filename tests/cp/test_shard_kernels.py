"""Kernels for windows and unequal head dims, and the refusals of `ring_attention`."""

import pytest
import torch
from modeling.packed_flash import OPERATORS
from modeling.reference import dense_attention

from trl_codraft.cp import ContextLayout, ring_attention
from trl_codraft.cp.gathered import gather_trunk
from trl_codraft.cp.kernels import ChunkedWindowKernel, CudaWindowKernel, PaddedKernel, choose_shard_kernel
from trl_codraft.modeling.attention_kernels import ChunkedKernel, CpuFlashKernel
from trl_codraft.modeling.flash_operators import TorchFlash
from trl_codraft.modeling.kernel_call import Attended, Documents, Mask


def rows(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("left", [0, 1, 5, 100])
@pytest.mark.parametrize("max_scores", [30, 2**24])
def test_window_kernel_equals_a_banded_dense_softmax(left, max_scores):
    """Queries are the last rows of their document, as after a halo."""
    q_lens, k_lens = [7, 0, 3, 12], [19, 4, 3, 12]
    q, dout = rows(22, 4, 6), rows(22, 4, 6, seed=1)
    k, v = rows(38, 2, 6, seed=2), rows(38, 2, 6, seed=3)
    mask, q_start, k_start = torch.zeros(22, 38, dtype=torch.bool), 0, 0
    for q_len, k_len in zip(q_lens, k_lens, strict=True):
        band = torch.ones(k_len, k_len, dtype=torch.bool).tril().triu(-left)
        mask[q_start : q_start + q_len, k_start : k_start + k_len] = band[k_len - q_len :]
        q_start, k_start = q_start + q_len, k_start + k_len
    leaves = [tensor.clone().requires_grad_() for tensor in (q, k, v)]
    expected = dense_attention(*leaves, mask, 0.3)
    expected_grads = torch.autograd.grad(expected, leaves, dout)

    kernel = ChunkedWindowKernel(left, max_scores)
    out, lse = kernel.forward(q, k, v, Documents(q_lens, k_lens), Mask(causal=True, scale=0.3))
    grads = kernel.backward(dout, q, k, v, Attended(out, lse), Documents(q_lens, k_lens), Mask(causal=True, scale=0.3))
    torch.testing.assert_close(out, expected.detach(), atol=1e-13, rtol=1e-13)
    for ours, theirs in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-13, rtol=1e-13)


def test_window_kernel_computes_scores_of_the_window_only(monkeypatch):
    computed = []
    kernel, chunks = ChunkedWindowKernel(15), ChunkedWindowKernel._chunks

    def recording(self, *arguments):
        for chunk in chunks(self, *arguments):
            computed.append(chunk[2].numel())
            yield chunk

    monkeypatch.setattr(ChunkedWindowKernel, "_chunks", recording)
    tensors = (rows(512, 1, 4) for _ in range(3))
    kernel.forward(*tensors, Documents([512], [512]), Mask(causal=True, scale=1.0))
    assert sum(computed) <= 512 * 2 * 16


@pytest.mark.parametrize("emulate", OPERATORS.values(), ids=OPERATORS)
@pytest.mark.parametrize("left", [0, 1, 5, 100])
def test_cuda_window_calls_mean_what_the_chunked_kernel_computes(monkeypatch, left, emulate):
    call = Documents([7, 3, 12], [19, 3, 12]), Mask(causal=True, scale=0.3)
    q, dout = rows(22, 4, 6), rows(22, 4, 6, seed=1)
    k, v = rows(34, 2, 6, seed=2), rows(34, 2, 6, seed=3)
    calls = []
    kernel, expected = CudaWindowKernel(left, emulate(monkeypatch, calls)), ChunkedWindowKernel(left)
    results = []
    for each in (kernel, expected):
        out, lse = each.forward(q, k, v, *call)
        results.append((out, lse, *each.backward(dout, q, k, v, Attended(out, lse), *call)))
    assert calls == [True]
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-13, rtol=1e-13)


def test_cuda_window_calls_fit_the_operators_of_this_torch():
    q, k = (torch.empty(7, heads, 6, dtype=torch.bfloat16, device="meta") for heads in (4, 2))
    kernel, call = CudaWindowKernel(3, TorchFlash()), (Documents([4, 3], [4, 3]), Mask(causal=True, scale=0.3))
    out, lse = kernel.forward(q, k, k, *call)
    assert (out.shape, lse.shape) == ((7, 4, 6), (7, 4))
    grads = kernel.backward(out, q, k, k, Attended(out, lse), *call)
    assert [grad.shape for grad in grads] == [(7, 4, 6), (7, 2, 6), (7, 2, 6)]


def test_kernel_choice():
    q, narrow = rows(1, 2, 8), rows(1, 2, 4)
    assert isinstance(choose_shard_kernel(q, q), CpuFlashKernel)
    assert isinstance(choose_shard_kernel(q.half(), q.half()), ChunkedKernel)
    assert isinstance(choose_shard_kernel(q, q, 3), ChunkedWindowKernel)
    padded = choose_shard_kernel(q, narrow)
    assert isinstance(padded, PaddedKernel)
    assert isinstance(padded.kernel, CpuFlashKernel)


def test_calls_that_do_not_fit_are_refused():
    layout = ContextLayout.plan([4, 3])
    q, k = torch.zeros(7, 4, 6), torch.zeros(7, 2, 6)
    with pytest.raises(ValueError, match="got 6 queries, 7 keys and 7 values for a layout of 7 query rows"):
        ring_attention(q[:6], k, k, layout)
    with pytest.raises(ValueError, match="Heads do not fit"):
        ring_attention(q, torch.zeros(7, 3, 6), torch.zeros(7, 3, 6), layout)
    with pytest.raises(ValueError, match="a key and a value for each of the 7 query rows"):
        ring_attention(q, k, k, layout, branch=([k], []))
    with pytest.raises(ValueError, match="window of 0"):
        ring_attention(q, k, k, layout, window=0)
    with pytest.raises(ValueError, match="one sink per query head, 4"):
        ring_attention(q, k, k, layout, sinks=torch.zeros(2))
    with pytest.raises(ValueError, match="do not gather its trunk"):
        ring_attention(q, k, k, layout, window=3, trunk=gather_trunk(k, k, layout))
    with pytest.raises(ValueError, match="gathered from other keys"):
        ring_attention(q, k, k, layout, trunk=gather_trunk(k.clone(), k, layout))


def test_gradients_arrive_in_the_dtype_of_their_inputs_and_twice_through_one_gathering():
    layout = ContextLayout.plan([4, 3])
    q, k, v = (rows(7, heads, 6, dtype=torch.bfloat16, seed=heads).requires_grad_() for heads in (4, 2, 2))
    trunk = gather_trunk(k, v, layout)
    out = ring_attention(q, k, v, layout, trunk=trunk)
    first = torch.autograd.grad(out.sum(), (q, k, v), retain_graph=True)
    second = torch.autograd.grad(out.sum(), (q, k, v))
    for one, other in zip(first, second, strict=True):
        assert one.dtype == torch.bfloat16
        assert torch.equal(one, other)
