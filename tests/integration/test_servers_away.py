"""Engines whose server somebody else runs: while nobody answers there, their worker takes no jobs, and none is lost."""

import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from engines.base import outage_of
from engines.llamacpp.server import Launch, LlamaServerProcess
from engines.registry import EngineOptions, open_engine
from messages.errors import Cancelled, EngineUnavailable
from messages.jobs import Sampling, user_prompt
from messages.workers import ENGINE_AWAY
from tests.support import llama_server_program
from tests.support.fake_ollama import MODEL as OLLAMA_MODEL
from tests.support.fake_ollama import FakeOllama
from tests.support.fake_openai import MODEL as OPENAI_MODEL
from tests.support.fake_openai import FakeOpenAI
from tests.support.pipeline import Pipeline, WatchedEngine, work
from tests.support.tiny_gguf import write_gguf
from tests.support.waiting import wait_until

SHORT = Sampling(max_tokens=8, temperature=0)
GO = user_prompt("", "go")
KINDS: dict[str, tuple[Callable[..., Any], str]] = {
    "ollama": (FakeOllama, f"/{OLLAMA_MODEL}"),
    "openai": (FakeOpenAI, f"/{OPENAI_MODEL}"),
}


@pytest.fixture(params=KINDS)
def served(request: pytest.FixtureRequest) -> Iterator[tuple[Any, Any, Any, Callable[[], Any]]]:
    """A server, two workers' engines that ask it, and how to start another one in its place."""
    make, place = KINDS[request.param]
    servers = [make()]
    url = servers[0].url
    port = int(url.removesuffix("/v1").rpartition(":")[2])
    engines = [open_engine(request.param, EngineOptions(f"{url}{place}", context=1024, slots=2)) for _ in range(2)]

    def again() -> Any:
        servers.append(make(port))
        return servers[-1]

    yield servers[0], *engines, again
    for engine in engines:
        engine.close()
    for server in servers:
        server.close()


def test_a_request_that_met_closing_connections_is_sent_again(served: Any) -> None:
    server, engine, *_ = served
    server.habits.hangs_up = 3
    assert engine.decode_text(GO, SHORT).completion_tokens == 8
    server.habits.hangs_up = 4
    with pytest.raises(EngineUnavailable, match="isconnected"):
        engine.decode_text(GO, SHORT)


def test_a_decode_is_stopped_while_the_server_is_silent(served: Any) -> None:
    # Given a server that says one word and then nothing
    server, engine, *_ = served
    server.habits.hang.clear()
    stop = threading.Event()
    pieces: list[str] = []

    def stop_now(piece: str) -> None:
        pieces.append(piece)
        stop.set()

    # When it is stopped
    with pytest.raises(Cancelled):
        engine.decode_text(GO, SHORT, stop_now, stop)
    # Then no more came, and the engine works on
    assert pieces == ["word0 "]
    server.habits.hang.set()
    assert engine.decode_text(GO, SHORT).completion_tokens == 8
    # And what is wrong later is said
    server.close()
    with pytest.raises(EngineUnavailable, match="does not answer"):
        engine.decode_text(GO, SHORT)
    engine.close()
    with pytest.raises(EngineUnavailable, match="closed"):
        engine.decode_text(GO, SHORT)


def test_jobs_wait_for_a_server_that_is_away(served: Any, caplog: pytest.LogCaptureFixture) -> None:
    # Given more jobs than slots, for an engine whose server has ended
    server, engine, other, again = served
    with Pipeline() as pipeline, caplog.at_level(logging.WARNING):
        pipeline.start_prefill(cast(WatchedEngine, other))
        decode = pipeline.start_decode(engine)
        server.close()
        jobs = [pipeline.job(f"def f{number}(): ...") for number in range(16)]
        pipeline.submit(*jobs)
        # When it stays away for longer than a job's first retries
        wait_until(lambda: outage_of(engine), "its engine says so")
        wait_until(lambda: pipeline.ready(work("decode")) == len(jobs), "all jobs wait for whoever is there")
        assert decode.worker.registration().off == ENGINE_AWAY
        assert "does not answer" in decode.worker.registration().notes
        # Then those lost one attempt that were begun, and all are answered when it is there again
        again()
        results = [pipeline.result(job) for job in jobs]
        assert {result.state for result in results} == {"succeeded"}
        assert max(result.attempts for result in results) == 2
        assert sum(result.attempts for result in results) <= len(jobs) + 8
    said = [record.message for record in caplog.records if "until it does" in record.message]
    assert len(said) == 1
    assert "answers again" in caplog.text


def test_a_server_that_only_closed_a_connection_is_not_away(served: Any, caplog: pytest.LogCaptureFixture) -> None:
    server, engine, *_ = served
    server.habits.hangs_up = 4
    with caplog.at_level(logging.WARNING), pytest.raises(EngineUnavailable):
        engine.decode_text(user_prompt("", "x"), SHORT)
    wait_until(lambda: not outage_of(engine), "it was looked at")
    assert "takes no jobs" not in caplog.text
    assert engine.decode_text(user_prompt("", "x"), SHORT).text


def test_what_a_server_refuses_is_no_absence(served: Any) -> None:
    server, engine, *_ = served
    server.habits.fails_with = (500, "out of memory")
    with pytest.raises(EngineUnavailable, match="out of memory"):
        engine.decode_text(user_prompt("", "x"), SHORT)
    assert outage_of(engine) == ""


def test_a_llama_server_is_away_from_its_end_until_its_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given two engines on one llama-server: somebody else's, and its own worker's
    weights = write_gguf(tmp_path / "tiny.gguf")
    program = llama_server_program.install(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    process = LlamaServerProcess(str(program), Launch(weights, 1024, 2, tmp_path, 1))
    address = f"{process.server.url}?slots={tmp_path}&model={weights}"
    engine = open_engine("llamacpp", EngineOptions(address, context=256, slots=1, threads=1))
    tokens = engine.tokenize(user_prompt("", "Who was Kvasir?"), 0.0).ids
    text = engine.decode(tokens, None, SHORT).text
    assert outage_of(engine) == process.server.outage == ""
    # When it dies, and is asked before anybody has looked
    os.kill(process.process.pid, signal.SIGKILL)
    with pytest.raises(EngineUnavailable):
        engine.decode(tokens, None, SHORT)
    # Then it is away at once, and answers as before when it is there again
    assert "does not answer" in outage_of(engine)
    wait_until(lambda: not outage_of(engine), "it was started again", timeout_s=20)
    assert engine.decode(tokens, None, SHORT).text == text
    engine.close()
    process.close()
