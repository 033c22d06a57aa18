"""`make audit` fails for what is known and for what could not be looked up, and says which it was."""

import json
from dataclasses import replace
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.support import audit

OURS = {"name": "kvasir-inference", "skip_reason": "distribution marked as editable"}
CLEAN = {"name": "pika", "version": "1.4", "vulns": []}
BAD = {
    "name": "click",
    "version": "8.1",
    "vulns": [{"id": "PYSEC-1", "aliases": ["CVE-1"], "fix_versions": ["8.2"], "description": ""}],
}
TODAY = date(2026, 11, 23)
ASIDE = audit.AdvisoryException("we do not call it", TODAY + timedelta(days=30))
UNSEEN = {"name": "rich", "skip_reason": "Dependency not found on PyPI and could not be audited: rich (13)"}


@pytest.mark.parametrize(
    ("packages", "exceptions", "problems"),
    [
        ([OURS, CLEAN], {}, []),
        ([OURS, CLEAN, BAD], {}, ["click 8.1: PYSEC-1; fixed in 8.2"]),
        ([CLEAN, BAD], {"CVE-1": ASIDE}, []),
        ([CLEAN], {"CVE-1": ASIDE}, ["the exception CVE-1 is not reported any more"]),
        (
            [OURS, CLEAN, UNSEEN],
            {},
            ["1 of 2 packages could not be looked up; the first: Dependency not found on PyPI"],
        ),
        ([OURS, UNSEEN], {"CVE-1": ASIDE}, ["PyPI could not be asked about any of 1 packages: Dependency not found"]),
        ([OURS], {}, ["0 of 0 packages could not be looked up"]),
    ],
)
def test_a_report_is_judged(
    packages: list[Any], exceptions: dict[str, audit.AdvisoryException], problems: list[str]
) -> None:
    found = list(audit.problems_of({"dependencies": packages, "fixes": []}, exceptions))
    assert len(found) == len(problems)
    assert all(said.startswith(begins) for said, begins in zip(found, problems, strict=True)), found


@pytest.mark.parametrize(
    ("aside", "flaw"),
    [
        (ASIDE, ""),
        (replace(ASIDE, reason="not reachable"), "doesn't say why"),
        (replace(ASIDE, until=TODAY), ""),
        (replace(ASIDE, until=TODAY - timedelta(days=1)), "ended on 2026-11-22"),
        (replace(ASIDE, until=date(2099, 1, 1)), "set a date within 92 days"),
    ],
)
def test_an_exception_has_a_reason_and_ends(aside: audit.AdvisoryException, flaw: str) -> None:
    found = list(audit.flaws({"CVE-1": aside}, TODAY))
    assert len(found) == bool(flaw)
    assert flaw in "".join(found)


def test_the_list_of_exceptions_is_in_order() -> None:
    assert list(audit.flaws(audit.EXCEPTIONS, datetime.now(UTC).date())) == []


def test_exceptions_out_of_order_fail_a_clean_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "pip-audit"
    report = json.dumps({"dependencies": [CLEAN, BAD]})
    program.write_text(f'#!/bin/sh\nwhile [ "$1" != --output ]; do shift; done\necho \'{report}\' > "$2"\n')
    program.chmod(0o755)
    monkeypatch.setattr(
        audit, "EXCEPTIONS", {"CVE-1": audit.AdvisoryException("we do not call it", datetime.now(UTC).date())}
    )
    assert audit.main(str(program)) == 0
    monkeypatch.setattr(audit, "EXCEPTIONS", {"CVE-1": replace(ASIDE, until=date(2026, 1, 1))})
    assert audit.main(str(program)) == 1


def test_no_answer_is_a_failure_with_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    silent = tmp_path / "pip-audit"
    silent.write_text("#!/bin/sh\necho 'ConnectionError: no route' >&2; exit 1\n")
    silent.chmod(0o755)
    assert audit.main(str(silent)) == 1
    assert capsys.readouterr().out == "audit: the advisories can't be looked up: ConnectionError: no route\n"
