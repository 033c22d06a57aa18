"""Deterministic checks: what a program can see in a submission without a model. A rubric lists them under `checks`:

    checks:
      - {criterion: churn, variables: [churn_rate]}      # assigned somewhere
      - {criterion: revenue, functions: [group_by|aggregate]}   # one of these is called
      - {criterion: revenue, columns: [region, month]}   # named somewhere in the code
      - {criterion: churn, output: present}              # some cell has an output
      - {criterion: churn, output: as solution}          # the figures in the solution's outputs are in the student's

`criterion` is optional. A check is skipped if the format can't answer it: a script holds no outputs, Markdown calls no
function, SQL assigns no variable. The findings are shown in the student's part of the prompt, after the prefix, and
beside the model's answer. If a criterion gets full points although its check failed, a person must look.
"""

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from grading.submissions.submission import SubmissionPart
from messages.errors import RubricError

Kind = Literal["variables", "functions", "columns", "output"]
KINDS: tuple[Kind, ...] = ("variables", "functions", "columns", "output")
PRESENT = "present"
AS_SOLUTION = "as solution"

MAX_CHECKS = 50
MAX_NAMES = 50
_NAME = re.compile(r"[^\W\d][\w.]{0,79}(?:(?:::|\.)[\w.]{1,80})?\Z")
_COLUMN = re.compile(r"[^\n\"'`]{1,80}\Z")
_FIGURE = re.compile(r"(?<![\w.])-?\d[\d,]*(?:\.\d+)?(?:[eE][+-]?\d+)?(?![\w])")
_ENOUGH_DIGITS = 3  # numbers with fewer digits occur in every output
_MOST_FIGURES = 200
# Relative tolerance. It is needed because programs round their outputs differently.
_CLOSE = 1e-3
# The output must contain at least this share of the solution's numbers.
_MATCHING_SHARE = 0.8
# Matches the location of a part that came from a notebook.
_CELL = re.compile(r"(?:^|, )cell \d")
# Matches the location of Markdown, plain text, or text typed into the LMS.
_PROSE = re.compile(r"(?:^|, )text\Z")
# Matches an SQL query, which can also be inside a Python string.
_QUERY = re.compile(r"\bselect\s+[^\s(].{0,2000}?\bfrom\b", re.IGNORECASE | re.DOTALL)
_SQL_FUNCTION = re.compile(
    "abs|avg|cast|ceil|coalesce|concat|count|date|dense_rank|extract|floor|ifnull|lag|lead|length|lower|max|min|ntile"
    "|nullif|now|rank|replace|round|row_number|strftime|substr|substring|sum|total|trim|upper",
    re.IGNORECASE,
)
_STRING = r"""(\"{3}.*?\"{3}|'{3}.*?'{3}|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*')"""
# The key says whether the language is SQL. The patterns skip strings, because a "#" in a string does not begin a
# comment. In SQL, a "#" is part of a name.
_COMMENTS = {
    False: re.compile(rf"(?s:{_STRING})|(?:#|--(?= )).*"),
    True: re.compile(rf"(?s:{_STRING})|--.*|(?s:/\*.*?\*/)"),
}
# In these patterns, `{0}` stands for the name. A variable can get its value from an arrow, from "=" (also with a type),
# or in a loop. In SQL, it can get its value from AS or from the definition of a table.
_PATTERNS = {
    "variables": r"(?<![\w.$]){0}\s*(?::\s?[\w.\[\], |]+)?(?:<<?-|:?=(?!=)|[-+*/|&%]=)|->>?\s*{0}(?![\w.])"
    r"|(?m:^[ \t(\[]*(?:\*?\w+[ \t]*,[ \t]*)*{0}[ \t]*,[ \t\w,*]*[)\]]?[ \t]*=(?!=))|\bfor\s*\(?\s*{0}\s+in\b"
    r"|\bas\s+[\"`\[]?{0}(?!\w)|\b(?:table|view|with)\s+(?:if\s+not\s+exists\s+)?{0}(?!\w)",
    "functions": r"(?<!\w){0}\s*\(",
    "columns": r"(?<!\w){0}(?!\w)",
}


@dataclass(frozen=True, slots=True)
class Check:
    """One entry of the rubric's `checks`. Each name may hold alternatives, separated by "|"."""

    kind: Kind
    names: tuple[str, ...]
    criterion: str = ""


@dataclass(frozen=True, slots=True)
class CheckFinding:
    """The result of one check. `text` contains no words of the student."""

    criterion: str
    has_passed: bool
    text: str


def parse_checks(file: str, data: Any, criteria: Iterable[str]) -> tuple[Check, ...]:
    """Parse the rubric's checks. Raises RubricError, which names the file and the entry."""
    if not isinstance(data, list) or len(data) > MAX_CHECKS:
        raise RubricError(f"{file}: 'checks' must be a list of at most {MAX_CHECKS} checks")
    criterion_ids = set(criteria)
    return tuple(
        _check(f"{file}: check {number}", check_data, criterion_ids) for number, check_data in enumerate(data, 1)
    )


def _check(at: str, check_data: Any, criteria: set[str]) -> Check:
    kinds = [kind for kind in KINDS if isinstance(check_data, dict) and kind in check_data]
    if not isinstance(check_data, dict) or len(kinds) != 1 or set(check_data) - {*KINDS, "criterion"}:
        raise RubricError(
            f"{at} must have exactly one of the keys {', '.join(KINDS)}; the only other key allowed is 'criterion'"
        )
    criterion, kind = check_data.get("criterion", ""), kinds[0]
    if criterion != "" and not (isinstance(criterion, str) and criterion in criteria):
        raise RubricError(f"{at}: {criterion!r:.60} is not the id of a criterion: use an id from 'criteria'")
    if kind == "output":
        if check_data[kind] not in (PRESENT, AS_SOLUTION):
            raise RubricError(f"{at}: 'output' must be '{PRESENT}' or '{AS_SOLUTION}', not {check_data[kind]!r:.60}")
        return Check(kind, (check_data[kind],), criterion)
    names = [check_data[kind]] if isinstance(check_data[kind], str) else check_data[kind]
    if not isinstance(names, list) or not 0 < len(names) <= MAX_NAMES:
        raise RubricError(f"{at}: '{kind}' must be a list of 1 to {MAX_NAMES} names")
    name_pattern = _COLUMN if kind == "columns" else _NAME
    for name in names:
        if not isinstance(name, str) or not all(
            name_pattern.match(alternative.strip()) for alternative in name.split("|")
        ):
            raise RubricError(
                f"{at}: {name!r:.60} is not a valid name; use letters, digits, '_' and '.', and write "
                "alternatives as a|b"
            )
    return Check(kind, tuple(names), criterion)


def run_checks(
    checks: Iterable[Check],
    parts: Iterable[SubmissionPart],
    solution: Iterable[SubmissionPart] = (),
    language: str = "",
) -> list[CheckFinding]:
    """Run checks on a submission's parts, before cuts. A check that the format can't answer gives no finding.

    Only notebooks hold outputs, prose calls no functions, and SQL has other words for what functions do in R and
    Python.
    """
    parts = list(parts)
    source = "\n".join(part.text for part in parts if part.kind == "code")
    sql = language == "SQL" or bool(_QUERY.search(source))
    code = _COMMENTS[language == "SQL"].sub(lambda match: match[1] or "", source)
    output_text = "\n".join(part.text for part in parts if part.kind == "output")
    expected = "\n".join(part.text for part in solution if part.kind == "output")
    findings: list[CheckFinding] = []
    for check in checks:
        if check.kind == "output":
            findings += (
                [_output_finding(check, output_text, expected)]
                if any(_CELL.search(part.location) for part in parts)
                else []
            )
        elif not all(_PROSE.search(part.location) for part in parts):
            name_findings = [(_name_finding(check, name, code, sql), name) for name in check.names]
            findings += [
                finding
                for finding, name in name_findings
                if finding.has_passed or _can_tell(check, name, sql, language)
            ]
    return findings


def _can_tell(check: Check, name: str, sql: bool, language: str) -> bool:
    """Whether a name that was not found means that the check failed."""
    if check.kind == "variables":
        return language != "SQL"
    has_sql_function = any(_SQL_FUNCTION.fullmatch(alternative.strip()) for alternative in name.split("|"))
    return check.kind == "columns" or not sql or has_sql_function


def _name_finding(check: Check, name: str, code: str, sql: bool) -> CheckFinding:
    case = re.IGNORECASE if sql else re.NOFLAG
    is_present = any(
        re.search(_PATTERNS[check.kind].format(re.escape(alternative.strip())), code, case)
        for alternative in name.split("|")
    )
    noun, verb = {
        "variables": ("variable", "assigned"),
        "functions": ("function", "called"),
        "columns": ("column", "used"),
    }[check.kind]
    alternatives = name.replace("|", " or ")
    return CheckFinding(check.criterion, is_present, f"{noun} {alternatives}: {verb if is_present else f'not {verb}'}")


def _output_finding(check: Check, output_text: str, expected: str) -> CheckFinding:
    if check.names == (PRESENT,):
        is_present = bool(output_text.strip())
        return CheckFinding(
            check.criterion, is_present, "outputs: present" if is_present else "outputs: none; was the work run?"
        )
    solution_figures = _figures(expected)
    if not solution_figures:
        return CheckFinding(
            check.criterion, has_passed=True, text="outputs: the solution shows no figures to compare with"
        )
    student_figures = _figures(output_text)
    match_count = sum(
        any(math.isclose(figure, student_figure, rel_tol=_CLOSE) for student_figure in student_figures)
        for figure in solution_figures
    )
    has_passed = match_count >= _MATCHING_SHARE * len(solution_figures)
    return CheckFinding(
        check.criterion,
        has_passed,
        f"outputs: {match_count} of {len(solution_figures)} figures of the solution's are there",
    )


def _figures(text: str) -> list[float]:
    """Return the distinct numbers with three digits or more, in order."""
    figures = _FIGURE.findall(text[:1_000_000])
    long_figures = (figure for figure in figures if len(re.sub(r"\D", "", figure).lstrip("0")) >= _ENOUGH_DIGITS)
    return list(dict.fromkeys(float(figure.replace(",", "")) for figure in long_figures))[:_MOST_FIGURES]
