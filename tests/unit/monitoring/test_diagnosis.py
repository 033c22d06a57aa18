"""The six situations of the runbook, read back from their table: what it shows is what the diagnosis needs and says."""

import re
from pathlib import Path

import pytest

from monitoring.dashboards.panels import PANELS
from tests.support.diagnosis import SITUATIONS, diagnose

DOCS = Path(__file__).resolve().parents[3] / "docs"
RUNBOOK = (DOCS / "how-to/runbook.md").read_text()
TABLE = (DOCS / "measurements/2026-11-21-situations.md").read_text()
ROWS = [[cell.strip() for cell in line.strip("|").split("|")] for line in TABLE.splitlines() if line.startswith("| ")]
HEADINGS, VERDICTS = ROWS[0][1:], ROWS[-1][1:]


def column(situation: str) -> dict[str, dict[str, float]]:
    """The panels of one situation, as the table has them; the model is called m."""
    place = HEADINGS.index(situation) + 1
    return {row[0]: dict(_series(row[place])) for row in ROWS[1:-1]}


def _series(cell: str) -> list[tuple[str, float]]:
    found = (re.fullmatch(r"(?:(.*) )?([\d.,]+)", part) for part in cell.split("<br>"))
    return [(f"m {one[1]}" if one[1] else "m", float(one[2].replace(",", ""))) for one in found if one]


def test_the_table_has_the_six_and_only_panels_that_exist() -> None:
    assert sorted(HEADINGS) == sorted(SITUATIONS)
    assert {row[0] for row in ROWS[1:-1]} <= {panel.title for panel in PANELS}


@pytest.mark.parametrize("situation", SITUATIONS)
def test_a_situation_is_named_by_what_the_runbook_shows_of_it(situation: str) -> None:
    assert diagnose(column(situation)) == situation
    assert VERDICTS[HEADINGS.index(situation)] == situation


def test_the_runbook_says_what_to_do_in_each() -> None:
    for situation in SITUATIONS:
        assert f"- **{situation}**: " in RUNBOOK


def test_an_old_queue_with_idle_slots_is_no_bottleneck() -> None:
    seen = column("decode-bound")
    assert diagnose(seen | {"Decode slots busy, share": {"m": 0.1}}) == "healthy"
