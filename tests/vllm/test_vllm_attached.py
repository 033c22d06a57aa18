"""A `vllm serve` that runs already: attached to, killed, started with another model, asked for nonsense by others."""

import json
import logging
import signal
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import pytest

from benchmarks.matrix_caches import difference, prefilled
from engines.proof import prove
from engines.registry import Engine, EngineOptions, open_engine
from engines.sketch import compare
from engines.sketching import fresh_sketch
from engines.vllm import conversation, environment
from engines.vllm.engine import VLLMEngine, attach
from engines.vllm.host.kvasir_vllm import events
from messages.errors import ConfigError, EngineUnavailable
from messages.jobs import Sampling
from messages.kv import Record
from tests.support.processes import ROOT
from tests.support.vllm_contract import ENDLESS, GREEDY, TOKENS, VLLMContract, answers
from tests.support.vllm_server import START_S, VLLMServer
from tests.support.waiting import wait_until

pytestmark = pytest.mark.vllm

MODEL = ROOT / "examples/model/kvasir-demo"
FLAGS = ("--dtype", "float32", "--max-model-len", "8192", "--max-num-batched-tokens", "512")
SCHEMA = {
    "type": "object",
    "properties": {"points": {"type": "integer"}, "feedback": {"type": "string", "maxLength": 20}},
    "required": ["points", "feedback"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VLLMServer]:
    made = VLLMServer(tmp_path_factory.mktemp("vllm"))
    try:
        made.start(MODEL, *FLAGS)
        yield made
    finally:
        made.kill()


@pytest.fixture(scope="module")
def engine(server: VLLMServer) -> Iterator[VLLMEngine]:
    opened = attach(EngineOptions(server.url, slots=2, prefill_slots=4))
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def llamacpp() -> Iterator[Engine]:
    weights = str(ROOT / "examples/model/kvasir-demo.gguf")
    opened = open_engine("llamacpp", EngineOptions(weights, context=8192, slots=1, threads=1))
    yield opened
    opened.close()


def posted(server: VLLMServer, **body: Any) -> tuple[int, Any]:
    """Status and answer of a request by somebody else."""
    content = json.dumps({"prompt": [5, 6, 7, 8], "max_tokens": 2, "temperature": 0} | body).encode()
    request = urllib.request.Request(f"{server.url}/v1/completions", content, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status, json.load(response)
    except HTTPError as error:
        return error.code, error.read()


class TestServer(VLLMContract):
    """Somebody else's."""


def test_what_it_serves_is_learnt_from_it_and_its_transfer_proved(engine: VLLMEngine) -> None:
    info = engine.info
    assert (info.device, info.context, info.prefill_slots) == ("cpu", 8192, 4)
    assert info.layout is not None
    assert info.layout.dtype == "f32"
    assert prove(engine, engine) == ""


def test_a_kv_transfer_changes_no_answer_both_ways(engine: VLLMEngine, llamacpp: Engine) -> None:
    for sampling in (GREEDY, Sampling(max_tokens=60, temperature=0, json_schema=json.dumps(SCHEMA))):
        cold = llamacpp.decode(TOKENS, None, sampling).text
        # Without a cache all of the prompt is evaluated each time: vLLM's own prefix cache, which is on, has nothing
        for _ in range(2):
            answer = engine.decode(TOKENS, None, sampling)
            assert (answer.text, answer.evaluated_tokens) == (cold, len(TOKENS))
        for sender, receiver in ((engine, llamacpp), (llamacpp, engine), (engine, engine)):
            answer = receiver.decode(TOKENS, prefilled(sender, TOKENS), sampling)
            assert (answer.text, answer.evaluated_tokens) == (cold, 1)


def test_sketches_hold_there_too(engine: VLLMEngine, llamacpp: Engine) -> None:
    made = [fresh_sketch(one, one.info.layout) for one in (engine, llamacpp) if one.info.layout]
    assert not compare(*made).problem
    assert difference(prefilled(engine, TOKENS), prefilled(llamacpp, TOKENS)) < 0.05  # llama.cpp keeps float16


def test_an_answer_is_drawn_from_its_seed_with_and_without_a_transfer(engine: VLLMEngine) -> None:
    def drawn(seed: int) -> Sampling:
        return Sampling(max_tokens=40, temperature=1.2, top_p=0.95, seed=seed)

    cold = [engine.decode(TOKENS, None, drawn(seed)).text for seed in (1, 2)]
    cache = prefilled(engine, TOKENS)
    assert [engine.decode(TOKENS, cache, drawn(seed)).text for seed in (1, 2)] == cold
    assert cold[0] != cold[1]


def test_a_prefill_begins_from_what_the_store_has(engine: VLLMEngine) -> None:
    # Whether that is all but nothing or all of it
    whole = prefilled(engine, TOKENS)
    for held in (20, len(whole.blocks)):
        begun = type(whole)(whole.layout, whole.blocks[:held])
        done = engine.prefill(TOKENS[:-1], lambda record: None, begun.num_tokens, begun)
        assert done.computed_tokens == max(1, len(TOKENS) - 1 - begun.num_tokens)


def test_a_cache_that_covers_all_of_a_prompt_is_put_in_as_it_is(engine: VLLMEngine) -> None:
    # Given a prefill resumed from a cache of all its tokens, of which vLLM computes the last one again
    whole = prefilled(engine, TOKENS)
    again: list[Record] = []
    engine.prefill(TOKENS[:-1], again.append, 0, whole)
    # Then what it gives out is what was put in
    assert difference(type(whole)(whole.layout, tuple(again)), whole) < 1e-4  # type: ignore[arg-type]


def test_what_others_ask_of_the_server_neither_ends_it_nor_reaches_a_file(
    server: VLLMServer, engine: VLLMEngine, tmp_path: Path
) -> None:
    # Given requests with parameters that are garbled, of another version, or lead out of shared memory
    asked = {"version": events.VERSION, "key": "k", "folder": "f", "block": 32, "emit": 0, "inject": None}
    wrong: list[Any] = [
        *(7, [], {}, {"key": "k"}, asked | {"version": 99}, asked | {"block": 0}, asked | {"block": "x"}),
        *(asked | {"folder": folder} for folder in ("..", "../../tmp", f"{tmp_path}", 3, "nobody")),
        *(asked | {"inject": inject} for inject in (["../x.kv", 3], ["x", 3], [1, 2], "x", ["x.kv", -1])),
        *(asked | {"sampling": sampling} for sampling in ({}, {"temperature": 1}, 3, {"temperature": "hot"})),
        *(asked | {"key": key} for key in ("../k", "", None, "k" * 500)),
    ]
    # Then each is answered as if it said nothing, or refused, and the server goes on
    plain = posted(server)[1]["choices"][0]["text"]
    for given in wrong:
        status, answer = posted(server, kv_transfer_params={events.NAME: given})
        assert status in (200, 400) or (status == 500 and given["inject"]), (given, answer)
        assert status != 200 or answer["choices"][0]["text"] == plain, given
    assert posted(server, kv_transfer_params={"do_remote_decode": False})[0] == 200
    assert list(tmp_path.iterdir()) == []
    assert engine.decode(TOKENS, None, GREEDY).evaluated_tokens == len(TOKENS)


def test_a_link_in_shared_memory_is_not_followed(server: VLLMServer, engine: VLLMEngine, tmp_path: Path) -> None:
    # Given a link to a file that vLLM can read, in the folder of somebody who may ask
    secret = tmp_path / "secret"
    secret.write_bytes(bytes(1 << 16))
    link = engine.host.folder / "link.kv"
    link.symlink_to(secret)
    asked = {"version": events.VERSION, "key": "k", "folder": engine.host.folder.name, "block": 32, "emit": 0}
    try:
        # Then what it holds is not put into the cache
        body = {events.NAME: asked | {"inject": ["link.kv", 3]}}
        assert posted(server, kv_transfer_params=body)[0] == 500
    finally:
        link.unlink()
    assert engine.decode(TOKENS, None, GREEDY).evaluated_tokens == len(TOKENS)


def test_another_model_than_the_one_that_is_served_is_refused(server: VLLMServer, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    for path in MODEL.iterdir():
        (other / path.name).symlink_to(path)
    config = json.loads((MODEL / "config.json").read_text()) | {"intermediate_size": 999}
    (other / "config.json").unlink()
    (other / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"from the one in weights: its intermediate_size is \d+, but .*999"):
        attach(EngineOptions(f"{server.url}?model={other}"))
    with pytest.raises(ConfigError, match=r"holds only 8,192 tokens, fewer than the 9,000 .*--max-model-len"):
        attach(EngineOptions(server.url, context=9000))
    with pytest.raises(ConfigError, match="use 'model' or 'shared'"):
        attach(EngineOptions(f"{server.url}?slots=/dev/shm"))


def test_a_folder_that_the_server_does_not_reach_is_said(server: VLLMServer, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"does not reach .*: start vLLM on this machine"):
        attach(EngineOptions(f"{server.url}?shared={tmp_path}"))


def test_one_that_is_killed_is_taken_up_again_only_as_what_it_was(
    server: VLLMServer, engine: VLLMEngine, caplog: pytest.LogCaptureFixture
) -> None:
    # Given an answer under way
    caplog.set_level(logging.WARNING)
    cold = engine.decode(TOKENS, None, GREEDY)
    cache = prefilled(engine, TOKENS)

    # When the server is killed, then the answer is for now none, and so are those that follow
    with pytest.raises(EngineUnavailable):
        engine.decode(TOKENS, None, ENDLESS, on_text=lambda _: server.kill())
    with pytest.raises(EngineUnavailable, match="is looked for again"):
        engine.decode(TOKENS, cache, GREEDY)
    # And when it comes back with numbers of another kind, nothing is asked of it
    server.start(MODEL, *FLAGS[2:], "--dtype", "float16")
    wait_until(lambda: "serves another model now" in caplog.text, "it is looked at", START_S)
    with pytest.raises(EngineUnavailable, match="serves another model now"):
        engine.decode(TOKENS, cache, GREEDY)
    # And when it comes back as it was, the next job is answered as before
    server.kill()
    server.start(MODEL, *FLAGS)
    wait_until(lambda: answers(engine, cache) == (cold.text, 1), "it answers again", START_S, 0.5)


def test_one_that_was_started_again_between_two_jobs_is_noticed_at_the_next(
    server: VLLMServer, engine: VLLMEngine
) -> None:
    cold = engine.decode(TOKENS, None, GREEDY)
    server.kill()
    server.start(MODEL, *FLAGS)
    with pytest.raises(EngineUnavailable, match="it was started again"):
        engine.decode(TOKENS, None, GREEDY)
    wait_until(lambda: answers(engine, None) == (cold.text, len(TOKENS)), "it answers again", START_S, 0.5)


def test_one_that_hangs_is_noticed_and_taken_up_again(
    server: VLLMServer, engine: VLLMEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    cold = engine.decode(TOKENS, None, GREEDY)
    monkeypatch.setattr(conversation, "SILENT_S", 5.0)
    with pytest.raises(EngineUnavailable, match="it hangs"):
        engine.decode(TOKENS, None, ENDLESS, on_text=lambda _: server.stop(signal.SIGSTOP))
    monkeypatch.undo()
    server.stop(signal.SIGCONT)
    wait_until(lambda: answers(engine, None) == (cold.text, len(TOKENS)), "it answers again", START_S, 0.5)


def in_its_environment(folder: Path, program: str) -> str:
    """What a program says that vLLM's Python runs, with the connector's folder on its path and nothing else of ours."""
    told = f"import sys; sys.path.insert(0, {str(folder)!r})\n{program}"
    python = environment.find().python
    done = subprocess.run([python, "-I", "-c", told], capture_output=True, text=True, timeout=START_S)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_the_connector_needs_nothing_but_what_vllm_brings(tmp_path: Path) -> None:
    # Given an environment in which there is neither Kvasir nor what it is made of
    environment.write_connector(tmp_path)
    absent = ("kvasir", "engines", "messages", "kvstore", "pika", "redis", "msgpack", "xxhash")
    program = f"""
for name in {absent!r}:
    sys.modules[name] = None  # importing it is an error
from kvasir_vllm.connector import KvasirConnector
from kvasir_vllm.sampling import KvasirSampler
from kvasir_vllm.pages import Pages
print(KvasirConnector.__name__, KvasirSampler.__name__, Pages.__name__)
"""
    assert "KvasirConnector KvasirSampler Pages" in in_its_environment(tmp_path, program)


def test_a_vllm_without_the_connector_s_flags_does_not_start_with_it(tmp_path: Path) -> None:
    # Given what vLLM makes of its defaults, and of our file's flags
    environment.write_connector(tmp_path)
    program = f"""
import yaml
from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import EngineArgs
from kvasir_vllm.connector import require_settings
flags = yaml.safe_load(open({str(tmp_path / environment.FLAGS)!r}))
transfer = KVTransferConfig(**flags.pop("kv-transfer-config"))
ours = {{name.replace("-", "_"): value for name, value in flags.items()}}
for given in (ours, {{}}):
    config = EngineArgs(model={str(MODEL)!r}, kv_transfer_config=transfer, **given).create_engine_config()
    try:
        require_settings(config)
        print("fits")
    except ValueError as error:
        print("refused:", error)
"""
    said = [line for line in in_its_environment(tmp_path, program).splitlines() if line.startswith(("fits", "refused"))]
    # Then only the latter do
    assert said[0] == "fits"
    for flag in ("--logits-processors", "--generation-config vllm", "--structured-outputs-config"):
        assert flag in said[1]
