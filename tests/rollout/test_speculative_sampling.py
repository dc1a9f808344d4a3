"""
Sampled rollouts follow the policy's distribution: chi-square of whole completions against exact enumeration.

The expected probabilities come from teacher-forced plain forwards and Transformers' own logits processors; nothing of
the package takes part. Broken acceptance rules must fail the same test with the same number of samples.
"""

import pytest
import torch
from rollout.drafts import ragged_prompts, random_draft
from tiny import tiny_policy
from transformers import LogitsProcessorList
from transformers.generation import logits_process as hf

from trl_codraft.rollout import accept, loop
from trl_codraft.rollout.speculative import speculative_generate


VOCAB, EOS, NEW_TOKENS, SAMPLES = 5, 2, 6, 2500

CALLS = {
    "temperature": {"temperature": 0.7},
    "top_k": {"top_k": 3},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.25},
    "repetition_penalty": {"repetition_penalty": 3.0},
    "plain": {},
}


def processor_list(name, mask):
    value = next(iter(CALLS[name].values()), None)
    makers = {
        "temperature": lambda: hf.TemperatureLogitsWarper(value),
        "top_k": lambda: hf.TopKLogitsWarper(value),
        "top_p": lambda: hf.TopPLogitsWarper(value),
        "min_p": lambda: hf.MinPLogitsWarper(value),
        "repetition_penalty": lambda: hf.RepetitionPenaltyLogitsProcessor(value, (mask == 0).sum(1)),
    }
    return LogitsProcessorList([makers[name]()] if name in makers else [])


@pytest.fixture(scope="module")
def policy():
    return tiny_policy(
        "llama", scale=8.0, vocab_size=VOCAB, hidden_size=16, num_hidden_layers=1, head_dim=4, intermediate_size=16,
        num_attention_heads=2, num_key_value_heads=1,
    )  # fmt: skip


@pytest.fixture(scope="module")
def prompts():
    return ragged_prompts([4, 1], vocab_size=VOCAB, seed=2)


@pytest.fixture(scope="module")
def exact(policy, prompts):
    """Probability of every completion, per processor and prompt: {completion tuple: probability}."""
    cache = {}

    def enumerate_all(name):
        if name not in cache:
            cache[name] = [exact_completions(policy, *prompts, row, name) for row in range(len(prompts[0]))]
        return cache[name]

    return enumerate_all


@torch.no_grad()
def exact_completions(policy, ids, mask, row, name):
    prompt, prompt_mask = ids[row : row + 1], mask[row : row + 1]
    alive, finished = {(): 1.0}, {}
    for _ in range(NEW_TOKENS):
        prefixes = torch.tensor(list(alive), dtype=torch.long).view(len(alive), -1)
        full = torch.cat((prompt.expand(len(alive), -1), prefixes), 1)
        full_mask = torch.cat((prompt_mask.expand(len(alive), -1), torch.ones_like(prefixes)), 1)
        positions = (full_mask.cumsum(1) - 1).clamp(min=0)
        logits = policy(full, attention_mask=full_mask, position_ids=positions).logits[:, -1].float()
        processors = processor_list(name, full_mask)
        probabilities = processors(full, logits).softmax(-1).double().tolist()
        grown = {}
        for (prefix, mass), row_probabilities in zip(alive.items(), probabilities, strict=True):
            for token, probability in enumerate(row_probabilities):
                if probability > 0:
                    target = finished if token == EOS else grown
                    target[(*prefix, token)] = mass * probability
        alive = grown
    return {**finished, **alive}


def sample(policy, draft, prompts, k, name, seed=0, **options):
    """Completions per prompt, each a tuple that ends at EOS."""
    ids, mask = (tensor.repeat_interleave(SAMPLES, 0) for tensor in prompts)
    generator = torch.Generator().manual_seed(seed)
    output = speculative_generate(
        policy, draft, ids, mask, num_draft_tokens=k, generator=generator, do_sample=True, max_new_tokens=NEW_TOKENS,
        **{"top_k": 0, **CALLS[name], **options},
    )  # fmt: skip
    completions = []
    for tokens in output.sequences[:, ids.shape[1] :].tolist():
        completions.append(tuple(tokens[: tokens.index(EOS) + 1] if EOS in tokens else tokens))
    return [completions[:SAMPLES], completions[SAMPLES:]], output.stats


def p_value(expected, completions):
    """Chi-square p-value over completions, rare ones pooled until 8 are expected in a bin."""
    counts = dict.fromkeys(expected, 0)
    for completion in completions:
        if completion not in counts:
            return 0.0  # impossible under the policy
        counts[completion] += 1
    assert abs(sum(expected.values()) - 1) < 1e-5
    bins, pooled, seen = [], 0.0, 0
    for completion in sorted(expected, key=expected.get):
        pooled, seen = pooled + expected[completion] * len(completions), seen + counts[completion]
        if pooled >= 8:
            bins.append((pooled, seen))
            pooled, seen = 0.0, 0
    assert len(bins) > 20
    bins[-1] = (bins[-1][0] + pooled, bins[-1][1] + seen)
    statistic = sum((seen - mean) ** 2 / mean for mean, seen in bins)
    half_df, half_x = (torch.tensor(value / 2, dtype=torch.float64) for value in (len(bins) - 1.0, statistic))
    return float(torch.special.gammaincc(half_df, half_x))


def worst_p_value(policy, prompts, exact, k, name, target_ids=None, seed=0):
    draft = random_draft(policy, seed=3, target_ids=target_ids)
    rows, stats = sample(policy, draft, prompts, k, name, seed)
    assert k == 0 or 0.15 < stats.accept_rate < 0.95  # both outcomes of a verification are exercised
    return min(p_value(expected, row) for expected, row in zip(exact(name), rows, strict=True))


@pytest.mark.parametrize("k", [1, 2, 4])
@pytest.mark.parametrize("target_ids", [None, [0, 2, 3, 4]], ids=["full", "reduced"])
@pytest.mark.parametrize("name", CALLS)
def test_completions_follow_the_policy(policy, prompts, exact, name, target_ids, k):
    assert worst_p_value(policy, prompts, exact, k, name, target_ids) > 1e-3


class Changing:
    """A controller whose draft length changes from round to round, also to 0, by what was kept before."""

    max_draft_tokens = 4

    def __init__(self, turn):
        self.lengths, self.turn = [4, 0, 2, 1, 0, 3], turn
        self.clock = lambda: 0.0
        self.begin = lambda: None
        self.used = set()

    def choose(self, active_rows):
        return self.lengths[self.turn % len(self.lengths)]

    def observe(self, finished):
        self.used.add(max(finished.drafted))
        self.turn += 1 + sum(finished.kept) % 2


@pytest.mark.parametrize("target_ids", [None, [0, 2, 3, 4]], ids=["full", "reduced"])
@pytest.mark.parametrize("graphs", [False, True], ids=["live", "graphs"])
@pytest.mark.parametrize("name", ["plain", "top_p", "repetition_penalty"])
def test_completions_follow_the_policy_while_the_draft_length_changes(
    policy, prompts, exact, cuda_graphs, name, graphs, target_ids
):
    """Few rows a call, so that calls and rows see many sequences of lengths."""
    draft, controllers = random_draft(policy, seed=3, target_ids=target_ids), []
    make = lambda: controllers.append(Changing(len(controllers))) or controllers[-1]  # noqa: E731
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("trl_codraft.rollout.speculative.DraftLengthController", make)
        patch.setattr(f"{__name__}.SAMPLES", 250)
        parts = [sample(policy, draft, prompts, "auto", name, seed, cuda_graphs=graphs) for seed in range(10)]
    rows = [[completion for part, _ in parts for completion in part[row]] for row in range(2)]
    assert set().union(*(controller.used for controller in controllers)) == {0, 1, 2, 3, 4}
    assert min(p_value(expected, row) for expected, row in zip(exact(name), rows, strict=True)) > 1e-3


def test_drawing_follows_the_probabilities_and_never_picks_zero():
    """Against exact probabilities; zeros at the front, in the middle and at the end."""
    p = torch.tensor([0.0, 0.3, 0.0, 0.05, 0.65, 0.0, 0.0]).repeat(20000, 1)
    drawn = torch.bincount(accept.draw(p, torch.Generator().manual_seed(0)), minlength=7)
    assert drawn[p[0] == 0].sum() == 0
    expected = p[0] * len(p)
    inside = expected > 0
    statistic = ((drawn - expected)[inside] ** 2 / expected[inside]).sum()
    assert statistic < 13.8  # chi-square with 2 degrees of freedom at 0.001
    # The largest random number there is, and a row whose sum is rounded.
    for total in (1.0, 0.1, 3.0):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch, "rand", lambda *size, **kwargs: torch.full((1, 1), 1 - 2**-53, dtype=torch.float64))
            assert accept.draw(total * p[:1]) == 4
            patch.setattr(torch, "rand", lambda *size, **kwargs: torch.zeros(1, 1, dtype=torch.float64))
            assert accept.draw(total * p[:1]) == 1


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("k", [0, 2])
def test_policy_that_broke_down_ends_the_rollout_as_in_generate(prompts, k, value):
    policy = tiny_policy("llama", vocab_size=VOCAB)
    draft = random_draft(policy)
    policy.lm_head.weight.data.fill_(value)
    with pytest.raises(RuntimeError, match="inf.*nan"):
        policy.generate(prompts[0], attention_mask=prompts[1], do_sample=True, max_new_tokens=1)
    with pytest.raises(RuntimeError, match="NaN or infinite"):
        speculative_generate(policy, draft, *prompts, num_draft_tokens=k, do_sample=True, max_new_tokens=1)


def test_plain_rounds_follow_the_policy(policy, prompts, exact):
    assert worst_p_value(policy, prompts, exact, 0, "top_p") > 1e-3


MUTANTS = {
    "accept_always": ("accepts", lambda uniform, p, q: torch.ones_like(p, dtype=torch.bool)),
    "accept_where_p_exceeds_q": ("accepts", lambda uniform, p, q: p > q),
    "accept_with_probability_p": ("accepts", lambda uniform, p, q: uniform < p),
    "resample_from_p": ("residual", lambda p, q: p),
    "resample_from_absolute_difference": ("residual", lambda p, q: (p - q).abs()),
}


@pytest.mark.parametrize("mutant", MUTANTS)
@pytest.mark.parametrize("k", [1, 4])
def test_wrong_rules_are_seen(policy, prompts, exact, monkeypatch, mutant, k):
    attribute, replacement = MUTANTS[mutant]
    monkeypatch.setattr(accept, attribute, replacement)
    assert worst_p_value_unchecked(policy, prompts, exact, k) < 1e-6


def test_draft_probabilities_at_another_temperature_are_seen(policy, prompts, exact, monkeypatch):
    original = loop.Rollout._verify

    def hotter(self, *args):
        *others, drafts = args
        if drafts is not None:
            drafts.q = drafts.q.sqrt() / drafts.q.sqrt().sum(-1, keepdim=True).clamp(min=1e-9)
        return original(self, *others, drafts)

    monkeypatch.setattr(loop.Rollout, "_verify", hotter)
    assert worst_p_value_unchecked(policy, prompts, exact, 2) < 1e-6


def test_processor_left_out_of_verification_is_seen(policy, prompts, exact, monkeypatch):
    original = loop.Rollout._verify

    def raw(self, *args):
        kept = self.rule.processors
        self.rule.processors = lambda prefixes, scores: scores
        result = original(self, *args)
        self.rule.processors = kept
        return result

    monkeypatch.setattr(loop.Rollout, "_verify", raw)
    for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty"):
        assert worst_p_value_unchecked(policy, prompts, exact, 2, name) < 1e-6, name


def worst_p_value_unchecked(policy, prompts, exact, k, name="temperature"):
    rows, _ = sample(policy, random_draft(policy, seed=3), prompts, k, name)
    return min(p_value(expected, row) for expected, row in zip(exact(name), rows, strict=True))


def test_generator_makes_rollouts_reproducible_and_leaves_the_global_state_alone(policy, prompts):
    draft = random_draft(policy)

    def run(generator):
        return speculative_generate(
            policy, draft, *prompts, num_draft_tokens=3, generator=generator, do_sample=True, max_new_tokens=20,
        ).sequences  # fmt: skip

    before = torch.get_rng_state()
    first = run(torch.Generator().manual_seed(5))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(first, run(torch.Generator().manual_seed(5)))
    torch.manual_seed(5)
    run(None)
    assert not torch.equal(torch.get_rng_state(), before)


def test_identical_distributions_have_no_residual_to_divide_by():
    p = torch.tensor([[0.25, 0.75, 0.0], [0.5, 0.5, 0.0]])
    assert torch.equal(accept.residual(p, p), p)
    rest = accept.residual(p, torch.tensor([[0.5, 0.5, 0.0], [0.0, 0.5, 0.5]]))
    assert torch.equal(rest, torch.tensor([[0.0, 1.0, 0.0], [1.0, 0.0, 0.0]]))


def test_impossible_token_is_rejected_even_by_a_zero_draw():
    zero, half = torch.zeros(1), torch.full((1,), 0.5)
    assert not accept.accepts(zero, zero, half)
    assert accept.accepts(zero, half, half)


def test_draft_emptied_by_the_processors_falls_back_to_its_own_distribution():
    raw = torch.tensor([[1.0, 2.0, -torch.inf], [1.0, 2.0, -torch.inf], [torch.nan, 1.0, 2.0]])
    processed = torch.tensor([[-torch.inf] * 3, [-torch.inf, 5.0, -torch.inf], [torch.nan, 1.0, 2.0]])
    q = accept.draft_distribution(processed, raw)
    torch.testing.assert_close(q[0], raw[0].softmax(-1))
    assert torch.equal(q[1], torch.tensor([0.0, 1.0, 0.0]))
    torch.testing.assert_close(q[2], torch.full((3,), 1 / 3))


@pytest.mark.parametrize("do_sample", [False, True])
def test_draft_that_returns_nan_costs_only_speed(policy, prompts, exact, do_sample):
    draft = random_draft(policy, seed=3)
    torch.nn.init.constant_(draft.fc.weight, torch.nan)
    if do_sample:
        rows, stats = sample(policy, draft, prompts, 2, "top_p")
        assert min(p_value(expected, row) for expected, row in zip(exact("top_p"), rows, strict=True)) > 1e-3
        return
    plain = policy.generate(prompts[0], attention_mask=prompts[1], do_sample=False, max_new_tokens=9)
    output = speculative_generate(policy, draft, *prompts, num_draft_tokens=2, do_sample=False, max_new_tokens=9)
    assert torch.equal(output.sequences, plain)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("kwargs", [{"eta_cutoff": 1e-3}, {"top_h": 0.5}], ids=["eta", "top_h"])
def test_processors_that_raise_on_broken_scores_never_see_the_drafts(value, kwargs, policy, prompts):
    draft = random_draft(policy, seed=3)
    torch.nn.init.constant_(draft.lm_head.weight, value)
    output = speculative_generate(
        policy, draft, *prompts, num_draft_tokens=2, do_sample=True, max_new_tokens=4, **kwargs
    )
    assert output.stats.drafted > 0
