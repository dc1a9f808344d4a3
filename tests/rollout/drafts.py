"""Drafts with known behaviour, and ragged prompts, for the rollout tests."""

from types import SimpleNamespace

import torch
from torch import nn

from trl_codraft.modeling.configuration_eagle3 import Eagle3DraftConfig
from trl_codraft.modeling.modeling_eagle3 import Eagle3DraftModel


def random_draft(policy, seed=0, scale=1.0, target_ids=None, **overrides):
    """A draft with random weights: it is almost always wrong when greedy, and has its own opinion when sampling."""
    if target_ids is not None:
        overrides["draft_vocab_size"] = len(target_ids)
    draft = Eagle3DraftModel(Eagle3DraftConfig.from_policy(policy.config, **overrides)).to(policy.dtype)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in draft.parameters():
            if parameter.dim() > 1:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale * parameter.shape[1] ** -0.5)
    if target_ids is not None:
        draft.set_vocab(torch.tensor(target_ids))
    return draft


class OracleDraft(nn.Module):
    """
    A draft that proposes what the policy itself would say after the text it can see in *its own cache*: it stores
    token ids as keys (slot r: x_r and x_{r+1}) and runs the policy on them. If the loop misplaces, forgets or keeps a
    stale draft row anywhere, it proposes something else and acceptance drops below 1.

    `corrupt(ids, length)` returning True makes the proposal after `ids[:length]` wrong on purpose.
    """

    def __init__(self, policy, corrupt=None, max_position_embeddings=256, target_ids=None):
        super().__init__()
        self.__dict__["policy"] = policy
        vocab_size = policy.config.vocab_size
        self.corrupt = corrupt
        self.target_ids = torch.arange(vocab_size) if target_ids is None else torch.tensor(list(target_ids))
        self.config = SimpleNamespace(
            vocab_size=vocab_size,
            draft_vocab_size=len(self.target_ids),
            tap_layers=[0],
            max_position_embeddings=max_position_embeddings,
        )

    def fuse_taps(self, taps):
        return taps

    def feedback(self, hidden):
        return hidden

    def compute_logits(self, hidden):
        return hidden[..., self.target_ids].float()

    def logits_of(self, ids):
        return self.policy(ids, use_cache=False).logits

    def _ids(self, embeds):
        table = self.policy.get_input_embeddings().weight
        return torch.cdist(embeds.double(), table.double()).argmin(-1)

    def step(self, hidden, token_embeds, position_ids, cache, attention_mask, columns=None):
        following = self._ids(token_embeds)
        true_row = hidden.shape[-1] == token_embeds.shape[-1]
        current = self._ids(hidden) if true_row else torch.zeros_like(following)
        store = torch.stack((current, following), -1)[:, None].double()
        known, _ = cache.update(store, store, 0)
        ids = torch.cat((known[:, 0, :1, 0], known[:, 0, :, 1]), 1).long()
        logits = self.logits_of(ids.contiguous())
        rows = torch.arange(len(ids))[:, None]
        outputs = logits[rows, position_ids + 1]
        if self.corrupt is not None:
            for row in range(outputs.shape[0]):
                for column in range(outputs.shape[1]):
                    if self.corrupt(ids[row], int(position_ids[row, column]) + 2):
                        best = outputs[row, column].argmax()
                        outputs[row, column, best] = outputs[row, column].min() - 1
        return outputs if columns is None else outputs[rows, columns[:, None]]


def ragged_prompts(lengths, vocab_size=104, seed=0, columns=None):
    """Left-padded random prompts: ids and mask `(B, columns)`; pads are 0."""
    columns = columns or max(lengths)
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, vocab_size, (len(lengths), columns), generator=generator)
    mask = torch.ones_like(ids)
    for row, length in enumerate(lengths):
        mask[row, : columns - length] = 0
    return ids * mask, mask


def shared_prompts(beginning, rests, repeats=1, seed=0, vocab_size=104):
    """Prompts that begin with the same tokens: left-padded ids and mask, each `repeats` times in a row."""
    generator = torch.Generator().manual_seed(seed)
    stem = torch.randint(3, vocab_size, (beginning,), generator=generator)
    columns = beginning + max(rests)
    ids = torch.zeros(len(rests), columns, dtype=torch.long)
    for row, rest in enumerate(rests):
        tail = torch.randint(3, vocab_size, (rest,), generator=generator)
        ids[row, columns - beginning - rest :] = torch.cat((stem, tail))
    ids = ids.repeat_interleave(repeats, 0)
    return ids, (ids != 0).long()
