"""Branch attention and its kernels against one dense masked softmax, outputs and all gradients."""

import pytest
import torch
from modeling.allocations import BytesMade, LargestTensor
from modeling.packed_flash import OPERATORS, install_flash_attn
from modeling.reference import branch_mask, dense_attention

from trl_codraft.modeling.attention import branch_attention
from trl_codraft.modeling.attention_kernels import (
    ChunkedKernel,
    CpuFlashKernel,
    CudaFlashKernel,
    choose_kernel,
    merge_partials,
)
from trl_codraft.modeling.flash_operators import FlashAttention2, TorchFlash, installed_flash
from trl_codraft.modeling.kernel_call import Attended, Documents, Mask
from trl_codraft.modeling.packing import PackedLayout


KERNELS = {"cpu_flash": CpuFlashKernel(), "chunked": ChunkedKernel(max_scores=200)}
TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2}
# (documents, first row of each that later passes compute)
PACKS = [
    ([37, 3, 64, 1, 19], [20, 0, 40, 1, 18]),
    ([37, 3, 64, 1, 19], None),
    ([1, 1], None),
    ([5, 0, 7], [5, 0, 6]),
    ([9], [0]),
]
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def random_tensors(*shapes, dtype=torch.float64, seed=0, device="cpu"):
    generator = torch.Generator().manual_seed(seed)
    tensors = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return [tensor.to(device=device, dtype=dtype).requires_grad_() for tensor in tensors]


def dense_branch_attention(q, k, v, layout, branch_k, branch_v, scale):
    """Per document: every trunk key of the document and every branch key of the document, masked."""
    outs, q_start = [], 0
    for start, length, root in zip(layout.doc_starts, layout.doc_lens, layout.first_valid_root, strict=True):
        root = root if branch_k else 0
        queries, trunk = slice(q_start, q_start + length - root), slice(start, start + length)
        mask = branch_mask(length, len(branch_k))[root:]
        # Branch keys exist for the rows of the suffix only.
        kept = torch.cat(
            [torch.ones(length), torch.tensor([0.0] * root + [1.0] * (length - root)).repeat(len(branch_k))]
        )
        keys = torch.cat([k[trunk], *(key[queries] for key in branch_k)])
        values = torch.cat([v[trunk], *(value[queries] for value in branch_v)])
        outs.append(dense_attention(q[queries], keys, values, mask[:, kept.bool()], scale))
        q_start = queries.stop
    return torch.cat(outs)


def assert_close(actual, expected, dtype):
    """Absolute error against the size of the whole tensor: single-key rows have gradients of exactly zero."""
    for ours, theirs in zip(actual, expected, strict=True):
        assert ours.dtype == dtype
        assert (ours.double() - theirs).abs().max() <= TOLERANCES[dtype] * max(1.0, theirs.abs().max())


def check_branch_attention(kernel, pack, heads, head_dim, num_branches, dtype, device="cpu"):
    doc_lens, roots = pack
    layout = PackedLayout(doc_lens, roots, device=device)
    num_queries = sum(layout.query_lens(1 if num_branches else 0))
    (num_heads, num_kv_heads), num_rows = heads, sum(doc_lens)
    q_shape, trunk_shape = (num_queries, num_heads, head_dim), (num_rows, num_kv_heads, head_dim)
    shapes = [q_shape, trunk_shape, trunk_shape] + [(num_queries, num_kv_heads, head_dim)] * (2 * num_branches)
    leaves = random_tensors(*shapes, dtype=dtype, device=device)
    (dout,) = random_tensors(q_shape, dtype=dtype, device=device, seed=1)
    q, k, v, *rest = leaves
    branch = (rest[:num_branches], rest[num_branches:]) if num_branches else None
    out = branch_attention(q, k, v, layout, branch=branch, scale=0.4, kernel=kernel)
    grads = torch.autograd.grad(out, leaves, dout)

    exact = [leaf.detach().double().cpu().requires_grad_() for leaf in leaves]
    q, k, v, *rest = exact
    expected = dense_branch_attention(q, k, v, layout, rest[:num_branches], rest[num_branches:], 0.4)
    expected_grads = torch.autograd.grad(expected, exact, dout.double().cpu())
    assert_close([out.cpu(), *(grad.cpu() for grad in grads)], [expected, *expected_grads], dtype)


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
@pytest.mark.parametrize("pack", PACKS, ids=str)
@pytest.mark.parametrize("num_branches", [0, 1, 3])
def test_branch_attention_equals_dense_softmax(kernel, pack, num_branches):
    check_branch_attention(kernel, pack, (4, 2), 6, num_branches, torch.float64)


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_branch_attention_in_lower_precision(kernel, dtype):
    check_branch_attention(kernel, PACKS[0], (4, 2), 16, 3, dtype)


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
@pytest.mark.parametrize("heads", [(4, 4), (4, 1), (6, 2)], ids=str)
@pytest.mark.parametrize("head_dim", [2, 10, 40])
def test_branch_attention_head_layouts(kernel, heads, head_dim):
    check_branch_attention(kernel, PACKS[0], heads, head_dim, 2, torch.float64)


@needs_cuda
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("head_dim", [10, 64])
def test_cuda_flash_equals_dense_softmax(dtype, head_dim):
    kernel = choose_kernel(torch.zeros(1, 4, head_dim, dtype=dtype, device="cuda"))
    assert isinstance(kernel, CudaFlashKernel)
    TOLERANCES.setdefault(torch.float16, 1e-2)
    for pack in PACKS:
        for num_branches in (0, 3):
            check_branch_attention(kernel, pack, (4, 2), head_dim, num_branches, dtype, device="cuda")


@needs_cuda
def test_chunked_kernel_on_cuda_equals_dense_softmax():
    assert isinstance(choose_kernel(torch.zeros(1, 4, 8, device="cuda")), ChunkedKernel)
    check_branch_attention(ChunkedKernel(200), PACKS[0], (4, 2), 8, 3, torch.float32, device="cuda")


# Kernels alone


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
@pytest.mark.parametrize(
    ("q_lens", "k_lens", "causal"),
    [
        ([7, 3], [7, 3], True),
        ([4, 0, 3], [9, 5, 3], True),
        ([4, 6, 0], [9, 0, 5], False),
        ([6, 2], [1, 30], False),
        ([0], [4], False),
        ([3], [0], False),
    ],
    ids=str,
)
def test_kernels_with_further_keys_of_the_caller(kernel, q_lens, k_lens, causal):
    """Backward called with the output and log-sum-exp over these and other keys gives the gradients of the whole."""
    num_queries, num_keys = sum(q_lens), sum(k_lens)
    call = Documents(q_lens, k_lens), Mask(causal=causal, scale=0.3)
    q, k, v = random_tensors((num_queries, 4, 6), (num_keys, 2, 6), (num_keys, 2, 6))
    other_k, other_v = random_tensors((5, 2, 6), (5, 2, 6), seed=3)
    (dout,) = random_tensors((num_queries, 4, 6), seed=4)
    mask, q_start, k_start = torch.zeros(num_queries, num_keys, dtype=torch.bool), 0, 0
    for q_len, k_len in zip(q_lens, k_lens, strict=True):
        block = torch.ones(q_len, k_len, dtype=torch.bool)
        block = block.tril(k_len - q_len) if causal else block
        mask[q_start : q_start + q_len, k_start : k_start + k_len] = block
        q_start, k_start = q_start + q_len, k_start + k_len
    mask = torch.cat([mask, torch.ones(num_queries, 5, dtype=torch.bool)], dim=1)
    expected = dense_attention(q, torch.cat([k, other_k]), torch.cat([v, other_v]), mask, 0.3)
    expected_grads = torch.autograd.grad(expected, (q, k, v, other_k, other_v), dout)

    with torch.no_grad():
        here = kernel.forward(q, k, v, *call)
        there = ChunkedKernel().forward(
            q, other_k, other_v, Documents([num_queries], [5]), Mask(causal=False, scale=0.3)
        )
        attended = merge_partials(here, there)
        grads = kernel.backward(dout, q, k, v, attended, *call)
        rest = ChunkedKernel().backward(
            dout, q, other_k, other_v, attended, Documents([num_queries], [5]), Mask(causal=False, scale=0.3)
        )
    torch.testing.assert_close(attended.out, expected, atol=1e-13, rtol=1e-13)
    torch.testing.assert_close(grads[0] + rest[0], expected_grads[0], atol=1e-13, rtol=1e-13)
    for ours, theirs in zip((*grads[1:], *rest[1:]), expected_grads[1:], strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-13, rtol=1e-13)


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
def test_query_without_a_key_is_neutral(kernel):
    q, k = torch.ones(2, 2, 4), torch.ones(0, 2, 4)
    out, lse = kernel.forward(q, k, k, Documents([2], [0]), Mask(causal=False, scale=1.0))
    assert torch.equal(out, torch.zeros(2, 2, 4))
    assert torch.equal(lse, torch.full((2, 2), -torch.inf))


def test_merge_survives_extreme_log_sum_exps():
    out_a, out_b = torch.full((4, 1, 2), 1.0), torch.full((4, 1, 2), 3.0)
    lse_a = torch.tensor([[1e3], [-1e3], [-torch.inf], [-torch.inf]])
    lse_b = torch.tensor([[0.0], [0.0], [5.0], [-torch.inf]])
    out, lse = merge_partials(Attended(out_a, lse_a), Attended(out_b, lse_b))
    assert torch.equal(out[:, 0, 0], torch.tensor([1.0, 3.0, 3.0, 0.0]))
    assert torch.equal(lse[:, 0], torch.tensor([1e3, 0.0, 5.0, -torch.inf]))


@pytest.mark.parametrize("kernel", [CpuFlashKernel(), ChunkedKernel(max_scores=2**13)], ids=["cpu_flash", "chunked"])
def test_no_tensor_grows_with_tokens_squared(kernel):
    largest = {}
    for num_rows in (256, 512):
        shapes = [(num_rows, 2, 8)] * 5
        q, k, v, branch_k, branch_v = random_tensors(*shapes, dtype=torch.float32)
        with LargestTensor() as mode:
            branch = ([branch_k], [branch_v])
            branch_attention(
                q, k, v, PackedLayout([num_rows]), branch=branch, scale=0.3, kernel=kernel
            ).sum().backward()
        largest[num_rows] = mode.numel
    assert largest[512] <= 2 * largest[256] < 256 * 256


def test_a_lone_block_is_handed_on_as_the_kernel_left_it():
    """The trunk of pass 0 is one causal block: nothing is merged, widened or copied behind the kernel's own call."""
    q, k, v = (
        tensor.detach() for tensor in random_tensors((256, 4, 8), (256, 2, 8), (256, 2, 8), dtype=torch.bfloat16)
    )
    kernel, call = CpuFlashKernel(), (Documents([256], [256]), Mask(causal=True, scale=0.3))
    with BytesMade() as block:
        expected = kernel._block_forward(q, k, v, *call)
        expected += kernel._block_backward(expected.out, q, k, v, expected, *call)
    with BytesMade() as whole:
        out, lse = kernel.forward(q, k, v, *call)
        grads = kernel.backward(out, q, k, v, Attended(out, lse), *call)
    assert whole.bytes == block.bytes
    assert all(torch.equal(ours, theirs) for ours, theirs in zip((out, lse, *grads), expected, strict=True))


# The CUDA kernel's calls, without a GPU


@pytest.mark.parametrize("emulate", OPERATORS.values(), ids=OPERATORS)
@pytest.mark.parametrize("pack", PACKS, ids=str)
def test_cuda_flash_calls_mean_the_dense_softmax(monkeypatch, pack, emulate):
    calls = []
    kernel = CudaFlashKernel(emulate(monkeypatch, calls))
    check_branch_attention(kernel, pack, (4, 2), 6, 3, torch.float64)
    assert set(calls) <= {True, False}
    assert 1 <= len(calls) <= 2


def test_flash_attn_is_used_where_a_known_release_is_installed(monkeypatch):
    assert isinstance(installed_flash.__wrapped__(), TorchFlash)
    install_flash_attn(monkeypatch, [])
    assert isinstance(installed_flash.__wrapped__(), FlashAttention2)


def raise_import_error(*_):
    raise ImportError("flash_attn_2_cuda: undefined symbol")


@pytest.mark.parametrize(
    ("version", "broken", "said"),
    [("2.7.4", False, "2.7.4 is not 2.8"), ("3.0.0", False, "3.0.0 is not 2.8"), ("2.8.3", True, "undefined symbol")],
)
def test_a_flash_attn_that_cannot_be_used_is_named_and_left_alone(monkeypatch, caplog, version, broken, said):
    install_flash_attn(monkeypatch, [], version)
    if broken:
        monkeypatch.setattr(FlashAttention2, "__init__", raise_import_error)
    assert isinstance(installed_flash.__wrapped__(), TorchFlash)
    assert said in caplog.text


def test_cuda_flash_calls_fit_the_operators_of_this_torch():
    q, k = (torch.empty(7, heads, 6, dtype=torch.bfloat16, device="meta") for heads in (4, 2))
    call = Documents([4, 3], [4, 3]), Mask(causal=True, scale=0.3)
    out, lse = CudaFlashKernel(TorchFlash())._block_forward(q, k, k, *call)
    assert (out.shape, lse.shape) == ((7, 4, 6), (7, 4))
    grads = CudaFlashKernel(TorchFlash())._block_backward(out, q, k, k, Attended(out, lse), *call)
    assert [grad.shape for grad in grads] == [(7, 4, 6), (7, 2, 6), (7, 2, 6)]


def test_kernel_choice_on_the_cpu():
    assert isinstance(choose_kernel(torch.zeros(1, 2, 10)), CpuFlashKernel)
    assert isinstance(choose_kernel(torch.zeros(1, 2, 10, dtype=torch.float16)), ChunkedKernel)


def test_rows_that_do_not_fit_the_layout_are_refused():
    layout = PackedLayout([4, 3], [1, 3])
    q, k = torch.zeros(3, 4, 6), torch.zeros(7, 2, 6)
    with pytest.raises(ValueError, match="3 queries, 7 keys and 7 values for a layout of 7 query rows"):
        branch_attention(q, k, k, layout, scale=1.0)
    with pytest.raises(ValueError, match="2 query heads cannot share 3"):
        branch_attention(torch.zeros(7, 2, 6), torch.zeros(7, 3, 6), torch.zeros(7, 3, 6), layout, scale=1.0)
    with pytest.raises(ValueError, match="a key and a value for each of the 3 query rows"):
        branch_attention(q, k, k, layout, branch=([k], [k]), scale=1.0)
