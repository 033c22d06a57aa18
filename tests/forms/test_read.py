"""Today's program reads what release 0.1.0 left behind, and goes on with it."""

import json
import logging
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from desk.assignments import grading_work, read_inputs
from desk.rounds import changes, rounds
from grading.reviews import read_overrides
from monitoring import logs
from tests.forms.batches import ADA, CLASS, HOME, MODEL, RELEASE, run, steady, workplace
from tests.forms.gateway import BATCH, FILE, serving
from tests.forms.gateway import steady as steady_ids
from tests.support.pipeline import Pipeline
from tests.support.waiting import wait_until

SAID = {tuple(each["command"][1:]): each for each in json.loads((RELEASE / "outputs.json").read_text("utf-8"))}
CLASS_4 = Path("class-4")


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    """The place where the commands run, with all batches as the release left them."""
    loggers = [logging.getLogger(name) for name in ("", *logs.ROOMS)]
    before = [(logger, list(logger.handlers), logger.level) for logger in loggers]
    with workplace(tmp_path):
        _unpack(RELEASE / "batches", tmp_path, tmp_path)
        yield tmp_path
    for logger, handlers, level in before:
        logger.handlers[:] = handlers
        logger.setLevel(level)


def _unpack(source: Path, to: Path, home: Path) -> None:
    for path in source.rglob("*"):
        if path.is_file():
            place = to / path.relative_to(source)
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(path.read_bytes().replace(HOME.encode(), str(home).encode()))


def recorded(name: str) -> str:
    return (RELEASE / "batches" / name).read_text("utf-8")


def said(home: Path, *words: str) -> Any:
    """What a command says today, and what it said then."""
    now = steady(json.dumps(run(*words)), home)
    return json.loads(now), SAID[words]


def lines(path: Path) -> list[str]:
    return path.read_text("utf-8").splitlines(keepends=True)


def test_a_graded_class_is_shown_and_exported_as_it_was(home: Path) -> None:
    shutil.rmtree(CLASS_4 / "feedback-md.zip")  # here it is a folder, as it is compared
    shutil.rmtree(CLASS_4 / "feedback-html.zip")
    shutil.rmtree(CLASS_4 / "moodle-feedback.zip")
    table, plain = recorded("class-4/grades.csv"), recorded("class-4/final-grades.csv")
    for name in ("grades.csv", "grades.json", "final-grades.csv", "canvas-gradebook.csv", "moodle-worksheet.csv"):
        (CLASS_4 / name).unlink()

    now, then = said(home, "results", "class-4", "--json")
    assert now == then
    assert (CLASS_4 / "grades.csv").read_text("utf-8") == table
    assert json.loads((CLASS_4 / "grades.json").read_text("utf-8")) == json.loads(recorded("class-4/grades.json"))
    for words in (each for each in SAID if each[:2] == ("export", "class-4") and "--dry-run" not in each):
        now, then = said(home, *words)
        assert (now["code"], now["stdout"]) == (then["code"], then["stdout"])
    assert (CLASS_4 / "final-grades.csv").read_bytes().decode() == plain
    for name in ("canvas-gradebook.csv", "moodle-worksheet.csv"):
        assert (CLASS_4 / name).read_bytes() == (RELEASE / "batches/class-4" / name).read_bytes()


def test_a_class_that_was_cut_off_goes_on_with_its_own_jobs(home: Path) -> None:
    journal, sent = CLASS_4 / "results.jsonl", CLASS_4 / "submitted.jsonl"
    whole = journal.read_text("utf-8")
    left = lines(journal)[2:]
    journal.write_text("".join(left), "utf-8")
    sent.write_text("".join(line for line in lines(sent) if json.loads(line)["job_id"] in "".join(left)), "utf-8")

    now, then = said(home, "grade", *CLASS, "--out", "class-4", "--samples", "2")
    assert (now["code"], now["stdout"]) == (then["code"], then["stdout"])
    assert sorted(steady(journal.read_text("utf-8"), home).splitlines()) == sorted(whole.splitlines())
    assert (CLASS_4 / "grades.csv").read_text("utf-8") == recorded("class-4/grades.csv")
    assert (
        json.loads((CLASS_4 / "batch.json").read_text("utf-8"))["jobs"]
        == json.loads(recorded("class-4/batch.json"))["jobs"]
    )


def test_reviews_requests_and_the_sample_are_read(home: Path) -> None:
    made = read_overrides(CLASS_4)
    assert [(each.criterion_id, each.points, each.reviewer) for each in made] == [
        ("works", 1.5, "Ada"),
        (None, None, "Ada"),
    ]
    requests = run("requests", "class-4", "--json")["stdout"]["requests"]
    asked = [json.loads(line) for line in recorded("class-4/requests.jsonl").splitlines()]
    assert [(each["id"], each["reply"]) for each in requests] == [
        (asked[0]["id"], "You are right."),
        (asked[1]["id"], None),
    ]
    sheet = CLASS_4 / "hand-grades.csv"
    sheet.write_text(sheet.read_text("utf-8").replace('"","",""', '"1","1.5",""'), "utf-8")
    bound = run("bound", "class-4", "--json")["stdout"]
    seed = json.loads(recorded("class-4/bound.json"))["seed"]
    assert (bound["seed"], bound["drawn_by"], bound["parts"][0]["drawn"]) == (seed, "Ada", 2)


def test_a_regraded_class_keeps_its_rounds_and_takes_another(home: Path) -> None:
    place = Path("criteria")
    assert [each.name for each in rounds(place)] == ["1"]
    assert [(each.who, each.round, sorted(each.criteria)) for each in changes(place)] == [("ada", "1", ["works"])]
    shutil.copy("class/rubric-later.yaml", "class/rubric.yaml")
    again = run("regrade", "criteria", "--yes", "--quiet", "--json")
    assert (again["code"], again["stdout"]) == (0, ["Nothing has changed since the class was graded."])
    assert (place / "grades.csv").read_text("utf-8") == recorded("criteria/grades.csv")

    rubric = Path("class/rubric.yaml")
    rubric.write_text(rubric.read_text("utf-8").replace("It can be read", "It reads well"), "utf-8")
    again = run("regrade", "criteria", "--criterion", "clear", "--yes", "--quiet", "--json")
    assert (again["code"], again["stdout"]["cost"]["jobs"]) == (0, 2)
    assert [each.round for each in changes(place)] == ["1", "2"]


def test_answers_to_prompts_are_not_asked_for_again(home: Path) -> None:
    journal = Path("prompts/results.jsonl").read_bytes()
    words = next(each for each in SAID if each[0] == "run")
    now, then = said(home, *words)
    assert (now["code"], now["stdout"]) == (then["code"], then["stdout"])
    assert Path("prompts/results.jsonl").read_bytes() == journal
    assert sorted(lines(Path("prompts/answers.jsonl"))) == lines(RELEASE / "batches/prompts/answers.jsonl")


def test_an_assignment_of_the_desk_is_read(home: Path) -> None:
    inputs = read_inputs(Path("desk"))
    assert (inputs.title, inputs.code_model, inputs.ask, inputs.samples) == ("Homework 4", MODEL, "criteria", 3)
    assert Path(inputs.rubric).is_file()
    assert Path(inputs.submissions).name == ADA
    record = grading_work(Path("desk")).record()
    assert record
    assert (record.kind, record.limit, record.only, record.stopped) == ("grade", 5, (ADA,), False)
    assert grading_work(Path("desk")).exit_code == 0


def one_clock(told: Any) -> Any:
    return json.loads(steady_ids(json.dumps(told), {}, Path("/nowhere")))


def _answer(body: Any) -> Any:
    """One JSON object, or a file's lines."""
    if isinstance(body, str):
        body = body.splitlines()
    return [json.loads(line) for line in body] if isinstance(body, list) else [body]


def test_a_gateway_takes_up_the_batch_under_way_and_serves_the_files(tmp_path: Path) -> None:
    home = tmp_path / "state"
    _unpack(RELEASE / "gateway", home, home)
    under_way = home / "batches" / f"{BATCH}.json"
    described = json.loads(under_way.read_text("utf-8")) | {"created": time.time()}  # else it expires one day
    under_way.write_text(json.dumps(described), "utf-8")
    exchanges = json.loads((RELEASE / "gateway.json").read_text("utf-8"))["exchanges"]
    then = {each["asked"]: each for each in exchanges if "asked" in each}
    with Pipeline() as pipeline:
        pipeline.start()
        with serving(pipeline, home) as (_served, call):
            kept = [name for name in then if name.startswith(("GET /v1/files/file-0", "GET /v1/batches/batch_0"))]
            assert len(kept) == 5
            for name in kept:
                answer = call("GET", name.partition(" ")[2])
                assert answer.status_code == 200
                assert one_clock(_answer(answer.text)) == one_clock(_answer(then[name]["body"]))
            assert call("GET", "/v1/models", key="kv-wrong").status_code == 401
            place = f"/v1/batches/{BATCH}"
            wait_until(lambda: call("GET", place).json()["status"] == "completed", "the batch is over", timeout_s=20)
            counts = call("GET", place).json()["request_counts"]
            assert counts == {"total": 3, "completed": 2, "failed": 1}
            assert call("DELETE", f"/v1/files/{FILE}").status_code == 200
