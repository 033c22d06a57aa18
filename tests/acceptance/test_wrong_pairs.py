"""What can't work is refused in one sentence: workers when they start, jobs when they are met; who works goes on."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from infra.config.settings import load_settings
from kvasir.connect import connect
from messages.jobs import JobResult, Sampling
from tests.support.processes import SIMULATED_MODEL, Cluster, CompletedCommand, ModelEntry

pytestmark = pytest.mark.system  # each process takes seconds to start

MODEL = "pairs:1b"
OTHER_MODEL = (
    "lone:1b"  # the registrations of killed workers stay a while, and would refuse other weights of the same name
)
SHAPES = "sim:scale=0,seed=1"
DEMO_FILE = Path(__file__).parents[2] / "examples" / "model" / "kvasir-demo.gguf"


@pytest.fixture
def cluster(tmp_path: Path, broker_url: str, store_url: str) -> Iterator[Cluster]:
    with Cluster(tmp_path, broker_url, store_url, {MODEL: SIMULATED_MODEL}) as cluster:
        yield cluster


def _start(cluster: Cluster, model: str, engine: str, weights: str, *more: str) -> CompletedCommand:
    return cluster.run("decode-worker", "--model", model, "--engine", engine, "--weights", weights, *more)


def _assert_refused(done: CompletedCommand, *expected: str) -> None:
    assert done.code == 2, done.stderr
    said = [line for line in done.stderr.splitlines() if line.startswith("kvasir: ")]
    assert len(said) == 1
    assert "Traceback" not in done.stderr
    for words in expected:
        assert words in said[0]


def test_a_worker_with_other_weights_or_heads_than_the_queues_is_refused(cluster: Cluster) -> None:
    # Given a prefill worker
    cluster.worker("prefill", cluster.models[0], "--engine", "simulated", "--weights", SHAPES)
    # When a decode worker of other weights, or with another number of heads, is started for its model
    for weights in ("sim:scale=0,seed=2", "sim:scale=0,seed=1,kv_heads=3"):
        refused = _start(cluster, cluster.models[0], "simulated", weights)
        # Then it is told so
        _assert_refused(refused, "with other weights", "give both workers the same file")
    # And one of the same is taken, and a job is done
    cluster.worker("decode", cluster.models[0], "--engine", "simulated", "--weights", SHAPES)
    assert cluster.run("ask", "Is it still there?", "--model", cluster.models[0]).code == 0


def test_weights_that_are_missing_or_cut_short_are_refused(cluster: Cluster, tmp_path: Path) -> None:
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(DEMO_FILE.read_bytes()[:100_000])
    _assert_refused(_start(cluster, cluster.models[0], "llamacpp", str(tmp_path / "no.gguf")), "no.gguf")
    _assert_refused(_start(cluster, cluster.models[0], "llamacpp", str(cut)), "cut.gguf")


def _ask(cluster: Cluster, prompt: str, **sampling: str) -> JobResult:
    settings = load_settings(config=cluster.config, environ=cluster.environment)
    with connect(settings, name="asking") as client:
        return client.ask(cluster.models[0], prompt, Sampling(max_tokens=4, **sampling), deadline_s=120)


def test_a_job_that_no_engine_can_do_fails_in_one_sentence_and_the_workers_live(
    tmp_path: Path, broker_url: str, store_url: str
) -> None:
    # Given both workers with a real model of a context of 2,048 tokens
    model = ModelEntry("llamacpp", str(DEMO_FILE), context=2048)
    with Cluster(tmp_path, broker_url, store_url, {OTHER_MODEL: model}) as cluster:
        workers = [cluster.worker(role, cluster.models[0]) for role in ("prefill", "decode")]
        # When they are asked for more than the context holds, or for a schema that is none
        too_long = _ask(cluster, "word " * 4000)
        no_schema = _ask(cluster, "Why?", json_schema='{"type": "nonsense"}')
        # Then each is told so
        for result, kind, words in (
            (too_long, "ContextExceeded", "2,048"),
            (no_schema, "InvalidSchema", "JSON schema"),
        ):
            assert (result.state, result.error.kind) == ("failed", kind)
            assert words in result.error.message
            assert "\n" not in result.error.message
        # And both workers go on
        assert _ask(cluster, "Why?").state == "succeeded"
        assert all(worker.alive for worker in workers)
