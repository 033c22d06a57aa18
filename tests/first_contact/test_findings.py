"""FINDINGS.md holds: each finding names a test that exists, is collected, and is not skipped."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROW = re.compile(r"^\| (1[45]\.\w+) \| (.+) \| (tests/\S+) \|$")
ROWS = [ROW.match(line) for line in (ROOT / "tests/first_contact/FINDINGS.md").read_text("utf-8").splitlines()]
FINDINGS = [(row[1], row[3]) for row in ROWS if row]
NUMBERS = [f"14.{number}" for number in range(1, 21)] + [f"15.{number}" for number in range(1, 11)]

_COLLECT = """
import sys, pytest

class Names:
    def pytest_collection_modifyitems(self, items):
        for item in items:
            left_out = item.get_closest_marker("skip") or item.get_closest_marker("xfail")
            print("LEFT OUT" if left_out else "RUNS", item.nodeid.partition("[")[0], item.nodeid, sep="\\t")

sys.exit(pytest.main(["--collect-only", "-qq", "-p", "no:cacheprovider", *sys.argv[1:]], plugins=[Names()]))
"""


@pytest.fixture(scope="module")
def collected() -> set[str]:
    """Ids of the tests in the files that FINDINGS.md names, with and without their parameters."""
    files = sorted({test.partition("::")[0] for _number, test in FINDINGS})
    command = [sys.executable, "-c", _COLLECT, *files]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line.split("\t") for line in done.stdout.splitlines() if line.startswith("RUNS\t")]
    return {name for line in lines for name in line[1:]}


def test_every_finding_names_a_test_that_runs(collected: set[str]) -> None:
    assert [(number, test) for number, test in FINDINGS if test not in collected] == []


def test_every_number_of_the_two_reviews_has_a_row() -> None:
    assert [number for number in NUMBERS if number not in {found for found, _test in FINDINGS}] == []


def test_every_row_of_the_table_was_understood() -> None:
    text = (ROOT / "tests/first_contact/FINDINGS.md").read_text("utf-8")
    assert len(FINDINGS) == sum(line.startswith("| 1") for line in text.splitlines())
