"""Names, grades and the batch's secret are for their user alone: 0600 in 0700 folders, whatever the umask."""

import os
import stat
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from desk import assignments
from desk.assignments import Inputs, grading_work
from desk.rounds import keep_grades, start_round
from desk.view import BatchView
from engines.llamacpp.engine import LlamaCppEngine
from engines.llamacpp.start import start
from engines.registry import EngineOptions
from grading.report.grades import load_graded
from grading.reviews import Override, append_override
from infra.config.settings import load_settings
from kvasir import cli
from kvasir.desk_app.configuration import DeskBackend
from messages.jobs import user_prompt
from tests.support.homework import RUBRIC, tiny, tiny_class
from tests.support.tiny_gguf import write_gguf
from tests.support.waiting import wait_until


@pytest.fixture(params=[0o000, 0o077])
def under(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


@pytest.fixture(autouse=True)
def configured(configured_folder: Path) -> None:
    (configured_folder / "kvasir.toml").chmod(0o644)


def open_to_others(*places: Path) -> list[str]:
    """Files and folders, from these on, that others than their user may read, write or enter."""
    found = [path for place in places for path in (place, *place.rglob("*"))]
    assert len(found) > len(places)
    return [f"{stat.filemode(path.lstat().st_mode)} {path}" for path in found if path.lstat().st_mode & 0o077]


def test_what_commands_write(tmp_path: Path, under: int) -> None:
    homework = tiny_class(tmp_path / "homework", 1)
    (tmp_path / "prompts.jsonl").write_text('{"id": "a", "prompt": "Hello"}\n')
    (tmp_path / "lms").mkdir(0o755)
    (tmp_path / "lms").chmod(0o755)

    assert cli.run_command(["grade", *tiny(homework, tmp_path / "results" / "hw", "--quiet")]) == 0
    assert cli.run_command(["run", "prompts.jsonl", "--model", "tiny:1b", "--out", "results/prompts", "--quiet"]) == 0
    for kind in ("feedback", "csv", "moodle-feedback"):
        export = ["export", "results/hw", "--format", kind, "--include-unreviewed", "--yes"]
        assert cli.run_command(export) in (0, 1)
        assert cli.run_command([*export, "--to", f"lms/{kind}"]) in (0, 1)

    assert open_to_others(tmp_path / "results") == []
    assert sorted(stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "lms").iterdir()) == [0o600] * 3
    assert stat.S_IMODE((tmp_path / "lms").stat().st_mode) == 0o755, "a folder of the person's own stays as it is"


@pytest.mark.system  # two processes each
def test_what_the_desk_writes(tmp_path: Path, under: int) -> None:
    desk = DeskBackend(load_settings(), None, tmp_path / "home")
    folder = assignments.create_folder(desk.home, "Means")
    rubric = assignments.save_rubric(folder, "rubric.yaml", RUBRIC.encode())
    files = [(f"doe_{number}_1_hw.py", f"x = {number}\n".encode()) for number in range(2)]
    submissions = assignments.save_submissions(folder, files)
    solution = assignments.save_file(folder / "solution", "solution.py", b"print(1)\n")
    inputs = Inputs("Means", str(submissions), str(rubric), str(solution))
    assignments.save_inputs(folder, inputs)
    assert cli.run_command(assignments.grade_command(desk, inputs, folder)[3:]) == 0
    grading_work(folder).start([sys.executable, "-c", "print('doe: 4 points'); open('report.txt', 'w')"])
    wait_until(lambda: grading_work(folder).exit_code is not None, "its process has ended", 60)
    view = BatchView(folder, desk.request_of).refresh()
    append_override(folder, Override(view.grades[0].item_id, None, None, "Well done.", "read", "Ivo"))
    keep_grades(folder, load_graded(folder))
    if not under:  # a process more
        place = start_round(desk, folder, view, rubric)
        wait_until(lambda: grading_work(place).exit_code is not None, "the class is regraded", 60)

    assert open_to_others(desk.home) == []


def test_what_an_older_kvasir_left_open_is_closed_when_it_is_opened(tmp_path: Path) -> None:
    homework = tiny_class(tmp_path / "homework", 1)
    out = tmp_path / "out"
    assert cli.run_command(["grade", *tiny(homework, out, "--quiet")]) == 0
    out.chmod(0o755)
    for path in out.iterdir():
        path.chmod(0o644)

    assert cli.run_command(["results", str(out)]) == 0

    assert open_to_others(out) == []


def test_a_folder_with_more_in_it_stays_open_and_only_what_is_ours_is_closed(tmp_path: Path) -> None:
    homework = tiny_class(tmp_path / "homework", 1)
    out = tmp_path / "project"
    out.mkdir()
    out.chmod(0o755)
    (out / "thesis.txt").write_text("mine")
    (out / "thesis.txt").chmod(0o644)

    for _ in range(2):
        assert cli.run_command(["grade", *tiny(homework, out, "--quiet")]) == 0

    assert [line.split("/")[-1] for line in open_to_others(out)] == ["project", "thesis.txt"]


def test_slot_files_with_a_prompts_cache_are_closed(tmp_path: Path) -> None:
    before = os.umask(0)
    backing = start(EngineOptions(str(write_gguf(tmp_path / "tiny.gguf")), context=512, slots=1, threads=1))
    folder = backing.slot_folder
    assert folder
    engine = LlamaCppEngine(backing, 1)
    seen: set[str] = set()
    done = threading.Event()

    def watch() -> None:
        while not done.is_set():
            for name in set(os.listdir(folder)) - {"server.sock"}:  # which the folder guards
                with suppress(OSError):  # gone again
                    seen.add(stat.filemode((folder / name).stat().st_mode))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        tokens = engine.tokenize(user_prompt("", "Hello there"), 0.0).ids
        wait_until(lambda: engine.prefill(tokens, lambda _block: None) and bool(seen), "a slot file is seen")
    finally:
        done.set()
        watcher.join()
        engine.close()
        os.umask(before)

    assert seen == {"-rw-------"}
