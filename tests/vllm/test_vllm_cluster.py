"""The demo's class, and models with windows, over RabbitMQ and Redis: vLLM at one end, llama.cpp at the other."""

import subprocess
import sys
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import redis

from benchmarks import matrix_models
from engines.registry import EngineOptions, open_engine
from infra.config.settings import load_settings
from kvasir import connect
from messages.jobs import Sampling, user_prompt
from messages.workers import ENGINE_AWAY
from tests.support.homework import Demo, assert_each_once, example, journal, outcomes, same_batch
from tests.support.processes import ROOT, Cluster, environment
from tests.support.vllm_server import START_S, VLLMServer
from tests.support.waiting import wait_until

pytestmark = pytest.mark.vllm

SHORT = Sampling(max_tokens=8, temperature=0)
SHARED = "Each line of the report has a number and a name. " * 6
MODEL = "kvasir-demo"
WEIGHTS = ROOT / "examples" / "model"
SERVED = (WEIGHTS / "kvasir-demo", "--dtype", "float32", "--max-model-len", "16384")
CONFIG = f"""
[grading]
code_model = "{MODEL}"
feedback_model = "{MODEL}"
temperature = 0.0

[models.{MODEL}]
engine = "llamacpp"
context = 16384
slots = 1
threads = 1
same_weights = ["llamacpp", "vllm"]
weights = {{ llamacpp = "{WEIGHTS / "kvasir-demo.gguf"}", vllm = "{WEIGHTS / "kvasir-demo"}?dtype=float32" }}
"""


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Demo:
    """The class, graded by llama.cpp alone in one process."""
    return Demo(tmp_path_factory.mktemp("demo") / "results")


@pytest.fixture(scope="module")
def undecided(demo: Demo, tmp_path_factory: pytest.TempPathFactory) -> set[tuple[str, str, str]]:
    """What llama.cpp says on two threads, and not on one: sums in another order tip answers of which it is not sure.

    The longest prompt has one, of 7,000 tokens: two words are within 0.24 nats of each other there.
    """
    folder = tmp_path_factory.mktemp("two-threads")
    config = folder / "two.toml"
    config.write_text(CONFIG.replace("threads = 1", "threads = 2"), "utf-8")
    out = same_batch(demo.out, folder / "out")
    command = [sys.executable, "-m", "kvasir", "--config", str(config), "grade", *example(out)]
    done = subprocess.run(command, env=environment(folder), cwd=ROOT, capture_output=True, text=True, timeout=400)
    assert done.returncode == 1, done.stderr  # one submission is corrupt
    return outcomes(out) - outcomes(demo.out)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VLLMServer]:
    """A vLLM that somebody else runs."""
    made = VLLMServer(tmp_path_factory.mktemp("vllm"))
    try:
        made.start(*SERVED)
        yield made
    finally:
        made.kill()


@pytest.fixture
def cluster(tmp_path: Path, broker_url: str, store_url: str) -> Iterator[Cluster]:
    # All tests grade the same batch: what an earlier one has stored would be found, and nothing prefilled.
    with closing(redis.Redis.from_url(store_url)) as store:
        store.flushdb()
    config = tmp_path / "vllm.toml"
    config.write_text(CONFIG, "utf-8")
    with Cluster(tmp_path / "cluster", broker_url, store_url, config) as made:
        yield made


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [("vllm", "llamacpp"), ("llamacpp", "vllm"), ("attached", "llamacpp"), ("llamacpp", "attached")],
)
def test_a_class_is_graded_as_by_llamacpp_alone(
    prefill: str,
    decode: str,
    cluster: Cluster,
    demo: Demo,
    undecided: set[tuple[str, str, str]],
    request: pytest.FixtureRequest,
) -> None:
    def options(engine: str) -> tuple[str, ...]:
        if engine != "attached":
            return ("--engine", engine)
        return ("--engine", "vllm", "--weights", request.getfixturevalue("server").url)

    # Given a worker of each stage
    out = same_batch(demo.out, cluster.folder / "out")
    workers = [cluster.launch("prefill", MODEL, *options(prefill)), cluster.launch("decode", MODEL, *options(decode))]
    for worker in workers:
        worker.wait_until_registered(START_S)
    # When the class is graded
    done = cluster.run("grade", *example(out), timeout_s=500)
    assert done.code == 1, done.stderr  # one submission is corrupt
    assert_as_by_llamacpp_alone(out, demo, undecided)


def test_a_server_that_is_killed_amid_a_class_and_started_again_costs_no_answer(
    cluster: Cluster, demo: Demo, undecided: set[tuple[str, str, str]], server: VLLMServer
) -> None:
    # Given a class that is being graded
    out = same_batch(demo.out, cluster.folder / "out")
    workers = [
        cluster.launch("prefill", MODEL, "--engine", "llamacpp"),
        cluster.launch("decode", MODEL, "--engine", "vllm", "--weights", server.url),
    ]
    for worker in workers:
        worker.wait_until_registered(START_S)
    with ThreadPoolExecutor(1) as thread:
        grading = thread.submit(cluster.run, "grade", *example(out), timeout_s=2 * START_S)
        # The worker's word for it: on a busy machine the whole class is answered before the journal says so
        wait_until(lambda: len(workers[1].events("replied")) >= 3, "some answers are there", 300)
        # When the vLLM that its decode worker is attached to is killed, and somebody starts it again
        server.kill()
        assert len(workers[1].events("replied")) < 28
        # Then the worker takes nothing more, and says so
        wait_until(lambda: workers[1].registration.off == ENGINE_AWAY, "it says that its engine is away", 30)
        server.start(*SERVED)
        assert grading.result().code == 1
    # And a job was tried again, but once only, no answer is missing, and none is another
    assert "attempt 1 failed" in workers[1].text()
    assert "attempt 2 failed" not in workers[1].text()
    assert_as_by_llamacpp_alone(out, demo, undecided)


@pytest.mark.parametrize(("prefill", "decode"), [("vllm", "llamacpp"), ("llamacpp", "vllm")])
@pytest.mark.parametrize("model", matrix_models.WINDOWED)
def test_a_model_with_windows_answers_as_in_llamacpp_alone(
    model: str, prefill: str, decode: str, tmp_path: Path, broker_url: str, store_url: str
) -> None:
    # Given prompts that begin alike, for several windows, and what llama.cpp alone says to them
    matrix_models.write(tmp_path, model, seed=0)
    weights = {name: str(matrix_models.weights_for(name, tmp_path, model)) for name in ("llamacpp", "vllm")}
    prompts = [user_prompt(SHARED, own) for own in ("def total(): pass", "print(3)", "x = 1\n" * 40)]
    llamacpp = open_engine("llamacpp", EngineOptions(weights["llamacpp"], context=1024, slots=1, threads=1))
    with closing(llamacpp):
        alone = [llamacpp.decode(llamacpp.tokenize(prompt, 0.0).ids, None, SHORT).text for prompt in prompts]
    name = f"{model}-{prefill}-{decode}"  # and so queues of its own
    config = tmp_path / "windows.toml"
    config.write_text(
        f"[models.{name}]\nengine = 'llamacpp'\ncontext = 1024\nslots = 2\nthreads = 1\nshort_prompt_tokens = 0\n"
        f"same_weights = ['llamacpp', 'vllm']\nweights.llamacpp = '{weights['llamacpp']}'\n"
        f"weights.vllm = '{weights['vllm']}'\n"
    )
    with Cluster(tmp_path / "cluster", broker_url, store_url, config) as cluster:
        workers = [
            cluster.launch("prefill", name, "--engine", prefill),
            cluster.launch("decode", name, "--engine", decode),
        ]
        for worker in workers:
            worker.wait_until_registered(START_S)
        # When they are answered by two workers
        settings = load_settings(config=cluster.config, environ=cluster.environment)
        with connect(settings, [name]) as client:
            batch = f"{name}-{uuid.uuid4().hex[:8]}"
            jobs = [client.new_job(batch, str(number), name, prompt, SHORT) for number, prompt in enumerate(prompts)]
            client.submit(jobs)
            results = {one.job_id: one for one in client.gather(batch, [job.job_id for job in jobs], timeout_s=300)}
    # Then each answer is that of llama.cpp alone, from a transferred cache, and the common part was computed once
    found = [results[job.job_id] for job in jobs]
    assert {one.decode.evaluated_tokens for one in found} == {1}
    assert {one.decode.kv_transfer for one in found} <= {"verified", "verified-rounded"}
    assert [one.text for one in found] == alone
    lengths = [one.decode.prompt_tokens for one in found]
    assert sum(one.prefill.computed_tokens for one in found) < sum(lengths) - 2 * 64


def answers(out: Path) -> list[dict[str, Any]]:
    """The jobs that have one."""
    return [row for row in journal(out) if row["state"] == "succeeded"]


def assert_as_by_llamacpp_alone(out: Path, demo: Demo, undecided: set[tuple[str, str, str]]) -> None:
    """Every answer is one that llama.cpp gives alone, from a transferred cache of which one token was left."""
    found = answers(out)
    assert len(found) == 28
    assert {row["decode"]["kv_transfer"] for row in found} <= {"verified", "verified-rounded"}
    assert {row["decode"]["evaluated_tokens"] for row in found} == {1}
    assert len(undecided) <= 2
    assert outcomes(out) <= outcomes(demo.out) | undecided
    assert_each_once(out)
