"""Characters at which Unicode ends a line, in an answer: clients that cut streams there get it whole."""

import json
from typing import Any

import httpx
import ollama
import openai
import pytest

from engines.simulated.engine import SimulatedEngine
from tests.support.gateway import ServedGateway
from tests.support.pipeline import MODEL, Pipeline
from tests.support.waiting import wait_until

ANSWER = "one\u2028two\u2029three\x85four\x1cfive\x0csix\nseven"
ASK: Any = [{"role": "user", "content": "What is a line?"}]


@pytest.fixture(autouse=True)
def _answers(pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SimulatedEngine, "_answer", lambda _self, _tokens, _sampling: (ANSWER, "stop"))
    pipeline.start()


def test_ollama_s_client(served: ServedGateway) -> None:
    with ollama.Client(host=served.url, timeout=30) as client:
        pieces = list(client.chat(MODEL, ASK, stream=True))
    assert "".join(piece.message.content or "" for piece in pieces) == ANSWER


def test_openai_s_client_and_one_that_cuts_lines_as_python_does(served: ServedGateway) -> None:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="x", max_retries=0, timeout=30) as client:
        chunks = client.chat.completions.create(model=MODEL, messages=ASK, stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == ANSWER
    body = {"model": MODEL, "messages": ASK, "stream": True}
    with httpx.stream("POST", f"{served.url}/v1/chat/completions", json=body, timeout=30) as response:
        assert all(line.startswith(("data: ", ": ")) for line in response.iter_lines() if line)


def test_the_output_file_of_a_batch(served: ServedGateway) -> None:
    line = {
        "custom_id": "1",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {"model": MODEL, "messages": ASK},
    }
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="x", max_retries=0, timeout=30) as client:
        file = client.files.create(file=("in.jsonl", json.dumps(line).encode()), purpose="batch")
        batch = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
        wait_until(lambda: client.batches.retrieve(batch.id).output_file_id, "the batch is over", 30)
        output = client.files.content(client.batches.retrieve(batch.id).output_file_id or "").text
    (row,) = map(json.loads, output.splitlines())
    assert row["response"]["body"]["choices"][0]["message"]["content"] == ANSWER
