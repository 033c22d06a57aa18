"""Every table in the documentation is one: a header, a rule below it, and rows of as many cells."""

import re
from itertools import groupby
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PAGES = sorted(page for place in ("", "docs/**/", "examples/*/", "benchmarks/") for page in ROOT.glob(f"{place}*.md"))


def cells(line: str) -> int:
    return len(re.sub(r"`[^`]*`|\\\|", "", line).strip().strip("|").split("|"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_tables_of_a_page_are_whole(page: Path) -> None:
    text = re.sub(r"```.*?```", lambda fenced: "\n" * fenced[0].count("\n"), page.read_text("utf-8"), flags=re.DOTALL)
    numbered = enumerate(text.splitlines(), 1)
    for is_table, lines in groupby(numbered, key=lambda pair: pair[1].startswith("|")):
        rows = list(lines)
        if is_table:
            assert len(rows) >= 3, f"{page}:{rows[0][0]}: a row without a table"
            assert re.fullmatch(r"[|\s:-]+", rows[1][1]), f"{page}:{rows[1][0]}: no rule below the header"
            for number, row in rows:
                assert cells(row) == cells(rows[0][1]), f"{page}:{number}: {row}"
