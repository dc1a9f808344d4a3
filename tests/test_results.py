"""Results of benchmarks say at which commit they were made."""

import re
from pathlib import Path

import pytest


RESULTS = sorted((Path(__file__).resolve().parents[1] / "benchmarks" / "results").glob("*.txt"))


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_a_result_names_its_commit_in_its_first_line(path):
    first = path.read_text().splitlines()[0]
    assert re.match(r"(Made at commits?|commit) [0-9a-f]{7,40}\b", first), first


def test_there_are_results():
    assert len(RESULTS) > 15
