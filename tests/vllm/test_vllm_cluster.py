"""The demo's class over RabbitMQ and Redis with vLLM at one end, and llama.cpp at the other."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.homework import Demo, assert_each_once, example, journal, outcomes, same_batch
from tests.support.processes import ROOT, Cluster

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


@pytest.fixture(params=[("vllm", "llamacpp"), ("llamacpp", "vllm")], ids="-".join)
def cluster(
    request: pytest.FixtureRequest, tmp_path: Path, broker_url: str, store_url: str
) -> Iterator[tuple[Cluster, str, str]]:
    config = tmp_path / "vllm.toml"
    config.write_text(CONFIG, "utf-8")
    with Cluster(tmp_path / "cluster", broker_url, store_url, config) as made:
        yield made, *request.param


def test_a_class_is_graded_as_by_llamacpp_alone(cluster: tuple[Cluster, str, str], demo: Demo) -> None:
    # Given a worker of each stage
    made, prefill, decode = cluster
    out = same_batch(demo.out, made.folder / "out")
    workers = [made.launch("prefill", MODEL, "--engine", prefill), made.launch("decode", MODEL, "--engine", decode)]
    for worker in workers:
        worker.wait_until_registered()
    # When the class is graded
    done = made.run("grade", *example(out), timeout_s=500)
    assert done.code == 1, done.stderr  # one submission is corrupt
    # Then every answer is the one that llama.cpp gives alone, from a transferred cache of which one token was left
    answers = [row for row in journal(out) if row["state"] == "succeeded"]
    assert len(answers) == 28
    assert {row["decode"]["kv_transfer"] for row in answers} <= {"verified", "verified-rounded"}
    assert {row["decode"]["evaluated_tokens"] for row in answers} == {1}
    assert outcomes(out) == outcomes(demo.out)
    assert_each_once(out)
