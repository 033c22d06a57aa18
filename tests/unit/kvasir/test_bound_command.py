"""`kvasir bound` in somebody's hands: draw, fill in the sheet, read the sentence."""

import csv
import json
from pathlib import Path

import pytest

from grading.hand_sample import BoundError, SamplePlan, draw_sample, load_draw
from grading.report.grades import load_graded
from grading.reviews import Override, append_override
from kvasir import cli
from tests.support.desk import answer, plan_tiny_class, write_grades

SIZE = 80
OUT = Path("out")
SHEET = OUT / "hand-grades.csv"


@pytest.fixture(autouse=True)
def graded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A class in which the model gave everybody four of five points, and quoted the last ten wrongly."""
    monkeypatch.chdir(tmp_path)
    out, assignment = plan_tiny_class(tmp_path, SIZE)
    answer(out, assignment, range(SIZE - 10))
    answer(out, assignment, range(SIZE - 10, SIZE), evidence="never written")
    write_grades(out, assignment)


def rows() -> list[dict[str, str]]:
    return list(csv.DictReader(SHEET.read_text("utf-8").splitlines()))


def fill(points: int = 2, wrong: int = 0) -> None:
    """Hand grades for everybody drawn; the first so many have nothing."""
    lines = rows()
    for number, row in enumerate(lines):
        for name in [name for name in row if "(0 to" in name]:
            row[name] = "0" if number < wrong else str(points)
    with SHEET.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(lines[0]))
        writer.writeheader()
        writer.writerows(lines)


def bound(*words: str) -> int:
    return cli.run_command(["bound", "out", *words])


def test_the_sheet_is_blind_and_the_promise_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert bound("--draw", "30", "--by", "Ada") == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "Ada drew 30 of 80 grades. It is written down." in said
    assert "have so little doubt that they stand for others" in said
    assert len(rows()) == 30
    assert {value for row in rows() for name, value in row.items() if name != "submission"} == {""}

    fill()
    assert bound() == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "With 90% confidence at most" in said
    assert "of the grades that nobody looks at differ from yours by more than 1 point." in said
    assert "30 of 30" in said
    assert "No error in 30 still allows 7.4%, in 15 14.3%." in said


def test_too_many_differences_promise_nothing_and_say_so(capsys: pytest.CaptureFixture[str]) -> None:
    bound("--draw", "15", "--at-most", "10")
    assert "too few: draw more, before you fill in the sheet" in " ".join(capsys.readouterr().out.split())
    fill(wrong=8)
    assert bound() == 1
    assert "15 grades can't promise that" in " ".join(capsys.readouterr().out.split())
    assert bound("--json") == 1
    found = json.loads(capsys.readouterr().out)
    assert found["promised"] is False
    assert found["parts"][0]["found"][0]["off"] > 0
    assert "student" not in json.dumps(found)


def test_a_sample_is_drawn_once_and_may_grow_only_while_nobody_has_graded(capsys: pytest.CaptureFixture[str]) -> None:
    bound("--draw", "15")
    seed = load_draw(OUT).seed
    first = [row["submission"] for row in rows()]
    assert bound("--draw", "30") == 0
    assert load_draw(OUT).seed == seed
    assert [row["submission"] for row in rows()][:15] == first

    fill()
    capsys.readouterr()
    assert bound("--draw", "30") == 2
    assert "draw a second sample of the same grades and keep the better one" in " ".join(
        capsys.readouterr().err.split()
    )


def test_whoever_deletes_the_record_draws_the_same_again_and_loses_no_hand_grade() -> None:
    bound("--draw", "15")
    empty = SHEET.read_bytes()
    fill()
    filled = SHEET.read_bytes()
    (OUT / "bound.json").unlink()
    assert bound("--draw", "15") == 0
    assert SHEET.read_bytes() == empty
    assert [path.read_bytes() for path in OUT.glob("hand-grades.*.csv")] == [filled]


def test_a_draw_that_is_refused_leaves_the_one_before() -> None:
    bound("--draw", "15")
    kept = (OUT / "bound.json").read_bytes()
    Path("parts.csv").write_text("submission,part\n", "utf-8")
    assert bound("--draw", "15", "--strata", "parts.csv") == 2
    assert (OUT / "bound.json").read_bytes() == kept


def change_the_first_grade() -> None:
    grades = OUT / "grades.json"
    kept = json.loads(grades.read_text("utf-8"))
    kept["grades"][0]["points"] = 0
    grades.write_text(json.dumps(kept), "utf-8")


def test_other_grades_draw_another_sample() -> None:
    bound("--draw", "15")
    seed = load_draw(OUT).seed
    change_the_first_grade()
    assert bound("--draw", "15") == 0
    assert load_draw(OUT).seed != seed


def test_what_a_person_has_decided_on_is_neither_drawn_nor_promised(capsys: pytest.CaptureFixture[str]) -> None:
    ids = [one.item_id for one in load_graded(OUT).grades[:20]]
    append_override(OUT, *[Override(id, None, None, None, "looked at", "Ada") for id in ids])
    assert bound("--draw", "60") == 0
    assert len(rows()) == 60
    assert not load_draw(OUT).sampled_members().keys() & set(ids)
    fill()
    capsys.readouterr()
    bound()
    said = " ".join(capsys.readouterr().out.split())
    assert "20 grades were decided on by a person before the draw" in said
    assert "added since" not in said


def test_looks_that_were_planned_cost_and_others_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    bound("--draw", "15,30")
    assert load_draw(OUT).confidence == pytest.approx(0.95)
    fill()
    assert bound("--more") == 0
    assert len(rows()) == 30
    assert rows()[0]["works (0 to 3)"] == "2"
    assert rows()[29]["works (0 to 3)"] == ""
    capsys.readouterr()
    assert bound("--more") == 2
    assert "name both sizes when you draw" in " ".join(capsys.readouterr().err.split())


def spoil(what: str) -> None:
    text = SHEET.read_text("utf-8")
    lines = text.splitlines(keepends=True)
    first = lines[1].split(",")[0]
    changed = {
        "half": [lines[0], f"{first},2,,\n", *lines[2:]],
        "too much": [lines[0], f"{first},9,2,\n", *lines[2:]],
        "no number": [lines[0], f"{first},good,2,\n", *lines[2:]],
        "twice": [*lines, lines[1]],
        "gone": [lines[0], *lines[2:]],
        "stranger": [*lines, "mallory.py,2,2,\n"],
        "column": [lines[0].replace("works", "work"), *lines[1:]],
    }[what]
    SHEET.write_text("".join(changed), "utf-8")


@pytest.mark.parametrize(
    ("what", "sentence"),
    [
        ("half", "has empty cells: add points for clear"),
        ("too much", "points must be from 0 to 3, not 9"),
        ("no number", "'good' is not a number of points"),
        ("twice", "has two rows; keep only one row"),
        ("gone", "rows are missing"),
        ("stranger", "this class has no submission called 'mallory.py'"),
        ("column", "the columns were changed"),
    ],
)
def test_a_sheet_that_is_not_as_it_should_be_is_refused_with_what_to_mend(
    what: str, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    bound("--draw", "15")
    fill()
    spoil(what)
    assert bound() == 2
    assert sentence in " ".join(capsys.readouterr().err.split())


def test_an_empty_sheet_promises_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    bound("--draw", "15")
    assert bound() == 2
    assert "15 of 15 submissions have no points yet" in " ".join(capsys.readouterr().err.split())


def test_grades_that_changed_need_another_sample(capsys: pytest.CaptureFixture[str]) -> None:
    bound("--draw", "15")
    fill()
    change_the_first_grade()
    assert bound() == 2
    assert "1 grade changed since the sample was drawn" in " ".join(capsys.readouterr().err.split())
    assert bound("--draw", "15") == 0
    assert len(list(OUT.glob("hand-grades.*.csv"))) == 1


def test_a_record_that_was_changed_is_refused() -> None:
    made = draw_sample(OUT, SamplePlan((15,)), "Ada")
    path = OUT / "bound.json"
    path.write_text(path.read_text("utf-8").replace(made.seed, "0" * 16), "utf-8")
    with pytest.raises(BoundError, match="does not match its seed"):
        load_draw(OUT)


def test_parts_have_a_sample_and_a_bound_each(capsys: pytest.CaptureFixture[str]) -> None:
    names = [f"student{number}_{100 + number}_1_homework.py" for number in range(SIZE)]
    Path("parts.csv").write_text(
        "submission,part\n"
        + "".join(f"{name},{'early' if number < 40 else 'late'}\n" for number, name in enumerate(names))
    )
    assert bound("--draw", "15", "--strata", "parts.csv") == 0
    assert len(rows()) == 30
    assert load_draw(OUT).confidence == pytest.approx(0.95)
    fill()
    bound("--json")
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [part["name"] for part in found["parts"]] == ["early", "late"]
    Path("parts.csv").write_text("submission,part\n", "utf-8")
    assert cli.run_command(["bound", "out", "--draw", "15", "--strata", "parts.csv"]) == 2


def test_reviews_since_the_draw_may_stand_in_for_the_sheet_but_are_not_blind(
    capsys: pytest.CaptureFixture[str],
) -> None:
    made = draw_sample(
        OUT, SamplePlan((30,)), "Ada"
    )  # at least 20 of them with little doubt, which is enough, whoever is drawn
    assert bound("--reviews") == 2
    append_override(OUT, *[Override(id, None, None, None, "looked at", "Ada") for id in made.sampled_members()])
    capsys.readouterr()
    assert bound("--reviews") == 0
    assert "with the model's points in sight" in " ".join(capsys.readouterr().out.split())
