"""The made-up class is complete, says what it claims to say, and is read as `expected.json` promises."""

import json
import re
import subprocess
from base64 import b64decode
from collections import defaultdict
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from examples.homework import make
from grading.rubric.rubric import Aspect, load_rubric
from grading.submissions.lms_names import student_id
from grading.submissions.reading import Submission, read_document, read_submissions

HERE = Path(make.__file__).parent
SUBMISSIONS = HERE / "submissions"
MAX_FILE_BYTES = 1_000_000
NUM_SUBMISSIONS = 16
REPORT = re.compile(r"(?<!\w)([a-z]\w*)=(\d\d)(?!\d)")
RESULTS = {"n_doubled": 37, "n_incomplete": 58, "share_churned": 31, "mean_amount": 84, "max_month": 62}


def load(name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((HERE / name).read_text(encoding="utf-8"))
    return content


EXPECTED = load("expected.json")
LABELS = load("labels.json")["submissions"]
NOTEBOOKS = sorted(HERE.rglob("*.ipynb"))


@cache
def submissions() -> dict[str, Submission]:
    return {submission.name: submission for submission in read_submissions(SUBMISSIONS)}


def all_outputs(path: Path) -> list[dict[str, Any]]:
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return [output for cell in cells for output in cell.get("outputs", [])]


def reports(texts: Iterable[str]) -> list[tuple[str, int]]:
    """(name, value) of every `name=42` whose name the rubric asks for."""
    found = [report for text in texts for report in REPORT.findall(text)]
    return [(name, int(value)) for name, value in found if name in RESULTS]


def read_by(role: Aspect, submission: Submission) -> list[str]:
    """Where a report counts for this role: outputs or prose, and comments for both."""
    kind = "output" if role == "code" else "text"
    code = [line.strip() for part in submission.parts if part.kind == "code" for line in part.text.splitlines()]
    comments = [line for line in code if line.startswith(("#", "--"))]
    return [*(part.text for part in submission.parts if part.kind == kind), *comments]


def test_git_tracks_every_file_of_the_class() -> None:
    found = (path.relative_to(HERE) for path in HERE.rglob("*") if path.is_file() and path.suffix != ".pyc")
    files = {path.as_posix() for path in found if path.parts[0] != "results"}  # what `make demo` leaves there
    listed = subprocess.run(["git", "ls-files", "."], cwd=HERE, capture_output=True, text=True, check=True).stdout

    tracked = set(listed.splitlines())

    assert files == tracked
    assert len({name.split("/")[1] for name in tracked if name.startswith("submissions/")}) == NUM_SUBMISSIONS


def test_the_generated_files_are_made_again_byte_for_byte(tmp_path: Path) -> None:
    make.make(tmp_path)

    for name in make.FILES:
        assert (tmp_path / name).read_bytes() == (HERE / name).read_bytes(), name


def test_the_rubric_adds_up_and_both_models_have_work() -> None:
    rubric = load_rubric(HERE / "rubric.yaml")

    assert rubric.total == sum(criterion.points for criterion in rubric.criteria) == 10
    assert rubric.for_model("code")
    assert rubric.for_model("feedback")


def test_every_submission_has_a_label_within_the_rubric_best_first() -> None:
    grids = {criterion.id: criterion.grid for criterion in load_rubric(HERE / "rubric.yaml").criteria}

    readable = [label for label in LABELS.values() if label["points"] is not None]

    assert set(LABELS) == set(submissions())
    for label in readable:
        assert set(label["points"]) == set(grids)
        assert all(points in grids[name] for name, points in label["points"].items())
        assert label["total"] == sum(label["points"].values())
    totals = [label["total"] for label in readable]
    assert totals == sorted(totals, reverse=True)


def test_the_solution_reports_every_result_where_it_counts() -> None:
    solution = read_document(HERE / "solution.ipynb")

    for criterion in load_rubric(HERE / "rubric.yaml").criteria:
        reported = dict(reports(read_by(criterion.model, solution)))
        assert reported[criterion.id] == RESULTS[criterion.id]
        assert str(RESULTS[criterion.id]) in criterion.guidance


@pytest.mark.parametrize("name", [name for name, label in LABELS.items() if label["points"] is not None])
def test_the_labels_follow_from_the_files(name: str) -> None:
    submission = submissions()[name]
    everywhere = [reported for reported, _ in reports(part.text for part in submission.parts)]

    assert len(everywhere) == len(set(everywhere)), "a result is reported once"
    for criterion in load_rubric(HERE / "rubric.yaml").criteria:
        found = dict(reports(read_by(criterion.model, submission))).get(criterion.id)
        points = 0 if found is None else 2 if found == RESULTS[criterion.id] else 1
        assert points == LABELS[name]["points"][criterion.id], criterion.id
        assert points or criterion.id not in everywhere, "a report stands where it counts"


def test_the_printed_rows_give_the_results_of_the_solution() -> None:
    name = next(name for name in LABELS if "final-FINAL" in name)
    printed = [part.text.splitlines()[1:] for part in submissions()[name].parts if part.kind == "output"]
    orders, unique, complete = ([row.split() for row in rows] for rows in printed[:3])
    active = {row[2] for row in complete if row[3] >= "2023-10-03"}
    months: dict[str, float] = defaultdict(float)
    for row in complete:
        months[row[3][:7]] += float(row[5])

    assert len(orders) - len(unique) == RESULTS["n_doubled"]
    assert len(unique) - len(complete) == RESULTS["n_incomplete"]
    assert round(100 * (1 - len(active) / make.CUSTOMERS)) == RESULTS["share_churned"]
    assert round(sum(months.values()) / len(complete)) == RESULTS["mean_amount"]
    assert round(max(months.values()) / 1000) == RESULTS["max_month"]


def test_exactly_the_expected_submissions_fail_for_the_expected_reason_or_are_empty() -> None:
    assert [name for name, submission in submissions().items() if submission.empty] == EXPECTED["empty"]
    failed = {name: submission.problem for name, submission in submissions().items() if submission.problem}

    assert set(failed) == set(EXPECTED["failed"])
    for name, reason in EXPECTED["failed"].items():
        assert reason in failed[name]


def test_names_are_those_of_canvas_downloads_with_one_user_each() -> None:
    pattern = re.compile(r"[a-z]+_(LATE_)?\d{5}_\d{6}(_[\w-]+\.[A-Za-z]+)?")

    assert all(pattern.fullmatch(name) for name in submissions())
    assert len({student_id(name) for name in submissions()}) == NUM_SUBMISSIONS


def test_the_class_is_mixed() -> None:
    suffixes = {path.suffix for path in SUBMISSIONS.rglob("*") if path.is_file()}
    languages = {submission.language for submission in submissions().values()}

    assert suffixes >= {".ipynb", ".R", ".Rmd", ".qmd", ".py", ".sql", ".md", ".txt"}
    assert languages >= {"R", "Python", "SQL"}


def test_one_submission_is_huge_and_no_file_is_larger_than_git_likes() -> None:
    printed = {
        name: sum(len(part.text) for part in submission.parts if part.kind == "output")
        for name, submission in submissions().items()
    }

    assert sum(length > 500_000 for length in printed.values()) == 1
    assert max(path.stat().st_size for path in HERE.rglob("*")) < MAX_FILE_BYTES


def test_one_submission_talks_to_the_grader_in_chat_tokens() -> None:
    talking = [name for name, read in submissions().items() if any("<|im_end|>" in part.text for part in read.parts)]

    assert len(talking) == 1
    assert LABELS[talking[0]]["total"] <= 1


def test_one_notebook_stopped_at_an_error_and_has_cells_that_never_ran() -> None:
    stopped = [submission for submission in submissions().values() if any("error" in n for n in submission.notes)]

    assert len(stopped) == 1
    assert any("never run" in note for note in stopped[0].notes)


def test_pictures_are_real_pngs() -> None:
    readable = [path for path in NOTEBOOKS if path.name not in EXPECTED["failed"]]

    pictures = [
        b64decode(output["data"]["image/png"])
        for path in readable
        for output in all_outputs(path)
        if "image/png" in output.get("data", {})
    ]

    assert pictures
    assert all(picture.startswith(b"\x89PNG\r\n\x1a\n") and picture.endswith(b"IEND\xaeB`\x82") for picture in pictures)


def test_solution_and_template_are_read_and_the_template_gives_nothing_away() -> None:
    solution, template = read_document(HERE / "solution.ipynb"), read_document(HERE / "template.ipynb")

    code = [part.text for part in template.parts if part.kind == "code"]

    assert solution.language == template.language == "R"
    assert not any("churned" in text or "duplicated" in text for text in code)
    assert not any(REPORT.search(part.text) for part in template.parts)
