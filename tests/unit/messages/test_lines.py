"""A record of a format of lines is one line for every reader, and says what it said."""

import csv
import io
import json
import logging
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grading.cells import csv_text
from messages.lines import on_one_line
from monitoring import logs
from producers.storage.journal import Lines

BREAKS = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"
HOSTILE = st.text(st.sampled_from(f'{BREAKS}a"\\\u00e4\u00a0\U0001f600,'))


@given(HOSTILE)
def test_json_on_one_line_says_the_same(text: str) -> None:
    line = on_one_line(json.dumps({text: text}, ensure_ascii=False))
    assert line.splitlines() == [line]
    assert json.loads(line) == {text: text}


def test_what_needs_no_escape_has_none() -> None:
    assert on_one_line('{"a": "é\u00a0中"}') == '{"a": "é\u00a0中"}'


def test_the_journal_is_cut_where_it_ends_its_lines(tmp_path: Path) -> None:
    lines = Lines(tmp_path / "results.jsonl")
    lines.append([{"text": BREAKS}, {"text": "b"}])
    assert [json.loads(line)["text"] for line in lines.path.read_text("utf-8").splitlines()] == [BREAKS, "b"]


@pytest.mark.parametrize("style", ["console", "json"])
def test_a_log_line_is_no_two(style: logs.Style, capsys: pytest.CaptureFixture[str]) -> None:
    root, levels = logging.getLogger(), {name: logging.getLogger(name).level for name in ("", *logs.ROOMS)}
    try:
        logs.configure("info", style)
        logging.getLogger("gateway").info("asked for %s", f"a{BREAKS}00:00:00 ERROR forged")
        written = capsys.readouterr().err
    finally:
        for handler in [handler for handler in root.handlers if isinstance(handler, logs._Stderr)]:
            root.removeHandler(handler)
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
    assert written.splitlines() == [written.removesuffix("\n")]


def test_a_csv_has_no_breaks_but_the_usual_ones() -> None:
    (row,) = csv.reader(io.StringIO(csv_text([["1", f"well{BREAKS}done"]]), newline=""))
    assert not set(row[1]) & set("\v\f\x1c\x1d\x1e\x85\u2028\u2029")
    assert row[1].startswith("well\n")
    assert row[1].endswith("\ndone")
