"""
Memory of the draft's loss against plain autograd over full logits, as the text grows.

Both arms unroll the same draft over one document whose every token is trained; the dense arm then keeps what autograd
keeps of `K` student logits and the teacher's, `[T, V]` each in float32. First their losses and gradients are checked
to agree. Then, for forward and backward: bytes of the distinct storages that autograd saves, plus the highest sum of
live allocations. "logits alone" is what the K + 1 tensors of logits would take if nothing else existed.

    python benchmarks/draft_memory.py --lengths 512 1024 2048 --vocab_size 49152
"""

import argparse

import torch
from measuring import machine, saved_and_peak_bytes
from transformers import LlamaConfig, LlamaForCausalLM

from trl_codraft.modeling.configuration_eagle3 import Eagle3DraftConfig
from trl_codraft.modeling.losses import draft_loss
from trl_codraft.modeling.modeling_eagle3 import Eagle3DraftModel
from trl_codraft.modeling.packing import pack_rows
from trl_codraft.modeling.teacher import PolicyHead


MIB = 2**20


def build(args):
    """A draft with random weights for a small policy, and the policy's head."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=args.vocab_size,
        hidden_size=args.hidden_size,
        intermediate_size=2 * args.hidden_size,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2 * max(args.lengths),
    )
    policy = LlamaForCausalLM(config).requires_grad_(False)
    draft = Eagle3DraftModel(Eagle3DraftConfig.from_policy(config))
    for weight in draft.parameters():
        torch.nn.init.normal_(weight, std=0.05) if weight.dim() > 1 else torch.nn.init.ones_(weight)
    return draft, PolicyHead(policy)


def document(draft, length, passes):
    """A microbatch of one document with random hidden states, every token trained."""
    generator = torch.Generator().manual_seed(length)
    config, ones = draft.config, torch.ones(1, length, dtype=torch.long)
    ids = torch.randint(config.vocab_size, (1, length), generator=generator)
    hidden = [
        torch.randn(1, length, config.target_hidden_size, generator=generator)
        for _ in range(len(config.tap_layers) + 1)
    ]
    return pack_rows(ids, ones, ones.bool(), hidden[:-1], hidden[-1], passes)


def fused(draft, head, batch, args):
    return draft_loss(
        draft, head, batch, num_passes=args.passes, decay=args.decay, chunk_size=args.chunk_size
    ).loss_sum


def dense(draft, head, batch, args):
    """The same sum by full logits and autograd."""
    hidden = draft.unroll(batch.taps, head.embed(batch.input_ids), batch.layout, args.passes)
    teacher = head.logits(batch.last_hidden).softmax(dim=-1)
    total = 0.0
    for num_pass, rows in enumerate(hidden):
        # Row r is taught at r + 1 + s and predicts x_{r+2+s}, so the last 2 + s rows have no target.
        last = batch.last_hidden.shape[0] - 2 - num_pass
        student = draft.compute_logits(rows[:last]).log_softmax(dim=-1)
        total = total - args.decay**num_pass * (teacher[1 + num_pass : 1 + num_pass + last] * student).sum()
    return total


def measure(arm, draft, head, batch, args):
    def run():
        arm(draft, head, batch, args).backward()
        draft.zero_grad()

    return saved_and_peak_bytes(run)


def require_equal(draft, head, batch, args):
    """Raises unless both arms give the same loss and gradients."""
    results = []
    for arm in (fused, dense):
        loss = arm(draft, head, batch, args)
        loss.backward()
        results.append([loss.detach(), *(weight.grad for weight in draft.parameters())])
        draft.zero_grad()
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4 * float(theirs.abs().max()))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[1])
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 1024, 2048])
    parser.add_argument("--vocab_size", type=int, default=49152)
    parser.add_argument("--hidden_size", type=int, default=64)
    parser.add_argument("--passes", type=int, default=4)
    parser.add_argument("--decay", type=float, default=0.8)
    parser.add_argument("--chunk_size", type=int, default=128)
    args = parser.parse_args()

    draft, head = build(args)
    require_equal(draft, head, document(draft, 128, args.passes), args)
    print(f"{machine()}, V={args.vocab_size}, K={args.passes}, float32")
    print(f"draft_loss_chunk_size={args.chunk_size}; losses and gradients of both arms agree")
    print(
        f"{'T':>6}{'fused, MiB':>14}{'(saved)':>10}{'dense, MiB':>14}{'(saved)':>10}{'ratio':>8}{'logits alone':>16}"
    )
    totals = []
    for length in args.lengths:
        batch = document(draft, length, args.passes)
        (saved, peak), (dense_saved, dense_peak) = (measure(arm, draft, head, batch, args) for arm in (fused, dense))
        totals.append(saved + peak)
        logits = (args.passes + 1) * length * args.vocab_size * 4
        print(
            f"{length:>6}{totals[-1] / MIB:>14.0f}{saved / MIB:>10.0f}"
            f"{(dense_saved + dense_peak) / MIB:>14.0f}{dense_saved / MIB:>10.0f}"
            f"{(dense_saved + dense_peak) / totals[-1]:>8.1f}{logits / totals[-1]:>15.1f}x"
        )
    if len(totals) >= 3:
        slope = (totals[-1] - totals[-2]) / (totals[-2] - totals[-3])
        print(f"growth of the last step over the one before: {slope:.2f} (2 when lengths double and memory is linear)")


if __name__ == "__main__":
    main()
