"""Small drafts and ragged microbatches for the tests of the loss and of the training."""

import torch
from tiny import tiny_policy

from trl_codraft.modeling.configuration_eagle3 import Eagle3DraftConfig
from trl_codraft.modeling.modeling_eagle3 import Eagle3DraftModel
from trl_codraft.modeling.packing import pack_rows
from trl_codraft.modeling.teacher import PolicyHead
from trl_codraft.modeling.vocab import choose_draft_vocab


DRAFT_VOCAB_SIZE = 40


def pad_head(policy, rows=24):
    """Gives a policy's head, and an embedding tied to it, rows beyond the vocabulary, some of them likely tokens."""
    head, table = policy.get_output_embeddings(), policy.get_input_embeddings()
    weight = torch.nn.Parameter(torch.cat([head.weight.detach(), head.weight.detach()[:rows].flip(1)]))
    if table.weight is head.weight:
        table.weight = weight
    head.weight = weight


def draft_case(dtype=torch.float64, reduced=False, seed=0, padded=False, tied=False, **overrides):
    """`(draft, head)` with random weights everywhere, so that no gradient is zero by construction."""
    policy = tiny_policy(dtype=dtype, scale=8.0, tie_word_embeddings=tied)
    assert (policy.get_output_embeddings().weight is policy.get_input_embeddings().weight) == tied
    if padded:
        pad_head(policy)
    if reduced:
        overrides["draft_vocab_size"] = DRAFT_VOCAB_SIZE
    config = Eagle3DraftConfig.from_policy(policy.config, **overrides)
    generator = torch.Generator().manual_seed(seed)
    draft = Eagle3DraftModel(config).to(dtype)
    draft.compute_dtype = dtype
    with torch.no_grad():
        for parameter in draft.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(1 + 0.2 * noise if parameter.dim() == 1 else 2 * noise / parameter.shape[1] ** 0.5)
    if reduced:
        counts = torch.rand(config.vocab_size, generator=generator)
        draft.set_vocab(choose_draft_vocab(counts, DRAFT_VOCAB_SIZE, [0, 1, 2]))
    return draft, PolicyHead(policy)


def microbatch(config, lengths, trained, num_passes, dtype=torch.float64, seed=1):
    """
    A left-padded microbatch as `pack_rows` takes it, random taps and hidden states. `trained` lists, per row, the
    half-open ranges of trained positions. Returns `(batch or None, documents)`.
    """
    generator = torch.Generator().manual_seed(seed)
    shape = (len(lengths), max(lengths, default=0) + 1)
    ids = torch.randint(0, config.vocab_size, shape, generator=generator)
    num_taps = len(config.tap_layers)
    hidden = [
        torch.randn(*shape, config.target_hidden_size, generator=generator).to(dtype) for _ in range(num_taps + 1)
    ]
    mask, trained_mask = torch.zeros(shape, dtype=torch.long), torch.zeros(shape, dtype=torch.long)
    documents = []
    for row, (length, ranges) in enumerate(zip(lengths, trained, strict=True)):
        start = shape[1] - length
        mask[row, start:] = 1
        for low, high in ranges:
            trained_mask[row, start + low : start + high] = 1
        documents.append(
            {
                "input_ids": ids[row, start:],
                "taps": torch.cat([tap[row, start:] for tap in hidden[:-1]], dim=-1),
                "last_hidden": hidden[-1][row, start:],
                "trained": trained_mask[row, start:].bool(),
            }
        )
    return pack_rows(ids, mask, trained_mask, hidden[:-1], hidden[-1], num_passes), documents


# Per case: document lengths and trained ranges. Prompts, tool holes, one-token and empty documents, nothing trained.
RAGGED = ([9, 1, 12, 0, 2, 7], [[(4, 9)], [(0, 1)], [(2, 5), (8, 12)], [], [(0, 2)], []])
SHORT = ([3, 2], [[(0, 3)], [(0, 2)]])
NOTHING_TRAINED = ([6, 4], [[], []])
