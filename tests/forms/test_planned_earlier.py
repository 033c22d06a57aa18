"""Folders that commit 809876f planned and sent nothing of: carried over where the input is the same, else migrated.

`planned_by_809876f` was made by that commit's `kvasir run prompts.jsonl` and `kvasir grade` (the class is that of
`tests/integration/older_batch`), with a broker that nobody could reach.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from desk.rounds import changes
from grading.export.requests import read_requests
from grading.reviews import read_overrides
from kvasir import cli
from messages.errors import BatchError
from tests.support.processes import ROOT, SIMULATED_MODEL, config_text

RECORDED = Path(__file__).parent / "planned_by_809876f"
RUN = ("run", "prompts.jsonl", "--out", "lines", "--quiet")
GRADE = ("grade", "class/handed-in", "--rubric", "class/rubric.yaml", "--out", "graded", "--quiet")

Kvasir = Callable[..., tuple[int, str]]


@pytest.fixture
def kvasir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Kvasir:
    """Runs a command beside the folders as they were left: its exit code, and what it said."""
    shutil.copytree(RECORDED, tmp_path, dirs_exist_ok=True)
    shutil.copytree(ROOT / "tests/integration/older_batch", tmp_path / "class", ignore=shutil.ignore_patterns("out*"))
    for name in ("lines", "graded"):
        manifest = tmp_path / name / "batch.json"
        manifest.write_text(manifest.read_text("utf-8").replace("HOME", str(tmp_path)), "utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "nobody"))
    (tmp_path / "kvasir.toml").write_text(config_text({"tiny:1b": SIMULATED_MODEL}), "utf-8")

    def run(*words: str) -> tuple[int, str]:
        capsys.readouterr()
        code = cli.run_command(words)
        return code, "".join(capsys.readouterr())

    return run


def manifest(name: str) -> dict[str, Any]:
    made: dict[str, Any] = json.loads(Path(name, "batch.json").read_text("utf-8"))
    return made


def answered(name: str) -> set[str]:
    rows = map(json.loads, Path(name, "results.jsonl").read_text("utf-8").splitlines())
    return {row["job_id"] for row in rows if row["state"] == "succeeded"}


def test_lines_that_were_never_sent_are_carried_over(kvasir: Kvasir) -> None:
    before = manifest("lines")

    code, _ = kvasir(*RUN)

    after = manifest("lines")
    assert code == 1  # one line was never JSON
    assert (after["batch_id"], after["secret"]) == (before["batch_id"], before["secret"])
    assert [each["name"] for each in after["jobs"]] == ["a", "b", "line 3", "c"]
    sendable = {each["job_id"] for each in after["jobs"] if each["role"] == "prompt"}
    assert answered("lines") == sendable
    assert not sendable & {each["job_id"] for each in before["jobs"]}
    journal = Path("lines/results.jsonl").read_bytes()
    assert kvasir(*RUN)[0] == 1
    assert Path("lines/results.jsonl").read_bytes() == journal


@pytest.mark.parametrize("words", [GRADE, ("watch", "graded", "--quiet")])
def test_a_class_that_was_never_sent_is_carried_over(kvasir: Kvasir, words: tuple[str, ...]) -> None:
    before = manifest("graded")

    code, said = kvasir(*words, "--json")

    assert code == 1, said  # one can't be read
    after = manifest("graded")
    assert [each["item_id"] for each in after["jobs"]] == [each["item_id"] for each in before["jobs"]]
    assert answered("graded") == {each["job_id"] for each in after["jobs"] if each["role"] != "intake"}


def test_lines_that_have_changed_are_migrated_by_a_command_that_says_what_has(kvasir: Kvasir) -> None:
    prompts, before = Path("prompts.jsonl"), manifest("lines")
    prompts.write_text(prompts.read_text("utf-8").replace('"id": "c"', '"id": "d"'), "utf-8")

    code, said = kvasir(*RUN)
    assert code == cli.EXIT_USAGE
    assert "kvasir migrate lines" in said
    assert manifest("lines") == before

    code, said = kvasir("migrate", "lines")
    assert code == 0
    told = said.splitlines()
    assert told[:3] == [
        "4 jobs planned in an older form, none of them sent: dropped.",
        "In the input and not in the plan: d",
        "In the plan and not in the input: c",
    ]
    assert "kvasir run" in told[3]
    assert manifest("lines")["jobs"] == []
    assert kvasir(*RUN)[0] == 1
    assert len(answered("lines")) == 3
    assert kvasir("migrate", "lines") == (0, "lines is of this version's form already.\n")


def test_a_class_that_has_changed_is_migrated_and_graded_as_it_is_now(kvasir: Kvasir) -> None:
    shutil.move("class/handed-in/wubo_48102_910002_hw4.R", "class/handed-in/another_48109_910009_hw4.R")

    code, said = kvasir(*GRADE)
    assert (code, "kvasir migrate graded" in said) == (cli.EXIT_USAGE, True)
    code, said = kvasir("migrate", "graded")
    assert (code, "another_48109" in said, "wubo_48102" in said) == (0, True, True)
    kvasir("watch", "graded", "--quiet")
    assert {"another_48109_910009_hw4.R"} < {each["name"] for each in manifest("graded")["jobs"]}
    assert "wubo" not in json.dumps(manifest("graded")["jobs"])
    assert len(answered("graded")) == 6


@pytest.mark.parametrize("left", ["submitted.jsonl", "results.jsonl"])
def test_what_was_sent_is_not_planned_anew(kvasir: Kvasir, left: str) -> None:
    job = manifest("lines")["jobs"][0]["job_id"]
    row = json.loads(Path("lines/results.jsonl").read_text("utf-8").splitlines()[0])
    sent = {"job_id": job, "run": 1}
    answer = row | sent | {"item_id": "e9132fc5315e6610", "state": "succeeded", "error": None, "text": "Yes."}
    with Path("lines", left).open("a") as file:
        file.write(json.dumps(sent if left == "submitted.jsonl" else answer) + "\n")
    before = Path("lines/batch.json").read_bytes()

    for words in (("migrate", "lines"), (*RUN, "--retry-failed")):
        code, said = kvasir(*words)
        assert (code, "of an older form" in said) == (cli.EXIT_USAGE, True)
    assert Path("lines/batch.json").read_bytes() == before


def test_what_a_newer_version_wrote_is_refused_with_what_reads_it(kvasir: Kvasir) -> None:
    whole = manifest("lines")
    for change, sentence in (
        ({"version": 2}, "another version of kvasir; to upgrade, run: python -m pip install --upgrade"),
        ({"v": 2}, "written by a newer kvasir; to upgrade, run: python -m pip install --upgrade"),
    ):
        Path("lines/batch.json").write_text(json.dumps(whole | change), "utf-8")
        code, said = kvasir(*RUN)
        assert (code, sentence in said) == (cli.EXIT_USAGE, True), said
    Path("lines/batch.json").write_text(json.dumps(whole | {"prompt_form": 99}), "utf-8")
    code, said = kvasir("migrate", "lines")
    assert (code, "a newer kvasir made the prompts" in said) == (cli.EXIT_USAGE, True)


@pytest.mark.parametrize(
    ("name", "read"),
    [("reviews.jsonl", read_overrides), ("requests.jsonl", read_requests), ("changes.jsonl", changes)],
)
def test_a_line_of_a_newer_version_is_not_to_be_removed(tmp_path: Path, name: str, read: Callable[[Path], Any]) -> None:
    (tmp_path / name).write_text('{"v": 2}\n', "utf-8")
    with pytest.raises(BatchError, match=f"{name}, line 1.*written by a newer kvasir; to upgrade") as refused:
        read(tmp_path)
    assert "remove the line" not in str(refused.value)
