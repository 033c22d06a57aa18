"""The rubric: what is graded, for how many points, by which of the two models.

    title: Loops and functions
    instructions: Grade the third homework of a first course in R.     # optional
    feedback: Write the summary in German, and begin with what went well.   # optional: its tone or language
    total: 10                                                          # optional: checked against the sum
    criteria:
      - id: loops
        title: Uses a loop where it is the right tool
        points: 6
        step: 0.5                                                      # optional, 1
        deduction: 2                                                   # optional, 0: the fewest points are then -2
        model: code                                                    # code: reads code, output and short texts;
                                                                       # feedback: reads everything, texts first
        guidance: A while loop is fine too.                            # optional; students never see it
        rulings: [Half the points where the loop never ends.]          # optional: on edge cases; part of the guidance
    late: {due: 2026-11-03T23:59:00+01:00, percent: 10}               # optional: see `late` (late.py)
    checks: […]                                                        # optional: see `checks` (checks.py)

The file is YAML or JSON, according to its suffix. In YAML, put a text that holds a colon and a space in quotes. Other
formats can be read too (formats.py).
"""

import difflib
import hashlib
import json
import math
import re
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import asdict, dataclass
from decimal import Decimal
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import yaml

from grading.rubric.checks import Check, parse_checks
from grading.rubric.formats import RESERVED_IDS, from_canvas, from_earlier_form, is_earlier_form
from grading.rubric.formats import plain as plain
from grading.rubric.late import KEYS as LATE_KEYS
from grading.rubric.late import LateRule, parse_late
from messages.errors import RubricError
from producers.storage.private import open_ordinary

Aspect = Literal["code", "feedback"]
ASPECTS: tuple[Aspect, ...] = ("code", "feedback")
KINDS = ("yaml", "yml", "json", "csv")  # endings of a rubric's file name
Points = int | float

MAX_FILE_BYTES = 1 << 20
# Each alias can double the size of the data. This limit allows shared texts, but no YAML bomb.
MAX_ALIASES = 10
# Maximum depth of nested lists and keys.
MAX_DEPTH = 10
# Maximum number of nodes in a YAML file. There is a limit because PyYAML is slow. Large rubrics have about 4,000 nodes.
MAX_PARTS = 10_000
MAX_DIGITS = 40  # maximum number of digits in a number; YAML reads 1:1:1:… as a number too
MAX_CRITERIA = 60
MAX_POINTS = 10_000
MAX_STEPS = 201  # maximum number of values on a criterion's scale of points, including 0
MIN_STEP = Decimal("0.001")
MAX_TITLE = 200  # characters
MAX_GUIDANCE = 8_000
MAX_RULINGS, MAX_RULING = 20, 400  # maximum number of a criterion's rulings, and of a ruling's characters
MAX_INSTRUCTIONS = 50_000

_TOO_DEEP = f"lists and keys within each other, more than {MAX_DEPTH} deep; is this the rubric?"
_ID = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,39}\Z")
_TOP_KEYS = ("title", "instructions", "criteria", "total", "checks", "feedback", "late")
_CRITERION_KEYS = ("id", "title", "points", "guidance", "model", "step", "deduction", "rulings")


@dataclass(frozen=True, slots=True)
class Criterion:
    """Something that earns points, from `minimum` to `points` in steps of `step`. `guidance` is for graders only.

    `guidance` ends with the `rulings` on edge cases, one on each line.
    """

    id: str
    title: str
    points: Points
    guidance: str
    model: Aspect
    step: Points = 1
    rulings: tuple[str, ...] = ()
    minimum: Points = 0  # below 0 if the criterion can deduct points

    @property
    def grid(self) -> tuple[Points, ...]:
        """All numbers of points that may be given, in ascending order."""
        first, last = (int(exact(points) / exact(self.step)) for points in (self.minimum, self.points))
        return tuple(plain(exact(self.step) * i) for i in range(first, last + 1))


@dataclass(frozen=True)
class Rubric:
    """A checked rubric. `digest` (32 hex digits) changes with everything that a model could notice."""

    title: str
    instructions: str
    criteria: tuple[Criterion, ...]
    digest: str
    checks: tuple[Check, ...] = ()
    feedback: str = ""  # instructions for the summary
    late: LateRule | None = None  # not part of the digest

    @cached_property
    def total(self) -> Points:
        """The most points that a submission can earn."""
        return add_points(criterion.points for criterion in self.criteria)

    def for_model(self, aspect: Aspect) -> tuple[Criterion, ...]:
        """Return the criteria that this model grades, in the rubric's order. There may be none."""
        return tuple(criterion for criterion in self.criteria if criterion.model == aspect)


def exact(points: Points) -> Decimal:
    """Return the number exactly as it is written: 0.1 is a tenth."""
    return Decimal(str(points))


def add_points(points: Iterable[Points]) -> Points:
    """Add points without binary rounding: ten times 0.1 is 1."""
    return plain(sum(map(exact, points), Decimal(0)))


def total_points(points: Iterable[Points]) -> Points:
    """Return the sum of points, but at least 0, because Moodle reads a negative number as "no grade"."""
    return max(0, add_points(points))


def load_rubric(path: Path) -> Rubric:
    """Read a rubric from a .yaml, .yml or .json file, or from a .csv exported by Canvas.

    Raises RubricError: one sentence with the file, the place in it, and what to write instead.
    """
    return parse_rubric(str(path), _read_text(path), path.suffix.lower())


def parse_rubric(file: str, text: str, suffix: str) -> Rubric:
    """Read a rubric from a text. `suffix` says which kind of file it comes from. Raises as `load_rubric`."""
    top = _mapping(file, "the rubric", rubric_data(file, text, suffix), _TOP_KEYS, ("title", "criteria"))
    title = _text(file, "title", top["title"], MAX_TITLE, line=True)
    instructions = _text(file, "instructions", top.get("instructions", ""), MAX_INSTRUCTIONS)
    criteria = _parse_criteria(file, top["criteria"])
    checks = parse_checks(file, top.get("checks", []), [criterion.id for criterion in criteria])
    feedback = _text(file, "feedback", top.get("feedback", ""), MAX_GUIDANCE)
    digest = _digest(title, instructions, criteria, checks, feedback)
    late = (
        parse_late(file, _mapping(file, "late", top["late"], LATE_KEYS, ("due", "percent"))) if "late" in top else None
    )
    rubric = Rubric(title, instructions, criteria, digest, checks, feedback, late)
    _check_total(file, top.get("total"), rubric.total)
    return rubric


def rubric_data(file: str, text: str, suffix: str) -> Any:
    """Read a rubric in any format into Kvasir's keys and values, unchecked. Raises RubricError."""
    if suffix == ".csv":
        return from_canvas(file, text)
    data = _parse_json(file, text) if suffix == ".json" else _parse_yaml(file, text)
    _check_values(file, data)
    return from_earlier_form(file, data) if is_earlier_form(data) else data


def _digest(
    title: str, instructions: str, criteria: tuple[Criterion, ...], checks: tuple[Check, ...], feedback: str
) -> str:
    # The rulings and a minimum of 0 are left out, so that older rubrics keep their digests. The guidance contains the
    # rulings anyway.
    criteria_data = [
        {name: value for name, value in asdict(criterion).items() if name != "rulings" and (name != "minimum" or value)}
        for criterion in criteria
    ]
    content = [title, instructions, criteria_data, [asdict(check) for check in checks]]
    content += [feedback] if feedback else []  # an empty feedback adds nothing, so older rubrics keep their digests
    return hashlib.blake2b(json.dumps(content).encode(), digest_size=16, person=b"kvasir.rubric").hexdigest()


# --- from file to data ---


def _read_text(path: Path) -> str:
    if path.suffix.lower() not in {f".{kind}" for kind in KINDS}:
        raise RubricError(f"{path}: a rubric's file name must end in .yaml, .yml, .json or .csv (Canvas)")
    try:
        with open_ordinary(path) as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise RubricError(f"{path}: the rubric can't be read: {error.strerror or error}") from None
    if len(data) > MAX_FILE_BYTES:
        raise RubricError(f"{path}: the file is larger than {MAX_FILE_BYTES >> 20} MiB; is this the rubric?")
    is_csv = path.suffix.lower() == ".csv"
    remedy = "open it in the spreadsheet and save it as 'CSV UTF-8'" if is_csv else "save the file as UTF-8"
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise RubricError(f"{path}: line {line} is not UTF-8; {remedy}") from None
    if "\0" in text:  # for example UTF-16 without a byte order mark
        raise RubricError(f"{path} is not UTF-8; {remedy}")
    return text


def _parse_json(file: str, text: str) -> Any:
    def no_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        _refuse_repeats(file, [key for key, _ in pairs])
        return dict(pairs)

    try:
        return json.loads(text, object_pairs_hook=no_repeats)
    except json.JSONDecodeError as error:
        raise RubricError(f"{file}: line {error.lineno}, column {error.colno} is not JSON: {error.msg}") from None
    except (ValueError, RecursionError) as error:
        raise RubricError(f"{file}: the file is JSON, but it can't be read: {error}") from None


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader, except that a duplicate key is an error instead of silently replacing the first.

    Content that would take long or much memory to load is refused early: PyYAML reads a file event by event.
    """

    def __init__(self, file: str, text: str) -> None:
        super().__init__(text)
        self.name = file
        self._parts = self._aliases = self._depth = 0

    def get_event(self) -> Any:
        """Return the next part of the file.

        Raises RubricError if there are too many parts, or if they are nested too deeply.
        """
        event = super().get_event()  # type: ignore[no-untyped-call]
        self._parts += 1
        self._aliases += isinstance(event, yaml.AliasEvent)
        self._depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if problem := self._problem(event):
            raise RubricError(f"{self.name}: line {event.start_mark.line + 1}: {problem}")
        return event

    def _problem(self, event: Any) -> str:
        if self._aliases > MAX_ALIASES:
            return f"{self._aliases} YAML aliases (*name); at most {MAX_ALIASES} are read: write them out"
        if self._depth > MAX_DEPTH:
            return _TOO_DEEP
        if self._parts > MAX_PARTS:
            return f"more than {MAX_PARTS:,} keys and values; is this the rubric?"
        number = event.value if isinstance(event, yaml.ScalarEvent) and event.implicit[0] else ""
        if len(number) > MAX_DIGITS and not number.strip("0123456789abcdefxABCDEF_.:+-"):
            return f"a number of {len(number):,} digits; shorten it, or put it in quotes"
        return ""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"]
        _refuse_repeats(f"{self.name}: line {node.start_mark.line + 1}", keys)
        return super().construct_mapping(node, deep)


def _parse_yaml(file: str, text: str) -> Any:
    try:
        return _Loader(file, text).get_single_data()
    except RubricError:
        raise
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        position = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        hint = "; put a text with a colon in it in quotes" if "mapping values" in str(error.problem) else ""
        raise RubricError(f"{file}: {position}not YAML: {error.problem or error.context}{hint}") from None
    except Exception as error:  # noqa: BLE001  PyYAML meets odd scalars with ValueError, KeyError, AttributeError, ...
        first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise RubricError(f"{file}: the file is YAML, but it can't be read: {first_line}") from None


def _check_values(file: str, data: Any, depth: int = 0) -> None:
    """Refuse values that later code could not show or compute with."""
    if depth > MAX_DEPTH:
        raise RubricError(f"{file}: {_TOO_DEEP}")
    if isinstance(data, int) and abs(data) >= 10**MAX_DIGITS:
        raise RubricError(f"{file}: a number has more than {MAX_DIGITS} digits; points must be at most {MAX_POINTS:,}")
    for key in data if isinstance(data, dict) else ():
        if not isinstance(key, str):
            raise RubricError(f"{file}: the key {_quote(key)} must be text; put it in quotes")
    for element in data.values() if isinstance(data, dict) else data if isinstance(data, list) else ():
        _check_values(file, element, depth + 1)


def _refuse_repeats(place: str, keys: list[Any]) -> None:
    seen_keys: set[Hashable] = set()
    # Unhashable keys are skipped, because PyYAML refuses them itself and names their line.
    for key in (key for key in keys if isinstance(key, Hashable)):
        if key in seen_keys:
            raise RubricError(f"{place}: the key {_quote(key)} occurs twice; remove one")
        seen_keys.add(key)


# --- from data to rubric ---


def _parse_criteria(file: str, data: Any) -> tuple[Criterion, ...]:
    if not isinstance(data, list):
        raise RubricError(f"{file}: 'criteria' must be a list of criteria, not {_quote(data)}")
    if not data:
        raise RubricError(f"{file}: 'criteria' is empty; write at least one criterion with id, title, points and model")
    if len(data) > MAX_CRITERIA:
        raise RubricError(
            f"{file}: the rubric has {len(data)} criteria, but at most {MAX_CRITERIA} are allowed; join some of them"
        )
    criteria = tuple(_parse_criterion(file, number, criterion_data) for number, criterion_data in enumerate(data, 1))
    first_numbers: dict[str, int] = {}
    for number, criterion in enumerate(criteria, 1):
        # Two ids must not differ only in case, because people would confuse the columns in a spreadsheet.
        first = first_numbers.setdefault(criterion.id.casefold(), number)
        if first != number:
            raise RubricError(
                f"{file}: criteria {first} and {number} both have the id {criterion.id!r}; change one of the ids"
            )
    return criteria


def _parse_criterion(file: str, number: int, data: Any) -> Criterion:
    name = data.get("id") if isinstance(data, dict) else None
    place = f"criterion {number} ({name!r:.42})" if isinstance(name, str) else f"criterion {number}"
    at = f"{file}: {place}"
    fields = _mapping(file, place, data, _CRITERION_KEYS, ("id", "title", "points", "model"))
    deduction = _positive_number(at, "deduction", fields["deduction"]) if "deduction" in fields else Decimal(0)
    only_costs = deduction and fields["points"] == 0
    points = Decimal(0) if only_costs else _positive_number(at, "points", fields["points"])
    step = _positive_number(at, "step", fields.get("step", 1))
    _check_grid(at, deduction, points, step)
    rulings = _rulings(at, fields.get("rulings", []))
    guidance = _text(at, "guidance", fields.get("guidance", ""), MAX_GUIDANCE)
    return Criterion(
        id=_id(at, fields["id"]),
        title=_text(at, "title", fields["title"], MAX_TITLE, line=True),
        points=plain(points),
        guidance="\n".join([*([guidance] if guidance else []), *(f"Ruling: {ruling}" for ruling in rulings)]),
        model=_aspect(at, fields["model"]),
        step=plain(step),
        rulings=rulings,
        minimum=plain(-deduction),
    )


def _rulings(at: str, value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or len(value) > MAX_RULINGS:
        raise RubricError(f"{at}: 'rulings' must be a list of at most {MAX_RULINGS} sentences, not {_quote(value)}")
    return tuple(_text(at, "rulings", ruling, MAX_RULING, line=True) for ruling in value)


def _mapping(
    file: str, place: str, data: Any, keys: tuple[str, ...], required_keys: tuple[str, ...]
) -> Mapping[str, Any]:
    if not isinstance(data, dict):
        raise RubricError(f"{file}: {place} must contain keys and values ({', '.join(keys)}), not {_quote(data)}")
    for key in data:
        if key not in keys:
            close = difflib.get_close_matches(str(key), keys, n=1)
            hint = f"did you mean '{close[0]}'?" if close else f"the keys are {', '.join(keys)}"
            raise RubricError(f"{file}: {place}: unknown key {_quote(key)}; {hint}")
    for key in required_keys:
        if key not in data:
            raise RubricError(f"{file}: {place}: '{key}' is missing; add '{key}: …'")
    return data


def _text(at: str, key: str, value: Any, longest: int, line: bool = False) -> str:
    """Return the text, stripped. With `line`, it must not be empty and must have no line break."""
    if not isinstance(value, str):
        raise RubricError(f"{at}: '{key}' must be text, not {_quote(value)}; put it in quotes")
    text = value.strip()
    if len(text) > longest:
        raise RubricError(
            f"{at}: '{key}' is {len(text):,} characters long; at most {longest:,} are allowed: shorten it"
        )
    if any(0xD800 <= ord(char) < 0xE000 or (char < " " and char not in "\t\n\r") for char in text):
        raise RubricError(f"{at}: '{key}' contains a control character; remove it")
    if line and (not text or "\n" in text or "\r" in text):
        raise RubricError(f"{at}: '{key}' must be one line of text, not {_quote(value)}")
    return text


def _id(at: str, value: Any) -> str:
    if not isinstance(value, str):
        raise RubricError(f"{at}: 'id' must be text, not {_quote(value)}; put it in quotes")
    if not _ID.match(value):
        raise RubricError(
            f"{at}: 'id' must be a letter and up to 39 letters, digits, '_' or '-', not {_quote(value)}; put "
            "longer words into the title"
        )
    if value.casefold() in RESERVED_IDS:
        raise RubricError(f"{at}: the id {value!r} has another meaning in the results; choose another id")
    return value


def _aspect(at: str, value: Any) -> Aspect:
    for aspect in ASPECTS:
        if value == aspect:
            return aspect
    raise RubricError(f"{at}: 'model' must be 'code' or 'feedback', not {_quote(value)}")


def _positive_number(at: str, key: str, value: Any) -> Decimal:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise RubricError(f"{at}: '{key}' must be a number, not {_quote(value)}; write it without quotes or a unit")
    if not math.isfinite(value) or value <= 0:
        raise RubricError(f"{at}: '{key}' must be a number above 0, not {_quote(value)}")
    if value > MAX_POINTS:
        raise RubricError(f"{at}: '{key}' must be at most {MAX_POINTS:,}, not {value:g}")
    return exact(value)


def _check_grid(at: str, deduction: Decimal, points: Decimal, step: Decimal) -> None:
    if step < MIN_STEP:
        raise RubricError(f"{at}: 'step' must be at least {MIN_STEP}, not {plain(step)}")
    if points % step or deduction % step:
        key, value = ("points", points) if points % step else ("deduction", deduction)
        raise RubricError(f"{at}: {key} {plain(value)} is not a multiple of step {plain(step)}; change one of the two")
    if (points + deduction) / step + 1 > MAX_STEPS:
        raise RubricError(
            f"{at}: {plain(-deduction)} to {plain(points)} in steps of {plain(step)} is more than {MAX_STEPS} values; "
            "set a larger 'step'"
        )


def _check_total(file: str, total: Any, real: Points) -> None:
    if not real:
        raise RubricError(f"{file}: no criterion earns points; give at least one criterion more than 0 points")
    if total is not None and plain(_positive_number(file, "total", total)) != real:
        raise RubricError(f"{file}: 'total' is {_quote(total)}, but the criteria add up to {real}; correct one of them")


def _quote(value: Any) -> str:
    """Return a short form of a value for an error message, without looking through a whole container."""
    if isinstance(value, dict):
        return "keys and values"
    if isinstance(value, list | tuple | set):
        return "a list"
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) > 10**20:
        return "a very large number"
    return "nothing" if value is None else f"{value!r:.60}"
