"""The rule behind `num_draft_tokens="auto"`, on simulated machines whose best length is known."""

import logging
import random

import pytest
import torch
from rollout.drafts import OracleDraft, ragged_prompts, random_draft
from tiny import tiny_policy

from trl_codraft.rollout.acceptance_rates import AcceptanceRecord
from trl_codraft.rollout.controller import DraftLengthController, FixedDraftLength, Round, row_bucket
from trl_codraft.rollout.drafting import DraftRollout
from trl_codraft.rollout.speculative import SpeculativeDecoder


class Machine:
    """Rounds with a given acceptance per position and a given cost `seconds(rows, k)`; counts what they took."""

    def __init__(self, acceptance, seconds, seed=0):
        self.acceptance, self.seconds = acceptance, seconds
        self.random = random.Random(seed)
        self.choices, self.spent, self.plain = [], 0.0, 0.0
        self.drift = 1.0  # what happens to all costs alike, as when contexts grow

    def run(self, controller, rows=4, rounds=400):
        """One rollout; returns its choices."""
        controller.begin()
        choices, waiting = [], 1
        for _ in range(rounds):
            k = controller.choose(rows)
            kept = [self.kept(k) for _ in range(rows)]
            # The draft's backlog: what it did not read in plain rounds.
            backlog, waiting = k > 0 and waiting > 4, 0 if k else waiting + 1
            time = self.drift * (self.seconds(rows, k) + (0.2 if backlog else 0.0))
            committed = sum(kept) + rows
            controller.observe(Round(rows, [k] * rows, kept, committed, time, backlog))
            self.spent += time
            self.plain += self.drift * self.seconds(rows, 0) * committed / rows
            choices.append(k)
        self.choices += choices
        return choices

    def kept(self, k):
        for position in range(k):
            if self.random.random() >= self.acceptance[position]:
                return position
        return k

    @property
    def speedup(self):
        return self.plain / self.spent


def speedups(acceptance, seconds, rows=4):
    """Expected speed-up of every fixed length."""
    result, run, expected = [], 1.0, 1.0
    for k in range(len(acceptance) + 1):
        result.append(expected * seconds(rows, 0) / seconds(rows, k))
        if k < len(acceptance):
            run *= acceptance[k]
            expected += run
    return result


CASES = {
    "good_draft": ([0.9] * 6, lambda rows, k: 1 + 0.1 * k),
    "cheap_draft": ([0.6] * 6, lambda rows, k: 1 + 0.02 * k),
    "expensive_verification": ([0.5] * 6, lambda rows, k: 1 + 0.9 * k),
    "useless_draft": ([0.02] * 6, lambda rows, k: 1 + 0.2 * k),
    "first_position_only": ([0.9, 0.05, 0.05, 0.05, 0.05, 0.05], lambda rows, k: 1 + 0.15 * k),
    # One more token is dear, the next three are free: measured on a CPU at batch 1.
    "step_then_flat": ([0.8] * 6, lambda rows, k: 1.0 if k == 0 else 2.1 + 0.02 * k),
    "slow_machine": ([0.7] * 6, lambda rows, k: 100.0 * (1 + 0.25 * k)),
}


@pytest.mark.parametrize("rows", [1, 4, 16])
@pytest.mark.parametrize("name", CASES)
def test_comes_close_to_the_best_fixed_length(name, rows):
    acceptance, seconds = CASES[name]
    machine, controller = Machine(acceptance, seconds), DraftLengthController()
    machine.run(controller, rows, 200)
    best = max(speedups(acceptance, seconds, rows))
    machine.spent = machine.plain = 0.0
    late = machine.run(controller, rows, 600)
    assert machine.speedup > 0.93 * best
    most_common = max(set(late), key=late.count)
    assert speedups(acceptance, seconds, rows)[most_common] > 0.93 * best


@pytest.mark.parametrize("extra", [0.05, 0.3, 1.2])
@pytest.mark.parametrize("rows", [1, 4, 16])
def test_useless_draft_costs_little_from_the_first_round(rows, extra):
    """A whole short rollout of a new controller, then longer ones: what is lost is bounded."""
    machine, controller = Machine([0.0] * 6, lambda rows, k: 1 + extra * k), DraftLengthController()
    machine.run(controller, rows, 64)
    assert machine.spent - machine.plain < 6  # plain steps, once in the controller's life
    machine.spent = machine.plain = 0.0
    for _ in range(10):
        machine.run(controller, rows, 64)
    assert machine.speedup > 0.965
    assert machine.choices[-200:].count(0) > 150


def test_recovers_when_the_draft_improves():
    machine, controller = Machine([0.0] * 6, lambda rows, k: 1 + 0.1 * k), DraftLengthController()
    machine.run(controller, rounds=400)
    assert machine.choices[-50:].count(0) > 40
    machine.acceptance = [0.8] * 6
    machine.run(controller, rounds=400)
    late = machine.choices[-100:]
    assert sum(k >= 2 for k in late) > 80


@pytest.mark.parametrize(("first", "then"), [(0.05, 0.9), (0.9, 0.05)], ids=["dearer", "cheaper"])
def test_old_costs_are_forgotten(first, then):
    """Another machine, or another policy behind the same controller: what drafting costs changes for good."""
    machine, controller = Machine([0.6] * 6, lambda rows, k: 1 + first * k), DraftLengthController()
    machine.run(controller, rounds=1000)
    machine.seconds = lambda rows, k: 1 + then * k
    late = machine.run(controller, rounds=1500)[-300:]
    expected = speedups(machine.acceptance, machine.seconds)
    assert expected[max(set(late), key=late.count)] > 0.93 * max(expected)


def test_what_looked_dear_at_first_is_tried_again():
    """The first round of each length takes long: a kernel is loaded, another process runs beside."""
    controller, measured = DraftLengthController(), set()
    machine = Machine([0.6] * 6, lambda rows, k: (1 + 0.1 * k) * (1 if k == 0 or k in measured else 20))
    observe = controller.observe
    controller.observe = lambda done: (observe(done), done.unusual or measured.add(max(done.drafted)))
    late = machine.run(controller, rounds=2500)[-300:]
    expected = speedups(machine.acceptance, machine.seconds)
    assert expected[max(set(late), key=late.count)] > 0.93 * max(expected)


def test_falls_back_when_the_draft_breaks():
    machine, controller = Machine([0.85] * 6, lambda rows, k: 1 + 0.1 * k), DraftLengthController()
    machine.run(controller, rounds=300)
    assert machine.choices[-50:].count(0) < 15
    machine.acceptance = [0.0] * 6
    choices = machine.run(controller, rounds=200)
    assert choices[100:].count(0) > 70
    assert max(choices[100:], key=choices[100:].count) == 0


def test_growing_contexts_do_not_pass_for_dear_drafts():
    """All costs triple within each rollout; their ratios stay."""
    machine, controller = Machine([0.7] * 6, lambda rows, k: 1 + 0.15 * k), DraftLengthController()
    for _ in range(6):
        for step in range(20):
            machine.drift = 1 + 0.1 * step
            controller_begin, controller.begin = controller.begin, lambda: None
            if step == 0:
                controller_begin()
            machine.run(controller, rounds=10)
            controller.begin = controller_begin
    best = max(speedups(machine.acceptance, machine.seconds))
    assert machine.speedup > 0.92 * best
    ratio = controller.cost(4, 3)
    assert abs(ratio - 1.45) < 0.2


def test_a_plain_round_that_was_recorded_is_measured_in_the_next():
    """Where forwards are recorded as graphs, the first round of every length in a rollout is dear."""
    machine, controller = Machine([0.8] * 6, lambda rows, k: 1 + 0.1 * k), DraftLengthController()
    trials = 0
    for _ in range(40):
        controller.begin()
        recorded, tries_plain = set(), False
        for _ in range(60):
            k = controller.choose(4)
            assert k == 0 or not tries_plain
            records = k not in recorded
            recorded.add(k)
            kept = [machine.kept(k) for _ in range(4)]
            seconds = machine.seconds(4, k) + 5.0 * records
            controller.observe(Round(4, [k] * 4, kept, sum(kept) + 4, seconds, unusual=records))
            tries_plain = records and k == 0 and len(recorded) > 1
            trials += tries_plain
    assert trials > 5
    assert machine.seconds(4, 3) == pytest.approx(controller.cost(4, 3), rel=0.1)


def test_numbers_of_rows_are_measured_apart():
    """A batch whose rows finish: speculation pays with few rows only."""
    acceptance = [0.7] * 6
    machine = Machine(acceptance, lambda rows, k: max(1.0, rows * (k + 1) / 8) + 0.03 * k)
    controller = DraftLengthController()
    for _ in range(12):
        controller.begin()
        controller_begin, controller.begin = controller.begin, lambda: None
        late = {rows: machine.run(controller, rows, 20) for rows in (32, 16, 8, 4, 2, 1)}
        controller.begin = controller_begin
    assert late[32].count(0) >= 15
    assert late[16].count(0) >= 15
    assert min(sum(k >= 1 for k in late[2]), sum(k >= 3 for k in late[1])) >= 13


def test_unmeasured_lengths_are_estimated_from_rounds_with_as_many_tokens():
    controller = DraftLengthController()
    for rows, seconds in ((16, 3.0), (4, 1.0)):
        controller.begin()
        for _ in range(20):
            controller.observe(Round(rows, [0] * rows, [0] * rows, rows, seconds))
    assert controller.cost(4, 3) == pytest.approx(3.0 + 3 * 0.03)


def test_row_buckets():
    assert [row_bucket(rows) for rows in (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 13, 17, 25, 33)] == [
        1, 2, 3, 4, 6, 6, 8, 8, 12, 12, 16, 24, 32, 48,
    ]  # fmt: skip


def test_choice_depends_on_finished_rounds_only():
    """Two runs that differ in their last round choose alike until then."""
    machine, one, other = Machine([0.7] * 6, lambda rows, k: 1 + 0.1 * k), *(DraftLengthController() for _ in "ab")
    machine.run(one, rounds=80)
    again = Machine([0.7] * 6, lambda rows, k: 1 + 0.1 * k)
    assert again.run(other, rounds=80) == machine.choices
    assert one.choose(4) == other.choose(4)


def test_state_goes_through_a_checkpoint(tmp_path):
    controller, other = DraftLengthController(), DraftLengthController()
    Machine([0.9] * 6, lambda rows, k: 1 + 0.1 * k).run(controller)
    torch.save(controller.state_dict(), tmp_path / "state.pt")
    other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    machines = [Machine([0.9] * 6, lambda rows, k: 1 + 0.1 * k, seed=3) for _ in "ab"]
    assert machines[0].run(controller, rounds=60) == machines[1].run(other, rounds=60)
    assert machines[1].choices.count(6) > 30  # nothing is learned anew

    fixed = FixedDraftLength(3)
    fixed.load_state_dict(controller.state_dict())
    controller.load_state_dict(fixed.state_dict())
    assert fixed.choose(100) == 3
    with pytest.raises(ValueError, match="1..16"):
        DraftLengthController(17)


def test_report_compares_with_the_simulated_plain_time():
    acceptance, seconds = CASES["good_draft"]
    machine, controller = Machine(acceptance, seconds), DraftLengthController()
    machine.run(controller, rounds=300)
    report = controller.report
    assert report.seconds == pytest.approx(machine.spent, rel=0.05)
    assert report.plain_seconds / report.seconds == pytest.approx(machine.speedup, rel=0.05)
    assert report.predicted_seconds / report.seconds == pytest.approx(machine.speedup, rel=0.1)


def test_predicted_speedup_is_what_was_known_before_the_round():
    controller, promised = DraftLengthController(), 0.0
    for kept in ([0], [0, 0], [2, 2], [3, 0], [3, 3]):
        k = controller.choose(len(kept)) if kept[0] == 0 else 3
        promised += 2.0 * controller.gain(row_bucket(len(kept)), k)
        controller.observe(Round(len(kept), [k] * len(kept), [min(k, n) for n in kept], sum(kept) + len(kept), 2.0))
    assert controller.report.predicted_seconds == pytest.approx(promised)


def alarms(caplog):
    return [record.message for record in caplog.records if "collapsed" in record.message]


@pytest.mark.parametrize("fixed", [True, False], ids=["fixed", "auto"])
def test_collapse_of_acceptance_is_said_once_and_loudly(caplog, fixed):
    controller = FixedDraftLength(3) if fixed else DraftLengthController()
    machine = Machine([0.7] * 6, lambda rows, k: 1 + 0.1 * k)
    with caplog.at_level(logging.WARNING):
        machine.run(controller, rounds=200)
        assert alarms(caplog) == []
        machine.acceptance = [0.0] * 6
        machine.run(controller, rounds=2500)
        assert len(alarms(caplog)) == 1
        for cause in ("weights", "adapter", "taps", "constraint"):
            assert cause in alarms(caplog)[0]


def test_no_alarm_for_a_draft_that_never_was_good(caplog):
    with caplog.at_level(logging.WARNING):
        Machine([0.02] * 6, lambda rows, k: 1 + 0.1 * k).run(FixedDraftLength(3), rounds=800)
    assert alarms(caplog) == []


def test_positions_without_trials_follow_the_one_before():
    record = AcceptanceRecord(3)
    for _ in range(200):
        record.count([1, 1], [1, 0])
    assert record.rates() == pytest.approx([0.5, 0.5, 0.5], abs=0.01)
    for _ in range(400):
        record.count([2, 2], [1, 1])
    first, second, third = record.rates()
    assert first > 0.85
    assert second == third
    assert second < 0.02
    assert record.tokens(2) == pytest.approx(1 + first + first * second)


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
    assert decoder.stats.drafted > 0
    assert decoder.controller.acceptance.rates()[0] > 0.6  # the prior says 0.5, and the oracle is always right
    assert decoder.controller.report.plain_seconds > 0


def test_plain_rounds_in_which_the_draft_reads_its_backlog_are_not_measured(monkeypatch):
    policy = tiny_policy("llama", dtype=torch.float64, scale=3.0, num_hidden_layers=2)
    policy.generation_config.eos_token_id = None
    ids, mask = ragged_prompts([4, 7])
    decoder = SpeculativeDecoder(policy, OracleDraft(policy))
    reads, rounds, original = [], [], DraftRollout._catch_up
    monkeypatch.setattr(decoder.controller, "choose", lambda rows: 0)
    monkeypatch.setattr(DraftRollout, "_catch_up", lambda self: (reads.append(len(rounds)), original(self)))
    monkeypatch.setattr(decoder.controller, "observe", rounds.append)
    decoder.bind(policy.generate)(ids, attention_mask=mask, do_sample=False, max_new_tokens=90)
    decoder.close()
    assert reads == [32, 65]
    assert [number for number, finished in enumerate(rounds) if finished.unusual] == reads


@pytest.mark.parametrize("good", [True, False])
def test_loop_and_controller_on_a_simulated_clock(good):
    """Real rollouts; the clock advances by a known cost per policy forward, so the best length is known."""
    policy = tiny_policy("llama", dtype=torch.float64, scale=3.0, num_hidden_layers=2)
    policy.generation_config.eos_token_id = None
    ids, mask = ragged_prompts([4, 7])
    decoder = SpeculativeDecoder(policy, OracleDraft(policy) if good else random_draft(policy))
    now = [0.0]
    decoder.controller.clock = lambda: now[0]

    def advance(module, args, kwargs):
        # The oracle runs the policy, too, without a cache: that costs nothing here.
        if kwargs.get("use_cache"):
            now[0] += 1 + 0.2 * (kwargs["input_ids"].shape[1] - 1)

    hook = policy.register_forward_pre_hook(advance, with_kwargs=True)
    for _ in range(6):
        decoder.bind(policy.generate)(ids, attention_mask=mask, do_sample=False, max_new_tokens=60)
    decoder.stats.reset()
    start = now[0]
    decoder.bind(policy.generate)(ids, attention_mask=mask, do_sample=False, max_new_tokens=60)
    hook.remove()
    decoder.close()
    speedup = 60 / (now[0] - start)
    if good:
        assert decoder.controller.cost(2, 4) == pytest.approx(1.8, abs=0.01)
        assert speedup > 0.75 * 7 / 2.2  # the largest length, with a prefill and a short last round
    else:
        assert speedup > 0.95
