"""Processes that are killed or told to leave in the middle of a batch: nothing is lost, nothing counts twice.

The engine is simulated: its text is the same at any speed, so that what was disturbed can be compared with what was
not, and its pace is ours to choose, so that the middle lasts long enough to be met.
"""

import signal
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import redis

from infra.broker import topology
from infra.broker.envelope import submit_message
from infra.broker.rabbitmq import RabbitMQBroker
from messages import codec
from messages.jobs import PrefillJob, TokenEvent
from tests.support.homework import assert_each_once, journal, outcomes, same_batch, tiny, tiny_class
from tests.support.processes import SIMULATED_MODEL, Cluster, RunningProcess, Worker, environment, run
from tests.support.waiting import wait_until

pytestmark = pytest.mark.system  # minutes, not seconds

SLOW = replace(SIMULATED_MODEL, weights="sim:scale=1,prefill=1000000,decode=30")  # some four seconds an answer
SLOWER = "sim:scale=1,decode=4"  # the same model on a machine that takes half a minute


@pytest.fixture
def homework(tmp_path: Path) -> Path:
    """Three submissions, six jobs."""
    return tiny_class(tmp_path / "homework")


@pytest.fixture
def slow(tmp_path: Path, broker_url: str, store_url: str, model_name: str) -> Iterator[Cluster]:
    """A cluster whose answers take seconds."""
    with Cluster(tmp_path / "cluster", broker_url, store_url, {model_name: SLOW}) as cluster:
        yield cluster


@pytest.fixture
def undisturbed(tmp_path: Path, homework: Path, slow: Cluster) -> Path:
    """The same batch, graded in one process that nobody disturbs."""
    home = tmp_path / "undisturbed"
    home.mkdir()
    out = home / "out"
    quick = home / "kvasir.toml"
    quick.write_text(slow.config.read_text("utf-8").replace(SLOW.weights, SIMULATED_MODEL.weights), "utf-8")
    done = run("--config", str(quick), "grade", *tiny(homework, out), env=environment(home), cwd=home)
    assert done.code == 0, done.stderr
    return out


@pytest.mark.gate
def test_killing_a_decode_worker_in_the_middle_of_an_answer_changes_no_result(
    slow: Cluster, homework: Path, undisturbed: Path, tmp_path: Path
) -> None:
    # Given a batch in the queues, each of its jobs with a listener to its tokens, and then the workers
    out = same_batch(undisturbed, tmp_path / "disturbed")
    grading = slow.start("grade", *tiny(homework, out))
    with _Tokens(slow, jobs=6) as tokens:
        slow.worker("prefill", slow.models[0])
        decodes = [slow.launch("decode", slow.models[0]) for _ in range(2)]
        for worker in decodes:
            worker.wait_until_registered()

        # When the holder of a delivery with tokens produced is killed
        job, victim = tokens.wait_for_holder(decodes)
        victim.kill()

        # Then the batch ends as if nothing had been, the job having begun again on the other worker
        assert grading.wait() == 0, grading.text()
        assert outcomes(out) == outcomes(undisturbed)
        assert_each_once(out)
        survivor = next(worker for worker in decodes if worker is not victim)
        returned = {event["job"] for event in survivor.events("redelivered") if event.get("returns", 0) >= 1}
        assert job in returned
        wait_until(lambda: tokens.poll().begun_again(job), f"the tokens of {job} began again")


def test_a_worker_told_to_leave_hands_its_jobs_on_and_none_counts_as_returned(
    slow: Cluster, homework: Path, undisturbed: Path, tmp_path: Path
) -> None:
    # Given a decode worker that is busy in both slots
    out = same_batch(undisturbed, tmp_path / "disturbed")
    prefill = slow.launch("prefill", slow.models[0])
    leaving = slow.worker("decode", slow.models[0], "--grace", "0.5", "--weights", SLOWER)
    prefill.wait_until_registered()
    grading = slow.start("grade", *tiny(homework, out))
    wait_until(lambda: leaving.registration.busy == 2, "both slots are taken", timeout_s=60)

    # When it is told to leave, and another one comes
    assert leaving.terminate(timeout_s=20) == 0
    staying = slow.worker("decode", slow.models[0], "--weights", SIMULATED_MODEL.weights)

    # Then the other one does all of it, and the broker has counted nothing
    assert grading.wait() == 0, grading.text()
    assert outcomes(out) == outcomes(undisturbed)
    assert_each_once(out)
    wait_until(lambda: len(staying.events("answered")) == 6, "its log names all six")
    assert not [event for event in staying.events("redelivered") if event.get("returns", 0)]


@dataclass
class _Pieces:
    """What has been heard of one job's answer."""

    deliveries: list[str] = field(default_factory=list)
    last_index: int = -1
    ended: bool = False


class _Tokens:
    """Listens to the tokens of a batch that lies in the prefill queue: each job is published again, with a stream."""

    def __init__(self, cluster: Cluster, jobs: int) -> None:
        self._broker = RabbitMQBroker(cluster.broker_url, name="tokens")
        self._queue = topology.work_queue("prefill", cluster.models[0], "bulk")
        self._store = redis.Redis.from_url(cluster.store_url, decode_responses=True)
        self._heard: dict[str, _Pieces] = {}
        self._broker.declare(cluster.models)
        wait_until(lambda: self._ready() == jobs, f"{jobs} jobs are queued", timeout_s=60)
        stream = self._broker.open_private_queue(f"stream.{cluster.models[0]}", topology.STREAM)
        self._consumer = self._broker.consume(stream, prefetch=1000)
        for _ in range(jobs):
            self._publish_anew(stream)

    def poll(self) -> "_Tokens":
        """Hear what has arrived."""
        while delivery := self._consumer.receive(0):
            delivery.ack()
            event = codec.decode(delivery.message.body, TokenEvent)
            pieces = self._heard.setdefault(event.job_id, _Pieces())
            if event.delivery not in pieces.deliveries:
                pieces.deliveries.append(event.delivery)
            pieces.last_index, pieces.ended = event.index, event.last
        return self

    def wait_for_holder(self, workers: list[Worker]) -> tuple[str, Worker]:
        """A job that has produced tokens and is not done, and the worker that holds its delivery."""
        return wait_until(lambda: self.poll()._holder(workers), "a worker is in the middle of an answer", 60)

    def begun_again(self, job_id: str) -> bool:
        """Whether a second delivery of this job has produced tokens."""
        return len(self._heard[job_id].deliveries) > 1

    def __enter__(self) -> "_Tokens":
        return self

    def __exit__(self, *_exception: object) -> None:
        self._broker.close()
        self._store.close()

    def _holder(self, workers: list[Worker]) -> tuple[str, Worker] | None:
        for job_id, pieces in self._heard.items():
            if pieces.ended or not 3 <= pieces.last_index <= 60:
                continue
            claimed = str(self._store.get(f"claim:{{{job_id}:1}}") or "")
            holders = [worker for worker in workers if f".{worker.pid}." in claimed and worker.registration.busy]
            if holders:
                return job_id, holders[0]
        return None

    def _ready(self) -> int:
        depth = self._broker.depth(self._queue)
        return depth.ready if depth else 0

    def _publish_anew(self, stream: str) -> None:
        delivery = self._broker.get(self._queue)
        assert delivery
        job = codec.decode(delivery.message.body, PrefillJob)
        self._broker.publish(*submit_message(replace(job, stream_to=stream)))
        delivery.ack()


# --- the producer ---


@pytest.fixture
def two_models(tmp_path: Path, broker_url: str, store_url: str, model_name: str) -> Iterator[Cluster]:
    """A cluster where only the first model is served, so that a grading stops in the middle by itself."""
    models = {model_name: SIMULATED_MODEL, f"late-{model_name}": SIMULATED_MODEL}
    with Cluster(tmp_path / "cluster", broker_url, store_url, models) as cluster:
        _serve(cluster, model_name)
        yield cluster


def _serve(cluster: Cluster, model: str) -> None:
    workers = [cluster.launch(role, model) for role in ("prefill", "decode")]
    for worker in workers:
        worker.wait_until_registered()


def _grade_up_to_the_middle(cluster: Cluster, arguments: list[str], out: Path) -> RunningProcess:
    grading = cluster.start("grade", *arguments)
    wait_until(lambda: len(journal(out)) == 3 or not grading.alive, "half of the six jobs are journaled", timeout_s=60)
    assert grading.alive, grading.text()
    return grading


@pytest.mark.parametrize(("how", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -9)], ids=["Ctrl-C", "SIGKILL"])
@pytest.mark.gate
def test_a_grading_stopped_in_the_middle_goes_on_with_the_same_command(
    two_models: Cluster, homework: Path, tmp_path: Path, how: signal.Signals, code: int
) -> None:
    # Given a batch of which half is done
    out = tmp_path / "out"
    arguments = tiny(homework, out, "--feedback-model", two_models.models[1])
    grading = _grade_up_to_the_middle(two_models, arguments, out)
    half = (out / "results.jsonl").read_bytes()

    # When its producer is stopped, and the same command is given once the other model is served
    grading.send(how)
    assert grading.wait() == code
    assert "Traceback" not in grading.text()
    _serve(two_models, two_models.models[1])
    again = two_models.run("grade", *arguments)

    # Then it goes on where it stopped
    assert again.code == 0, again.stderr
    assert (out / "results.jsonl").read_bytes().startswith(half)
    assert_each_once(out)
    assert len((out / "submitted.jsonl").read_text("utf-8").splitlines()) == 6  # nothing was published twice
