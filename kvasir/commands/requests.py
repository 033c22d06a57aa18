"""`kvasir requests`: students' requests for another look, the replies to them, and a file with both."""

from pathlib import Path
from typing import Any

import click

from desk.decisions import account
from grading import export as out
from grading.export import FinalGrade, Request
from grading.report.grades import one_line, show_points
from infra.config.next_command import next_command
from kvasir.commands.export import bytes_of, write_export
from kvasir.options import json_option, path
from kvasir.terminal import print_table, say, say_json, stderr
from messages.errors import UsageError
from producers.words import plural


@click.command()
@click.argument("batch", type=path)
@click.option(
    "--from",
    "request_file",
    type=path,
    help="Read requests from this CSV with columns submission (or student_id), request, criterion.",
)
@click.option("--answer", "request_id", metavar="ID", help="Answer this request with --reply.")
@click.option("--reply", metavar="TEXT", help="Answer the request of --answer with this text.")
@click.option("--by", metavar="NAME", help="Record who enters or answers the request [default: the login name].")
@click.option("--to", type=path, help="Write requests, replies, points and evidence to this file (CSV).")
@json_option
def requests(
    batch: Path,
    request_file: Path | None,
    request_id: str | None,
    reply: str | None,
    by: str | None,
    to: Path | None,
    as_json: bool,
) -> int:
    """List requests for another look at grades of the batch in folder BATCH; read in, answer, or write them out.

    An answer changes no points: decide on the grade in the desk's review, then reply. Nothing that was kept is ever
    rewritten (requests.jsonl). The exit code is 1 while a request waits for its reply.
    """
    if (request_id is None) != (reply is None):
        raise UsageError("--answer (the request's id) and --reply (the text for the student) must be given together")
    _, grades = out.final_grades(batch)
    by_item = {final.grade.id: final for final in grades}
    account_name = by or account()
    data = bytes_of(request_file)
    if data is not None:
        new_requests, remark = out.requests_from(batch, data, grades, account_name)
        new_count = out.add_requests(batch, new_requests)
        if remark:
            say(remark, stderr)
        if not as_json:
            say(f"{plural(new_count, 'new request')}.")
    if request_id and reply is not None:
        _save_reply(batch, request_id, reply, by_item, account_name)
    all_requests = out.read_requests(batch)
    if as_json:
        say_json({"requests": [_as_json(request, by_item.get(request.item_id)) for request in all_requests]})
    elif all_requests:
        print_table(
            ("id", "submission", "criterion", "points", "request", "reply"),
            [_row(request, by_item) for request in all_requests],
        )
    else:
        say("Nobody has asked for another look.")
    if to:
        write_export(out.export_replies(batch), batch, to)
    return 1 if any(request.answer is None for request in all_requests) else 0


def _save_reply(batch: Path, request_id: str, reply: str, by_item: dict[str, FinalGrade], account_name: str) -> None:
    request = next((request for request in out.read_requests(batch) if request.id == request_id), None)
    if request is None:
        raise UsageError(
            f"there is no request {request_id!r}; list the requests with {next_command('requests', batch)}"
        )
    final = by_item.get(request.item_id)
    out.save_reply(batch, request, reply, out.points_of(final, request.criterion_id) if final else None, account_name)
    if request.answer:
        say(f"The earlier reply stays in the record, and no longer counts: {one_line(request.answer.reply)}", stderr)


def _row(request: Request, by_item: dict[str, FinalGrade]) -> list[str]:
    final = by_item.get(request.item_id)
    points_before, points_now = request.points, out.points_of(final, request.criterion_id) if final else None
    return [
        request.id,
        one_line(final.grade.display_name) if final else request.item_id,
        request.criterion_id or "",
        show_points(points_before)
        if points_before == points_now
        else f"{show_points(points_before) or 'blank'} → {show_points(points_now) or 'blank'}",
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
