import os

import pytest

from trl_suite.run import Refusal, compare, main, read_refusals


PASSED = {"outcome": "passed", "message": ""}
REFUSED = {"outcome": "failed", "message": "x.py:1\nE   ValueError: a processor. Set `use_draft=False`"}
CRASHED = {"outcome": "failed", "message": "x.py:1\nE   KeyError: 'tool_mask'"}
LISTED = {"t": Refusal("t", "VLM policies (processor): raise", "use_draft=False")}


def test_pass_with_both_is_no_problem():
    assert compare({"t": PASSED}, {"t": PASSED}, {}) == []


def test_failure_with_ours_only_is_a_problem_that_names_the_error():
    (problem,) = compare({"t": PASSED}, {"t": CRASHED}, {})
    assert "KeyError: 'tool_mask'" in problem


@pytest.mark.parametrize("outcome", ["skipped", "failed"])
def test_what_does_not_pass_with_the_original_says_nothing(outcome):
    assert compare({"t": {"outcome": outcome, "message": ""}}, {"t": CRASHED}, {}) == []


def test_test_that_ours_skips_or_loses_is_a_problem():
    assert len(compare({"t": PASSED}, {"t": {"outcome": "skipped", "message": ""}}, {})) == 1
    assert len(compare({"t": PASSED}, {}, {})) == 1


def test_listed_refusal_is_accepted_with_its_own_error_only():
    assert compare({"t": PASSED}, {"t": REFUSED}, LISTED) == []
    assert "not with" in compare({"t": PASSED}, {"t": CRASHED}, LISTED)[0]


def test_listed_refusal_that_passes_is_a_problem():
    assert "but it passes" in compare({"t": PASSED}, {"t": PASSED}, LISTED)[0]


def test_refusals_are_read_and_malformed_lines_raise(tmp_path):
    path = tmp_path / "refusals.txt"
    path.write_text("# comment\n\nA::b[c-0.5] | a row: raise, set `x` | some words\n")
    assert read_refusals(path) == {"A::b[c-0.5]": Refusal("A::b[c-0.5]", "a row: raise, set `x`", "some words")}
    path.write_text("A::b | a row\n")
    with pytest.raises(ValueError, match="test . row . words"):
        read_refusals(path)


@pytest.mark.trl
@pytest.mark.timeout(0)
def test_trl_own_tests_pass():
    if "TRL_TESTS" not in os.environ:
        pytest.skip("TRL_TESTS is not set to the tests folder of a checkout of TRL")
    assert main(["--tests", os.environ["TRL_TESTS"], "--workers", "2"]) == 0
