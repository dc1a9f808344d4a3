"""Rollouts whose forwards are recorded once and replayed: they return what `generate` returns."""

import copy

import pytest
import torch
from grpo_runs import assert_same_run, codraft_trainer
from rollout.drafts import OracleDraft, ragged_prompts, random_draft
from rollout.graphs_on_cpu import FakeDevice
from rollout.test_speculative_policies import FAMILIES, family_policy
from tiny import tiny_policy

from trl_codraft.rollout import loop, speculative, static_shapes
from trl_codraft.rollout.speculative import SpeculativeDecoder, speculative_generate
from trl_codraft.rollout.static_shapes import LiveSteps, StaticSteps, padded, steps_for


LENGTHS = [9, 2, 6, 4, 7]


@pytest.fixture(scope="module")
def policy():
    policy = tiny_policy("llama", dtype=torch.float64, scale=3.0, num_hidden_layers=2)
    policy.generation_config.eos_token_id = None
    return policy


class SimilarDraft(OracleDraft):
    """Proposes what a policy with slightly other weights would say: often, but not always, the same."""

    def __init__(self, policy):
        super().__init__(copy.deepcopy(policy))
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for parameter in self.policy.model.layers.parameters():
                parameter += 0.01 * torch.randn(parameter.shape, generator=generator)

    def logits_of(self, ids):
        # With a mask of its own, or Transformers asks the host whether it needs one.
        hidden = torch.full((ids.shape[1],) * 2, -torch.inf, dtype=torch.float64).triu(1)
        mask = hidden.expand(len(ids), 1, -1, -1)
        return self.policy(ids, attention_mask=mask, use_cache=False).logits


def generated(policy, draft, cuda_graphs, ids, mask, **kwargs):
    torch.manual_seed(5)
    return speculative_generate(policy, draft, ids, mask, cuda_graphs=cuda_graphs, **kwargs)


@pytest.mark.parametrize("name", FAMILIES)
def test_family_returns_what_generate_returns(name, cuda_graphs):
    policy = family_policy(name)
    if hasattr(policy.config, "num_experts_per_tok"):
        policy.set_experts_implementation("batched_mm")  # the eager one asks the host which experts are hit
    ids, mask = ragged_prompts([9, 2, 6], seed=1)
    plain = policy.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=14)
    output = generated(
        policy, random_draft(policy), True, ids, mask, num_draft_tokens=3, do_sample=False, max_new_tokens=14
    )
    assert torch.equal(output.sequences, plain)
    assert sum(graph.replays for graph in cuda_graphs) > 0


@pytest.mark.parametrize("k", [0, 1, 4])
def test_unequal_acceptance_and_ends_return_what_generate_returns(policy, k, cuda_graphs, monkeypatch):
    """Rows leave at different times and outgrow several numbers of slots, so batches are padded in every way."""
    monkeypatch.setattr(static_shapes, "SLOT_MULTIPLE", 8)
    for module in (loop, speculative):
        monkeypatch.setattr(module, "INITIAL_NEW_SLOTS", 4)
    ids, mask = ragged_prompts(LENGTHS, seed=1)
    free = policy.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=24)[:, ids.shape[1] :]
    ends = [int(free[0, 6]), int(free[1, 15]), int(free[3, 20])]
    call = {"do_sample": False, "max_new_tokens": 24, "eos_token_id": ends, "pad_token_id": 0}
    plain = policy.generate(ids, attention_mask=mask, **call)
    output = generated(policy, SimilarDraft(policy), True, ids, mask, num_draft_tokens=k, **call)
    assert torch.equal(output.sequences, plain)
    live = generated(policy, SimilarDraft(policy), False, ids, mask, num_draft_tokens=k, **call)
    assert output.stats == live.stats
    if k:
        assert 0.2 < output.stats.accept_rate < 0.98
    assert sum(graph.replays for graph in cuda_graphs) > 10


@pytest.mark.parametrize("vocabulary", [None, range(0, 104, 2)])
def test_sampled_tokens_are_those_of_live_forwards(policy, vocabulary, cuda_graphs):
    ids, mask = ragged_prompts(LENGTHS, seed=2)
    draft = random_draft(policy, target_ids=None if vocabulary is None else list(vocabulary))
    call = {"num_draft_tokens": 3, "do_sample": True, "temperature": 0.9, "max_new_tokens": 20}
    live = generated(policy, draft, False, ids, mask, **call)
    recorded = generated(policy, draft, True, ids, mask, **call)
    assert torch.equal(recorded.sequences, live.sequences)
    assert recorded.stats == live.stats
    assert 0 < live.stats.accepted < live.stats.drafted


def test_the_root_of_a_chain_survives_it(cuda_graphs, monkeypatch):
    """In fp32, where the draft's hidden states and scores are left in one place."""
    policy = tiny_policy("llama", scale=3.0)
    propose, chains = loop.DraftRollout.propose, []

    def checked(self, counts, choose):
        self._catch_up()
        before = self._root_hidden.clone()
        tokens = propose(self, counts, choose)
        assert torch.equal(self._root_hidden, before)
        chains.append(tokens)
        return tokens

    monkeypatch.setattr(loop.DraftRollout, "propose", checked)
    ids, mask = ragged_prompts([5, 5, 3, 2])
    generated(policy, random_draft(policy), True, ids, mask, num_draft_tokens=3, do_sample=False, max_new_tokens=20)
    assert len(chains) > 5


def test_each_shape_is_recorded_once_and_replayed_from_then_on(policy, cuda_graphs):
    ids, mask = ragged_prompts([5])
    ids, mask = ids.repeat(4, 1), mask.repeat(4, 1)  # equal rows leave together
    call = {"num_draft_tokens": 3, "do_sample": False, "max_new_tokens": 40}
    output = generated(policy, random_draft(policy), True, ids, mask, **call)
    rounds = output.stats.policy_forwards - 1
    assert rounds > 30
    # Per round one policy forward, one reading of true rows (the prompt's is not recorded), one score, two chained
    # steps; in the last rounds, which may draft 2, 1 and 0 tokens, fewer.
    assert len(cuda_graphs) <= 4 + 4 + 1 + 1
    calls = sum(graph.replays + 1 for graph in cuda_graphs)
    assert 5 * rounds - 10 <= calls <= 5 * rounds


def test_new_weights_are_read_by_the_next_rollout(policy, cuda_graphs):
    policy, draft = copy.deepcopy(policy), random_draft(policy)
    decoder = SpeculativeDecoder(policy, draft, num_draft_tokens=2, cuda_graphs=True)
    generate = decoder.bind(policy.generate)
    ids, mask = ragged_prompts([4, 6])
    call = {"attention_mask": mask, "do_sample": False, "max_new_tokens": 12}
    before = generate(ids, **call)
    for parameter in policy.parameters():
        parameter.data = -parameter.data  # at another address
    after = generate(ids, **call)
    decoder.close()
    assert torch.equal(after, policy.generate(ids, **call))
    assert not torch.equal(after, before)


def test_hidden_states_for_training_survive_later_replays(policy, cuda_graphs):
    ids, mask = ragged_prompts([4, 6])
    traces = []
    for wanted in (False, True):
        decoder = SpeculativeDecoder(policy, random_draft(policy), num_draft_tokens=2, cuda_graphs=wanted)
        with decoder.recording() as trace:
            decoder.bind(policy.generate)(ids, attention_mask=mask, do_sample=False, max_new_tokens=12)
        decoder.close()
        traces.append(trace)
    for row, length in enumerate((16, 18)):
        for live, recorded in zip(traces[0].row(row, length), traces[1].row(row, length), strict=True):
            torch.testing.assert_close(recorded, live, rtol=1e-10, atol=1e-12)


def test_captures_are_on_the_device_of_the_policy(policy, cuda_graphs, monkeypatch):
    """Elsewhere than where its kernels run a graph stays empty, and replays leave the outputs of the capture."""
    captures, graph = [], torch.cuda.graph

    def note(*args, **kwargs):
        captures.append((FakeDevice.current, args[2] if len(args) > 2 else kwargs.get("stream")))
        return graph(*args, **kwargs)

    monkeypatch.setattr(torch.cuda, "graph", note)
    ids, mask = ragged_prompts([4, 6])
    generated(policy, random_draft(policy), True, ids, mask, num_draft_tokens=2, max_new_tokens=12)
    assert set(captures) == {(policy.device, ("stream", policy.device))}


def test_a_policy_that_reads_values_on_the_host_is_refused(policy, cuda_graphs):
    policy = copy.deepcopy(policy)
    policy.model.layers[0].register_forward_pre_hook(lambda module, args: args[0].sum().item() and None)
    ids, mask = ragged_prompts([4, 6])
    with pytest.raises(RuntimeError, match="cannot be recorded as a CUDA graph.*not permitted.*graphs=False"):
        generated(policy, random_draft(policy), True, ids, mask, num_draft_tokens=2, max_new_tokens=12)


def test_rounds_that_record_are_not_measured(policy, cuda_graphs):
    """Recording takes long: a length would look dear for it."""
    decoder = SpeculativeDecoder(policy, random_draft(policy), cuda_graphs=True)
    seen = []
    observe = decoder.controller.observe
    decoder.controller.observe = lambda finished: (seen.append((finished, len(cuda_graphs))), observe(finished))
    ids, mask = ragged_prompts([4, 6])
    decoder.bind(policy.generate)(ids, attention_mask=mask, do_sample=False, max_new_tokens=40)
    decoder.close()
    counts = [0, *(count for _, count in seen)]
    recorded = [later > earlier for earlier, later in zip(counts, counts[1:], strict=False)]
    assert set(recorded) == {True, False}
    assert all(finished.unusual for (finished, _), new in zip(seen, recorded, strict=True) if new)
    assert not all(finished.unusual for finished, _ in seen)


def test_sizes_are_few_and_hold_what_they_are_asked_for():
    steps = StaticSteps(None)
    for count in range(1, 4097):
        assert count <= steps.slots(count, limit=4096) <= min(4096, max(1.25 * count, count + 255))
    assert len({steps.slots(count, 1 << 18) for count in range(1, 1 << 18, 7)}) < 50
    assert all(count <= steps.rows(count) <= 1.5 * count for count in range(1, 200))


def test_padding_keeps_what_was_there():
    tensor = torch.arange(6).view(2, 3)
    wide = padded(tensor, 3, 4, fill=-1)
    assert wide.tolist() == [[0, 1, 2, -1], [3, 4, 5, -1], [-1, -1, -1, -1]]
    assert padded(tensor, 2) is tensor


def test_other_devices_and_sharded_policies_are_refused(policy, monkeypatch):
    assert type(steps_for(torch.device("cpu"), False)) is LiveSteps
    ids, mask = ragged_prompts([4, 6])
    with pytest.raises(ValueError, match="needs a CUDA device; the policy is on cpu"):
        speculative_generate(policy, random_draft(policy), ids, mask, cuda_graphs=True, max_new_tokens=4)
    monkeypatch.setattr(static_shapes, "StaticSteps", None)
    with pytest.raises(ValueError, match="sharded policy"):
        speculative_generate(
            policy, random_draft(policy), ids, mask, cuda_graphs=True, synced_gpus=True, max_new_tokens=4
        )


def test_a_training_run_is_the_one_with_live_forwards(tmp_path, cuda_graphs, monkeypatch):
    # Graphs are replayed on the CPU here, which a run of a user refuses.
    monkeypatch.setattr("trl_codraft.grpo.rollouts.refuse_cuda_graphs_elsewhere", lambda run: None)
    runs = []
    for wanted in (False, True):
        policy = tiny_policy("llama", dtype=torch.float64, scale=3.0)
        trainer = codraft_trainer(tmp_path, policy, rollout_cuda_graphs=wanted, draft_pretrain_steps=1)
        trainer.train()
        runs.append(trainer)
    assert_same_run(*runs)
    assert sum(graph.replays for graph in cuda_graphs) > 10


def test_engines_record_their_own_graphs(tmp_path):
    with pytest.raises(ValueError, match="`rollout_cuda_graphs=True` is for rollouts without vLLM"):
        codraft_trainer(tmp_path, rollout_cuda_graphs=True, use_vllm=True)
