"""The demo's class over RabbitMQ and Redis with vLLM at one end, and llama.cpp at the other."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.support.homework import Demo, assert_each_once, example, journal, outcomes, same_batch
from tests.support.processes import ROOT, Cluster
from tests.support.vllm_server import START_S, VLLMServer
from tests.support.waiting import wait_until

pytestmark = pytest.mark.vllm

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
    config = tmp_path / "vllm.toml"
    config.write_text(CONFIG, "utf-8")
    with Cluster(tmp_path / "cluster", broker_url, store_url, config) as made:
        yield made


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [("vllm", "llamacpp"), ("llamacpp", "vllm"), ("attached", "llamacpp"), ("llamacpp", "attached")],
)
def test_a_class_is_graded_as_by_llamacpp_alone(
    prefill: str, decode: str, cluster: Cluster, demo: Demo, request: pytest.FixtureRequest
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
    assert_as_by_llamacpp_alone(out, demo)


def test_a_server_that_is_killed_amid_a_class_and_started_again_costs_no_answer(
    cluster: Cluster, demo: Demo, server: VLLMServer
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
        wait_until(lambda: len(answers(out)) >= 3, "some answers are there", 300)
        # When the vLLM that its decode worker is attached to is killed, and somebody starts it again
        server.kill()
        assert len(answers(out)) < 28
        server.start(*SERVED)
        assert grading.result().code == 1
    # Then a job was tried again, no answer is missing, and none is another
    assert "attempt 1 failed" in workers[1].text()
    assert_as_by_llamacpp_alone(out, demo)


def answers(out: Path) -> list[dict[str, Any]]:
    """The jobs that have one."""
    return [row for row in journal(out) if row["state"] == "succeeded"]


def assert_as_by_llamacpp_alone(out: Path, demo: Demo) -> None:
    """Every answer is the one that llama.cpp gives alone, from a transferred cache of which one token was left."""
    found = answers(out)
    assert len(found) == 28
    assert {row["decode"]["kv_transfer"] for row in found} <= {"verified", "verified-rounded"}
    assert {row["decode"]["evaluated_tokens"] for row in found} == {1}
    assert outcomes(out) == outcomes(demo.out)
    assert_each_once(out)
