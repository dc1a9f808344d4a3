"""The claims of `stage_worker.py`: what a trainer does with stages, against the whole policy in one process."""

import pytest
from forked_ranks import run_script, succeeded
from stage_worker import CLAIMS


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    return run_script("stage_worker.py", tmp_path_factory.mktemp("stages"), folder="pp")


NAMES = [f"{claim.__name__} {list(settings.values())}" for _, claim, settings in CLAIMS]


@pytest.mark.parametrize("number", range(len(CLAIMS)), ids=NAMES)
def test_on_all_ranks(outcomes, number):
    succeeded(outcomes[number])
