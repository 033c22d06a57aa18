"""`kvasir requests`: students who ask for another look, what was replied, and the file with both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from desk.decisions import account
from grading import export as out
from grading.export import FinalGrade, Request
from grading.report.grades import one_line, show_points
from infra.config.next_command import next_command
from kvasir.commands.export import bytes_of, write
from kvasir.options import json_option, path
from kvasir.terminal import say, say_json, stderr, table
from messages.errors import UsageError
from producers.words import plural


@click.command()
@click.argument("batch", type=path)
@click.option("--from", "read", type=path, help="CSV to read in: submission (or student_id), request, criterion.")
@click.option("--answer", "answered", metavar="ID", help="The request that --reply answers.")
@click.option("--reply", metavar="TEXT", help="What the student is told.")
@click.option("--by", metavar="NAME", help="Who enters or answers [default: who is logged in].")
@click.option("--to", type=path, help="Write requests, replies, points and evidence to this file (CSV).")
@json_option
def requests(
    batch: Path,
    read: Path | None,
    answered: str | None,
    reply: str | None,
    by: str | None,
    to: Path | None,
    as_json: bool,
) -> int:
    """List who asked for another look at a grade of the batch in folder BATCH, and take in, answer or write out.

    An answer changes no points: decide on the grade in the desk's review, then reply. Nothing that was kept is ever
    rewritten (requests.jsonl). The exit code is 1 while a request waits for its reply.
    """
    if (answered is None) != (reply is None):
        raise UsageError("--answer names the request, and --reply says what the student is told: give both")
    _, grades = out.final_grades(batch)
    by_item = {final.grade.id: final for final in grades}
    who = by or account()
    data = bytes_of(read)
    if data is not None:
        asked, remark = out.requests_from(data, grades, who)
        new = out.add_requests(batch, asked)
        if remark:
            stderr.print(remark, soft_wrap=True, markup=False, highlight=False)
        if not as_json:
            say(f"{plural(new, 'new request')}.")
    if answered and reply is not None:
        _answer(batch, answered, reply, by_item, who)
    found = out.read_requests(batch)
    if as_json:
        say_json({"requests": [_as_json(request, by_item.get(request.item_id)) for request in found]})
    elif found:
        table(("id", "submission", "criterion", "points", "request", "reply"), [_row(one, by_item) for one in found])
    else:
        say("Nobody has asked for another look.")
    if to:
        write(out.export_replies(batch), batch, to)
    return 1 if any(request.answer is None for request in found) else 0


def _answer(batch: Path, wanted: str, reply: str, by_item: dict[str, FinalGrade], who: str) -> None:
    request = next((one for one in out.read_requests(batch) if one.id == wanted), None)
    if request is None:
        raise UsageError(f"there is no request {wanted!r}: {next_command('requests', batch)} lists them")
    final = by_item.get(request.item_id)
    out.save_reply(batch, request, reply, out.points_of(final, request.criterion_id) if final else None, who)
    if request.answer:
        stderr.print(
            f"The earlier reply stays in the record, and no longer counts: {one_line(request.answer.reply)}",
            soft_wrap=True,
            markup=False,
            highlight=False,
        )


def _row(request: Request, by_item: dict[str, FinalGrade]) -> list[str]:
    final = by_item.get(request.item_id)
    then, now = request.points, out.points_of(final, request.criterion_id) if final else None
    return [
        request.id,
        one_line(final.submission) if final else request.item_id,
        request.criterion_id or "",
        show_points(then) if then == now else f"{show_points(then) or 'blank'} → {show_points(now) or 'blank'}",
        one_line(request.text),
        one_line(request.answer.reply) if request.answer else "",
    ]


def _as_json(request: Request, final: FinalGrade | None) -> dict[str, Any]:
    return {
        "id": request.id,
        "submission": final.submission if final else None,
        "criterion": request.criterion_id,
        "request": request.text,
        "reply": request.answer.reply if request.answer else None,
        "points_then": request.points,
        "points_now": out.points_of(final, request.criterion_id) if final else None,
    }


COMMANDS = (requests,)
