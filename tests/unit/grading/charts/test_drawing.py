"""Pictures are whole SVG, have words for those who see none, hold no markup of others, and show what happened."""

import re
from xml.etree import ElementTree

import pytest

from grading.charts import runs
from grading.charts.drawing import Bar, Picture, Span, columns, lines, points, spans
from messages.jobs import DecodeReport, JobResult, PrefillReport

HOSTILE = '<script>"&</script>'
SVG = "{http://www.w3.org/2000/svg}"


def elements(picture: Picture, kind: str) -> list[ElementTree.Element]:
    return list(ElementTree.fromstring(picture.file()).iter(f"{SVG}{kind}"))


def result(number: int, taken_s: float, stored_s: float, decoded_s: float, ended_s: float) -> JobResult:
    prefill = PrefillReport("spark1.1.a", queue_s=taken_s, prefill_s=stored_s - taken_s)
    decode = DecodeReport("mac1.1.b", queue_s=decoded_s, total_s=ended_s)
    return JobResult(f"{number:032x}", 1, "b", f"s{number}", "coder", "succeeded", prefill=prefill, decode=decode)


RESULTS = [result(1, 0, 2, 2, 6), result(2, 2, 4, 4, 8), result(3, 4, 6, 7, 9)]
EVERY = [
    columns(HOSTILE, "points", "submissions", {"model": [Bar("0", 0), Bar(HOSTILE, 3)], "people": [Bar("0", 3)] * 2}),
    points(HOSTILE, "model", "person", {(1, 1): 3, (2, 0.5): 1}, 2),
    lines(HOSTILE, "jobs", {HOSTILE: [(0, 3), (4, 0)], "decode": []}),
    spans(HOSTILE, [Span(HOSTILE, HOSTILE, 0, 2), Span(HOSTILE, "b", 1, 3)]),
]


@pytest.mark.parametrize("picture", EVERY, ids=["columns", "points", "lines", "spans"])
def test_a_picture_is_one_element_with_words_and_nobody_elses_markup(picture: Picture) -> None:
    root = ElementTree.fromstring(picture.file())

    assert root.get("role") == "img"
    assert f"{picture.title}. {picture.words}" == root.get("aria-label")
    assert HOSTILE in [text.text for text in root.iter(f"{SVG}text")]
    assert not list(root.iter(f"{SVG}script"))
    assert "<script" not in picture.image(dark=True)
    # Nothing of it lies outside: percent across, pixels down.
    assert all(0 <= float(across[:-1]) <= 100 for node in root.iter() if (across := node.get("x", "0%")).endswith("%"))
    assert all(float(node.get("y", 0)) <= picture.height for node in root.iter())


def test_columns_are_as_high_as_their_counts() -> None:
    drawn = elements(EVERY[0], "rect")
    high = {node[0].text: float(node.get("height", 0)) for node in drawn if len(node)}

    assert high["model, 0: 0"] == 0
    assert high[f"model, {HOSTILE}: 3"] == max(high.values()) > 100


def test_a_sixth_line_has_a_colour_and_the_legend_names_it() -> None:
    picture = lines("depths", "jobs", {f"queue {number}": [(0, number), (4, 0)] for number in range(6)})
    styled = set(re.findall(r"\.chart \.(k\d)\{", picture.file()))
    drawn = {line.get("class", "").removeprefix("line ") for line in elements(picture, "line")} - {"rule"}
    assert drawn <= styled
    assert [rect.get("class") for rect in elements(picture, "rect")][5] == "k0"


def test_circles_say_where_both_agree_and_where_not() -> None:
    assert EVERY[1].words == "Of 4, 3 the same, 0 above the line, 1 below"


def test_slots_that_work_at_once_have_lanes_of_their_own() -> None:
    picture = spans("Run", [Span("mac", "a", 0, 2), Span("mac", "a", 1, 3), Span("mac", "a", 2, 4)])

    assert len({node.get("y") for node in elements(picture, "rect")}) == 2
    assert picture.words == "mac: 3 in 2 at once, busy 75% of the time; 4.0 s in all"


def test_a_run_of_many_jobs_stays_small_and_whole() -> None:
    many = [Span("mac", "a", at * 0.5, at * 0.5 + 0.5) for at in range(20_000)] + [Span("mac2", "b", 0, 10_000)]

    picture = spans("Run", many)

    assert len(picture.file()) < 300_000
    wide = [float(str(node.get("width"))[:-1]) for node in elements(picture, "rect") if node.get("height") == "10.0"]
    assert sum(wide) == pytest.approx(2 * 99, rel=0.02)


def test_a_run_is_drawn_from_its_results() -> None:
    progress, waited, gantt = runs.pictures(RESULTS)

    assert progress.words == "answered: at most 3; over 9.0 s"
    assert waited.words == "for prefill: at most 3; for decode: at most 1; over 7.0 s"
    assert re.findall(r"[\w. ·]+: 3 in \d", gantt.words) == [
        "spark1.1.a · prefill: 3 in 1",
        " mac1.1.b · decode: 3 in 2",
    ]
    assert runs.pictures([]) == []
