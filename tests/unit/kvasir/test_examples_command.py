"""`kvasir grade --examples` in somebody's hands: told before, computed once, kept, and forgotten."""

import json
from pathlib import Path

import pytest

from grading.report.grades import load_graded
from kvasir import cli
from producers.batch.batch import Batch
from tests.support.homework import tiny_class

SIZE = 10
OUT = Path("out")


@pytest.fixture
def words(configured_folder: Path) -> list[str]:
    """`grade` with examples: a class of ten, of which six were graded by hand."""
    homework = tiny_class(configured_folder / "homework", SIZE)
    for path in (homework / "submissions").iterdir():
        path.write_text(path.read_text("utf-8") + "# The mean of no values is an error.\n" * 20, "utf-8")
    points = [(0, 0), (1, 1), (2, 2), (3, 2), (2, 1), (1, 0)]
    rows = [
        f"student{number}_{100 + number}_1_homework.py,{id},{given}"
        for number, pair in enumerate(points)
        for id, given in zip(("works", "clear"), pair, strict=True)
    ]
    Path("hand.csv").write_text("\n".join(["submission,criterion,points", *rows]), "utf-8")
    files = ["--rubric", str(homework / "rubric.yaml"), "--examples", "hand.csv", "--out", str(OUT)]
    return [str(homework / "submissions"), *files, "--code-model", "tiny:1b", "--feedback-model", "tiny:1b"]


def test_the_dry_run_names_them_and_says_what_they_take(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run_command(["grade", *words, "--dry-run"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "Graded by you, and examples for the others (" in said
    assert "computed once for each model): student" in said

    assert cli.run_command(["grade", *words, "--dry-run", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["examples"]["submissions"]) == 3
    assert found["examples"]["tokens"] > 3 * 100
    assert found["prompts"] == 2 * (SIZE - 3)
    assert all(part["tokens"] > found["examples"]["tokens"] for part in found["shared_prefix"])


def test_the_examples_kv_cache_is_computed_once_for_each_prompt_and_restored_for_all_others(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run_command(["grade", *words, "--dry-run", "--json"]) == 0
    example_tokens = json.loads(capsys.readouterr().out)["examples"]["tokens"]
    cli.run_command(["grade", *words, "--quiet"])

    with Batch(OUT, is_owner=False) as batch:
        results = {role: [] for role in ("code", "feedback")}  # type: ignore[var-annotated]
        for entry in batch.entries:
            results[entry.role].append(batch.result(entry.job_id))
    for of_role in results.values():
        restored = sorted(result.prefill.restored_tokens for result in of_role)
        assert len(restored) == SIZE - 3
        assert restored[0] < example_tokens
        assert restored[1] > example_tokens
    grades = {grade.submission: grade for grade in load_graded(OUT).grades}
    assert sum("as an example" in " ".join(grade.remarks) for grade in grades.values()) == 3


def test_a_second_run_and_a_look_ask_nothing(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    cli.run_command(["grade", *words, "--quiet"])
    before = (OUT / "results.jsonl").read_bytes()
    capsys.readouterr()
    cli.run_command(["grade", *words, "--quiet"])
    assert (OUT / "results.jsonl").read_bytes() == before
    cli.run_command(["results", str(OUT)])
    assert (OUT / "results.jsonl").read_bytes() == before


def test_forget_deletes_the_copy(words: list[str]) -> None:
    cli.run_command(["grade", *words, "--quiet"])
    assert list(OUT.glob("inputs/*/examples.json"))

    assert cli.run_command(["forget", str(OUT), "--yes"]) == 0

    assert not OUT.exists()
    assert Path("hand.csv").exists()
