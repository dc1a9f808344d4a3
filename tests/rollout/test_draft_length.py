"""The rule behind `num_draft_tokens="auto"`."""

import pytest
import torch
from rollout.drafts import OracleDraft, ragged_prompts
from tiny import tiny_policy

from trl_codraft.rollout.controller import DraftLengthController, FixedDraftLength
from trl_codraft.rollout.speculative import SpeculativeDecoder


def simulate(controller, acceptance, seconds, rows=4, rounds=400, seed=0):
    """Rounds of a machine with the given acceptance per position and the given cost; returns the last choices."""
    generator = torch.Generator().manual_seed(seed)
    choices = []
    for _ in range(rounds):
        k = controller.choose(rows)
        hits = torch.rand(rows, max(k, 1), generator=generator) < torch.tensor(acceptance)[: max(k, 1)]
        kept = hits.long().cumprod(1).sum(1).tolist() if k else [0] * rows
        controller.observe(rows, [k] * rows, kept, seconds(k))
        choices.append(k)
    return choices[-23:]


def best(acceptance, seconds):
    def rate(k):
        run, expected = 1.0, 1.0
        for alpha in acceptance[:k]:
            run *= alpha
            expected += run
        return expected / seconds(k)

    return max(range(len(acceptance) + 1), key=rate)


CASES = {
    "good_draft": ([0.9] * 6, lambda k: 1 + 0.1 * k),
    "cheap_draft": ([0.6] * 6, lambda k: 1 + 0.02 * k),
    "expensive_verification": ([0.5] * 6, lambda k: 1 + 0.9 * k),
    "useless_draft": ([0.02] * 6, lambda k: 1 + 0.2 * k),
    "first_position_only": ([0.9, 0.05, 0.05, 0.05, 0.05, 0.05], lambda k: 1 + 0.15 * k),
}


@pytest.mark.parametrize("name", CASES)
def test_settles_on_the_fastest_length(name):
    acceptance, seconds = CASES[name]
    choices = simulate(DraftLengthController(), acceptance, seconds)
    target = best(acceptance, seconds)
    most_common = max(set(choices), key=choices.count)
    assert abs(most_common - target) <= 1
    assert (target == 0) == (most_common == 0)


def test_numbers_of_rows_are_measured_apart():
    controller = DraftLengthController()
    for _ in range(10):
        simulate(controller, [0.7] * 6, lambda k: 1 + 0.05 * k, rows=1, rounds=30)
        simulate(controller, [0.7] * 6, lambda k: 1 + 1.5 * k, rows=32, rounds=30)
    assert controller.choose(1) >= 3
    assert controller.choose(32) == 0


def test_other_lengths_are_tried_now_and_then():
    controller = DraftLengthController()
    choices = {controller.choose(4) for _ in range(200)}
    assert 0 in choices
    assert len(choices) >= 3


def test_state_goes_through_a_checkpoint():
    controller, other = DraftLengthController(), DraftLengthController()
    simulate(controller, [0.9] * 6, lambda k: 1 + 0.1 * k)
    other.load_state_dict(controller.state_dict())
    assert [controller.choose(4) for _ in range(60)] == [other.choose(4) for _ in range(60)]
    FixedDraftLength(3).load_state_dict(FixedDraftLength(3).state_dict())
    assert FixedDraftLength(3).choose(100) == 3
    with pytest.raises(ValueError, match="1..16"):
        DraftLengthController(17)


def test_auto_rolls_out_exactly_and_measures():
    policy = tiny_policy("llama", dtype=torch.float64, scale=3.0, num_hidden_layers=2)
    policy.generation_config.eos_token_id = None
    ids, mask = ragged_prompts([4, 7])
    decoder = SpeculativeDecoder(policy, OracleDraft(policy))
    plain = policy.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=40)
    assert torch.equal(
        decoder.bind(policy.generate)(ids, attention_mask=mask, do_sample=False, max_new_tokens=40), plain
    )
    decoder.close()
    assert decoder.controller.acceptance[0] > 0.6  # the prior, and the oracle is always right
    assert min(decoder.controller.seconds[2].values()) > 0
