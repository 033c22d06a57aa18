"""What Kvasir says in words: numbers agree, advice can be followed, and nothing claims what did not happen."""

import io
from pathlib import Path

import pytest

from kvasir import cli
from producers.batch.batch import Batch
from tests.support.homework import tiny, tiny_class
from tests.support.processes import SIMULATED_MODEL, config_text

MODEL = "tiny:1b"


@pytest.fixture
def homework(configured_folder: Path) -> Path:
    """A class of two, one of whom handed in a folder, and one file that can't be read."""
    made = tiny_class(configured_folder / "homework", 1)
    (made / "submissions" / "broken_300_1_homework.ipynb").write_text("{", "utf-8")
    folder = made / "submissions" / "oakhollow_400_1"
    folder.mkdir()
    (folder / "work.py").write_text("print(1)\n", "utf-8")
    return made


@pytest.fixture
def graded(homework: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    assert cli.run_command(["grade", *tiny(homework, tmp_path / "out"), "--quiet"]) == 1
    capsys.readouterr()
    return tmp_path / "out"


@pytest.mark.parametrize("command", ["grade", "results", "retry"])
def test_a_grading_ends_with_how_many_are_in_each_state(
    homework: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    out = tmp_path / "out"
    cli.run_command(["grade", *tiny(homework, out), "--quiet"])
    if command != "grade":
        capsys.readouterr()
        cli.run_command([command, str(out)])
    said = capsys.readouterr()
    assert "3 submissions: 2 graded, 1 unreadable; " in said.out
    assert "need review" in said.out or "needs review" in said.out
    assert "1 failed" not in said.out + said.err


def test_a_file_that_can_not_be_read_is_no_failed_job(
    homework: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cli.run_command(["grade", *tiny(homework, tmp_path / "out")])
    last = [line for line in capsys.readouterr().err.splitlines() if "5/5 jobs" in line][-1]
    assert "1 not sent" in last
    assert "failed" not in last


def test_who_waits_has_not_failed(homework: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    slow = config_text({MODEL: SIMULATED_MODEL}).replace("scale=0", "scale=1,decode=100")
    (tmp_path / "kvasir.toml").write_text(slow, "utf-8")
    cli.run_command(["grade", *tiny(homework, tmp_path / "out"), "--quiet", "--max-wait", "0"])
    said = capsys.readouterr()
    assert "3 submissions: 1 unreadable, 2 waiting; none needs review" in said.out
    assert "4 jobs are still open" in said.err


@pytest.mark.parametrize("name", ["100", "student0_100_1_homework.py", "student0_100_1_homework", "400"])
def test_retry_takes_the_names_that_grade_takes(
    graded: Path, homework: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    before = len((graded / "results.jsonl").read_text("utf-8").splitlines())
    cli.run_command(["retry", str(graded), "--only", name])
    said = capsys.readouterr()
    assert "2 jobs run again" in said.err
    assert "no engine was called" not in said.out
    assert len((graded / "results.jsonl").read_text("utf-8").splitlines()) == before + 2
    with Batch(graded) as batch:
        assert not batch.open_jobs


def test_retry_names_what_it_does_not_know(graded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run_command(["retry", str(graded), "--only", "100,nobody,200"]) == cli.EXIT_USAGE
    said = capsys.readouterr()
    assert "holds no submission named 'nobody', '200'" in said.err
    assert "run again" not in said.err


def test_grade_names_all_that_it_does_not_know(
    homework: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        cli.run_command(["grade", *tiny(homework, tmp_path / "out", "--only", "nobody,100,somebody")]) == cli.EXIT_USAGE
    )
    assert "'nobody', 'somebody'" in capsys.readouterr().err


@pytest.mark.parametrize("answer", ["n\n", "\n", ""])
def test_forget_answered_no_says_that_nothing_was_deleted(
    graded: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], answer: str
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(answer))
    before = sorted(graded.iterdir())
    assert cli.run_command(["forget", str(graded)]) == 1
    said = capsys.readouterr().err
    assert "nothing was deleted" in said
    assert "interrupted" not in said
    assert sorted(graded.iterdir()) == before


def test_top_shows_this_machines_batches_by_name_without_a_cluster(
    homework: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run_command(["top", "--once"]) == 0
    assert "no batch in results/ yet" in capsys.readouterr().out
    cli.run_command(["grade", *tiny(homework, tmp_path / "results" / "homework4"), "--quiet"])
    capsys.readouterr()
    assert cli.run_command(["top", "--once"]) == 0
    said = capsys.readouterr()
    assert "No broker is configured" in said.out
    assert [line.split()[:3] for line in said.out.splitlines() if "homework4" in line] == [["homework4", "5/5", "100%"]]


def test_one_of_a_thing_is_not_many(
    graded: Path, homework: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    single = tmp_path / "single"
    cli.run_command(["run", _prompts(tmp_path, 1), "--model", MODEL, "--out", str(single)])
    cli.run_command(["grade", *tiny(homework, tmp_path / "dry", "--only", "100", "--dry-run")])
    cli.run_command(["forget", str(single), "--yes"])
    (tmp_path / "kvasir.toml").write_text(
        '[models."m"]\nengine = "llamacpp"\nweights.llamacpp = "none.gguf"\n', "utf-8"
    )
    cli.run_command(["doctor"])
    said = "".join(capsys.readouterr())
    assert "1 of 1 prompt answered" in said
    assert "1 job," in said
    assert "1 error, " in said
    for many in ("1 errors", "1 jobs", "1 prompts", "1 warnings", "1 submissions", "1 files"):
        assert many not in said


def _prompts(folder: Path, number: int) -> str:
    path = folder / "prompts.jsonl"
    path.write_text("".join(f'{{"id": "p{one}", "prompt": "Hello"}}\n' for one in range(number)), "utf-8")
    return str(path)
