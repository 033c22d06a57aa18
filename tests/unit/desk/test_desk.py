"""The desk without its pages."""

import io
import json
import zipfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from desk import assignments
from desk.assignments import InputError, Inputs
from desk.decisions import Decisions, GradeChange, ReviewError, make_overrides, round_overrides
from desk.differences import differences
from desk.estimate import duration, model_rates
from desk.progress import EXPECTED, Stages
from desk.rows import (
    QUEUES,
    Filter,
    make_rows,
    open_questions,
    page_count,
    page_of,
    select,
    standing_words,
    what_goes_out,
)
from desk.tail import LineTail
from desk.text import escape_markdown
from desk.view import BatchView
from grading.export import Request, add_requests
from grading.report.grades import outcomes
from grading.request import AskForm
from grading.reviews import Override, append_override
from grading.rubric.rubric import parse_rubric
from messages.errors import BatchError, RubricError, SubmissionError
from producers.batch import batch as batches
from producers.batch.batch import Batch
from producers.words import names_in
from tests.support.desk import answer, plan, plan_tiny_class, request_for, request_of
from tests.support.homework import RUBRIC, tiny_class


class Commands:
    """As much of a Backend as makes command lines."""

    def command(self, *arguments: str) -> list[str]:
        return ["kvasir", *arguments]


# --- reading a file that grows


def test_a_tail_gives_every_whole_line_once(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    tail = LineTail(path)
    assert tail.read() == ([], False)

    path.write_text('{"n": 1}\n{"n": 2}\n{"n"')
    first = tail.read()
    with path.open("a") as file:
        file.write(": 3}\n")

    assert first == ([{"n": 1}, {"n": 2}], False)
    assert tail.read() == ([{"n": 3}], False)
    assert tail.read() == ([], False)


def test_a_tail_begins_again_where_the_file_was_replaced(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.write_text('{"n": 1}\n')
    tail = LineTail(path)
    tail.read()

    (tmp_path / "new").write_text('{"n": 5}\n')
    (tmp_path / "new").replace(path)

    assert tail.read() == ([{"n": 5}], True)


def test_a_line_that_is_no_object_is_an_error_only_where_that_is_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.write_text('plain words\n{"n": 1}\n')

    assert LineTail(path, strict=False).read() == ([{"n": 1}], False)
    with pytest.raises(BatchError, match="plain words"):
        LineTail(path).read()


# --- a batch beside its owner


def test_a_view_follows_a_batch_that_another_process_owns(tmp_path: Path) -> None:
    out, assignment = plan_tiny_class(tmp_path)
    view = BatchView(out, request_of).refresh()
    assert [grade.state for grade in view.grades] == ["waiting"] * 3

    answer(out, assignment, [1])

    assert view.refresh().problem == ""
    assert [grade.state for grade in view.grades] == ["waiting", "graded", "waiting"]
    assert [grade.points for grade in view.grades] == [None, 4, None]
    assert (view.counts().finished_jobs, view.counts().open) == (2, 4)


def test_a_view_shows_of_two_successes_the_one_that_counts_for_the_batch(tmp_path: Path) -> None:
    # Given a submission that was graded, and graded again with another answer
    out, assignment = plan_tiny_class(tmp_path, 1)
    answer(out, assignment, [0], points=1)
    view = BatchView(out, request_of).refresh()
    assert [grade.points for grade in view.grades] == [2]
    with Batch(out) as batch:
        before = [batch.result(task.job.job_id) for task in assignment.tasks]
        batch.run_again(task.job.job_id for task in assignment.tasks)
        assert [grade.points for grade in view.refresh().grades] == [None]
        batch.journal.record(
            replace(result, run=2, text=result.text.replace('"points": 1', '"points": 2'))
            for result in before
            if result
        )

        # Then the view shows what the batch counts: nothing while it is open, and then the second answer
        assert [grade.points for grade in view.refresh().grades] == [4]
        assert [view.result(task.job.job_id) for task in assignment.tasks] == [
            batch.result(task.job.job_id) for task in assignment.tasks
        ]


def test_a_view_says_in_a_sentence_what_is_wrong_and_recovers(tmp_path: Path) -> None:
    out, _ = plan_tiny_class(tmp_path)
    work = request_of(batches.manifest_of(out)["request"]).folder
    work.rename(tmp_path / "elsewhere")
    view = BatchView(out, request_of).refresh()
    assert work.name in view.problem

    (tmp_path / "elsewhere").rename(work)
    again = BatchView(out, request_of).refresh()

    assert (again.problem, len(again.grades)) == ("", 3)


# --- decisions


def decided_class(folder: Path, points: int = 2) -> tuple[Path, BatchView, Decisions]:
    out, assignment = plan_tiny_class(folder)
    answer(out, assignment, [0, 1, 2], points)
    return out, BatchView(out, request_of).refresh(), Decisions(out)


def test_a_changed_grade_counts_and_leaves_the_results_as_they_were(tmp_path: Path) -> None:
    out, view, decisions = decided_class(tmp_path)
    before = (out / "results.jsonl").read_bytes()
    grade = view.grades[0]

    append_override(out, *make_overrides(grade, {}, {"works": GradeChange("I ran it", 3, "All of it runs.")}))

    row = make_rows(view, decisions.refresh())[0]
    assert (row.final.grade.points, row.final.points, row.final.is_reviewed) == (4, 5, True)
    assert row.final.criteria[0].feedback == "All of it runs."
    assert (out / "results.jsonl").read_bytes() == before


def test_only_what_differs_from_what_stands_is_a_decision(tmp_path: Path) -> None:
    _, view, decisions = decided_class(tmp_path)
    grade = view.grades[0]
    append_override(view.folder, *make_overrides(grade, {}, {"works": GradeChange("I ran it", 3)}))
    decided = decisions.refresh()[grade.item_id]

    assert make_overrides(grade, decided, {"works": GradeChange(points=3), "clear": GradeChange(points=2)}) == []
    assert [each.points for each in make_overrides(grade, decided, {"works": GradeChange("back", 2)})] == [2]


@pytest.mark.parametrize(("points", "reason", "said"), [(3, " ", "a short reason"), (4, "so", "from 0 to 3")])
def test_a_change_without_a_reason_or_out_of_range_is_refused(
    tmp_path: Path, points: int, reason: str, said: str
) -> None:
    _, view, _ = decided_class(tmp_path)

    with pytest.raises(ReviewError, match=said):
        make_overrides(view.grades[0], {}, {"works": GradeChange(reason, points)})


def test_a_regrade_is_compared_and_its_points_can_be_taken_over(tmp_path: Path) -> None:
    _, old, decisions = decided_class(tmp_path / "old")
    _, new, _ = decided_class(tmp_path / "new", points=1)
    before = {grade.submission: grade for grade in old.grades}

    found = differences(before, new.grades)
    append_override(old.folder, *round_overrides(old.grades[0], new.grades[0], "regraded"))

    assert [difference.change for difference in found] == [-2.0] * 3
    assert found[0].criteria == (("works", 2, 1), ("clear", 2, 1))
    assert [row.final.points for row in make_rows(old, decisions.refresh())] == [2, 4, 4]


# --- the table


def test_a_file_that_can_not_be_read_is_called_unreadable_as_in_the_terminal(tmp_path: Path) -> None:
    # Given a class of two, one of them handed in as a damaged notebook
    work = tiny_class(tmp_path, 2)
    (work / "submissions" / "student9_109_1_homework.ipynb").write_text('{"cells": [')
    out = tmp_path / "out"
    assignment = plan(out, request_for(work))
    answer(out, assignment, [0, 1])

    # When the desk lists it
    found = make_rows(BatchView(out, request_of).refresh(), {})

    # Then the word is the terminal's, a filter knows it, and nobody "failed"
    assert [row.state for row in found] == ["graded", "graded", "unreadable"]
    assert [row.number for row in select(found, QUEUES["without points"])] == [2]
    assert outcomes(row.final.grade for row in found) == "2 graded, 1 unreadable"


def test_a_link_instead_of_work_waits_for_a_person_on_the_desk(tmp_path: Path) -> None:
    work = tiny_class(tmp_path, 1)
    (work / "submissions" / "student9_LATE_109_text.html").write_text("<p>https://example.org/hw</p>")
    out = tmp_path / "out"
    assignment = plan(out, request_for(work))
    answer(out, assignment, [0])

    _, row = found = make_rows(BatchView(out, request_of).refresh(), {})

    assert (row.state, row.final.points) == ("link only", None)
    assert row.needs_review == ("only a link was handed in: https://example.org/hw",)
    assert [select(found, QUEUES[name]) for name in ("needs review", "without points")] == [[row], [row]]
    assert (standing_words(found), open_questions(found)) == ("1 of 2 needs review", "the whole work in 1")
    whole = Override(row.final.grade.item_id, None, 3, None, "seen there")
    [*_, settled] = make_rows(BatchView(out, request_of).refresh(), {whole.item_id: {None: whole}})
    assert (settled.final.points, settled.needs_review) == (3, ())


def test_an_export_says_who_has_decided_and_which_feedback_was_written_for_other_points(tmp_path: Path) -> None:
    out, assignment = plan_tiny_class(tmp_path, 4)
    answer(out, assignment, [0, 1, 2])
    answer(out, assignment, [3], evidence="nowhere to be found")
    view, decisions = BatchView(out, request_of).refresh(), Decisions(out)
    first, second, third, _ = [grade.item_id for grade in view.grades]
    append_override(out, Override(first, "works", 1, None, "less is there"))
    append_override(out, Override(second, "works", 1, "Half of it.", "less is there"))
    append_override(out, Override(third, "works", 3, "All of it.", "regraded in round 1"))
    standing = decisions.refresh()

    assert what_goes_out([row.final for row in make_rows(view, standing)], standing) == [
        "3 grades in this file: 2 that a person has decided on, 1 on the model's points alone.",
        # One of a criterion, and three summaries: of the same total, the points of which changed.
        "4 feedback texts were written for other points than those given now: "
        + ", ".join(grade.display_name for grade in view.grades[:3])
        + ". Review marks them with ⚑.",
    ]
    empty = replace(make_rows(view, standing)[0].final, grade=replace(view.grades[0], state="empty"))
    [counts, _] = what_goes_out([empty], {})
    assert counts.endswith("0 that a person has decided on, 0 on the model's points alone, 1 with nothing handed in.")
    assert what_goes_out([], {}) == [
        "0 grades in this file: 0 that a person has decided on, 0 on the model's points alone."
    ]


def test_how_a_class_stands_is_said_in_words(tmp_path: Path) -> None:
    out, assignment = plan_tiny_class(tmp_path, 5)
    answer(out, assignment, [0, 1])
    answer(out, assignment, [2, 3], evidence="nowhere to be found")
    view, decisions = BatchView(out, request_of).refresh(), Decisions(out)
    rows = make_rows(view, {})

    assert standing_words(rows, 200) == "2 of 200 need review; 196 not graded yet"
    assert (
        standing_words(rows, finish="done by about 23:10") == "2 of 5 need review; 1 being graded, done by about 23:10"
    )
    assert open_questions(rows) == "works in 2, clear in 2"

    append_override(out, Override(view.grades[2].item_id, "clear", 1, None, "r"))
    add_requests(out, [Request.about(rows[0].final, None, "Why?", "Ada")])
    rows = make_rows(view, decisions.refresh())
    assert (open_questions(rows), standing_words(rows)) == (
        "works in 2, clear in 1",
        "2 of 5 need review; 1 request waits for a reply; 1 not graded yet",
    )
    assert standing_words(rows[1:2]) == "none of 1 needs review"


def test_rows_are_filtered_sorted_counted_and_cut_into_pages(tmp_path: Path) -> None:
    out, assignment = plan_tiny_class(tmp_path, 4)
    answer(out, assignment, [1], points=1)
    answer(out, assignment, [2], points=2)
    found = make_rows(BatchView(out, request_of).refresh(), {})

    assert standing_words(found, total=9) == "7 not graded yet"
    assert [row.number for row in select(found, Filter(states=("graded",)))] == [1, 2]
    assert [row.number for row in select(found, Filter(order="points, highest first"))][:2] == [2, 1]
    assert [row.number for row in select(found, Filter(text="STUDENT3"))] == [3]
    assert (page_count(found, 3), [row.number for row in page_of(found, 7, 3)]) == (2, [3])


# --- progress and time


def log_lines(path: Path, *steps: tuple[str, str]) -> None:
    with path.open("a") as file:
        file.writelines(json.dumps({"event": event, "job": job}) + "\n" for event, job in steps)


def test_stages_follow_the_log_and_begin_again_with_the_next_process(tmp_path: Path) -> None:
    log = tmp_path / "log"
    stages = Stages(log)
    log_lines(log, ("submitted", "a"), ("submitted", "b"), ("prefill_started", "a"), ("passed_on", "a"))
    assert stages.refresh() == {
        "waiting": 1, "in prefill": 0, "waiting for decode": 1, "in decode": 0, "done": 0
    }  # fmt: skip

    log_lines(log, ("decode_started", "a"), ("journaled", "a"), ("replied", "a"))
    assert stages.refresh()["done"] == 1

    assert stages.finish_words() == "how long it takes is not known yet"
    log_lines(log, (f"{EXPECTED}about 2 h 05 min left", ""))
    assert stages.finish_words() == "about 2 h 05 min left"

    log_lines(log, ("work_started", ""), ("submitted", "b"))
    assert stages.finish_words() == "how long it takes is not known yet"
    assert sum(stages.refresh().values()) == 1


def test_what_is_in_hand_is_told_with_its_stage_and_since_when(tmp_path: Path) -> None:
    log = tmp_path / "log"
    steps = [
        ("b", "prefill_started", 3),
        ("a", "prefill_started", 1),
        ("a", "passed_on", 4),
        ("a", "decode_started", 5),
    ]
    steps += [("a", "first_token", 6), ("c", "decode_started", 2), ("c", "journaled", 7)]
    with log.open("a") as file:
        for job, event, second in steps:
            line = {"event": event, "job": job, "time": f"2026-11-25T02:00:0{second}.000+00:00"}
            file.write(json.dumps(line) + "\n")

    found = Stages(log).in_hand()

    assert [(job, stage, since.second) for job, stage, since in found] == [
        ("b", "in prefill", 3),
        ("a", "in decode", 5),
    ]
    log_lines(log, ("decode_started", "d"))  # its line has no time
    assert [job for job, *_ in Stages(log).in_hand()] == ["b", "a", "d"]


def test_rates_come_from_results(tmp_path: Path) -> None:
    _, view, _ = decided_class(tmp_path)

    coder, _writer = model_rates(view.results)

    assert (coder.prefill_tokens_per_s, coder.decode_tokens_per_s, coder.transferred_answers) == (500.0, 25.0, 3)


def test_durations_read_like_a_person_says_them() -> None:
    assert [duration(seconds) for seconds in (0.2, 80, 700, 11_100)] == ["1 s", "80 s", "12 min", "3 h 05 min"]


# --- what is given


def test_an_assignment_is_kept_and_found_again(tmp_path: Path) -> None:
    folder = assignments.create_folder(tmp_path, "Homework 4!")
    rubric = assignments.save_rubric(folder, "mine.yaml", RUBRIC.encode())
    assignments.save_inputs(folder, Inputs("Homework 4!", "/work", str(rubric)))

    assert folder.name == "homework-4"
    assert assignments.create_folder(tmp_path, "Homework 4").name == "homework-4-2"
    assert assignments.find_folders(tmp_path) == [folder]
    assert assignments.read_inputs(folder).rubric == str(rubric)


def test_a_batch_from_the_command_line_is_an_assignment_too(tmp_path: Path) -> None:
    out, _ = plan_tiny_class(tmp_path)

    inputs = assignments.read_inputs(out)

    assert assignments.find_folders(tmp_path / "none", [out]) == [out]
    assert (inputs.title, inputs.code_model, Path(inputs.submissions).name) == ("Means", "coder", "submissions")


@pytest.mark.parametrize("name", ["../../etc/cron.d/x", "C:\\work\\x", "/x", "a/../x"])
def test_an_uploaded_file_stays_in_its_folder_whatever_it_is_called(tmp_path: Path, name: str) -> None:
    saved = assignments.save_file(tmp_path / "in", name, b"data")

    assert saved == tmp_path / "in" / "x"
    assert saved.read_bytes() == b"data"


@pytest.mark.parametrize("name", ["", "..", "/", " . "])
def test_a_name_that_names_no_file_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(InputError, match="store a file named"):
        assignments.save_file(tmp_path, name, b"")


def test_another_rubric_is_another_version_and_a_broken_one_none(tmp_path: Path) -> None:
    first = assignments.save_rubric(tmp_path, "r.yaml", RUBRIC.encode())
    second = assignments.save_rubric(tmp_path, "r.yaml", RUBRIC.replace("points: 3", "points: 4").encode())

    with pytest.raises(RubricError, match=r"^r\.yaml: "):
        assignments.save_rubric(tmp_path, "r.yaml", b"title: [")

    (tmp_path / "rubrics" / ".third.yaml.0a1b2c3d").write_text("title: half")  # another person is saving it
    assert sorted(assignments.rubric_versions(tmp_path)) == sorted([first, second])


def test_a_version_is_used_from_the_start_or_by_a_round(tmp_path: Path) -> None:
    folder = assignments.create_folder(tmp_path, "Means")
    first = assignments.save_rubric(folder, "rubric.yaml", RUBRIC.encode())
    other = assignments.save_rubric(folder, "rubric.yaml", RUBRIC.replace("points: 3", "points: 4").encode())
    assignments.save_inputs(folder, Inputs("Means", str(tmp_path), str(first)))
    assignments.use_rubric(folder, other)
    assert assignments.read_inputs(folder).rubric == str(other)

    plan(folder, request_for(tiny_class(tmp_path / "class", 1)))
    with pytest.raises(InputError, match="already graded"):
        assignments.use_rubric(folder, first)


@pytest.mark.parametrize("ask", ["together", "criteria"])
def test_another_rubric_costs_what_its_edits_touch(tmp_path: Path, ask: AskForm) -> None:
    # Given a class of three that is graded
    tiny_class(tmp_path)
    request = replace(request_for(tmp_path), ask=ask)
    assignment = plan(tmp_path / "out", request)
    if ask == "together":
        answer(tmp_path / "out", assignment, range(3))
    view = BatchView(tmp_path / "out", lambda _kept: request).refresh()
    assert view.assignment

    # When nothing is changed, and when one criterion's guidance is
    same = view.cost(view.assignment.rubric)
    changed = parse_rubric("r", RUBRIC.replace("One point for each", "Two points for each"), ".yaml")
    cost, of_one = view.cost(changed), view.cost(changed, [view.grades[0].submission])

    # Then what has an answer is not asked again, and only a question that is new is named
    assert (same.jobs, same.asked) == ((0, ()) if ask == "together" else (6, ()))
    assert cost.asked == (("works", "clear") if ask == "together" else ("works",))
    assert (cost.submissions, of_one.submissions) == (3, 1)
    assert of_one.answer_tokens * 3 == cost.answer_tokens
    assert cost.removed == ()


@pytest.mark.parametrize("files", [[], [("a.py", b"1"), ("a.py", b"2")]])
def test_submissions_that_are_missing_or_named_twice_are_refused(
    tmp_path: Path, files: Sequence[tuple[str, bytes]]
) -> None:
    with pytest.raises(InputError):
        assignments.save_submissions(tmp_path, files)


@pytest.mark.parametrize(
    ("title", "name"),
    [("O'Brien's Übung 4", "o-brien-s-ubung-4"), ("Größe – 2. Teil", "grosse-2-teil"), ("作業", "assignment")],
)
def test_a_folder_is_named_after_its_title_without_accents(tmp_path: Path, title: str, name: str) -> None:
    assert assignments.create_folder(tmp_path, title).name == name
    assert assignments.create_folder(tmp_path, title).name == f"{name}-2"


def test_a_class_in_a_zip_that_was_cut_off_is_refused(tmp_path: Path) -> None:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        archive.writestr("anna.py", b"x = 1")

    assignments.check_zip("class.zip", made)
    assignments.check_zip("anna.py", io.BytesIO(b""))
    for name, data in ("class.zip", made.getvalue()[:-30]), ("CLASS.ZIP", b""):
        with pytest.raises(InputError, match="can't be read as a zip"):
            assignments.check_zip(name, io.BytesIO(data))


@pytest.mark.parametrize("data", [b"", b"{", b"\xff\xfe\xfd"])
def test_a_solution_that_cant_be_read_is_refused_by_its_own_name(data: bytes) -> None:
    assignments.check_document("Lösung.py", b"x = 1")
    with pytest.raises(SubmissionError, match=r"^Lösung\.ipynb can't be read: "):
        assignments.check_document("Lösung.ipynb", data)


def test_an_upload_that_is_not_there_yet_is_no_path_that_was_typed() -> None:
    with pytest.raises(InputError, match="no upload has arrived and no path is given"):
        assignments.find_submissions(" ")


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("a:b.py", "a_b.py"),
        ("anna/hw.py", "ben\\hw.py"),
        (".hw.py", "hw.py"),
        ("Anna.py", "anna.py"),
        ("Zo\u00eb.py", "Zoe\u0308.py"),
    ],
)
def test_two_uploads_that_would_be_one_file_are_refused_with_both_names(tmp_path: Path, one: str, other: str) -> None:
    with pytest.raises(InputError) as refused:
        assignments.save_submissions(tmp_path, [(one, b"1"), ("c.py", b"3"), (other, b"2")])

    assert repr(one) in str(refused.value)
    assert repr(other) in str(refused.value)
    assert list(tmp_path.iterdir()) == []


def test_the_commands_carry_what_was_given_and_no_more() -> None:
    inputs = Inputs("T", "work", "r.yaml", solution="s.ipynb", code_model="m")

    words = assignments.grade_command(Commands(), inputs, Path("out"), limit=5, names=["a", "b"])  # type: ignore[arg-type]

    assert words[words.index("grade") :] == [
        "grade", "work", "--rubric", "r.yaml", "--solution", "s.ipynb", "--code-model", "m",
        "--out", "out", "--yes", "--quiet", "--json", "--limit", "5", "--only", "a,b",
    ]  # fmt: skip


def test_names_are_passed_on_whatever_they_hold() -> None:
    names = ["Miller, Anna_12_3_hw.py", "b.py", 'said "x".py']

    words = assignments.grade_command(Commands(), Inputs("T", "w", "r"), Path("out"), names=names)  # type: ignore[arg-type]

    assert list(names_in(words[-1])) == names


def test_markdown_in_other_peoples_names_is_made_literal() -> None:
    assert escape_markdown("![x](http://a.b) :red[y]\n<b>") == r"\!\[x\]\(http\://a\.b\) \:red\[y\] \<b\>"
