"""A real trained model, SmolLM2-135M-Instruct: ten prompts in English through a prefill and a decode process.

Over a real broker and store, compared with one process of ours, and with llama.cpp's own server, which gets the text
and no more.
"""

import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from operator import eq
from pathlib import Path

import httpx
import jsonschema
import pytest

from infra.config.settings import Settings, load_settings
from kvasir import connect
from messages.jobs import JobResult, Sampling, user_prompt
from tests.support import smollm2
from tests.support.essays import PROMPTS
from tests.support.llama_server_program import install
from tests.support.processes import Cluster, ModelEntry
from tests.support.servers import HOST, Process, free_port
from tests.support.waiting import wait_until

pytestmark = pytest.mark.system

CONTEXT = 2048
GREEDY = Sampling(max_tokens=20, temperature=0)
SCHEMA = {
    "type": "object",
    "properties": {"points": {"type": "integer", "minimum": 0, "maximum": 9}, "clear": {"type": "boolean"}},
    "required": ["points", "clear"],
    "additionalProperties": False,
}
STRUCTURED = Sampling(max_tokens=60, temperature=0, json_schema=json.dumps(SCHEMA))
SEVERAL = Sampling(max_tokens=16, temperature=0.9, top_p=0.95, seed=7, answers=3)
ASKED = [*((prompt, GREEDY) for prompt in PROMPTS), (PROMPTS[2], STRUCTURED), (PROMPTS[3], SEVERAL)]
SHORT = 5  # of the prompts, so many are sent to llama.cpp's own server too
NAME = "smollm2:135m"


@dataclass(frozen=True, slots=True)
class Answers:
    """What came of ASKED, in its order."""

    cluster: list[JobResult]  # from a prefill process and a decode process
    one_process: list[JobResult]


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory, broker_url: str, store_url: str) -> Answers:
    # One thread: with more, the last digits of a sum depend on how the work was cut.
    model = ModelEntry("llamacpp", str(smollm2.weights()), context=CONTEXT, slots=1, threads=1)
    with (
        Cluster(tmp_path_factory.mktemp("smollm2"), broker_url, store_url, {NAME: model}) as cluster,
        ThreadPoolExecutor() as pool,
    ):
        for worker in [cluster.launch(role, NAME) for role in ("prefill", "decode")]:
            worker.wait_until_registered()
        alone = pool.submit(_ask, load_settings(config=cluster.config, environ={}))
        over_cluster = _ask(load_settings(config=cluster.config, environ=cluster.environment))
        return Answers(over_cluster, alone.result())


def _ask(settings: Settings) -> list[JobResult]:
    with connect(settings, [NAME]) as client:
        jobs = [
            client.new_job(NAME, f"item-{number}", NAME, user_prompt("", prompt), sampling)
            for number, (prompt, sampling) in enumerate(ASKED)
        ]
        client.submit(jobs)
        found = {result.job_id: result for result in client.gather(NAME, [job.job_id for job in jobs], 240)}
    return [found[job.job_id] for job in jobs]


def test_the_prompts_are_of_50_to_1500_tokens(answers: Answers) -> None:
    lengths = [result.decode.prompt_tokens for result in answers.cluster[: len(PROMPTS)]]
    assert len(set(lengths)) == 10
    assert 40 < min(lengths) < 80, lengths
    assert 1300 < max(lengths) < 1600, lengths


@pytest.mark.gate
def test_two_processes_say_what_one_says_and_evaluate_one_prompt_token(answers: Answers) -> None:
    for result in answers.cluster:
        assert result.state == "succeeded", result.error
        assert (result.decode.kv_transfer, result.decode.evaluated_tokens) == ("verified", 1)
        assert result.prefill.worker_id != result.decode.worker_id
    said = [(result.text, result.more_texts) for result in answers.cluster]
    assert said == [(result.text, result.more_texts) for result in answers.one_process]
    assert len(set(said)) == len(ASKED), "a model that has read them answers each differently"


def test_an_answer_under_a_schema_fits_it(answers: Answers) -> None:
    jsonschema.validate(json.loads(answers.cluster[len(PROMPTS)].text), SCHEMA)


def test_several_answers_come_from_one_prefill_and_differ(answers: Answers) -> None:
    several = answers.cluster[len(PROMPTS) + 1]
    texts = [several.text, *several.more_texts]
    assert len(set(texts)) == 3
    assert all(text.strip() for text in texts)


def test_llama_cpps_own_server_begins_its_answers_alike(answers: Answers, tmp_path: Path) -> None:
    """It computes the whole prompt at once, which rounds otherwise: where two words are nearly as good, it may part."""
    with _llama_server(tmp_path) as url:
        theirs = [_ask_server(url, prompt).split() for prompt in PROMPTS[:SHORT]]
    ours = [result.text.split() for result in answers.cluster[:SHORT]]
    assert [words[:2] for words in ours] == [words[:2] for words in theirs]
    assert sum(map(eq, ours, theirs)) >= SHORT // 2, [ours, theirs]


@contextmanager
def _llama_server(folder: Path) -> Iterator[str]:
    """The program as anybody starts it: nothing is split, nothing is transferred."""
    port = free_port()
    options = f"--host {HOST} --port {port} --ctx-size {CONTEXT} --parallel 1 --threads 1 --flash-attn on --cache-ram 0"
    command = [
        str(install(folder)),
        "--model",
        str(smollm2.weights()),
        *options.split(),
        "--slot-save-path",
        str(folder),
    ]
    server = Process(command, dict(os.environ), folder, folder / "log")
    try:
        url = f"http://{HOST}:{port}"
        wait_until(lambda: _answers(f"{url}/health"), "llama-server answers", 60)
        yield url
    finally:
        server.end(signal.SIGTERM, 10)


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=2).status_code == 200
    except httpx.HTTPError:
        return False


def _ask_server(url: str, prompt: str) -> str:
    asked = {
        "messages": [{"role": "user", "content": prompt}],
        "temperature": 0,
        "max_tokens": GREEDY.max_tokens,
        "cache_prompt": False,
    }
    answer = httpx.post(f"{url}/v1/chat/completions", json=asked, timeout=120).raise_for_status().json()
    return str(answer["choices"][0]["message"]["content"])
