"""Sharded policies: every rank runs the same number of forwards, whatever its own rows need."""

from forked_ranks import run_script


def test_sharded_ranks_finish_together_with_their_own_tokens(tmp_path):
    # The ranks themselves compare their tokens with those of the whole policy.
    first, second = run_script("lockstep_worker.py", tmp_path, timeout=150, folder="rollout")
    assert len(first) == 4
    assert first == second
    for run, counted in first:
        assert run == counted > 0
