"""Converts rubrics in other formats into the keys and values of Kvasir's.

    the earlier grader's JSON   assignment_info, rubric_elements, …, or only {name: {points, description}}
    Canvas's rubric CSV         Rubric Name, Criteria Name, Criteria Description, Criteria Enable Range, the ratings
    nbgrader's notebook         `grade_id` and `points` of each graded cell; hidden tests are left out
    Otter-Grader's notebook     `name` and `points` of each `# BEGIN QUESTION` (otter/assign/blocks.py)

The first two formats don't say which model reads a criterion. Words in its name decide this: see CODE_WORDS.
"""

import csv
import io
import re
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from typing import Any

import yaml

from grading.submissions.cell_marks import nbgrader_of, without_hidden_tests
from grading.submissions.notebooks import as_dict, as_list, cells_of, join_lines
from messages.errors import RubricError

CODE_WORDS = re.compile(
    r"code|coding|technical|function|loop|syntax|program|script|implement|import|clean|data (?:load|prep|manip)|"
    r"load|join|merge|query|sql|plot|chart|visuali|model|comput|calculat|variable|package",
    re.IGNORECASE,
)
_STEPS = tuple(Decimal(step) for step in ("1", "0.5", "0.25", "0.1", "0.05", "0.01", "0.001"))
# No criterion can have one of these ids. An id becomes a key in answers and a column of grades.csv, and these names
# already have a meaning there.
RESERVED_IDS = ("summary", "submission", "state", "points", "max_points", "needs_review", "remarks", "reason")
_OTTER_BOUNDARY = re.compile(r"(?:```otter\s*)?#\s+(BEGIN|END)\s+QUESTION\b", re.IGNORECASE)
_OTTER_TEST = re.compile(r"#+\s*(?:hidden\s*)?test\b|\W*(?:\w\s*=\s*)?\W*#\s*BEGIN\s*TEST\s*CONFIG", re.IGNORECASE)
_CANVAS = ("Rubric Name", "Criteria Name", "Criteria Description", "Criteria Enable Range")


def is_earlier_form(data: Any) -> bool:
    """Whether this JSON is a rubric of the earlier grader, in its long or short form."""
    if not isinstance(data, dict) or "criteria" in data:
        return False
    return "rubric_elements" in data or (
        bool(data) and all(isinstance(value, dict) and "points" in value for value in data.values())
    )


def from_earlier_form(file: str, data: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the earlier grader's rubric. Raises RubricError. The caller checks that the points add up."""
    info = as_dict(data.get("assignment_info"))
    elements = data.get("rubric_elements", data)
    if not isinstance(elements, dict) or not elements:
        raise RubricError(f"{file}: 'rubric_elements' must have a key for each criterion")
    total = info.get("total_points")
    criteria = [_earlier_criterion(file, key, value, total) for key, value in elements.items()]
    rubric: dict[str, Any] = {
        "title": str(info.get("title") or info.get("name") or "Assignment")[:200],
        "instructions": str(info.get("description") or ""),
        "criteria": _with_ids(criteria),
    }
    checks = list(_earlier_checks(as_dict(data.get("autograder_checks"))))
    return {**rubric, **({"total": total} if total is not None else {}), **({"checks": checks} if checks else {})}


def _earlier_criterion(file: str, key: str, value: Any, total: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise RubricError(f"{file}: {key!r:.60} must contain keys and values (points or max_points, description)")
    points = value.get("max_points", value.get("points"))
    if points is None and "weight" in value and _parse_number(total) is not None:
        points = plain((_parse_number(value["weight"]) or Decimal(0)) * (_parse_number(total) or Decimal(0)))
    if _parse_number(points) is None:
        raise RubricError(f"{file}: {key!r:.60} has no points; add 'max_points: …'")
    title = key.replace("_", " ").strip().capitalize()
    notes = [str(value.get("description") or ""), *map(str, as_list(value.get("criteria")))]
    notes += [f"Deduction: {fault}: {deduction}" for fault, deduction in as_dict(value.get("deductions")).items()]
    return _make_criterion(key, title, points, "\n".join(note for note in notes if note))


def _earlier_checks(autograder: Mapping[str, Any]) -> Iterable[dict[str, Any]]:
    """Convert the earlier grader's regular-expression checks. Equivalents of a function become alternatives to it."""
    if autograder.get("required_variables"):
        yield {"variables": list(map(str, as_list(autograder["required_variables"])))}
    for section in as_dict(autograder.get("sections")).values():
        section = as_dict(section)
        equivalents = as_dict(section.get("function_equivalents"))
        functions = [
            "|".join([str(name), *map(str, as_list(equivalents.get(str(name))))])
            for name in as_list(section.get("functions"))
        ]
        names_by_kind = {
            "variables": list(map(str, as_list(section.get("variables")))),
            "functions": functions,
            "columns": list(map(str, as_list(section.get("required_columns")))),
        }
        yield from ({kind: names} for kind, names in names_by_kind.items() if names)


# --- Canvas


def from_canvas(file: str, text: str) -> dict[str, Any]:
    """Convert a rubric that Canvas exported as CSV. Raises RubricError."""
    try:
        rows = [row for row in csv.reader(io.StringIO(text, newline=""), strict=True) if any(map(str.strip, row))]
    except csv.Error as error:
        raise RubricError(f"{file} is not valid CSV: {error}") from None
    header = [name.strip() for name in rows[0]] if rows else []
    missing_columns = [name for name in _CANVAS if name not in header]
    if missing_columns:
        raise RubricError(
            f"{file}: a rubric from Canvas needs the column {missing_columns[0]!r}; export the rubric from Canvas again"
        )
    at = {name: header.index(name) for name in _CANVAS}
    titles = {_cell(row, at["Rubric Name"]) for row in rows[1:]} - {""}
    if len(titles) != 1:
        raise RubricError(f"{file}: the file has {len(titles)} rubrics; keep the rows of only one of them")
    criteria = [_canvas_criterion(file, number, row, at, header) for number, row in enumerate(rows[1:], 1)]
    return {"title": titles.pop()[:200], "criteria": _with_ids(criteria)}


def _canvas_criterion(
    file: str, number: int, row: Sequence[str], at: Mapping[str, int], header: Sequence[str]
) -> dict[str, Any]:
    name = _cell(row, at["Criteria Name"])
    ratings = list(_ratings(row, header.index("Rating Name") if "Rating Name" in header else len(_CANVAS)))
    if not name or not ratings:
        raise RubricError(f"{file}: criterion {number} ({name!r:.60}) has no {'ratings' if name else 'name'}")
    points = []
    for label, _, value in ratings:
        if (worth := _parse_number(value)) is None or worth < 0:
            raise RubricError(f"{file}: criterion {number} ({name!r:.60}): {value!r:.20} is not a number of points")
        points.append((worth, label))
    lines = [_cell(row, at["Criteria Description"])]
    lines += [
        f"{value} points: {label}{f': {description}' if description else ''}" for label, description, value in ratings
    ]
    criterion = _make_criterion(name, name, plain(max(points)[0]), "\n".join(line for line in lines if line))
    if _cell(row, at["Criteria Enable Range"]).casefold() != "true":
        criterion["step"] = plain(_common_step([worth for worth, _ in points]))
    return criterion


def _ratings(row: Sequence[str], first: int) -> Iterable[tuple[str, str, str]]:
    for start in range(first, len(row), 3):
        name, description, points = (_cell(row, start + offset) for offset in range(3))
        if name or points:
            yield name, description, points


def _common_step(values: Iterable[Decimal]) -> Decimal:
    """Return the largest step of which every rating is a multiple."""
    nonzero_ratings = [value for value in values if value]
    steps = sorted({max(nonzero_ratings, default=Decimal(1)), *nonzero_ratings, *_STEPS}, reverse=True)
    return next((step for step in steps if all(value % step == 0 for value in nonzero_ratings)), _STEPS[-1])


# --- notebooks


def from_notebook(file: str, text: str) -> dict[str, Any]:
    """Read the points in a teacher's notebook. Raises RubricError."""
    cells = cells_of(text)
    criteria = [*_nbgrader_criteria(cells), *_otter_criteria(file, cells)]
    if not criteria:
        raise RubricError(f"{file} has no points: it needs a graded cell of nbgrader, or a question of Otter-Grader")
    headings = (line for cell in cells for line in join_lines(cell.get("source")).split("\n") if line.startswith("# "))
    return {"title": _plain_title(next(headings, "")) or "Assignment", "criteria": _with_ids(criteria)}


def _nbgrader_criteria(cells: Iterable[Mapping[str, Any]]) -> Iterable[dict[str, Any]]:
    """Yield a criterion for each cell with points. Its title is the text before it, or its own text if it is a task."""
    question = ""
    for cell in cells:
        marks, kind = nbgrader_of(cell), str(cell.get("cell_type"))
        source = without_hidden_tests(kind, join_lines(cell.get("source")))
        if kind == "markdown" and not marks.get("solution"):
            question = source
        if (marks.get("grade") or marks.get("task")) and _parse_number(marks.get("points")):
            is_test = kind == "code" and not marks.get("solution")
            notes = f"Tests that it should pass:\n{source}" if is_test and source.strip() else ""
            yield _of_cell(str(marks.get("grade_id")), question, marks["points"], notes, kind == "code")


def _otter_criteria(file: str, cells: Iterable[Mapping[str, Any]]) -> Iterable[dict[str, Any]]:
    """Yield a criterion for each question. Its title is the first text in the question."""
    config: Mapping[str, Any] = {}
    question, tests = "", 0
    for cell in cells:
        kind, source = cell.get("cell_type"), join_lines(cell.get("source"))
        if boundary := _OTTER_BOUNDARY.match(source):
            if boundary[1].upper() == "BEGIN":
                config, question, tests = as_dict(_yaml(file, source.strip("`").removeprefix("otter"))), "", 0
            elif config:
                yield _of_cell(
                    name if isinstance(name := config.get("name"), str) else "",
                    question,
                    _otter_points(config, tests),
                    "",
                    not config.get("manual"),
                )
                config = {}
        elif config and kind == "markdown":
            question = question or source
        elif config and _OTTER_TEST.match(source):
            tests += 1


def _otter_points(config: Mapping[str, Any], tests: int) -> Any:
    """Return a question's points as Otter-Grader does: 1 if none are given.

    See otter/assign/tests_manager.py, `determine_question_point_value`.
    """
    points = config.get("points")
    if isinstance(points, list):
        return sum(map(_one_unless_number, points))
    return _one_unless_number(points.get("each")) * tests if isinstance(points, dict) else _one_unless_number(points)


def _one_unless_number(value: Any) -> int | float:
    return value if isinstance(value, int | float) else 1


def _yaml(file: str, text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError):
        raise RubricError(f"{file}: the text after a `# BEGIN QUESTION` line is not valid YAML; correct it") from None


def _of_cell(id: str, question: str, points: Any, notes: str, is_code: bool) -> dict[str, Any]:
    return _make_criterion(id, _plain_title(question) or id, points, notes) | {
        "model": "code" if is_code else "feedback"
    }


def _plain_title(text: str) -> str:
    return " ".join(re.sub(r"[*#`]+|<!--.*?-->", " ", text).split())[:200]


# --- criteria of all formats


def _make_criterion(id: str, title: str, points: Any, guidance: str) -> dict[str, Any]:
    number = _parse_number(points) or Decimal(0)
    step = next((step for step in _STEPS if number % step == 0 and number / step <= 200), Decimal(1))
    return {
        "id": id,
        "title": " ".join(title.split())[:200],
        "points": plain(number),
        "guidance": guidance[:8_000],
        "model": "code" if CODE_WORDS.search(f"{id} {title}") else "feedback",
        "step": plain(step),
    }


def _with_ids(criteria: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Give every criterion a valid and unique id."""
    used_ids: set[str] = set()
    for number, criterion in enumerate(criteria, 1):
        words = re.sub(r"[^A-Za-z0-9]+", "_", criterion["id"]).strip("_").lower()[:36]
        id = words if words[:1].isalpha() else f"criterion_{number}"
        id = f"{id}_{number}" if id in used_ids or id in RESERVED_IDS else id
        used_ids.add(id)
        criterion["id"] = id
    return criteria


def _parse_number(value: Any) -> Decimal | None:
    """Parse a number of points, or return None if it is not a plausible one (a millionth to under 10⁹)."""
    try:
        number = Decimal(str(value).strip()).normalize()
    except ArithmeticError:
        return None
    return number if number.is_finite() and -6 <= number.adjusted() < 9 else None


def plain(number: Decimal) -> int | float:
    """Return an int if the number is whole, else the nearest float."""
    return int(number) if number == number.to_integral_value() else float(number)


def _cell(row: Sequence[str], index: int) -> str:
    return row[index].strip() if index < len(row) else ""
