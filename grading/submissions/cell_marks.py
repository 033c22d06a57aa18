"""The marks of nbgrader and Otter-Grader in a notebook: which cells the students were given, and hidden tests.

The rules are those of the two programs:

- nbgrader/utils.py, `is_locked` and `compute_checksum`: a cell that is graded and is not a solution is locked too. Each
  cell's checksum is computed when the notebook is handed out. It stays valid until somebody writes into the cell, also
  for solutions (`determine_grade` gives these 0 points).
- otter/assign/utils.py, `lock`: cells that students must not change are not editable.
- nbgrader/preprocessors/clearhiddentests.py: hidden tests stand between two marker lines.
- otter/assign/tests_manager.py, `read_test`: a hidden test is a cell, marked by its first line or its configuration.
"""

import hashlib
import itertools
import re
from collections.abc import Mapping
from typing import Any

_BEGIN, _END = "BEGIN HIDDEN TESTS", "END HIDDEN TESTS"
_HIDDEN_CELL = re.compile(r"#+\s*hidden\s*test\b", re.IGNORECASE)
_TEST_CONFIG = re.compile(r"#\s*(?:BEGIN|END)\s*TEST\s*CONFIG\b", re.IGNORECASE)
_HIDDEN_CONFIG = re.compile(r"#?\s*hidden:\s*true\b", re.IGNORECASE)


def nbgrader_of(cell: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return nbgrader's marks of a cell; empty if it has none."""
    metadata = cell.get("metadata")
    marks = metadata.get("nbgrader") if isinstance(metadata, dict) else None
    return marks if isinstance(marks, dict) else {}


def is_given(cell: Mapping[str, Any], source: str) -> bool:
    """Whether the students were given this cell, and this student has not changed it."""
    marks, metadata = nbgrader_of(cell), cell.get("metadata")
    if isinstance(marks.get("checksum"), str):
        return bool(marks["checksum"] == _checksum(str(cell.get("cell_type")), source, marks))
    return _is_locked(marks) or (
        isinstance(metadata, dict) and metadata.get("editable") is False and not marks.get("solution")
    )


def _is_locked(marks: Mapping[str, Any]) -> bool:
    return not marks.get("solution") and bool(marks.get("grade") or marks.get("locked"))


def _checksum(cell_type: str, source: str, marks: Mapping[str, Any]) -> str:
    """Compute nbgrader's checksum of a cell; "" if its metadata are incomplete."""
    is_graded = bool(marks.get("grade"))
    flags = f"{is_graded}{bool(marks.get('solution'))}{_is_locked(marks)}"
    points = marks.get("points", 0)
    if is_graded and not isinstance(points, int | float):
        return ""
    content = f"{source}{cell_type}{flags}{marks.get('grade_id')}{float(points) if is_graded else ''}"
    return hashlib.md5(content.encode("utf-8", "replace"), usedforsecurity=False).hexdigest()


def without_hidden_tests(cell_type: str, source: str) -> str:
    """Return a cell's text without its hidden tests."""
    if cell_type == "code" and _is_hidden_test(source):
        return ""
    if _BEGIN not in source:
        return source
    lines, is_hidden = [], False
    for line in source.split("\n"):
        is_hidden = _BEGIN in line or (is_hidden and _END not in line)
        lines += [] if is_hidden or _END in line else [line]
    return "\n".join(lines)


def _is_hidden_test(source: str) -> bool:
    first_line, *lines = source.lstrip().split("\n")
    if not _TEST_CONFIG.search(first_line[:80]):
        return bool(_HIDDEN_CELL.match(first_line))
    config = itertools.takewhile(lambda line: not _TEST_CONFIG.search(line[:80]), lines)
    return any(_HIDDEN_CONFIG.match(line.strip()) for line in config)
