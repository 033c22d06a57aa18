"""Workers that take each other's jobs, over a real RabbitMQ and Redis with simulated engines.

Nothing here measures speed: who did what is compared, where the figures leave no doubt.
"""

import uuid
from collections import Counter
from collections.abc import Iterator

import pytest

from decode_worker.stealing.models import LoadedModel, Stealable
from messages.errors import ConfigError
from messages.jobs import DecodeReport, JobResult
from messages.lifecycle import Step
from tests.support.fleet import PREFILL, Member, WorkerFleet, weights
from tests.support.waiting import wait_until

HALF_A_SECOND = weights(0.6)


@pytest.fixture
def models() -> tuple[str, str]:
    """Two models that no other test has: the thief's home, and the one with the work."""
    name = uuid.uuid4().hex[:12]
    return f"home-{name}:1b", f"busy-{name}:1b"


@pytest.fixture
def fleet(broker_url: str, store_url: str, models: tuple[str, str]) -> Iterator[WorkerFleet]:
    with WorkerFleet(broker_url, store_url, models) as fleet:
        yield fleet


def measured(fleet: WorkerFleet, model: str, seconds: dict[Member, float]) -> None:
    """These workers have measured how long a job of 20 tokens takes them, and everybody knows."""
    for member, seconds_each in seconds.items():
        member.worker.choice.note(model, DecodeReport(completion_tokens=20, decode_s=seconds_each))
    told = {member.worker_id for member in seconds if member.registration.model == model}
    wait_until(
        lambda: (
            told
            <= {
                registration.worker_id
                for registration in fleet.cluster_state.registrations()
                if registration.figures_for(model)[0]
            }
        ),
        "the registrations say how fast they are",
    )


def done_by(results: dict[str, JobResult]) -> Counter[str]:
    return Counter(result.decode.worker_id for result in results.values())


def test_an_idle_worker_takes_jobs_of_another_model_and_their_results_name_it(fleet, models):
    # Given eight jobs that wait for a worker with one slot, and an idle worker of another model, as fast
    home, busy = models
    fleet.start_prefill(busy)
    jobs = fleet.jobs(busy, 8)
    fleet.prefill(jobs)
    thief = fleet.start_decode(home, HALF_A_SECOND, stealable_models=[fleet.stealable(busy, HALF_A_SECOND)])
    worker = fleet.start_decode(busy, HALF_A_SECOND)

    # When they are decoded
    results = fleet.results(jobs)

    # Then both have worked, from the transferred KV caches
    assert set(done_by(results)) == {thief.worker_id, worker.worker_id}
    assert {(result.state, result.decode.kv_transfer) for result in results.values()} == {("succeeded", "verified")}

    # and every theft is counted, with its reason in figures, and its saving
    stolen = fleet.events_of(Step.STOLEN, busy)
    assert thief.registration.stolen == len(stolen) == done_by(results)[thief.worker_id]
    assert all(event.facts["waiting_s"] > event.facts["cost_s"] for event in stolen)
    assert all(event.facts["saving_s"] > 0 for event in stolen)
    assert thief.registration.resident == (home, busy)


def test_a_worker_with_work_of_its_own_does_that_first(fleet, models):
    # Given work for both models
    home, busy = models
    for model in models:
        fleet.start_prefill(model)
    own, others = fleet.jobs(home, 4), fleet.jobs(busy, 8)
    fleet.prefill(own)
    fleet.prefill(others)

    # When only a worker of the first model is there, which may steal
    thief = fleet.start_decode(home, weights(0.1), stealable_models=[fleet.stealable(busy, weights(0.1))])
    fleet.results(own)
    fleet.results(others)

    # Then it began all of its own before the first of the other
    begun = [event.model for event in fleet.events if event.step is Step.DECODE_STARTED]
    assert begun == [home] * 4 + [busy] * 8
    assert thief.registration.stolen == 8


@pytest.mark.system  # some six seconds
def test_a_worker_that_would_be_slower_than_the_wait_steals_nothing_and_its_refusals_are_counted(fleet, models):
    # Given an idle worker that needs a minute where the one at home needs half a second, and has measured it
    home, busy = models
    fleet.start_prefill(busy)
    thief = fleet.start_decode(home, PREFILL, stealable_models=[fleet.stealable(busy, weights(60))])
    worker = fleet.start_decode(busy, HALF_A_SECOND)
    measured(fleet, busy, {thief: 60, worker: 0.6})

    # When eight jobs come
    jobs = fleet.jobs(busy, 8)
    fleet.client.submit(jobs)
    results = fleet.results(jobs)

    # Then it left them all
    assert set(done_by(results)) == {worker.worker_id}
    assert thief.registration.stolen == 0
    assert thief.registration.not_stolen > 0
    assert fleet.events_of(Step.STOLEN, busy) == []


def test_the_crash_of_a_thief_loses_nothing(fleet, models):
    # Given a thief in the middle of a stolen job
    home, busy = models
    fleet.start_prefill(busy)
    jobs = fleet.jobs(busy, 3)
    fleet.prefill(jobs)
    thief = fleet.start_decode(home, weights(60), stealable_models=[fleet.stealable(busy, weights(60))])
    wait_until(lambda: thief.registration.jobs, "it decodes a stolen job")

    # When it is gone, and a worker of that model is there
    thief.crash()
    worker = fleet.start_decode(busy, weights(0.1))

    # Then every job is answered by that one
    assert done_by(fleet.results(jobs)) == {worker.worker_id: 3}


def test_a_model_with_other_weights_than_its_workers_is_not_stolen_and_the_home_model_is_still_served(fleet, models):
    # Given a model that this machine has in another version, as its loader finds out
    home, busy = models

    def load() -> LoadedModel:
        raise ConfigError("worker x serves busy with other weights")

    for model in models:
        fleet.start_prefill(model)
    thief = fleet.start_decode(home, PREFILL, stealable_models=[Stealable(busy, 0, load)])
    jobs = fleet.jobs(busy, 3)
    fleet.prefill(jobs)
    wait_until(lambda: thief.worker._model_cache.candidates() == [], "it has tried once, and tries no more")

    # When there is work for it, and a worker for the others
    own = fleet.jobs(home, 2)
    fleet.client.submit(own)
    assert set(done_by(fleet.results(own))) == {thief.worker_id}
    worker = fleet.start_decode(busy, PREFILL)

    # Then neither has touched the other's
    assert set(done_by(fleet.results(jobs))) == {worker.worker_id}
    assert thief.registration.resident == (home,)


def test_a_stolen_job_of_foreign_weights_is_answered_without_its_kv_cache(fleet, models):
    """Where no loader noticed: the fingerprint says so, and the answer is this engine's own, never a wrong one."""
    home, busy = models
    fleet.start_prefill(busy)
    jobs = fleet.jobs(busy, 1)
    fleet.prefill(jobs)

    fleet.start_decode(home, PREFILL, stealable_models=[fleet.stealable(busy, "sim:scale=0,seed=2")])

    (result,) = fleet.results(jobs).values()
    assert (result.state, result.decode.kv_transfer) == ("succeeded", "none")
    assert "this worker's model" in result.decode.why_none


@pytest.mark.system  # some six seconds
def test_a_slow_worker_leaves_the_last_job_to_a_faster_one(fleet, models):
    # Given a worker that takes a minute for what the other does in half a second, and both have measured it
    _, busy = models
    fleet.start_prefill(busy)
    slow, fast = fleet.start_decode(busy, weights(60)), fleet.start_decode(busy, HALF_A_SECOND)
    measured(fleet, busy, {slow: 60, fast: 0.6})

    # When jobs come that the faster one ends by itself sooner than the slower one ends a single one
    jobs = fleet.jobs(busy, 6)
    fleet.client.submit(jobs)

    # Then it does them all
    assert done_by(fleet.results(jobs)) == {fast.worker_id: 6}


@pytest.mark.system  # some six seconds
def test_what_the_faster_worker_does_not_take_is_taken_after_all(fleet, models):
    # Given a fast worker that is stuck: its registration is up, and it takes nothing
    _, busy = models
    fleet.start_prefill(busy)
    slow, fast = fleet.start_decode(busy, weights(0.8)), fleet.start_decode(busy, weights(0.1))
    measured(fleet, busy, {slow: 0.8, fast: 0.1})
    fast.broker.close()

    # When a job comes
    jobs = fleet.jobs(busy, 1)
    fleet.client.submit(jobs)

    # Then the slow one waits for a while, and does it
    assert set(done_by(fleet.results(jobs))) == {slow.worker_id}
