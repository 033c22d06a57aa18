"""`kvasir grade --dry-run`: what was found, how long it is, what the class shares, and what would be cut."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import click

from infra.settings import Settings
from kvasir.connect import connect
from kvasir.terminal import say, table
from messages.errors import ConfigError, Retry
from producers import grade
from producers.grade import Assignment, GradeRequest, Item
from producers.names import student_id
from producers.prompts import cut_summary
from producers.tokens import estimate_tokens
from producers.truncation import count_parts

# Any fixed ones: a dry run leaves no batch behind, and every code has the same length.
_BATCH_ID = "dry-run"
_SECRET = bytes(16)


@dataclass(frozen=True, slots=True)
class _Counter:
    """Counts tokens with the serving model's tokenizer if it is at hand."""

    count: Callable[[str], int]
    exact: bool


def show(settings: Settings, request: GradeRequest, as_json: bool) -> int:
    """Print the dry run; 0 if every submission can be read, else 1."""
    assignment = grade.prepare(request, _BATCH_ID, _SECRET)
    with ExitStack() as stack:
        counter = _counter(settings, assignment, stack)
        found = describe(assignment, counter.count, counter.exact)
    click.echo(json.dumps(found, ensure_ascii=False)) if as_json else _print(found)
    return 1 if any(item["problem"] for item in found["submissions"]) else 0


def describe(assignment: Assignment, count: Callable[[str], int], exact: bool) -> dict[str, Any]:
    """The dry run as plain data."""
    items = [_item(item, count) for item in assignment.items]
    return {
        "rubric": assignment.rubric.title,
        "points": assignment.rubric.total,
        "exact_tokens": exact,
        "prompts": len(assignment.tasks),
        "prompt_tokens": sum(sum(item["prompts"].values()) for item in items),
        "shared_prefix": [_shared(assignment, role, count) for role in assignment.request.models],
        "submissions": items,
    }


def _item(item: Item, count: Callable[[str], int]) -> dict[str, Any]:
    submission = item.submission
    return {
        "submission": submission.name,
        "language": submission.language,
        "problem": submission.problem,
        "empty": submission.empty and not submission.problem,
        "tokens": count_parts(submission, count),
        "images_left_out": submission.images_left_out,
        "cuts": cut_summary(item.cuts),
        "notes": list(submission.notes),
        "student_id": student_id(submission.name),
        "replaces": list(submission.superseded),
        "prompts": {task.role: count(task.prompt.shared + task.prompt.own) for task in item.tasks},
    }


def _shared(assignment: Assignment, role: str, count: Callable[[str], int]) -> dict[str, Any]:
    """How much of a role's prompts is the same for the class."""
    tasks = [task for task in assignment.tasks if task.role == role]
    if not tasks:
        return {"role": role, "tokens": 0, "percent": 0}
    shared = count(tasks[0].prompt.shared)
    total = sum(count(task.prompt.shared + task.prompt.own) for task in tasks)
    return {"role": role, "tokens": shared, "percent": round(100 * shared * len(tasks) / total) if total else 0}


def _counter(settings: Settings, assignment: Assignment, stack: ExitStack) -> _Counter:
    models = sorted({model.name for model in assignment.request.models.values()})
    try:
        client = stack.enter_context(connect(settings, models, name="dry run"))
    except (ConfigError, Retry):
        return _Counter(estimate_tokens, exact=False)
    if client.count_tokens(models[0], "") is None:
        return _Counter(estimate_tokens, exact=False)
    # Two models rarely share a tokenizer, but nearly so: one count is shown for both.
    return _Counter(lambda text: client.count_tokens(models[0], text) or 0, exact=True)


def _print(found: dict[str, Any]) -> None:
    how = "counted with the model's tokenizer" if found["exact_tokens"] else "estimated: no tokenizer at hand"
    rows = [_row(item) for item in found["submissions"]]
    table(("submission", "language", "code", "text", "output", "prompts", "remarks"), rows, right=_FIGURES)
    say(f"{found['prompts']} prompts, {found['prompt_tokens']:,} tokens ({how})")
    for part in found["shared_prefix"]:
        say(f"{part['role']}: the class shares {part['tokens']:,} tokens, {part['percent']}% of its prompts")


_FIGURES = ("code", "text", "output", "prompts")


def _row(item: dict[str, Any]) -> list[str]:
    tokens = item["tokens"]
    remarks = [item["problem"]] if item["problem"] else [*item["cuts"], *item["notes"]]
    if item["empty"]:
        remarks.insert(0, "nothing of the student's own: 0 points without a model")
    remarks += [f"replaces {name}" for name in item["replaces"]]
    if item["images_left_out"]:
        remarks.append(f"{item['images_left_out']} images left out")
    figures = [f"{tokens[kind]:,}" for kind in ("code", "text", "output")]
    return [item["submission"], item["language"], *figures, f"{sum(item['prompts'].values()):,}", "; ".join(remarks)]
