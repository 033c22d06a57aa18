"""A worker with both roles: two handlers over one engine, one choice of what to take next, and nothing else new."""

import math
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from infra.broker.control import announce_pause
from infra.quick_jobs import QuickJobs
from infra.worker_loop import OneByOne
from kvasir.cli import run_command
from kvasir.commands import worker as commands
from kvasir.worker import both_roles
from kvasir.worker.both_roles import TwoRoleWorker
from messages.jobs import PrefillJob
from messages.lifecycle import Step
from messages.workers import BOTH_ROLES, WorkerInfo, WorkerStage
from tests.support.pipeline import BATCH, MODEL, SLOW, Gate, Pipeline, SupervisedWorker, WatchedEngine, WorkerDied, work
from tests.support.waiting import wait_until


@pytest.fixture(params=[OneByOne, QuickJobs])
def pipeline(request: pytest.FixtureRequest) -> Iterator[Pipeline]:
    with Pipeline(steps=request.param) as pipeline:
        yield pipeline


def jobs_of(pipeline: Pipeline, count: int) -> list[PrefillJob]:
    return [pipeline.job(f"def f{number}(): return {number}\n" * 10) for number in range(count)]


def worker_of(both: SupervisedWorker) -> TwoRoleWorker:
    assert isinstance(both.worker, TwoRoleWorker)
    return both.worker


def test_every_job_is_done_by_the_one_engine_and_its_kv_cache_comes_from_memory(pipeline: Pipeline) -> None:
    both = pipeline.start_both()
    pipeline.kv.failing_calls = {"get"}  # whoever asked the store for a block would evaluate the prompt itself
    jobs = jobs_of(pipeline, 12)
    pipeline.submit(*jobs)
    for job in jobs:
        result = pipeline.result(job)
        assert (result.state, result.text) == ("succeeded", pipeline.undisturbed_text(job))
        assert result.decode.kv_transfer == "verified"
        assert result.prefill.worker_id == f"{result.decode.worker_id}.prefill"
    assert (len(both.engine.prefill_calls), len(both.engine.decode_calls)) == (12, 12)
    pipeline.nothing_is_left()


def test_the_order_of_safety_is_that_of_two_workers(pipeline: Pipeline) -> None:
    pipeline.start_both()
    job = pipeline.job()
    pipeline.run(job)
    both = [step for step in pipeline.steps(job) if step != Step.SUBMITTED]
    pipeline.leave(pipeline.workers[0])
    pipeline.start()
    another = pipeline.job("def another(): ...\n" * 40)
    pipeline.run(another)
    assert both == [step for step in pipeline.steps(another) if step != Step.SUBMITTED]


def test_it_registers_once_for_each_role_under_one_process(pipeline: Pipeline) -> None:
    both = worker_of(pipeline.start_both())
    wait_until(lambda: len(pipeline.cluster_state.registrations()) == 2, "both registrations are up")
    registrations = pipeline.cluster_state.registrations()
    assert {one.role for one in registrations} == {"prefill", "decode"}
    assert {one.process for one in registrations} == {both.worker_id}
    assert {one.details.roles for one in registrations} == {BOTH_ROLES}
    pipeline.leave(pipeline.workers[0])
    assert pipeline.cluster_state.registrations() == []


def test_prefill_runs_ahead_by_a_watermark_and_not_by_the_class(pipeline: Pipeline) -> None:
    # Two slots that take a minute each: two jobs are to wait, and one more may have begun
    pipeline.start_both(WatchedEngine(SLOW, slots=2))
    pipeline.submit(*jobs_of(pipeline, 30))
    wait_until(lambda: len(pipeline.workers[0].engine.decode_calls) == 2, "both slots decode")
    threading.Event().wait(1.6)  # the look that was due while nothing waited, and three more
    assert pipeline.ready(work("decode")) <= 3
    assert pipeline.ready(work("prefill")) >= 25


def test_it_looks_seldom_while_nothing_waits_and_often_while_jobs_do(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = worker_of(pipeline.start_both(WatchedEngine(SLOW, slots=2)))
    waits: list[float] = []
    wait = both._stopping.wait
    monkeypatch.setattr(both._stopping, "wait", lambda seconds: waits.append(seconds) or wait(seconds))
    wait_until(lambda: waits, "it looks")
    assert set(waits) == {5 * both_roles.LOOK_S}
    pipeline.submit(*jobs_of(pipeline, 30))
    wait_until(lambda: waits[-1] == both_roles.LOOK_S, "it looks often")


def test_an_urgent_prompt_is_prefilled_however_far_ahead_it_is(pipeline: Pipeline) -> None:
    pipeline.start_both(WatchedEngine(SLOW, slots=2))
    pipeline.submit(*jobs_of(pipeline, 30))
    wait_until(lambda: len(pipeline.workers[0].engine.decode_calls) == 2, "both slots decode")
    urgent = replace(pipeline.job("def urgent(): ...\n" * 40), lane="now")
    pipeline.submit(urgent)
    wait_until(lambda: pipeline.ready(work("decode", "now")) == 1, "it waits for a slot, prefilled")


def test_a_pause_is_of_both_roles(pipeline: Pipeline) -> None:
    both = worker_of(pipeline.start_both())
    for should_pause in (True, False):

        def has_arrived(should_pause: bool = should_pause) -> bool:
            announce_pause(pipeline.broker, both.worker_id, should_pause)  # as `kvasir pause` does: it may be lost
            return all((half.registration().off == "paused") == should_pause for half in (both.prefill, both.decode))

        wait_until(has_arrived, "both say so")
    assert pipeline.run(pipeline.job()).state == "succeeded"


def test_a_batch_that_is_cancelled_ends_in_both_roles(pipeline: Pipeline) -> None:
    both = pipeline.start_both(WatchedEngine(SLOW, slots=2))
    pipeline.submit(*jobs_of(pipeline, 6))
    wait_until(lambda: len(both.engine.decode_calls) == 2, "both slots decode")
    pipeline.client.cancel(BATCH)
    pipeline.nothing_is_left()


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_job_whose_worker_dies_in_either_role_is_done_after_its_restart(pipeline: Pipeline, role: str) -> None:
    # Given that the first job takes the process along in this role, and others are under way in both
    both = pipeline.start_both()
    deadly = "def deadly(): ...\n" * 40
    deaths = iter([both.dies_of(deadly)])

    def dies_once(tokens: object, stop: threading.Event | None) -> None:
        for effect in deaths:
            effect(tokens, stop)  # type: ignore[arg-type]

    if role == "prefill":
        both.engine.before_prefill = dies_once
    else:
        both.engine.before_decode = dies_once
    jobs = [pipeline.job(deadly), *jobs_of(pipeline, 8)]
    pipeline.submit(*jobs)
    for job in jobs:
        assert pipeline.result(job).text == pipeline.undisturbed_text(job)


def test_it_works_beside_workers_of_a_single_role(pipeline: Pipeline) -> None:
    pipeline.start()
    pipeline.start_both()
    jobs = jobs_of(pipeline, 30)
    pipeline.submit(*jobs)
    assert [pipeline.result(job).text for job in jobs] == [pipeline.undisturbed_text(job) for job in jobs]
    pipeline.nothing_is_left()


def test_what_it_keeps_in_memory_is_bounded_and_goes_with_its_job(pipeline: Pipeline) -> None:
    # Given memory for about one job: what does not fit is fetched from the store
    both = pipeline.start_both(kept_bytes=1 << 16)
    jobs = jobs_of(pipeline, 12)
    pipeline.submit(*jobs)
    assert {pipeline.result(job).decode.kv_transfer for job in jobs} == {"verified"}
    pipeline.nothing_is_left()
    kept = worker_of(both).decode._kv
    assert kept.held_bytes <= 1 << 16  # type: ignore[attr-defined]
    own = [ref for job in jobs for ref in pipeline.refs(job) if not ref.is_shared]
    assert own
    wait_until(lambda: not {key[2] for key in kept._blocks} & {*own}, "nothing of a job is kept beyond it")  # type: ignore[attr-defined]


def test_a_suspect_of_one_role_runs_beside_no_job_of_the_other() -> None:
    with Pipeline(unseen_copies=True) as pipeline:
        # Given a prompt that three workers died of
        suspect, first, later = (pipeline.job(f"def {name}(): ...\n" * 40) for name in ("suspect", "first", "later"))
        pipeline.submit(suspect)
        for _ in range(3):
            crashing = pipeline.new_broker()
            assert crashing.get(work("prefill"))
            pipeline.cluster_state.count_crashes("prefill", suspect.job_id, suspect.run, 1)
            crashing.close()
        engine = WatchedEngine()
        engine.before_decode = decoding = Gate()
        pipeline.start_both(engine)
        wait_until(lambda: Step.ISOLATED in pipeline.steps(suspect), "it is a suspect")
        # When a job is in a slot at that time
        pipeline.submit(first)
        decoding.wait()
        engine.before_prefill = prefilling = Gate()
        threading.Event().wait(2.5)  # suspects are looked for every two seconds
        # Then the suspect waits for its end, and nothing is begun while it runs
        assert not prefilling.call_arrived.is_set()
        decoding.open()
        prefilling.wait()
        pipeline.submit(later)
        threading.Event().wait(0.5)
        assert pipeline.ready(work("prefill")) == 1
        prefilling.open()
        assert [pipeline.result(job).state for job in (suspect, first, later)] == ["succeeded"] * 3


def test_a_role_that_ends_takes_the_other_along(pipeline: Pipeline) -> None:
    both = worker_of(pipeline.start_both())
    thread = pipeline.workers[0].thread
    both.prefill.stop()
    thread.join(10)
    assert not thread.is_alive()


def test_a_look_that_fails_ends_the_worker_which_would_go_by_old_figures_for_ever(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = worker_of(pipeline.start_both())

    def fails() -> None:
        raise WorkerDied

    monkeypatch.setattr(both, "look", fails)
    wait_until(lambda: pipeline.workers[0].worker is not both, "its supervisor starts another")
    assert pipeline.run(pipeline.job()).state == "succeeded"


def test_who_prefills_better_and_who_only_decodes_is_read_from_registrations() -> None:
    def registered(worker_id: str, role: WorkerStage, rate: float, **more: Any) -> WorkerInfo:
        plain = WorkerInfo(worker_id, role, MODEL, "simulated", "cpu", "", "", 4096, 4, "host", 1, 0.0)
        return replace(plain, tokens_per_s=rate, **more)

    spark = [registered("spark.1.a", "decode", 10.0, busy=1), registered("spark.1.a.prefill", "prefill", 2000.0)]
    mac, tower = registered("mac.1.b", "decode", 65.0), registered("tower.1.c", "prefill", 500.0)
    paused = registered("mac.2.d", "decode", 65.0, off="paused")
    away = registered("tower.2.e", "prefill", 500.0, off="its engine is away")
    fleet = [*spark, mac, tower, paused, away]
    assert both_roles.prefillers(fleet, MODEL, "another.prefill") == [spark[1], tower]
    assert both_roles.prefillers(fleet, MODEL, "spark.1.a.prefill") == [tower]
    # 2,000 tokens a second for each 40 that its four slots decode; a worker that does nothing else is the better one
    assert [both_roles.advantage(worker, fleet) for worker in (spark[1], tower)] == [50.0, math.inf]
    assert both_roles.advantage(spark[1], [replace(spark[0], tokens_per_s=0.0)]) == 0.0  # not measured
    assert [both_roles.lead(best, own) for best, own in ((50.0, 25.0), (50.0, 0.0), (math.inf, 0.0))] == [
        2,
        0,
        math.inf,
    ]
    assert both_roles.has_pure_decoders(fleet, MODEL)
    assert not both_roles.has_pure_decoders([*spark, tower, paused], MODEL)


@pytest.mark.parametrize(
    ("roles", "served"),
    [("", BOTH_ROLES), ("decode,prefill", BOTH_ROLES), ("prefill", ("prefill",)), ("decode", ("decode",))],
)
def test_a_worker_has_both_roles_unless_one_is_named(
    monkeypatch: pytest.MonkeyPatch, roles: str, served: tuple[WorkerStage, ...]
) -> None:
    options: list[Any] = []
    monkeypatch.setattr(commands.logs, "configure", lambda *_words, **_options: None)
    monkeypatch.setattr(commands, "serve", lambda _settings, given, _observe: options.append(given))
    assert run_command(["worker", "--model", MODEL, *(("--roles", roles) if roles else ())]) == 0
    assert [each.roles for each in options] == [served]


def test_a_role_that_is_none_is_named_with_those_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["worker", "--model", MODEL, "--roles", "prefill,grade"]) == 2
    assert "'grade' is not a role; the roles are prefill, decode" in capsys.readouterr().err
