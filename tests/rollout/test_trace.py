"""Hidden states that a rollout leaves behind, against a separate forward over its tokens."""

import pytest
import torch
from rollout.drafts import ragged_prompts, random_draft
from tiny import tiny_policy

from trl_codraft.modeling.taps import TapRecorder
from trl_codraft.rollout.speculative import SpeculativeDecoder


@pytest.fixture(scope="module")
def policy():
    return tiny_policy("llama", dtype=torch.float64, scale=2.0)


@pytest.mark.parametrize("k", [0, 1, 4])
def test_every_token_but_the_last_has_the_states_of_a_separate_forward(policy, k):
    """Ragged prompts, rejected and accepted tokens, rows that leave at different times."""
    draft = random_draft(policy, scale=1.5)
    prompts = [6, 1, 4, 9]
    ids, mask = ragged_prompts(prompts, seed=1)
    decoder = SpeculativeDecoder(policy, draft, num_draft_tokens=k, generator=torch.Generator().manual_seed(0))
    with decoder.recording() as trace:
        output = decoder.bind(policy.generate)(
            ids, attention_mask=mask, do_sample=True, temperature=3.0, top_k=0, max_new_tokens=24,
            eos_token_id=list(range(3, 12)), pad_token_id=0,
        )  # fmt: skip
    decoder.close()
    assert k == 0 or 0 < decoder.stats.accepted < decoder.stats.drafted
    recorder, lengths = TapRecorder(policy, draft.config.tap_layers), []
    for row, (prompt, tokens) in enumerate(zip(prompts, output[:, ids.shape[1] :].tolist(), strict=True)):
        ends = [index for index, token in enumerate(tokens) if token in range(3, 12)]
        length = prompt + (ends[0] + 1 if ends else len(tokens))
        lengths.append(length)
        with torch.no_grad(), recorder.record() as record:
            policy(output[row : row + 1, ids.shape[1] - prompt :][:, :length], use_cache=False)
        taps, last_hidden = trace.row(row, length)
        torch.testing.assert_close(taps[:-1], torch.cat(record.taps, -1)[0, :-1], rtol=0, atol=1e-10)
        torch.testing.assert_close(last_hidden[:-1], record.last_hidden[0, :-1], rtol=0, atol=1e-10)
        assert taps.shape[0] == last_hidden.shape[0] == length
        assert taps[-1].abs().max() == last_hidden[-1].abs().max() == 0
    recorder.close()
    assert len(set(lengths)) == len(lengths)


def test_a_row_that_was_not_read_to_its_end_and_a_second_call_are_refused(policy):
    ids, mask = ragged_prompts([4, 2])
    decoder = SpeculativeDecoder(policy, random_draft(policy), num_draft_tokens=2)
    generate = decoder.bind(policy.generate)
    call = {"attention_mask": mask, "do_sample": False, "max_new_tokens": 5, "eos_token_id": None}
    with decoder.recording() as trace:
        generate(ids, **call)
        with pytest.raises(RuntimeError, match="one call"):
            generate(ids, **call)
    trace.row(0, 9)
    with pytest.raises(RuntimeError, match="row 0, which has 30 tokens"):
        trace.row(0, 30)
    generate(ids, **call)  # nothing is kept outside
    decoder.close()
