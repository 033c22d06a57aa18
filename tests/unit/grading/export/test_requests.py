"""Students' requests for another look: read in, answered, written out, and never rewritten."""

import csv
import io
from pathlib import Path

import pytest

from grading.export import (
    ExportError,
    FinalGrade,
    Request,
    add_requests,
    export_replies,
    final_grades,
    points_of,
    read_requests,
    requests_from,
    save_reply,
)
from grading.export.requests import FILE
from grading.reviews import Override, append_override
from kvasir import cli
from messages.errors import BatchError
from tests.support import desk

SIZE = 3


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """Three students with two points for each of two criteria."""
    folder, assignment = desk.plan_tiny_class(tmp_path, SIZE)
    desk.answer(folder, assignment, range(SIZE))
    desk.write_grades(folder, assignment)
    return folder


def grades(out: Path) -> list[FinalGrade]:
    return final_grades(out)[1]


def table(out: Path, *rows: tuple[str, str, str]) -> bytes:
    """A table as a form makes it; a row's first cell is the number of a student."""
    names = [final.submission for final in grades(out)]
    made = io.StringIO(newline="")
    writer = csv.writer(made)
    writer.writerow(("submission", "criterion", "request"))
    writer.writerows((names[int(who)], *rest) for who, *rest in rows)
    return made.getvalue().encode()


def test_a_table_of_requests_is_read_once(out: Path) -> None:
    first = grades(out)[0].criteria[0]
    data = table(
        out, ("0", first.id, "I did label the axes."), ("2", "", "All of it, please;\nI was ill."), ("1", "", "")
    )

    assert add_requests(out, requests_from(out, data, grades(out), "Ann")[0]) == 2
    assert add_requests(out, requests_from(out, data, grades(out), "Bob")[0]) == 0

    one, two = read_requests(out)
    assert (one.criterion_id, one.text, one.points, one.by, one.answer) == (
        first.id,
        "I did label the axes.",
        2,
        "Ann",
        None,
    )
    assert (two.criterion_id, two.points) == (None, grades(out)[2].points)
    assert {one.item_id, two.item_id} == {grades(out)[0].grade.item_id, grades(out)[2].grade.item_id}


def test_a_criterion_may_be_named_by_its_title(out: Path) -> None:
    named = grades(out)[0].criteria[1]
    [request], _ = requests_from(out, table(out, ("0", f" {named.title.upper()} ", "why?")), grades(out))
    assert request.criterion_id == named.id


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"submission\nx\n", "the table of requests lacks columns: it needs a column request, and one of submission"),
        (b"request\nwhy?\n", "the table of requests lacks columns: it needs a column request, and one of submission"),
        (b"submission,request\nnobody.py,why?\n", "requests, row 2: this class has no submission 'nobody.py'"),
        (b"submission,request\n,why?\n", "requests, row 2: this class has no submission 'nobody'"),
        (b"ID,request\n100,Why, though? It runs.\n", "requests, row 2: there are more fields than in the header"),
        (
            b"ID;request\n100;why?\n101;Why; though?\n",
            "row 3: there are more fields than in the header; put quotes around values with",
        ),
    ],
)
def test_a_table_that_cannot_be_used_says_where(out: Path, data: bytes, said: str) -> None:
    with pytest.raises(ExportError) as refused:
        requests_from(out, data, grades(out))
    assert said in str(refused.value)


def test_rows_without_a_request_are_said_and_empty_lines_are_not(out: Path) -> None:
    data = table(out, ("0", "", "why?"), ("1", "", " "), ("2", "", "")) + b"\r\n,,,,\r\n"

    requests, remark = requests_from(out, data, grades(out))

    assert len(requests) == 1
    assert remark == "requests, rows 3, 4 hold no request"
    assert requests_from(out, table(out, ("1", "", "")), grades(out)) == ([], "requests, row 2 holds no request")


def test_a_criterion_that_is_none_and_a_text_without_end_are_refused(out: Path) -> None:
    with pytest.raises(ExportError, match="requests, row 2: 'style' is not a criterion of this class; use one of "):
        requests_from(out, table(out, ("0", "style", "why?")), grades(out))
    with pytest.raises(ExportError, match=r"the request is too long: at most 20,000 characters.* has 20,001"):
        Request.about(grades(out)[0], None, "x" * 20_001)
    assert read_requests(out) == []


def test_an_answer_keeps_the_points_then_and_now_and_the_last_one_counts(out: Path) -> None:
    final = grades(out)[0]
    asked = Request.about(final, final.criteria[0].id, "I did label the axes.", "Ann")
    add_requests(out, [asked])
    before = (out / FILE).read_bytes()
    with pytest.raises(ExportError, match="write what the student will read"):
        save_reply(out, asked, " ", 2)

    append_override(out, Override(final.grade.item_id, final.criteria[0].id, 3, "You did.", "asked"))
    save_reply(out, asked, "You did; sorry.", points_of(grades(out)[0], asked.criterion_id), "Bob")
    with pytest.raises(ExportError, match=r"somebody else has replied in the meantime \(Bob\): read that reply first"):
        save_reply(out, asked, "No.", 2, "Ann")
    save_reply(out, read_requests(out)[0], "You did. Thank you for asking.", 3, "Bob")

    [found] = read_requests(out)
    assert found.answer
    assert (found.points, found.answer.points, found.answer.reply, found.answer.by) == (
        2,
        3,
        "You did. Thank you for asking.",
        "Bob",
    )
    assert (out / FILE).read_bytes().startswith(before)
    assert len((out / FILE).read_bytes().splitlines()) == 3

    [header, row] = csv.reader(io.StringIO(export_replies(out).data.decode()))
    told = dict(zip(header, row, strict=True))
    assert (told["points_then"], told["points_now"]) == ("2", "3")
    assert (told["evidence"], told["feedback"]) == ("sum(values)", "You did.")
    assert (told["entered_by"], told["answered_by"]) == ("Ann", "Bob")


def test_cells_that_a_spreadsheet_would_run_are_made_harmless(out: Path) -> None:
    add_requests(out, [Request.about(grades(out)[0], None, '=HYPERLINK("http://x","y")')])
    exported = export_replies(out)
    [_, row] = csv.reader(io.StringIO(exported.data.decode()))
    assert not any(cell.startswith("=") for cell in row)
    assert exported.notes == ("1 of 1 requests have no reply yet.",)


def test_a_damaged_line_is_named(out: Path) -> None:
    (out / FILE).write_text('{"id": 7}\n')
    with pytest.raises(BatchError, match=r"requests\.jsonl, line 1"):
        read_requests(out)


def test_from_a_terminal(out: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def requests(*words: str) -> int:
        return cli.run_command(["requests", str(out), *words])

    assert requests() == 0
    assert "Nobody has asked for another look." in capsys.readouterr().out
    (tmp_path / "asked.csv").write_bytes(table(out, ("1", "", "Why so few?")))
    assert requests("--from", str(tmp_path / "asked.csv"), "--by", "Ann") == 1
    said = capsys.readouterr().out
    assert "1 new request." in said
    assert "Why so few?" in said
    [asked] = read_requests(out)
    assert (
        requests("--answer", asked.id, "--reply", "It stands: see the feedback.", "--to", str(tmp_path / "to.csv")) == 0
    )
    assert "It stands: see the feedback." in (tmp_path / "to.csv").read_text()
    assert requests("--answer", "none", "--reply", "x") == cli.EXIT_USAGE
    assert "there is no request 'none'" in capsys.readouterr().err
    assert requests("--answer", asked.id) == cli.EXIT_USAGE
    assert requests("--json") == 0
    assert '"reply": "It stands: see the feedback."' in capsys.readouterr().out
