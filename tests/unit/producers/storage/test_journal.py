"""The journal and the batch folder: what a crash, a duplicate or a full disk may do to them."""

import errno
import os
import tracemalloc
from pathlib import Path

import pytest

from messages.errors import BatchError
from messages.jobs import JobError, JobResult, PrefillJob, Sampling, user_prompt
from producers.batch.batch import Batch, BatchEntry, is_owned
from producers.storage.journal import Journal, Lines


def a_result(job: str = "j1", run: int = 1, state: str = "succeeded", text: str = "x") -> JobResult:
    error = JobError("decode", "X", "y") if state == "failed" else None
    return JobResult(job, run, "b1", "i1", "m", state, text=text, error=error)  # type: ignore[arg-type]


def test_the_first_result_of_a_run_wins_and_duplicates_add_no_line(tmp_path):
    journal = Journal(tmp_path / "results.jsonl")

    first = journal.record([a_result(text="first"), a_result(text="second")])
    again = journal.record([a_result(text="third")])

    assert [result.text for result in first] == ["first"]
    assert again == []
    assert len((tmp_path / "results.jsonl").read_text().splitlines()) == 1
    assert journal.result_of("j1").text == "first"


def test_a_job_counts_as_succeeded_once_any_run_did_and_else_by_its_highest_run(tmp_path):
    journal = Journal(tmp_path / "results.jsonl")

    journal.record([a_result(run=2, state="failed"), a_result(run=1, state="failed")])
    assert journal.result_of("j1").run == 2

    journal.record([a_result(run=3), a_result(run=4, state="failed")])
    assert (journal.result_of("j1").state, journal.result_of("j1").run) == ("succeeded", 3)


def test_a_line_torn_by_a_crash_is_cut_off_and_the_rest_is_read(tmp_path):
    path = tmp_path / "results.jsonl"
    Journal(path).record([a_result("j1"), a_result("j2")])
    whole = path.read_bytes()

    for cut in range(whole.index(b"\n") + 1, len(whole)):
        path.write_bytes(whole[:cut])
        journal = Journal(path)
        assert journal.result_of("j1") is not None
        assert journal.result_of("j2") is None
        journal.record([a_result("j2")])
        assert [*Journal(path).job_ids()] == ["j1", "j2"]


def test_a_full_disk_gives_one_clear_error_and_leaves_no_half_line(tmp_path, monkeypatch):
    path = tmp_path / "results.jsonl"
    journal = Journal(path)
    journal.record([a_result("j1")])
    before = path.read_bytes()
    real_write = os.write

    def write_half(descriptor: int, data: memoryview) -> int:
        if len(data) < 20:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real_write(descriptor, data[: len(data) // 2])

    monkeypatch.setattr(os, "write", write_half)
    with pytest.raises(BatchError, match=r"results\.jsonl: No space left on device"):
        journal.record([a_result("j2")])
    monkeypatch.undo()

    assert path.read_bytes() == before
    assert journal.record([a_result("j2")]) == [a_result("j2")]


def test_a_line_that_is_not_ours_is_named(tmp_path):
    path = tmp_path / "results.jsonl"
    path.write_text('{"job_id": 5}\n')
    with pytest.raises(BatchError, match="not a valid result"):
        Journal(path)
    path.write_text("[]\n")
    with pytest.raises(BatchError, match="line 1"):
        list(Lines(path).read_all(lambda row: row))


def an_entry(job: str) -> BatchEntry:
    return BatchEntry(job, f"item-{job}", "m", "code", "ada.R")


def a_job(job: str, run: int = 1) -> PrefillJob:
    return PrefillJob(job, "b1", "i1", "m", user_prompt("s", "o"), Sampling(1), run=run)


def test_a_batch_opened_again_knows_what_was_planned_confirmed_and_answered(tmp_path):
    with Batch(tmp_path / "hw1") as batch:
        batch.plan([an_entry("j1"), an_entry("j2"), an_entry("j3")], {"folder": "x"})
        batch.note_confirmed([a_job("j1"), a_job("j2")])
        batch.journal.record([a_result("j1")])
        name, secret = batch.batch_id, batch.secret

    with Batch(tmp_path / "hw1") as again:
        assert (again.batch_id, again.secret, again.request) == (name, secret, {"folder": "x"})
        assert list(again.open_jobs) == ["j2", "j3"]
        assert [again.is_confirmed(job) for job in ("j1", "j2", "j3")] == [True, True, False]
        counts = again.counts()
        assert (counts.total, counts.finished_jobs, counts.open) == (3, 1, 2)


def test_running_again_wants_a_new_result_except_where_one_succeeded(tmp_path):
    with Batch(tmp_path / "hw1") as batch:
        batch.plan([an_entry("j1"), an_entry("j2")], {"folder": "x"})
        batch.note_confirmed([a_job("j1"), a_job("j2")])
        batch.journal.record([a_result("j1"), a_result("j2", state="failed")])
        batch.run_again(["j2"])

    with Batch(tmp_path / "hw1") as again:
        assert list(again.open_jobs) == ["j2"]
        assert not again.is_confirmed("j2")
        again.journal.record([a_result("j2", run=2)])
        assert list(again.open_jobs) == []


@pytest.mark.parametrize(
    ("request_of_batch", "command"),
    [({"folder": "x"}, "kvasir watch hw1"), ({"prompts": "p.jsonl"}, "kvasir run p.jsonl --out hw1")],
)
def test_a_batch_of_prompts_goes_on_with_run_and_a_class_with_watch(tmp_path, monkeypatch, request_of_batch, command):
    monkeypatch.chdir(tmp_path)
    with Batch(Path("hw1")) as batch:
        batch.plan([an_entry("j1")], request_of_batch)
        assert batch.go_on_command == command


def test_a_batch_has_one_owner_at_a_time(tmp_path):
    with Batch(tmp_path / "hw1"):
        assert is_owned(tmp_path / "hw1")
        with pytest.raises(BatchError, match="in use by another kvasir process"):
            Batch(tmp_path / "hw1")
    assert not is_owned(tmp_path / "hw1")


def test_a_manifest_that_can_not_be_read_is_named_with_what_to_do(tmp_path):
    (tmp_path / "hw1").mkdir()
    (tmp_path / "hw1" / "batch.json").write_text("{")
    with pytest.raises(BatchError, match=r"batch\.json can't be read.*--out"):
        Batch(tmp_path / "hw1")


def test_a_folder_that_can_not_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(BatchError, match="can't use"):
        Batch(tmp_path / "file" / "hw1")


def test_what_is_kept_in_memory_of_a_result_does_not_grow_with_its_text(tmp_path):
    long = "x" * 100_000
    journal = Journal(tmp_path / "results.jsonl")
    tracemalloc.start()
    try:
        for number in range(50):
            journal.record([a_result(f"j{number}", text=long)])
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert kept < 2 * len(long)
    result = journal.result_of("j49")
    assert result is not None
    assert result.text == long


def test_a_job_that_is_wanted_again_is_open_until_that_run_has_its_line(tmp_path):
    with Batch(tmp_path / "hw1") as batch:
        batch.plan([an_entry("j1"), an_entry("j2")], {"folder": "x"})
        batch.journal.record([a_result("j1", state="failed"), a_result("j2")])
        assert not batch.open_jobs

        batch.want_runs({"j1": 3})
        batch.journal.record([a_result("j1", run=2, state="failed")])
        assert list(batch.open_jobs) == ["j1"]

        batch.journal.record([a_result("j1", run=3)])
        assert not batch.open_jobs
        counts = batch.counts()
        assert (counts.total, counts.succeeded, counts.failed) == (2, 2, 0)


def test_a_batch_of_thousands_is_read_back_as_it_was_planned(tmp_path):
    entries = [an_entry(f"j{number}") for number in range(1234)]
    with Batch(tmp_path / "hw1") as batch:
        batch.plan(entries, {"folder": "x"})
    with Batch(tmp_path / "hw1") as again:
        assert again.entries == entries
