"""A run of a part of the class changes that part; the class stays."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from grading.points import EARLIER_REMARK, KEPT_REMARK
from kvasir import cli
from tests.support.homework import tiny_class
from tests.support.processes import SIMULATED_MODEL, config_text

RUBRIC = Path("rubric.yaml")
CLASS = [f"student{number}_{100 + number}_1_homework.py" for number in range(4)]


@pytest.fixture
def course(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tiny_class(tmp_path, 4))
    Path("kvasir.toml").write_text(config_text({"tiny:1b": SIMULATED_MODEL}), "utf-8")
    return tmp_path


def grade(*more: str) -> int:
    return cli.run_command(["grade", "submissions", "--rubric", "rubric.yaml", "--out", "out", "--quiet", *more])


def rows(out: Path = Path("out")) -> list[str]:
    with (out / "grades.csv").open(encoding="utf-8", newline="") as file:
        return [row["submission"] for row in csv.DictReader(file)]


def grades_kept(out: Path = Path("out")) -> list[dict[str, Any]]:
    made: list[dict[str, Any]] = json.loads((out / "grades.json").read_text("utf-8"))["grades"]
    return made


def kept(out: Path = Path("out")) -> list[str]:
    return [one["submission"] for one in grades_kept(out)]


def planned(out: Path = Path("out")) -> list[str]:
    return sorted({job["name"] for job in json.loads((out / "batch.json").read_text("utf-8"))["jobs"]})


@pytest.mark.parametrize("part", [("--only", "101"), ("--limit", "1")])
def test_a_part_graded_after_the_class_leaves_the_class(course: Path, part: tuple[str, str]) -> None:
    assert grade() == 0
    before = Path("out/grades.csv").read_text("utf-8")

    assert grade(*part) == 0

    assert rows() == kept() == planned() == CLASS
    assert Path("out/grades.csv").read_text("utf-8") == before
    assert all(name in Path("out/report.html").read_text("utf-8") for name in CLASS)


def test_parts_add_up_and_then_everybody_is_graded(course: Path) -> None:
    grade("--limit", "1")
    grade("--only", "102")
    assert rows() == kept() == planned() == [CLASS[0], CLASS[2]]

    assert cli.run_command(["results", "out"]) == 0
    assert rows() == [CLASS[0], CLASS[2]]

    grade()
    assert rows() == kept() == planned() == CLASS


@pytest.mark.system
def test_exports_after_a_part_hold_the_class(course: Path) -> None:
    grade()
    grade("--only", "103")

    cli.run_command(["export", "out", "--format", "csv", "--to", "table.csv", "--yes"])

    assert Path("table.csv").read_text("utf-8").count("_homework.py") == len(CLASS)


@pytest.mark.system
def test_a_part_changes_its_own_grades_and_no_others(course: Path) -> None:
    grade()
    before = {one["submission"]: one for one in json.loads(Path("out/grades.json").read_text("utf-8"))["grades"]}
    Path("submissions", CLASS[2]).write_text("def median(values):\n    return sorted(values)[len(values) // 2]\n")
    Path("submissions", CLASS[3]).write_text("def mode(values):\n    return max(set(values), key=values.count)\n")

    grade("--only", "102")

    after = {one["submission"]: one for one in json.loads(Path("out/grades.json").read_text("utf-8"))["grades"]}
    assert list(after) == CLASS
    assert [after[name] == before[name] for name in CLASS] == [True, True, False, False]
    assert [after[CLASS[3]][key] for key in ("points", "criteria")] == [
        before[CLASS[3]][key] for key in ("points", "criteria")
    ]
    assert "as it was graded before" in after[CLASS[3]]["remarks"][-1]


@pytest.mark.system
def test_a_class_graded_with_two_rubrics_says_so(course: Path, capsys: pytest.CaptureFixture[str]) -> None:
    grade()
    Path("rubric.yaml").write_text(
        Path("rubric.yaml").read_text("utf-8").replace("Names and remarks", "Names"), "utf-8"
    )
    capsys.readouterr()

    grade("--only", "102")
    assert "3 of 4 submissions are graded with another rubric" in " ".join(capsys.readouterr().out.split())
    assert rows() == CLASS

    grade()
    assert "another rubric" not in capsys.readouterr().out
    assert "another rubric" not in Path("out/grades.csv").read_text("utf-8")


@pytest.mark.system
def test_a_look_at_the_results_changes_no_grade_although_the_rubric_has_changed(course: Path) -> None:
    grade()
    before = [one["points"] for one in json.loads(Path("out/grades.json").read_text("utf-8"))["grades"]]
    Path("rubric.yaml").write_text(
        Path("rubric.yaml").read_text("utf-8").replace("Names and remarks", "Names"), "utf-8"
    )

    assert cli.run_command(["results", "out"]) == 0
    assert cli.run_command(["results", "out"]) == 0

    assert [one["points"] for one in json.loads(Path("out/grades.json").read_text("utf-8"))["grades"]] == before
    assert planned() == CLASS


def test_work_that_was_only_seen_waiting_and_has_gone_again_leaves_no_row_and_work_that_stays_is_graded(
    course: Path,
) -> None:
    grade()
    before = Path("out/grades.csv").read_text("utf-8")
    newcomer = Path("submissions/student9_130_9_homework.py")
    newcomer.write_text("mean = 3\n", "utf-8")
    assert cli.run_command(["results", "out"]) == 1
    assert rows() == [*CLASS, newcomer.name]

    newcomer.rename("elsewhere.py")
    assert cli.run_command(["results", "out"]) == 0
    assert Path("out/grades.csv").read_text("utf-8") == before

    Path("elsewhere.py").rename(newcomer)
    assert cli.run_command(["results", "out"]) == 1
    assert cli.run_command(["watch", "out", "--quiet"]) == 0
    assert rows() == planned() == [*CLASS, newcomer.name]


@pytest.mark.parametrize(
    ("names", "after"),
    [
        (CLASS, "student2_102_7_homework-1.py"),
        (["ada.py", "ben.py", "Zo\u00eb.py", "dan.py"], "Zoe\u0308.py"),  # without ids, so only the names are compared
    ],
)
def test_a_look_keeps_the_grade_of_work_whose_file_is_called_otherwise_now(
    course: Path, names: list[str], after: str
) -> None:
    files = [Path("submissions", old).rename(Path("submissions", new)) for old, new in zip(CLASS, names, strict=True)]
    work, before = files[2], names[2]
    grade()
    [old] = [one for one in grades_kept() if one["submission"] == before]
    work.rename(Path("submissions", after))

    assert cli.run_command(["results", "out"]) == 0
    assert cli.run_command(["results", "out"]) == 0

    assert before not in rows()
    [new] = [one for one in grades_kept() if one["submission"] == after]
    assert [new[key] for key in ("item_id", "state", "points", "criteria")] == [
        old[key] for key in ("item_id", "state", "points", "criteria")
    ]
    assert new["remarks"] == [*old["remarks"], KEPT_REMARK]
    assert before in planned()

    assert cli.run_command(["watch", "out", "--quiet"]) == 0
    assert KEPT_REMARK not in Path("out/grades.csv").read_text("utf-8")
    assert after in planned()


@pytest.mark.parametrize("without", [False, True], ids=["each grade says its versions", "only the class does"])
def test_each_grade_is_compared_by_what_graded_it_and_not_by_what_graded_the_class_last(
    course: Path, without: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    rubric, gone = Path("rubric.yaml"), Path("submissions", CLASS[3])
    text = rubric.read_text("utf-8")
    grade()
    if without:
        made = json.loads(Path("out/grades.json").read_text("utf-8"))
        made["grades"] = [{name: one[name] for name in one if name != "versions"} for one in made["grades"]]
        Path("out/grades.json").write_text(json.dumps(made), "utf-8")
    rubric.write_text(text.replace("Names and remarks", "Names"), "utf-8")
    grade("--only", "102")
    assert "3 of 4 submissions are graded with another rubric" in " ".join(capsys.readouterr().out.split())

    rubric.write_text(text, "utf-8")
    gone.unlink()
    grade("--samples", "2", "--limit", "1")

    assert "1 of 4 submissions is graded with another rubric" in " ".join(capsys.readouterr().out.split())
    remarks = [{KEPT_REMARK, EARLIER_REMARK} & {*one["remarks"]} for one in grades_kept()]
    assert remarks == [set(), {KEPT_REMARK}, {EARLIER_REMARK}, set()]
