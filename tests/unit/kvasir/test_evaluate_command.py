"""`kvasir evaluate` in somebody's hands: a table, JSON and a page; two batches; models that grade first."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from grading.reviews import Override, append_override
from kvasir import cli
from kvasir.commands.evaluate import PAGE
from producers.storage.private import kept_in
from tests.support.desk import answer, plan_tiny_class, write_grades
from tests.support.homework import tiny_class
from tests.support.processes import SIMULATED_MODEL, config_text

SIZE = 40
OUT = Path("out")
MODELS = ("tiny:1b", "other:1b")


@pytest.fixture
def graded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A class in which the model gave everybody two points of three and two of two, and quoted the last ten wrongly."""
    monkeypatch.chdir(tmp_path)
    out, assignment = plan_tiny_class(tmp_path, SIZE)
    answer(out, assignment, range(SIZE - 10))
    answer(out, assignment, range(SIZE - 10, SIZE), evidence="never written")
    write_grades(out, assignment)
    rows = [
        f"{item.submission.name},{id},{points},{rater}"
        for number, item in enumerate(assignment.items)
        for rater, worked in (("Ada", number % 3 + 1), ("Bo", number % 2 + 1))
        for id, points in (("works", worked), ("clear", 0 if number >= SIZE - 8 else 2))
    ]
    Path("hand.csv").write_text(
        "\n".join(["submission,criterion,points,rater", *rows, "stranger,works,1,Ada"]), "utf-8"
    )
    return out


def evaluate(*words: str) -> int:
    return cli.run_command(["evaluate", *words])


def report(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    capsys.readouterr()
    assert evaluate(*words, "--json") == 0
    (one,) = json.loads(capsys.readouterr().out)["batches"]
    return dict(one)


@pytest.mark.usefixtures("graded")
def test_it_says_how_far_model_and_people_agree_and_what_doubts_are_worth(capsys: pytest.CaptureFixture[str]) -> None:
    assert evaluate("out", "--grades", "hand.csv") == 0
    said = " ".join(capsys.readouterr().out.split())
    for name in ("model: the total", "model: works", "band: partial", "people: the total", "floor: the total"):
        assert name in said
    assert "evidence not found: of 10 flagged, 5 were wrong; of 30 not flagged, 0" in said
    assert "energy not known" in said
    assert f"{SIZE} of {SIZE + 1} submissions" in said
    assert (OUT / PAGE) in kept_in(OUT)

    found = report(capsys, "out", "--grades", "hand.csv", "--watts", "100")
    assert found["submissions"] == SIZE
    works = next(each for each in found["agreements"]["model"] if each["name"] == "works")
    assert (works["pairs"], works["submissions"]) == (2 * SIZE, SIZE)
    low, high = works["measures"]["mae"]["interval"]
    assert low < works["measures"]["mae"]["value"] < high
    assert "kWh" in found["facts"]["Time"]
    assert found["gain"] == []


@pytest.mark.usefixtures("graded")
def test_the_page_needs_nothing_else_and_escapes_what_people_wrote(capsys: pytest.CaptureFixture[str]) -> None:
    assert evaluate("out", "--grades", "hand.csv") == 0
    page = (OUT / PAGE).read_text("utf-8")
    assert page.count("<svg") >= 4
    assert "<script" not in page
    assert not re.search(r"(?:src|href)=", page)
    assert "student" not in page
    capsys.readouterr()


@pytest.mark.usefixtures("graded")
def test_a_gradebooks_totals_and_reviews_stand_in_for_the_table(
    capsys: pytest.CaptureFixture[str], graded: Path
) -> None:
    Path("book.csv").write_text("ID,Homework\n" + "".join(f"{100 + n},3\n" for n in range(SIZE)), "utf-8")
    found = report(capsys, "out", "--grades", "book.csv", "--column", "homework")
    assert [each["name"] for each in found["agreements"]["model"]] == ["the total"]
    assert found["agreements"]["people"] == []

    name = f"student0_{100}_1_homework.py"
    append_override(graded, Override(name, "works", 0, None, "it does not run"))
    found = report(capsys, "out", "--reviews")
    assert found["submissions"] == 1
    assert "in sight" in found["facts"]["Hand grades"]
    assert "1 of 1 submission " in found["facts"]["Hand grades"]


@pytest.mark.usefixtures("graded")
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("out",), "--grades FILE, or --reviews"),
        (("out", "--grades", "hand.csv", "--reviews"), "--grades FILE, or --reviews"),
        (("out", "--grades", "none.csv"), "can't be read"),
        (("nowhere", "--grades", "hand.csv"), "holds no batch"),
        (("submissions", "--grades", "hand.csv", "--model", "m"), "--model needs a rubric"),
    ],
)
def test_what_can_not_be_evaluated_is_said(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], said: str
) -> None:
    assert evaluate(*words) == 2
    assert said in " ".join(capsys.readouterr().err.split())


@pytest.mark.usefixtures("graded")
@pytest.mark.parametrize(
    ("row", "said"),
    [("style,1", "1 points are outside the rubric's range for 'style'"), ("works,4", "4 points are outside")],
)
def test_points_that_the_rubric_does_not_have_are_refused(
    capsys: pytest.CaptureFixture[str], row: str, said: str
) -> None:
    Path("hand.csv").write_text(f"submission,criterion,points\nstudent0_100_1_homework.py,{row}\n", "utf-8")

    assert evaluate("out", "--grades", "hand.csv") == 2
    assert said in " ".join(capsys.readouterr().err.split())


def test_another_batch_is_compared_on_what_both_have_graded(
    capsys: pytest.CaptureFixture[str], graded: Path, tmp_path: Path
) -> None:
    other, assignment = plan_tiny_class(tmp_path / "other", SIZE)
    answer(other, assignment, range(SIZE), points=0)
    write_grades(other, assignment)

    found = report(capsys, str(graded), "--grades", "hand.csv", "--compare", str(other))

    gains = {each["name"]: each["measures"]["mae"] for each in found["gain"]}
    assert gains["works"]["value"] < 0
    assert gains["works"]["interval"][1] < 0


def test_an_old_batch_without_its_work_is_evaluated_without_a_floor(
    capsys: pytest.CaptureFixture[str], graded: Path
) -> None:
    for path in Path("submissions").iterdir():
        path.unlink()
    Path("submissions").rmdir()

    found = report(capsys, str(graded), "--grades", "hand.csv")

    assert found["agreements"]["floor"] == []
    assert found["submissions"] == SIZE


def test_models_grade_first_each_in_a_batch_of_its_own_and_are_not_asked_twice(
    configured_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (configured_folder / "kvasir.toml").write_text(config_text(dict.fromkeys(MODELS, SIMULATED_MODEL)), "utf-8")
    homework = tiny_class(configured_folder / "homework", 12)
    rows = [f"student{n}_{100 + n}_1_homework.py,{id},1" for n in range(12) for id in ("works", "clear")]
    Path("hand.csv").write_text("\n".join(["submission,criterion,points", *rows]), "utf-8")
    words = (str(homework / "submissions"), "--rubric", str(homework / "rubric.yaml"), "--grades", "hand.csv")

    assert evaluate(*words, "--model", MODELS[0], "--json") == 0
    (found,) = json.loads(capsys.readouterr().out)["batches"]
    journal = Path(found["folder"], "results.jsonl").read_bytes()
    assert found["submissions"] == 12
    assert evaluate(*words, "--model", MODELS[0], "--model", MODELS[1], "--json") == 0
    both = json.loads(capsys.readouterr().out)["batches"]
    assert [each["folder"] == found["folder"] for each in both] == [True, False]
    assert Path(found["folder"], "results.jsonl").read_bytes() == journal
