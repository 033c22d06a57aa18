"""The demo's class over RabbitMQ and Redis with vLLM at one end, and llama.cpp at the other."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.homework import Demo, assert_each_once, example, journal, outcomes, same_batch
from tests.support.processes import ROOT, Cluster
from tests.support.vllm_server import START_S, VLLMServer

pytestmark = pytest.mark.vllm

MODEL = "kvasir-demo"
WEIGHTS = ROOT / "examples" / "model"
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
        made.start(WEIGHTS / "kvasir-demo", "--dtype", "float32", "--max-model-len", "16384")
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
    # Then every answer is the one that llama.cpp gives alone, from a transferred cache of which one token was left
    answers = [row for row in journal(out) if row["state"] == "succeeded"]
    assert len(answers) == 28
    assert {row["decode"]["kv_transfer"] for row in answers} <= {"verified", "verified-rounded"}
    assert {row["decode"]["evaluated_tokens"] for row in answers} == {1}
    assert outcomes(out) == outcomes(demo.out)
    assert_each_once(out)
