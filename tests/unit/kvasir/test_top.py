"""`kvasir top` draws what status knows, and follows batches that others own."""

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from kvasir.commands.status import remarks
from kvasir.commands.top import frame
from kvasir.commands.top_batches import BatchState, BatchWatch, find_batches
from messages.errors import BatchError
from messages.jobs import JobError, JobResult
from producers.batch.batch import Batch, BatchEntry

JOBS = [f"{number:032x}" for number in range(4)]
WORKER = {
    "worker_id": "mac2.17.a1b2c3", "role": "decode", "model": "qwen3-coder:30b", "engine": "mlx", "device": "metal",
    "slots": 4, "busy": 3, "done": 1234, "tokens_per_s": 65.4, "transfers_kv": True, "notes": "", "off": "",
    "paused_because": "",
}  # fmt: skip
STATE: dict[str, Any] = {
    "workers": [WORKER],
    "queues": {
        "prefill.qwen3-coder:30b.bulk": 14,
        "prefill.qwen3-coder:30b.bulk-1": 3,
        "decode.qwen3-coder:30b.now": 2,
        "suspects.decode.qwen3-coder:30b": 1,
        "dead-letters": 5,
    },
    "unserved": ["gpt-oss:120b"],
    "unprefilled": [],
    "missing": ["spark1 gone for 40 s: its prefill worker of qwen3-coder:30b, held 3 jobs, taken over by mac1."],
    "store": {
        "used_bytes": 2_000_000_000, "reserved_bytes": 0, "mark_bytes": 8_500_000_000, "max_bytes": 10_000_000_000,
        "full": 0.2,
    },
}  # fmt: skip


def drawn(state: dict[str, Any], *batches: BatchState) -> str:
    console = Console(file=io.StringIO(), width=160)
    console.print(frame(state, batches, now=0.0))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    return str(text)


def entry(job_id: str) -> BatchEntry:
    return BatchEntry(job_id, f"{job_id[-4:]}.code", "m", "code", "a.ipynb")


def result(job_id: str, state: str = "succeeded", run: int = 1) -> JobResult:
    error = JobError("decode", "Poison", "it came back too often") if state == "failed" else None
    return JobResult(job_id, run, "b", f"{job_id[-4:]}.code", "m", state, error=error)  # type: ignore[arg-type]


@pytest.fixture
def batch(tmp_path: Path) -> Batch:
    made = Batch(tmp_path / "out")
    made.plan(map(entry, JOBS), {})
    return made


def worker(name: str, **changes: Any) -> dict[str, Any]:
    return WORKER | {"worker_id": name} | changes


def test_a_worker_far_slower_than_its_like_is_named() -> None:
    slow, unlike = worker("mac3.1.c", tokens_per_s=12.0), worker("spark1.1.d", engine="vllm", tokens_per_s=1.0)
    assert remarks(STATE | {"workers": [WORKER, slow, unlike]})[1] == (
        "mac3.1.c makes 12 tokens/s and mac2.17.a1b2c3 65: look at its machine (another program, heat, swapping)."
    )
    for well in (worker("mac3.1.c", tokens_per_s=17.0), slow | {"busy": 0}, slow | {"tokens_per_s": 0.0}):
        assert not any("mac3" in sentence for sentence in remarks(STATE | {"workers": [WORKER, well]}))


def test_a_worker_that_does_nothing_has_no_rate() -> None:
    for idle in (worker("mac3.1.c", busy=0), worker("mac3.1.c", off="paused itself", paused_because="no store")):
        line = next(line for line in drawn(STATE | {"workers": [idle]}).splitlines() if "mac3.1.c  mlx" in line)
        assert "65" not in line
        assert line.rstrip().endswith(idle["off"] or "1,234")


def test_a_frame_has_queues_workers_store_and_what_needs_a_person() -> None:
    text = drawn(STATE)
    line = next(line for line in text.splitlines() if line.startswith("qwen3-coder:30b  ") and "mac2" not in line)
    assert line.split() == ["qwen3-coder:30b", "·", "17", "·", "2", "·", "1"]
    for words in (
        "mac2.17.a1b2c3",
        "mlx on metal",
        "3/4",
        "1,234",
        "65",
        "dead-letters 5",
        "Nobody serves gpt-oss:120b",
    ):
        assert words in text
    assert "prefill waits" not in text


def test_a_full_store_is_told_of() -> None:
    assert "prefill waits" in drawn(STATE | {"store": STATE["store"] | {"used_bytes": 9_000_000_000}})


def test_a_batch_has_a_line_with_the_time_it_will_take() -> None:
    text = drawn(STATE, BatchState("hw4-1", 200, 50, 2, "about 90 min left"), BatchState("hw3-9", 10, 10, 0))
    assert "50/200" in text
    assert "25%" in text
    assert "about 90 min left" in text
    assert "done" in text


def test_a_batch_is_followed_while_its_owner_holds_it(batch: Batch) -> None:
    watch = BatchWatch(batch.folder)
    assert watch.look() == BatchState(batch.batch_id, 4, 0, 0)

    batch.journal.record([result(JOBS[0])])
    first = watch.look()
    batch.journal.record([result(JOBS[1]), result(JOBS[2], "failed")])
    second = watch.look()

    assert (first.result_count, first.open) == (1, 3)
    assert (second.result_count, second.failure_count) == (3, 1)


def test_a_job_that_runs_again_is_open_again(batch: Batch) -> None:
    batch.journal.record([result(JOBS[0], "failed")])
    watch = BatchWatch(batch.folder)
    assert watch.look().result_count == 1
    batch.run_again([JOBS[0]])
    assert watch.look().result_count == 0
    batch.journal.record([result(JOBS[0], run=2)])
    again = watch.look()
    assert (again.result_count, again.failure_count) == (1, 0)


def test_a_line_that_is_still_being_written_waits_for_the_next_look(batch: Batch) -> None:
    batch.journal.record([result(JOBS[0])])
    whole = (batch.folder / "results.jsonl").read_bytes()
    watch = BatchWatch(batch.folder)
    (batch.folder / "results.jsonl").write_bytes(whole[:-10])
    assert watch.look().result_count == 0
    (batch.folder / "results.jsonl").write_bytes(whole)
    assert watch.look().result_count == 1


def test_batches_are_those_named_or_those_in_results(batch: Batch, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    assert find_batches(()) == []
    assert len(find_batches((batch.folder,))) == 1
    (tmp_path / "results").mkdir()
    batch.folder.rename(tmp_path / "results" / "hw4")
    assert len(find_batches(())) == 1
    with pytest.raises(BatchError, match="holds no batch"):
        find_batches((tmp_path / "nothing",))
