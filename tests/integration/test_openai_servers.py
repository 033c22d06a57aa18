"""The openai engine in front of real servers with small weights: llama.cpp's, mlx_lm's, and our own gateway."""

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import httpx
import pytest
import xllamacpp

from engines.openai.engine import OpenAIEngine
from engines.registry import EngineOptions, open_engine
from messages.errors import ContextExceeded, InvalidSchema
from messages.jobs import Sampling, user_prompt
from tests.support.gateway import ServedGateway
from tests.support.pipeline import MODEL, Pipeline
from tests.support.servers import Process, free_port
from tests.support.tiny_gguf import TinyModel, write_gguf
from tests.support.tiny_hf import write_hf
from tests.support.waiting import wait_until

pytestmark = pytest.mark.system  # servers of other projects, as they are started

CONTEXT = 1024
ASK = user_prompt("", "How many points?")
SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"points": {"type": "integer", "minimum": 0, "maximum": 9}},
        "required": ["points"],
        "additionalProperties": False,
    }
)

Start = Callable[[Path, ExitStack], str]


def llama(folder: Path, stack: ExitStack) -> str:
    """The server inside xllamacpp; its weights for the engine."""
    params = xllamacpp.CommonParams()
    params.model.path = str(write_gguf(folder / "tiny.gguf"))
    params.n_ctx, params.n_parallel, params.cpuparams.n_threads = CONTEXT, 1, 1
    params.hostnames, params.port, params.warmup, params.ui = ["127.0.0.1"], 0, False, False
    running = [xllamacpp.Server(params)]
    stack.callback(running.clear)
    return f"{running[0].listening_address}/v1/{params.model.path}"


def mlx(folder: Path, stack: ExitStack) -> str:
    """mlx_lm.server, a process of its own."""
    weights = write_hf(folder / "hf", write_gguf(folder / "tiny.gguf"), TinyModel())
    port = free_port()
    (folder / "hub").mkdir()
    command = [sys.executable, "-m", "mlx_lm", "server", "--model", str(weights), "--port", str(port)]
    environ = os.environ | {"HF_HUB_CACHE": str(folder / "hub"), "HF_HUB_OFFLINE": "1"}
    process = Process(command, environ, folder, folder / "mlx.log")
    stack.callback(process.end, signal.SIGTERM, 5)
    wait_until(lambda: answers(f"http://127.0.0.1:{port}/health"), "mlx_lm.server answers", 120)
    return f"http://127.0.0.1:{port}/v1/{weights.resolve()}"


def gateway(folder: Path, stack: ExitStack) -> str:
    """Our own, over simulated engines."""
    pipeline = stack.enter_context(Pipeline())
    pipeline.start()
    return f"{stack.enter_context(ServedGateway(pipeline.client, folder)).url}/v1/{MODEL}"


def answers(url: str) -> bool:
    try:
        return httpx.get(url).status_code == httpx.codes.OK
    except httpx.HTTPError:
        return False


@pytest.fixture(params=[llama, mlx, gateway], ids=["llama.cpp", "mlx_lm", "gateway"])
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[OpenAIEngine]:
    with ExitStack() as stack:
        opened = open_engine("openai", EngineOptions(request.param(tmp_path, stack), context=CONTEXT))
        assert isinstance(opened, OpenAIEngine)
        yield opened
        opened.close()


def test_a_real_server_streams_counts_and_is_held_to_the_schema(engine: OpenAIEngine) -> None:
    # When it answers freely
    pieces: list[str] = []
    answer = engine.decode_text(ASK, Sampling(max_tokens=8, temperature=0.8, seed=7), pieces.append)
    # Then the pieces are the text, it counted both sides, and the same seed gives the same answer
    assert "".join(pieces) == answer.text
    assert answer.completion_tokens in range(1, 9)
    assert answer.evaluated_tokens > 4
    assert engine.decode_text(ASK, Sampling(max_tokens=8, temperature=0.8, seed=7)).text == answer.text
    # And under a schema the answer is JSON, unless it was cut off, or it is refused
    with suppress(InvalidSchema):
        graded = engine.decode_text(ASK, Sampling(max_tokens=40, json_schema=SCHEMA))
        assert graded.finish_reason == "length" or json.loads(graded.text)["points"] in range(10)
    with pytest.raises(ContextExceeded):
        engine.decode_text(user_prompt("", "word " * 1200), Sampling(max_tokens=8))
