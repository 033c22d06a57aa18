"""A folder whose prompts an earlier version made: nothing new is published from it, and no grade of it is lost.

`older_batch` was made by commit 809876f: two students are graded, one has a job under way and one that was never
published, one handed in what can't be read. Its prompts hold names that are found today. `out-form-2` is the same
class as commit e3979a8 had it: its prompts are today's, and its job ids were made in another way.
"""

import csv
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgpack
import pytest

from desk.rounds import start_round
from desk.view import BatchView
from grading.grades import make_grades
from infra.broker import topology
from infra.broker.base import Message
from infra.config.settings import load_settings
from kvasir import class_run, cli
from kvasir.desk_app.configuration import DeskBackend
from messages import codec
from messages.errors import BatchError
from messages.jobs import DecodeReport, JobResult, PrefillReport
from messages.lifecycle import Event, Step
from producers.batch.batch import Batch
from producers.batch.runner import Runner
from producers.client import Client
from tests.support.homework import tiny, tiny_class
from tests.support.pipeline import Pipeline, RecordingProgress
from tests.support.processes import SIMULATED_MODEL, ModelEntry, config_text

OLDER = Path(__file__).parent / "older_batch"
ADA, BO, MARK = "fairweatherada_48101_910001_hw4.R", "wubo_48102_910002_hw4.R", "longmark_48103_910003_hw4.md"
SENTENCE = "of an older form"


@pytest.fixture(params=[1, 2])
def form(request: pytest.FixtureRequest) -> int:
    """Of the older batch's prompts."""
    return int(request.param)


@pytest.fixture
def older(form: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The older batch's folder, in a place of its own, with a configuration of its model."""
    shutil.copytree(OLDER, tmp_path / "class", ignore=shutil.ignore_patterns("out*"))
    shutil.copytree(OLDER / ("out" if form == 1 else f"out-form-{form}"), tmp_path / "class/out")
    manifest = tmp_path / "class/out/batch.json"
    manifest.write_text(manifest.read_text("utf-8").replace("CLASS", str(tmp_path / "class")), "utf-8")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "kvasir.toml").write_text(config_text({"tiny:1b": SIMULATED_MODEL}), "utf-8")
    return tmp_path / "class/out"


Kvasir = Callable[..., tuple[int, str, str]]


@pytest.fixture
def kvasir(capsys: pytest.CaptureFixture[str]) -> Iterator[Kvasir]:
    """Runs a command in this process: (exit code, stdout, stderr)."""

    def run(*arguments: str | Path) -> tuple[int, str, str]:
        capsys.readouterr()
        code = cli.run_command([str(argument) for argument in arguments])
        return code, *capsys.readouterr()

    return run


def _sent(out: Path) -> bytes:
    """What says which jobs there are, and which of them the broker was given."""
    return (out / "batch.json").read_bytes() + (out / "submitted.jsonl").read_bytes()


def test_its_grades_are_read_with_their_evidence(older: Path, kvasir: Kvasir, tmp_path: Path) -> None:
    # Given a model with another context, for which other prompts would be made
    smaller = ModelEntry("simulated", "sim:scale=0", context=8192)
    (tmp_path / "kvasir.toml").write_text(config_text({"tiny:1b": smaller}), "utf-8")
    before = _sent(older)

    code, shown, _ = kvasir("results", older, "--json")

    grades = {made["submission"]: made for made in json.loads(shown)["submissions"]}
    assert code == 1  # one can't be read, one has no result yet
    assert grades[ADA]["points"] == grades[BO]["points"] == 4
    # The quotes stand in the older prompts, in which names were left: `A. Fairweather`, `Bo Wu`.
    assert not grades[ADA]["needs_review"]
    assert not grades[BO]["needs_review"]
    assert grades[MARK]["points"] is None
    assert _sent(older) == before


def test_its_grades_are_exported_with_what_a_person_decided(older: Path, kvasir: Kvasir, tmp_path: Path) -> None:
    kvasir("results", older)

    kvasir("export", older, "--format", "csv", "--to", tmp_path / "final-grades.csv", "--yes")

    rows = list(csv.reader((tmp_path / "final-grades.csv").read_text("utf-8-sig").splitlines()))
    assert [row for row in rows if ADA in row and "5" in row], rows


def _again(older: Path, command: str) -> list[str]:
    if command == "retry":
        return ["retry", str(older)]
    handed_in, rubric = older.parent / "handed-in", older.parent / "rubric.yaml"
    return [command, str(handed_in), "--rubric", str(rubric), "--out", str(older)]


@pytest.mark.parametrize("command", ["grade", "submit", "retry"])
def test_nothing_new_is_published_and_one_sentence_says_so(
    older: Path, kvasir: Kvasir, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    if command == "submit":  # it isn't even connected to
        monkeypatch.setenv("KVASIR_BROKER_URL", "amqp://127.0.0.1:9")
        monkeypatch.setenv("KVASIR_STORE_URL", "redis://127.0.0.1:9")
    before, journal = _sent(older), (older / "results.jsonl").read_bytes()

    code, shown, said = kvasir(*_again(older, command))

    assert (code, shown) == (cli.EXIT_USAGE, "")
    assert SENTENCE in said
    assert len(said.strip().splitlines()) == 1
    assert _sent(older) == before
    assert (older / "results.jsonl").read_bytes() == journal


def test_watching_without_a_cluster_ends_and_says_why(older: Path, kvasir: Kvasir) -> None:
    before = _sent(older)

    code, shown, said = kvasir("watch", older, "--json", "--quiet", "--max-wait", "60")

    assert code == 1
    assert SENTENCE in said
    assert json.loads(shown)["jobs"]["succeeded"] == 4
    assert _sent(older) == before


def test_what_is_under_way_is_gathered_and_the_rest_is_not_sent(older: Path, form: int) -> None:
    events: list[Event] = []
    with Pipeline() as pipeline, Batch(older) as batch:
        client = Client(pipeline.broker, pipeline.cluster_state, ["tiny:1b"], events.append)
        # Given the result of the job that was under way, which came while nobody listened
        (under_way,) = [entry for entry in batch.open_jobs.values() if batch.is_confirmed(entry.job_id)]
        pipeline.broker.open_reply_queue(batch.batch_id)
        result = _answer(batch, under_way.job_id, under_way.item_id)
        message = Message(_as_sent_before(result, form), result.job_id, result.batch_id)
        pipeline.broker.publish(topology.reply(batch.batch_id), message)

        # When somebody watches
        assignment = class_run.open_assignment(batch, class_run.request_of_batch(load_settings(), batch))
        counts = Runner(batch, assignment.tasks, client, RecordingProgress()).run(30)

        # Then it counts, and the job that the broker never had isn't sent
        assert counts.succeeded == 5
        assert [entry.role for entry in batch.open_jobs.values()] == ["feedback"]
        assert Step.SUBMITTED not in {event.step for event in events}
        (mark,) = [made for made in make_grades(assignment, batch.result) if made.submission == MARK]
        assert {criterion.id: criterion.points for criterion in mark.criteria} == {"works": 1, "clear": None}


def _answer(batch: Batch, job_id: str, item_id: str) -> JobResult:
    text = json.dumps({"works": {"evidence": "The mean of the long list is 2.", "points": 1, "feedback": "Fine."}})
    reports: dict[str, Any] = {"prefill": PrefillReport(), "decode": DecodeReport(kv_transfer="verified")}
    return JobResult(job_id, 1, batch.batch_id, item_id, "tiny:1b", "succeeded", text, "stop", **reports)


def _as_sent_before(result: JobResult, form: int) -> bytes:
    """A result as workers sent it when prompts had that form."""
    fields = codec.to_dict(result)
    del fields["answers"]
    if form == 1:
        report = fields["decode"]
        report |= {"hand_over": "kv", "handed_over_tokens": report["transferred_tokens"]}
        del report["kv_transfer"], report["transferred_tokens"]
    body: bytes = msgpack.packb({"v": 1, "kind": "result", **fields})
    return body


def test_the_desk_shows_it_and_starts_no_round(older: Path) -> None:
    view = BatchView(older, lambda kept: class_run.request_from_manifest(load_settings(), kept)).refresh()

    assert view.problem == ""
    assert {made.submission: made.points for made in view.grades}[ADA] == 4
    with Batch(older) as batch:  # what is open is given up, or a round would be refused for that
        batch.journal.record(
            JobResult(entry.job_id, 1, batch.batch_id, entry.item_id, entry.model, "cancelled")
            for entry in batch.open_jobs.values()
        )
    with pytest.raises(BatchError, match=SENTENCE):
        start_round(
            DeskBackend(load_settings(), None, older.parent), older, view.refresh(), older.parent / "rubric.yaml"
        )


def test_a_new_batch_says_the_form_of_its_prompts(older: Path, kvasir: Kvasir, tmp_path: Path) -> None:
    kvasir("grade", *tiny(tiny_class(tmp_path / "new"), tmp_path / "out"), "--quiet")

    assert json.loads((tmp_path / "out/batch.json").read_text("utf-8")).get("prompt_form", 0) > 2
    assert kvasir("grade", *tiny(tmp_path / "new", tmp_path / "out"), "--quiet")[0] != cli.EXIT_USAGE
