"""What the pages share: rows made once for each state of the class, and other people's text as plain text."""

from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from desk.backend import Backend, FleetView
from desk.decisions import accept_grade
from desk.fleet import FleetWatch
from grading.reviews import append_override
from tests.support.desk import answer, plan_tiny_class, request_of

pytestmark = pytest.mark.system  # the pages need Streamlit, which comes with the ui extra: so their imports are late

HOSTILE = "\n<script>a</script>&lt;</pre><img src=x onerror=a>\n  indented"


class Read(HTMLParser):
    """The tags and the text that a browser would see."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_data(self, data: str) -> None:
        self.text += data


def test_hostile_text_is_neither_markup_nor_changed() -> None:
    from desk.pages.markup import Markup

    for why, tags in ({}, ["pre"]), ({0: ""}, ["pre", "mark"]), ({0: HOSTILE}, ["pre", "mark", "small"]):
        markup = Markup()
        markup.verbatim(HOSTILE, why)

        read = Read()
        read.feed(markup._repr_html_())

        assert read.tags == tags
        said = HOSTILE if not why.get(0) else f"◂ {HOSTILE}{HOSTILE}"
        assert read.text == f"\n{said}", "a browser drops the first line break of a pre"


def test_rows_are_made_anew_only_when_a_result_or_a_decision_has_come(tmp_path: Path) -> None:
    from desk.pages.shared import Desk

    out, assignment = plan_tiny_class(tmp_path)
    desk = Desk(cast(Backend, SimpleNamespace(request_of=request_of)), FleetWatch(FleetView))
    _, first, _ = desk.rows(out)
    _, again, _ = desk.rows(out)
    assert all(one is other for one, other in zip(first, again, strict=True))

    answer(out, assignment, [1])
    view, graded, _ = desk.rows(out)
    assert [row.state for row in graded] == ["waiting", "graded", "waiting"]

    append_override(out, accept_grade(view.grades[1]))
    assert [row.final.is_reviewed for row in desk.rows(out)[1]] == [False, True, False]


def test_what_is_drawn_is_kept_until_what_it_shows_has_changed_and_only_the_latest() -> None:
    from desk.pages.shared import CACHE_SIZE, Desk

    desk = Desk(cast(Backend, SimpleNamespace(request_of=request_of)), FleetWatch(FleetView))
    made: list[str] = []

    def drawn(key: str, stamp: int) -> str:
        return desk.get_or_make(key, stamp, lambda: made.append(f"{key} {stamp}") or made[-1])  # type: ignore[func-returns-value]

    assert [drawn("a", 1), drawn("a", 1), drawn("a", 2)] == ["a 1", "a 1", "a 2"]
    for number in range(CACHE_SIZE - 1):
        drawn(f"other {number}", 0)
    assert drawn("a", 2) == "a 2"
    drawn("one more", 0)
    drawn("a", 2)
    drawn("other 0", 0)
    assert [each for each in made if each in ("a 2", "other 0 0")] == ["a 2", "other 0 0", "other 0 0"]
