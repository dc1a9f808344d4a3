"""
Brings the microbatches of a pipeline step to one shape.

A pipeline microbatch is one whole GRPO microbatch as its padded rows `(B, S)`, prompts on the left and completions on
the right, as TRL runs it: every attention implementation, window and mask of the policy stays what it is without a
pipeline. (Packed rows `[1, T]` need block-diagonal masks, which are dense without a kernel for them. Context-parallel
shards are packed, and run through the same pipeline as rows with `B = 1`.)

Shapes: `B` rows, `P` prompt columns, `C` completion columns, `S = P + C`.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.nn import functional as F


# Columns are rounded up to a multiple of this, so that few shapes occur and buffers are reused.
BUCKET = 64


class PaddedMicrobatch(NamedTuple):
    """
    The rows of a GRPO microbatch.

    Args:
        input_ids (`torch.LongTensor` of shape `(B, S)`), attention_mask (`torch.LongTensor` of shape `(B, S)`):
            Prompts padded on the left, completions on the right.
        completion_length (`int`):
            `C`.
    """

    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    completion_length: int


def pad_microbatches(
    microbatches: Sequence[PaddedMicrobatch], *, bucket: int = BUCKET, pad_token_id: int = 0
) -> list[PaddedMicrobatch]:
    """
    Brings microbatches to a common shape: prompts are padded further on the left, completions on the right, and
    missing rows (the last batch of an evaluation) repeat the first.

    Args:
        microbatches (`Sequence[PaddedMicrobatch]`):
            In the order of the schedule. All ranks of the pipeline pass the same.
        bucket (`int`, *optional*, defaults to `64`):
            `S` becomes a multiple of this.
        pad_token_id (`int`, *optional*, defaults to `0`):
            Id of added columns.

    Returns:
        `list[PaddedMicrobatch]`: of one shape. The values of a microbatch's own tokens are the first of its `B` rows
        and the first of its `C` completion columns.
    """
    rows = max(len(batch.input_ids) for batch in microbatches)
    completion = max(batch.completion_length for batch in microbatches)
    prompt = max(batch.input_ids.shape[1] - batch.completion_length for batch in microbatches)
    prompt += -(prompt + completion) % bucket
    padded = []
    for batch in microbatches:
        left = prompt - (batch.input_ids.shape[1] - batch.completion_length)
        sides = (left, completion - batch.completion_length)
        repeat = torch.arange(rows, device=batch.input_ids.device)
        repeat[len(batch.input_ids) :] = 0
        ids = F.pad(batch.input_ids, sides, value=pad_token_id)[repeat]
        mask = F.pad(batch.attention_mask, sides, value=0)[repeat]
        padded.append(PaddedMicrobatch(ids, mask, completion))
    return padded
