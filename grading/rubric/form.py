"""A rubric as the fields of a form, and back as a file.

Parts that the form does not show, such as checks, are copied unchanged. If the form changes nothing, the new rubric has
the same digest. Comments are not part of a rubric, so a file written from a form has none.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import count
from typing import Any

import yaml

from grading.rubric.late import LateRule
from grading.rubric.rubric import Points, Rubric, add_points, parse_rubric, rubric_data

_FIRST_WIDTH = 110  # as far as possible, lines of the YAML file have at most this many characters


@dataclass(frozen=True, slots=True)
class CriterionFields:
    """The fields of one criterion.

    `rulings` has one ruling on each line. `saved_id` is the id in the file, or "" for a new criterion.
    """

    id: str = ""
    title: str = ""
    points: Points = 1
    step: Points = 1
    model: str = "code"
    guidance: str = ""
    rulings: str = ""
    saved_id: str = ""
    deduction: Points = 0


NO_LATE_RULE = LateRule(due="", percent=10)  # `due` as in the rubric's file; "" means that there is no rule


@dataclass(frozen=True, slots=True)
class RubricFields:
    """All fields of a rubric. `rest` holds what no field shows: checks, and whether the total is written."""

    title: str = ""
    instructions: str = ""
    feedback: str = ""
    criteria: tuple[CriterionFields, ...] = ()
    late: LateRule = NO_LATE_RULE
    rest: Mapping[str, Any] = field(default_factory=dict)

    @property
    def total(self) -> Points:
        """The most points that can be earned."""
        return add_points(criterion.points for criterion in self.criteria)


def read_fields(file: str, text: str, suffix: str) -> RubricFields:
    """Read a rubric's fields from a text. `suffix` says which kind of file it comes from. Raises RubricError."""
    parse_rubric(file, text, suffix)
    data = rubric_data(file, text, suffix)
    criteria = tuple(
        CriterionFields(
            **{name: value for name, value in criterion_data.items() if name != "rulings"},
            rulings="\n".join(criterion_data.get("rulings", [])),
            saved_id=criterion_data["id"],
        )
        for criterion_data in data["criteria"]
    )
    late = data.get("late", {})
    rule = replace(NO_LATE_RULE, **late | {"due": str(late["due"])}) if late else NO_LATE_RULE
    field_names = {form_field.name for form_field in fields(RubricFields)}
    rest = {name: value for name, value in data.items() if name not in field_names}
    texts = {name: data[name] for name in ("title", "instructions", "feedback") if name in data}
    return RubricFields(**texts, criteria=criteria, late=rule, rest=rest)


def to_yaml(form: RubricFields) -> str:
    """Return the fields as a YAML rubric."""
    data: dict[str, Any] = {"title": form.title}
    data |= {name: getattr(form, name) for name in ("instructions", "feedback") if getattr(form, name)}
    data |= {"total": form.total} if "total" in form.rest else {}
    data["criteria"] = [_criterion_data(criterion) for criterion in form.criteria]
    if form.late.due:
        data["late"] = {
            name: value
            for name, value in asdict(form.late).items()
            if name in ("due", "percent") or value != getattr(NO_LATE_RULE, name)
        }
    if checks := _checks_data(form):
        data["checks"] = checks
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=_FIRST_WIDTH)


def _criterion_data(criterion: CriterionFields) -> dict[str, Any]:
    criterion_data: dict[str, Any] = {"id": criterion.id, "title": criterion.title, "points": criterion.points}
    criterion_data |= {"step": criterion.step} if criterion.step != 1 else {}
    criterion_data |= {"deduction": criterion.deduction} if criterion.deduction else {}
    criterion_data["model"] = criterion.model
    criterion_data |= {"guidance": criterion.guidance} if criterion.guidance else {}
    rulings = [line.strip() for line in criterion.rulings.splitlines() if line.strip()]
    return criterion_data | ({"rulings": rulings} if rulings else {})


def _checks_data(form: RubricFields) -> list[Any]:
    """Return the checks with the criteria's current ids. Checks of deleted criteria are left out."""
    now = {criterion.saved_id: criterion.id for criterion in form.criteria if criterion.saved_id}
    checks = form.rest.get("checks", [])
    return [
        check | ({"criterion": now[check["criterion"]]} if check.get("criterion") else {})
        for check in checks
        if not check.get("criterion") or check["criterion"] in now
    ]


def with_criterion(form: RubricFields) -> RubricFields:
    """Add a new criterion at the end, under an unused id."""
    used_ids = {id.casefold() for criterion in form.criteria for id in (criterion.id, criterion.saved_id)}
    free = next(f"criterion_{number}" for number in count(1) if f"criterion_{number}" not in used_ids)
    return replace(form, criteria=(*form.criteria, CriterionFields(id=free)))


def move_criterion(form: RubricFields, at: int, to: int | None) -> RubricFields:
    """Move the criterion at index `at` to index `to`, or delete it if `to` is None."""
    criteria = list(form.criteria)
    criterion = criteria.pop(at)
    if to is not None:
        criteria.insert(to, criterion)
    return replace(form, criteria=tuple(criteria))


def rubric_differences(before: Rubric, after: Rubric) -> list[str]:
    """Return what differs between two rubrics, in words. Ids of criteria come first."""
    old, new = ({criterion.id: criterion for criterion in rubric.criteria} for rubric in (before, after))
    differences = [f"{id} (new)" if id not in old else id for id, criterion in new.items() if old.get(id) != criterion]
    differences += [f"{id} (removed)" for id in old if id not in new]
    if not differences and [*old] != [*new]:
        differences.append("the order of the criteria")
    names = {"title": "title", "instructions": "instructions", "feedback": "how the summary is written"}
    return differences + [
        label for name, label in (names | {"checks": "checks"}).items() if getattr(before, name) != getattr(after, name)
    ]


def has_comments(text: str) -> bool:
    """Whether a YAML text holds comments: a `#` between two of its tokens."""
    end = 0
    try:
        for token in yaml.scan(text, Loader=yaml.SafeLoader):
            if "#" in text[end : token.start_mark.index]:
                return True
            end = max(end, token.end_mark.index)
    except yaml.YAMLError:
        return False
    return "#" in text[end:]


class _Dumper(yaml.SafeDumper):
    """Writes texts line by line, as a person would. Repeated values are written out, without YAML aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        """Never use an alias for a repeated value."""
        return True


def _as_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _as_text)
