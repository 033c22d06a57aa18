"""Streams when something goes wrong: workers that die, clients that leave, a gateway that is told to stop."""

import json
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from gateway import gateway as gateway_module
from gateway import streams as streams_module
from gateway.server import listening
from infra.broker import topology
from infra.broker.base import Address, Message
from messages import codec
from messages.errors import EngineUnavailable
from messages.jobs import Part, Sampling, TokenEvent
from tests.support.gateway import ServedGateway
from tests.support.pipeline import INSTANT, MODEL, SLOW, Gate, Pipeline, WatchedEngine
from tests.support.waiting import wait_until

ASK: Any = [{"role": "user", "content": "What is a queue?"}]


def client(served: ServedGateway) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{served.url}/v1", api_key="x", max_retries=0, timeout=30)


def text(stream: Any) -> str:
    return "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)


def submitted(pipeline: Pipeline) -> list[str]:
    """Batches of the jobs that were sent."""
    return [event.facts["batch_id"] for event in pipeline.events if event.step.name == "SUBMITTED"]


class Lossy:
    """Drops or changes pieces between the worker and the gateway."""

    def __init__(self, pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
        publish = pipeline.server.publish

        def changed(to: Address, message: Message) -> bool:
            if to.exchange != topology.STREAM:
                return publish(to, message)
            for event in change(codec.decode(message.body, TokenEvent)):
                publish(to, Message(codec.encode(event), message.message_id, message.correlation_id, persistent=False))
            return True

        monkeypatch.setattr(pipeline.server, "publish", changed)


def test_lost_pieces_come_from_the_result(
    served: ServedGateway, pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline.start()
    Lossy(pipeline, monkeypatch, lambda event: [] if event.index in (0, 2, 3) else [event])
    whole = client(served).chat.completions.create(model=MODEL, messages=ASK, seed=1)
    stream = client(served).chat.completions.create(model=MODEL, messages=ASK, seed=1, stream=True)
    assert text(stream) == whole.choices[0].message.content


class FailingEngine(WatchedEngine):
    """Its first answer breaks off after three pieces; what comes then has a seed that is higher by `other`."""

    def __init__(self, other: int) -> None:
        super().__init__(INSTANT)
        self.failed = False
        self._other = other

    def decode(self, tokens: Sequence[int], cache: Any, sampling: Any, on_text: Any = None, stop: Any = None) -> Any:
        if self.failed:
            return super().decode(tokens, cache, replace(sampling, seed=sampling.seed + self._other), on_text, stop)
        told = 0

        def on_piece(piece: str) -> None:
            nonlocal told
            if told == 3:
                self.failed = True
                raise EngineUnavailable("unplugged by the test")
            told += 1
            on_text(piece)

        return super().decode(tokens, cache, sampling, on_piece, stop)


def test_a_job_decoded_again_goes_on_where_the_stream_stopped(served: ServedGateway, pipeline: Pipeline) -> None:
    engine = FailingEngine(other=0)
    pipeline.start_prefill()
    pipeline.start_decode(engine)
    stream = client(served).chat.completions.create(model=MODEL, messages=ASK, seed=1, stream=True)

    job = pipeline.client.new_job("b", "i", MODEL, (Part("user", ASK[0]["content"]),), Sampling(16, 0, seed=1))
    assert text(stream) == pipeline.undisturbed_text(job)
    assert engine.failed


def test_another_answer_is_not_glued_to_the_first(served: ServedGateway, pipeline: Pipeline) -> None:
    pipeline.start_prefill()
    pipeline.start_decode(FailingEngine(other=1))
    passed: list[str] = []

    def read() -> None:
        for chunk in client(served).chat.completions.create(model=MODEL, messages=ASK, seed=1, stream=True):
            passed.append(chunk.choices[0].delta.content or "")

    with pytest.raises(openai.APIError, match="differs from the text already sent"):
        read()
    assert len("".join(passed)) == 12  # three pieces of the first, and nothing of the second


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_cancels_its_job_within_a_second(
    served: ServedGateway, pipeline: Pipeline, stream: bool
) -> None:
    pipeline.start(SLOW)
    engine = pipeline.workers[1].engine
    with pytest.raises(httpx.TimeoutException):
        httpx.post(
            f"{served.url}/v1/chat/completions", json={"model": MODEL, "messages": ASK, "stream": stream}, timeout=1
        )
    left = time.monotonic()
    (batch,) = submitted(pipeline)
    wait_until(lambda: pipeline.cluster_state.is_cancelled(batch), "the job is cancelled", timeout_s=1)
    wait_until(lambda: not pipeline.workers[1].worker.registration().busy, "its slot is free", timeout_s=2)
    assert time.monotonic() - left < 2
    assert engine.decode_calls
    wait_until(lambda: "kvasir_gateway_open_requests 1.0" in metrics(served), "only this request is open")


def test_a_client_that_leaves_in_the_middle_of_a_stream_cancels_its_job(
    served: ServedGateway, pipeline: Pipeline
) -> None:
    pipeline.start("sim:scale=1,prefill=1000000,decode=1,answer=8,spread=1")
    body = {"model": MODEL, "messages": ASK, "stream": True}
    with httpx.stream("POST", f"{served.url}/v1/chat/completions", json=body, timeout=30) as response:
        assert next(response.iter_lines())
    (batch,) = submitted(pipeline)
    wait_until(lambda: pipeline.cluster_state.is_cancelled(batch), "the job is cancelled", timeout_s=1)


def metrics(served: ServedGateway) -> str:
    return httpx.get(f"{served.url}/metrics").text


def test_an_answer_that_lets_wait_keeps_the_connection_open(
    served: ServedGateway, pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams_module, "_OPEN_S", 0.1)
    engine = WatchedEngine()
    gate = engine.before_decode = Gate()
    pipeline.start_prefill()
    pipeline.start_decode(engine)
    body = {"model": MODEL, "messages": ASK, "stream": True}
    with httpx.stream("POST", f"{served.url}/v1/chat/completions", json=body, timeout=30) as response:
        lines = response.iter_lines()
        assert next(lines) == ": waiting"
        gate.open()
        assert [line for line in lines if line][-1] == "data: [DONE]"


def test_told_to_stop_it_takes_nothing_more_and_ends_streams_in_good_order(
    pipeline: Pipeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gateway_module, "STOP_S", 0.5)
    pipeline.start(SLOW)
    with ServedGateway(pipeline.client, tmp_path) as served:
        body = {"model": MODEL, "messages": ASK, "stream": True}
        lines: list[str] = []
        opened = threading.Event()

        def read() -> None:
            with httpx.stream("POST", f"{served.url}/api/chat", json=body, timeout=30) as response:
                opened.set()
                lines.extend(response.iter_lines())

        monkeypatch.setattr(streams_module, "_OPEN_S", 0.1)
        reader = threading.Thread(target=read)
        reader.start()
        assert opened.wait(10)
        served.stop()
        wait_until(lambda: httpx.get(f"{served.url}/ready").status_code == 503, "it says that it is not ready")
        with pytest.raises(openai.InternalServerError, match="stopping"):
            client(served).chat.completions.create(model=MODEL, messages=ASK)
        reader.join(10)
    assert json.loads(lines[-1]) == {"error": "the gateway is stopping"}
    (batch,) = submitted(pipeline)
    assert pipeline.cluster_state.is_cancelled(batch)


def test_small_writes_leave_at_once() -> None:
    """Otherwise the second piece of a stream waits for the client's ack of the first, which takes 40 ms."""
    with listening("127.0.0.1", 0) as listener, socket.create_connection(listener.getsockname()):
        accepted, _ = listener.accept()
        with accepted:
            assert accepted.proto == socket.IPPROTO_TCP  # by this asyncio decides


def test_nothing_is_left_at_the_broker(pipeline: Pipeline, tmp_path: Path) -> None:
    pipeline.start()
    with ServedGateway(pipeline.client, tmp_path) as served:
        client(served).chat.completions.create(model=MODEL, messages=ASK)
        assert pipeline.broker.depth(topology.reply_queue(served.name))
    assert pipeline.broker.depth(topology.reply_queue(served.name)) is None
    pipeline.nothing_is_left()
