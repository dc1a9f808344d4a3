"""What the draft's loss keeps: linear in tokens, and no logits."""

import pytest
import torch
from modeling.draft_cases import microbatch
from tiny import tiny_policy

from benchmarks.measuring import saved_and_peak_bytes
from trl_codraft.modeling.configuration_eagle3 import Eagle3DraftConfig
from trl_codraft.modeling.losses import draft_loss
from trl_codraft.modeling.modeling_eagle3 import Eagle3DraftModel
from trl_codraft.modeling.teacher import PolicyHead


K = 4


def measured(vocab_size, num_tokens, chunk_size):
    """Saved plus peak bytes of forward and backward over one document, every token trained."""
    policy = tiny_policy(vocab_size=vocab_size)
    config = Eagle3DraftConfig.from_policy(policy.config, intermediate_size=32)
    draft, head = Eagle3DraftModel(config), PolicyHead(policy)
    batch, _ = microbatch(config, [num_tokens], [[(0, num_tokens)]], K, dtype=torch.float32)

    def run():
        draft_loss(draft, head, batch, num_passes=K, decay=0.8, chunk_size=chunk_size).loss_sum.backward()
        draft.zero_grad()

    saved, peak = saved_and_peak_bytes(run)
    return saved + peak


def check_linear_and_small(vocab_size, lengths, chunk_size):
    sizes = [measured(vocab_size, length, chunk_size) for length in lengths]
    slope = (sizes[2] - sizes[1]) / (sizes[1] - sizes[0])
    # K student and one teacher float32 tensor of (T, V): what the dense form cannot do without.
    ratios = [(K + 1) * length * vocab_size * 4 / size for length, size in zip(lengths, sizes, strict=True)]
    print(f"V={vocab_size} T={lengths}: {[size / 2**20 for size in sizes]} MiB, slope {slope}, dense / fused {ratios}")
    assert slope == pytest.approx(2.0, abs=0.1)
    assert min(ratios) >= 5


def test_memory_is_linear_in_tokens_and_far_below_dense_logits():
    check_linear_and_small(vocab_size=16384, lengths=(192, 384, 768), chunk_size=16)


@pytest.mark.slow
def test_memory_is_linear_in_tokens_and_far_below_dense_logits_at_full_vocabulary():
    check_linear_and_small(vocab_size=49152, lengths=(512, 1024, 2048), chunk_size=128)
