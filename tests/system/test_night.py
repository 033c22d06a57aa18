"""The short form of `make night`: every trouble once, in an order by seed, and the books agree in the morning."""

from pathlib import Path

import pytest

from tests.night.troubles import TROUBLES
from tests.night.whole import SHORT, whole_night

pytestmark = pytest.mark.system  # five minutes and more


def test_a_whole_night_loses_nothing_and_its_books_agree(tmp_path: Path) -> None:
    record = whole_night(tmp_path / "night", SHORT, seed=1, to=tmp_path / "out")

    assert record.is_clean, record.markdown()
    assert (record.lost, record.doubled, record.wrong, record.leaked, record.left) == (0, 0, 0, 0, 0)
    assert record.unequal == []
    assert {trouble.event for trouble in TROUBLES} <= {row.event for row in record.rows}
    assert record.retried > 0
    assert (tmp_path / "out" / "night.md").read_text("utf-8").count("| ") > len(TROUBLES)
    assert "<svg" in (tmp_path / "out" / "night-work.svg").read_text("utf-8")
    assert "<svg" in (tmp_path / "out" / "night-queues.svg").read_text("utf-8")
