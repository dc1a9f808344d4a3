"""Padded microbatches of a pipeline step: each computes what it would alone."""

import copy

import pytest
import torch
from tiny import tiny_policy

from trl_codraft.cp.rotary import rotary_by_length
from trl_codraft.grpo.pipeline_microbatches import MemberMicrobatch, PaddedStep
from trl_codraft.pp.stages.view import StageView


DYNAMIC = {
    "max_position_embeddings": 8,
    "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0},
}


def microbatch(prompt_length, completion_length):
    generator = torch.Generator().manual_seed(prompt_length)
    tensors = {}
    for name, length in (("prompt", prompt_length), ("completion", completion_length)):
        tensors[f"{name}_ids"] = torch.randint(3, 90, (2, length), generator=generator)
        tensors[f"{name}_mask"] = torch.ones(2, length, dtype=torch.long)
    tensors["prompt_mask"][1, :1] = tensors["completion_mask"][0, -1:] = 0
    return MemberMicrobatch(0, tensors)


@pytest.mark.parametrize("rope", [{}, DYNAMIC])
def test_hidden_states_are_those_of_a_microbatch_alone_whatever_ran_before(rope):
    policy, microbatches = (
        tiny_policy("llama", dtype=torch.float64, scale=3.0, **rope),
        [microbatch(30, 9), microbatch(5, 7)],
    )
    fresh = copy.deepcopy(policy)
    rows = PaddedStep(microbatches, pad_token_id=0, rotary=rotary_by_length(policy))
    stages = [StageView(policy, (2, 2), index, context=rows.forward_of) for index in range(2)]
    for number, inputs in enumerate(rows.inputs()):
        hidden = inputs["input_ids"]
        for stage in stages:
            # What the rank of a stage did before is its own affair: here a longer batch, on the second one alone.
            if stage.is_last:
                policy(input_ids=torch.ones(1, 60, dtype=torch.long))
            stage.microbatch = number
            hidden = stage(hidden, attention_mask=inputs["attention_mask"], position_ids=inputs["position_ids"])
        ids, mask = microbatches[number].input_ids, microbatches[number].attention_mask
        expected = copy.deepcopy(fresh)(input_ids=ids, attention_mask=mask).logits
        real = mask.bool()
        torch.testing.assert_close(rows.keep_states(number, hidden)[real], expected[real], rtol=1e-9, atol=1e-9)
