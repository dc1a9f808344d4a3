"""What our own inference proposes where a vLLM server proposed something (golden/proposals.json)."""

import copy

import torch
from golden_models import NUM_DRAFT_TOKENS
from transformers import DynamicCache

from trl_codraft.modeling.taps import TapRecorder


@torch.no_grad()
def propose(policy, draft, tokens, known_counts, position_offset=0):
    """
    Draft tokens after the prefixes of `tokens` of the given lengths. Row p reads the taps at p and the embedding of
    token p + 1 at position p, and predicts token p + 2.
    """
    recorder = TapRecorder(policy, draft.config.tap_layers)
    with recorder.record() as record:
        policy(torch.tensor([tokens]))
    recorder.close()
    embed = policy.get_input_embeddings()
    rows = len(tokens) - 1
    fused = draft.fuse_taps(torch.cat(record.taps, dim=-1))[:, :rows]
    trunk = DynamicCache()
    outputs = draft.step(fused, embed(torch.tensor([tokens[1:]])), torch.arange(rows)[None], trunk)
    chains = []
    for known in known_counts:
        cache = copy.deepcopy(trunk)
        if known <= rows:
            cache.crop(known - 1 - rows)
        hidden = outputs[:, known - 2 : known - 1]
        chain = [draft.target_ids[draft.compute_logits(hidden).argmax(-1)]]
        for step in range(NUM_DRAFT_TOKENS - 1):
            position = torch.tensor([[known - 1 + step + position_offset]])
            hidden = draft.step(draft.feedback(hidden), embed(chain[-1]), position, cache)
            chain.append(draft.target_ids[draft.compute_logits(hidden).argmax(-1)])
        chains.append([int(token) for token in chain])
    return chains


def agreement(policy, draft, rows, **kwargs):
    """(equal, all) over the recorded proposals."""
    equal = total = 0
    for row in rows:
        known_counts = [known for known, _ in row["proposals"]]
        ours = propose(policy, draft, row["prompt"] + row["output"], known_counts, **kwargs)
        equal += sum(mine == theirs for mine, (_, theirs) in zip(ours, row["proposals"], strict=True))
        total += len(ours)
    return equal, total
