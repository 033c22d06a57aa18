"""Deterministic checks: what a program can see in a submission without a model. A rubric lists them under `checks`:

    checks:
      - {criterion: churn, variables: [churn_rate]}      # assigned somewhere
      - {criterion: revenue, functions: [group_by|aggregate]}   # one of these is called
      - {criterion: revenue, columns: [region, month]}   # named somewhere in the code
      - {criterion: churn, output: present}              # some cell has an output
      - {criterion: churn, output: as solution}          # the figures in the solution's outputs are in the student's

`criterion` is optional. The findings stand in the student's part of the prompt, after the shared prefix, and beside the
model's answer: full points where a check of that criterion failed wait for a person.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from messages.errors import RubricError
from producers.notebooks import Part

Kind = Literal["variables", "functions", "columns", "output"]
KINDS: tuple[Kind, ...] = ("variables", "functions", "columns", "output")
PRESENT = "present"
AS_SOLUTION = "as solution"

MAX_CHECKS = 50
MAX_NAMES = 50
_NAME = re.compile(r"[^\W\d][\w.]{0,79}(?:(?:::|\.)[\w.]{1,80})?\Z")
_COLUMN = re.compile(r"[^\n\"'`]{1,80}\Z")
_FIGURE = re.compile(r"(?<![\w.])-?\d[\d,]*(?:\.\d+)?(?:[eE][+-]?\d+)?(?![\w])")
_ENOUGH_DIGITS = 3  # shorter figures are everywhere
_MOST_FIGURES = 200
_CLOSE = 1e-3  # relative: outputs are rounded to different lengths
_ENOUGH = 0.8  # of the solution's figures


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the rubric's `checks`. Each name may hold alternatives, separated by "|"."""

    kind: Kind
    names: tuple[str, ...]
    criterion: str = ""


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check says. `text` holds no word of the student's."""

    criterion: str
    passed: bool
    text: str


def parse_checks(file: str, data: Any, criteria: Iterable[str]) -> tuple[Check, ...]:
    """The rubric's checks. Raises RubricError that names the file and the line of the list."""
    if not isinstance(data, list) or len(data) > MAX_CHECKS:
        raise RubricError(f"{file}: 'checks' must be a list of at most {MAX_CHECKS} checks")
    known = set(criteria)
    return tuple(_check(f"{file}: check {number}", item, known) for number, item in enumerate(data, 1))


def _check(at: str, item: Any, criteria: set[str]) -> Check:
    kinds = [kind for kind in KINDS if isinstance(item, dict) and kind in item]
    if not isinstance(item, dict) or len(kinds) != 1 or set(item) - {*KINDS, "criterion"}:
        raise RubricError(f"{at} must have one of {', '.join(KINDS)}, and may have 'criterion'; nothing else")
    criterion, kind = item.get("criterion", ""), kinds[0]
    if criterion and criterion not in criteria:
        raise RubricError(f"{at}: {criterion!r:.60} is no criterion's id")
    if kind == "output":
        if item[kind] not in (PRESENT, AS_SOLUTION):
            raise RubricError(f"{at}: 'output' must be '{PRESENT}' or '{AS_SOLUTION}', not {item[kind]!r:.60}")
        return Check(kind, (item[kind],), criterion)
    names = [item[kind]] if isinstance(item[kind], str) else item[kind]
    if not isinstance(names, list) or not 0 < len(names) <= MAX_NAMES:
        raise RubricError(f"{at}: '{kind}' must be a list of 1 to {MAX_NAMES} names")
    allowed = _COLUMN if kind == "columns" else _NAME
    for name in names:
        if not isinstance(name, str) or not all(allowed.match(one.strip()) for one in name.split("|")):
            raise RubricError(f"{at}: {name!r:.60} is no name; alternatives are written a|b")
    return Check(kind, tuple(names), criterion)


def run_checks(checks: Iterable[Check], parts: Iterable[Part], solution: Iterable[Part] = ()) -> list[Finding]:
    """What the checks find in a submission's parts, before cuts. Without code or outputs there is nothing to find."""
    code = "\n".join(_without_comments(part.text) for part in parts if part.kind == "code")
    shown = "\n".join(part.text for part in parts if part.kind == "output")
    expected = "\n".join(part.text for part in solution if part.kind == "output")
    findings: list[Finding] = []
    for check in checks:
        if check.kind == "output":
            findings.append(_output(check, shown, expected))
        else:
            findings += [_named(check, name, code) for name in check.names]
    return findings


def _without_comments(code: str) -> str:
    """R's, Python's and SQL's; a quoted "#" goes too, which costs a name at worst."""
    return re.sub(r"(?:#|--(?= )).*", "", code)


def _named(check: Check, name: str, code: str) -> Finding:
    found = any(_PATTERNS[check.kind](one.strip(), code) for one in name.split("|"))
    what = {"variables": "variable", "functions": "function", "columns": "column"}[check.kind]
    did = {"variables": "assigned", "functions": "called", "columns": "used"}[check.kind]
    shown = name.replace("|", " or ")
    return Finding(check.criterion, found, f"{what} {shown}: {did if found else f'not {did}'}")


def _is_assigned(name: str, code: str) -> bool:
    word = re.escape(name)
    return bool(re.search(rf"(?<![\w.$]){word}\s*(?:<<?-|=(?!=))|->>?\s*{word}(?![\w.])", code))


def _is_called(name: str, code: str) -> bool:
    return bool(re.search(rf"(?<![\w]){re.escape(name)}\s*\(", code))


def _is_used(name: str, code: str) -> bool:
    return bool(re.search(rf"(?<![\w]){re.escape(name)}(?![\w])", code))


_PATTERNS = {"variables": _is_assigned, "functions": _is_called, "columns": _is_used}


def _output(check: Check, shown: str, expected: str) -> Finding:
    if check.names == (PRESENT,):
        there = bool(shown.strip())
        return Finding(check.criterion, there, "outputs: present" if there else "outputs: none; was the work run?")
    wanted = _figures(expected)
    if not wanted:
        return Finding(check.criterion, True, "outputs: the solution shows no figures to compare with")
    figures = _figures(shown)
    met = sum(any(_close(figure, other) for other in figures) for figure in wanted)
    passed = met >= _ENOUGH * len(wanted)
    return Finding(check.criterion, passed, f"outputs: {met} of {len(wanted)} figures of the solution's are there")


def _figures(text: str) -> list[float]:
    """The different figures with three digits or more, in order."""
    figures: dict[float, None] = {}
    for match in _FIGURE.finditer(text[:1_000_000]):
        digits = re.sub(r"\D", "", match.group()).lstrip("0")
        if len(digits) >= _ENOUGH_DIGITS and len(figures) < _MOST_FIGURES:
            figures[float(match.group().replace(",", ""))] = None
    return list(figures)


def _close(one: float, other: float) -> bool:
    return abs(one - other) <= _CLOSE * max(abs(one), abs(other))
