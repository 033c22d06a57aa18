"""When a batch will be done: from what waits, the workers that are there, and the answers so far."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

import pytest

from benchmarks import finish as nights
from desk.progress import EXPECTED
from infra.broker.topology import work_queue
from infra.config.schema import Rates
from infra.config.settings import MachineSettings, Settings, load_settings
from kvasir.plan.cluster import expectation, fleet_of_workers, remainder_of
from kvasir.plan.finish import MOST_PROMPTS, Finish, Remainder
from kvasir.plan.fleet import Decoder, Fleet, PlannedJob, Prefiller
from kvasir.plan.simulate import Backlog, Stealing, simulate
from kvasir.terminal import TerminalProgress
from messages.jobs import DecodeReport, JobResult, PrefillReport
from messages.workers import BOTH_ROLES, RateCurve, WorkerDetails, WorkerInfo
from producers.batch.batch import Batch, BatchEntry, Counts
from producers.client import Client

MODEL = "big:m"
FLEET = Fleet((Prefiller("spark", MODEL, 1000.0),), (Decoder("mac", MODEL, 2, {MODEL: 10.0}),))


def _jobs(count: int, name: str = "own") -> list[PlannedJob]:
    return [PlannedJob(f"{name} {number}", MODEL, 0, 100, 100) for number in range(count)]


def _finish(fleet: Fleet, backlog: Backlog, lengths: dict[str, list[int]], names: set[str]) -> Finish | None:
    return Remainder(fleet, backlog, lengths, names).finish()


def _names(jobs: Sequence[PlannedJob]) -> set[str]:
    return {job.name for job in jobs}


def test_the_interval_and_the_chance_are_those_of_one_distribution() -> None:
    finish = Finish(3600.0, 0.1)

    low_s, high_s = finish.interval_s
    assert low_s < 3600 < high_s
    assert finish.chance(high_s) - finish.chance(low_s) == pytest.approx(0.9)
    assert finish.chance(3600.0) == pytest.approx(0.5)
    assert finish.chance(0.0) == finish.chance(-5.0) < 1e-6
    assert finish.words() == "about 60 min left (90%: 51 min to 71 min)"


def test_what_takes_a_known_time_is_estimated_by_it() -> None:
    jobs = _jobs(40)

    finish = _finish(FLEET, Backlog(jobs, [], []), {MODEL: [100] * 20}, _names(jobs))

    assert finish is not None
    assert finish.left_s == pytest.approx(40 * 100 / (2 * 10), rel=0.08)  # two slots, 10 tokens a second each


def test_jobs_in_front_count_and_those_behind_hardly_do() -> None:
    own, others = _jobs(10), _jobs(30, "other")
    lengths = {MODEL: [100] * 20}

    first, last = (
        _finish(FLEET, Backlog(line, [], []), lengths, _names(own)) for line in ([*own, *others], [*others, *own])
    )

    assert first is not None
    assert last is not None
    assert last.left_s > 3 * first.left_s


def test_a_class_with_few_answers_is_less_certain() -> None:
    jobs = _jobs(60)

    known, unknown = (_finish(FLEET, Backlog(jobs, [], []), {MODEL: found}, _names(jobs)) for found in ([100] * 50, []))

    assert known is not None
    assert unknown is not None
    assert unknown.spread > known.spread


def test_nothing_left_and_nobody_there_have_no_estimate() -> None:
    jobs = _jobs(2)

    assert _finish(FLEET, Backlog([], [], []), {}, set()) is None
    assert _finish(replace(FLEET, decoders=()), Backlog(jobs, [], []), {}, _names(jobs)) is None


def test_a_queue_of_thousands_follows_from_a_part_of_it() -> None:
    short, long = _jobs(MOST_PROMPTS), _jobs(10 * MOST_PROMPTS)
    lengths = {MODEL: [100] * 20}

    few, many = (_finish(FLEET, Backlog(jobs, [], []), lengths, _names(jobs)) for jobs in (short, long))

    assert few is not None
    assert many is not None
    assert many.left_s == pytest.approx(10 * few.left_s, rel=0.02)


def test_a_simulation_begins_where_the_cluster_is() -> None:
    waiting, ready, running = (_jobs(1, name)[0] for name in ("waiting", "ready", "running"))

    run = simulate(FLEET, Backlog([waiting], [ready], [(0, replace(running, answer_tokens=40))]), Stealing())

    ends_s = {timing.job.name: timing.ended_s for timing in run.timings}
    assert ends_s["running 0"] == pytest.approx(4.0)
    assert ends_s["ready 0"] == pytest.approx(10.0)
    assert ends_s["waiting 0"] == pytest.approx(14.0)
    assert [timing.job.name for timing in run.prefills] == ["waiting 0"]


# --- from a cluster


def _worker(name: str, role: str, **fields: Any) -> WorkerInfo:
    known = {"engine": "mlx", "device": "metal", "fingerprint": "", "tokenizer": "", "context": 8192, "slots": 2}
    where = {"host": name, "pid": 7, "started_at": 0.0}
    return WorkerInfo(f"{name}.{role}", cast(Any, role), MODEL, **cast(Any, known | where | fields))


def _settings(**machines: Rates) -> Settings:
    tables = {
        name: MachineSettings(name=name, host=f"{name}.local", rates=MappingProxyType({MODEL: rates}))
        for name, rates in machines.items()
    }
    bare = load_settings({"models": {MODEL: {"context": 8192}}}, environ={}, cwd=Path("/"), user_dir=Path("/"))
    return replace(bare, machines=tables)


def test_workers_bring_their_curves_else_their_figures_else_the_configuration() -> None:
    curve = RateCurve(MODEL, (1, 4), (10.0, 30.0))
    both = WorkerDetails(roles=BOTH_ROLES, decode_curves=(curve,))
    measured = {"resident": (MODEL,), "resident_tokens_per_s": (12.0,), "resident_answer_tokens": (80.0,)}
    workers = [
        _worker("spark1", "prefill", details=replace(both, decode_curves=()), tokens_per_s=900.0),
        _worker("spark1", "decode", details=both, **measured),
        _worker("mac1", "decode", **measured),
        _worker("mac2", "decode"),
        _worker("mac3", "decode"),
        _worker("mac4", "decode", off="paused", **measured),
    ]

    fleet, registrations = fleet_of_workers(_settings(mac2=Rates(decode=5.0)), workers)

    assert [(each.machine, each.tokens_per_s) for each in fleet.prefillers] == [("spark1", 900.0)]
    assert [(each.machine, each.tokens_per_s[MODEL]) for each in fleet.decoders] == [
        ("spark1", curve),
        ("mac1.decode", 12.0),
        ("mac2.decode", 5.0),
    ]
    assert [worker.host for worker in registrations] == ["spark1", "mac1", "mac2"]


def test_a_worker_that_may_steal_a_model_is_taken_to_be_as_fast_as_the_models_own_workers() -> None:
    own = {"resident_tokens_per_s": (12.0,), "resident_answer_tokens": (80.0,)}
    thief = _worker("mac1", "decode", resident=(MODEL,), details=WorkerDetails(steals=("other", "nobody's")), **own)
    both = {"resident_tokens_per_s": (20.0, 9.0), "resident_answer_tokens": (50.0, 80.0)}
    measured = WorkerDetails(steals=(MODEL,))
    home = replace(_worker("mac2", "decode", resident=("other", MODEL), details=measured, **both), model="other")
    entries = {MODEL: {"context": 8192}, "other": {"context": 8192, "memory_gb": 65}}
    settings = load_settings({"models": entries}, environ={}, cwd=Path("/"), user_dir=Path("/"))

    fleet, _ = fleet_of_workers(settings, [thief, home])

    first, second = fleet.decoders
    assert dict(first.tokens_per_s) == {MODEL: 12.0, "other": 20.0}
    assert dict(second.tokens_per_s) == {"other": 20.0, MODEL: 9.0}  # what was measured here goes first
    assert first.load_s["other"] == pytest.approx(65.0)
    assert "other" not in second.load_s


class _Broker:
    def __init__(self, prefill: int, decode: int) -> None:
        self._ready = {work_queue("prefill", MODEL, "bulk"): prefill, work_queue("decode", MODEL, "bulk"): decode}

    def ready(self, *queues: str) -> int:
        return sum(self._ready.get(queue, 0) for queue in queues)


class _Client:
    def __init__(self, prefill: int, decode: int, busy: int) -> None:
        self.broker = _Broker(prefill, decode)
        measured = {"resident": (MODEL,), "resident_tokens_per_s": (10.0,), "resident_answer_tokens": (100.0,)}
        self._workers = [
            _worker("spark1", "prefill", tokens_per_s=1000.0),
            _worker("mac1", "decode", busy=busy, **measured),
        ]

    def workers(self) -> list[WorkerInfo]:
        return self._workers


def _client(prefill: int = 0, decode: int = 0, busy: int = 0) -> Client:
    return cast(Client, _Client(prefill, decode, busy))


@pytest.fixture
def batch(tmp_path: Path) -> Batch:
    """Ten jobs, none of which has a result."""
    made = Batch(tmp_path / "batch")
    made.plan([BatchEntry(f"job-{number}", f"s-{number}", MODEL, "code", "x") for number in range(10)], {})
    return made


def _result(batch: Batch, number: int, tokens: int) -> JobResult:
    decode = DecodeReport(completion_tokens=tokens, decode_s=1.0)
    prefill = PrefillReport(computed_tokens=70)
    return JobResult(
        f"job-{number}", 1, batch.batch_id, f"s-{number}", MODEL, "succeeded", prefill=prefill, decode=decode
    )


def _jobs_of(remainder: Remainder) -> list[PlannedJob]:
    backlog = remainder.backlog
    return [*(job for _, job in backlog.running_jobs), *backlog.ready_jobs, *backlog.waiting_jobs]


def test_a_batch_without_answers_stands_behind_what_waits_and_then_in_front(batch: Batch) -> None:
    before = remainder_of(_settings(), _client(prefill=25, decode=3, busy=2), batch)

    assert len(_jobs_of(before)) == 30
    assert [job.name for _, job in before.backlog.running_jobs] == [f"other {MODEL} 0", f"other {MODEL} 1"]
    assert before.backlog.waiting_jobs[-1].name == f"{MODEL} 9"
    assert {job.answer_tokens for job in _jobs_of(before)} == {100}

    batch.journal.record([_result(batch, 0, 300)])
    after = remainder_of(_settings(), _client(prefill=24, decode=3, busy=2), batch)

    assert len(after.names) == 9
    assert [job.name for _, job in after.backlog.running_jobs] == [f"{MODEL} 0", f"{MODEL} 1"]
    assert after.lengths == {MODEL: [300]}
    assert {job.own_tokens for job in _jobs_of(after)} == {70}


def test_a_batch_that_has_a_turn_stands_among_the_others(batch: Batch) -> None:
    client = _client(prefill=20, busy=2)
    cast(Any, client.broker)._ready[work_queue("prefill", MODEL, "bulk", 1)] = 10

    remainder = remainder_of(_settings(), client, batch)

    assert len(_jobs_of(remainder)) == 32
    assert {job.name for _, job in remainder.backlog.running_jobs} == {f"{MODEL} 0", f"other {MODEL} 0"}
    in_one_queue = remainder_of(_settings(), _client(prefill=30, busy=2), batch)
    finish, last = remainder.finish(), in_one_queue.finish()
    assert finish is not None
    assert last is not None
    assert finish.left_s == pytest.approx(20 / 32 * last.left_s, rel=0.15)  # with ten of the others, not after 22


def test_of_many_jobs_behind_a_batch_no_more_count_than_can_matter(batch: Batch) -> None:
    batch.journal.record([_result(batch, number, 100) for number in range(5)])

    remainder = remainder_of(_settings(), _client(prefill=5000), batch)

    assert len(_jobs_of(remainder)) == 50
    finish = remainder.finish()
    assert finish is not None
    assert finish.left_s == pytest.approx(5 * 100 / (2 * 10), rel=0.4)


def test_all_that_waits_is_asked_about_without_a_batch() -> None:
    assert len((remainder_of(_settings(), _client(prefill=4, decode=3, busy=2))).names) == 9
    assert remainder_of(_settings(), _client()).finish() is None


def test_a_deadline_has_a_chance_and_what_would_help(batch: Batch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvasir.plan.cluster.time.time", lambda: 1000.0)
    client = _client(prefill=8, busy=2)  # ten answers of 100 tokens, two at a time, 10 tokens a second: 50 s
    batch.request = {"ask": "criteria"}

    assert expectation(_settings(), client, batch).startswith("about ")
    assert expectation(_settings(), client, batch, 1000.0 + 500).endswith("; 100% chance to make the deadline")
    words = expectation(_settings(), client, batch, 1000.0 + 25)
    assert "; 0% chance to make the deadline; what would help: another machine like mac1.decode (" in words
    assert words.endswith(", shorter feedback, --ask together")


def test_a_cluster_that_has_measured_nothing_says_nothing(batch: Batch) -> None:
    client = _client(prefill=10)
    cast(Any, client)._workers = [_worker("mac1", "decode")]

    assert expectation(_settings(), client, batch, 1.0) == ""


def test_progress_asks_how_long_it_takes_seldom_and_logs_it_for_the_desk(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "kvasir.terminal")
    questions = []

    def expect() -> str:
        questions.append("how long?")
        return "about 3 min left (90%: 2 min to 4 min)"

    with TerminalProgress(quiet=False) as progress:
        progress.expect(expect)
        for done in (1, 50, 100):
            progress.update(Counts(100, done, 0, 0, 0))

    lines = [line for line in capsys.readouterr().err.splitlines() if EXPECTED not in line]  # beside a log, if any
    assert lines[0] == "1/100 jobs, 1%, about 3 min left (90%: 2 min to 4 min)"
    assert lines[-1] == "100/100 jobs, 100%"
    assert len(questions) == 1
    assert [record.getMessage() for record in caplog.records] == [f"{EXPECTED}{expect()}"]


def test_progress_that_nobody_sees_asks_nothing() -> None:
    with TerminalProgress(quiet=True) as progress:
        progress.expect(lambda: pytest.fail("asked, though nobody sees the answer"))
        progress.update(Counts(100, 1, 0, 0, 0))


def test_an_owner_sees_of_a_night_what_is_left_of_it() -> None:
    night = nights.draw_night(4)
    run = night.run()
    end_s = run.makespan_s

    remainder = nights.seen(night, run, 0, end_s / 2)

    left = {timing.job.name for timing in run.timings if timing.ended_s > end_s / 2}
    assert {job.name for job in _jobs_of(remainder)} == left
    assert remainder.names >= {name for name in left if name.startswith("0/")}
    assert sum(map(len, remainder.lengths.values())) == len(remainder.names - left)
    assert all(decoder.dies_s == math.inf for decoder in remainder.fleet.decoders)
