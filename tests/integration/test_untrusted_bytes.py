"""Bytes from a broker, a store or a student: refused before they cost anything."""

import dataclasses
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import cast

import msgpack
import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer

from engines.huggingface.prompt import HFPrompt
from engines.ollama.engine import OllamaEngine
from engines.registry import EngineOptions, open_engine
from kvstore.blocks import block_refs, shared_boundary
from messages import codec
from messages.errors import InvalidMessage
from messages.jobs import PrefillJob, Sampling, user_prompt
from messages.kv import Block
from messages.lifecycle import Step
from messages.workers import WorkerInfo
from tests.support.fake_ollama import MODEL, FakeOllama
from tests.support.pipeline import INSTANT, Pipeline, WatchedEngine, work
from tests.support.waiting import wait_until

DEMO = Path(__file__).parents[2] / "examples" / "model" / "kvasir-demo"
REGISTRATION = WorkerInfo("w", "decode", "m", "simulated", "cpu", "", "", 512, 1, "host", 1, 1.0)
READING = """
import sys, time
from messages import codec
from messages.errors import InvalidMessage
from messages.jobs import PrefillJob
from tests.support.memory import peak_bytes
body = eval(sys.argv[1])
before, held = time.process_time(), peak_bytes()
try:
    codec.decode(body, PrefillJob)
    raise SystemExit("was read")
except InvalidMessage:
    print(time.process_time() - before, peak_bytes() - held)
"""


@pytest.mark.parametrize(
    "body",
    [
        "b'\\xdd' + (12_000_000).to_bytes(4) + b'\\x90' * 12_000_000",  # empty lists
        pytest.param(
            "b'\\xdd' + (12_000_000).to_bytes(4) + b'\\x80' * 12_000_000", marks=pytest.mark.system
        ),  # empty maps
        "b'\\xdd' + (120_000).to_bytes(4) + (b'\\xdc\\x00\\x60' + b'\\x90' * 96) * 120_000",  # lists of lists
        pytest.param(
            "b'\\xdd' + (4_000_000).to_bytes(4) + b'\\xc7\\x00\\x05' * 4_000_000", marks=pytest.mark.system
        ),  # extensions without a byte
    ],
)
def test_a_message_of_empty_containers_costs_nothing(body: str) -> None:
    done = subprocess.run([sys.executable, "-c", READING, body], capture_output=True, text=True)

    assert done.returncode == 0, done.stderr
    seconds, more = map(float, done.stdout.split())
    assert seconds < 1
    assert more < 64 << 20


def test_messages_as_long_as_they_may_be_are_read() -> None:
    registration = dataclasses.replace(REGISTRATION, jobs=tuple(f"job-{n}" for n in range(1024)))
    tokens = tuple(range(1 << 20))
    job = PrefillJob("j", "b", "i", "m", user_prompt("shared", "own"), Sampling(5), tokens=tokens)

    assert codec.decode(codec.encode(registration), WorkerInfo) == registration
    assert codec.decode(codec.encode(job), PrefillJob) == job


def test_nests_within_a_field_are_refused() -> None:
    fields = msgpack.unpackb(codec.encode(REGISTRATION))

    with pytest.raises(InvalidMessage):
        codec.decode(msgpack.packb(fields | {"jobs": [[[]] * 200]}), WorkerInfo)


# --- marks in anybody's text


@pytest.mark.parametrize("mark", ["<turn|>", "<|turn>", "<tool_response>", "[INST]", "<think>"])
def test_marks_that_a_tokenizer_does_not_declare_stay_text(tmp_path: Path, mark: str) -> None:
    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    tokenizer.add_tokens([AddedToken(mark, special=False), AddedToken("    ", special=False)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    template = f"{mark}{{{{ messages[0].content }}}}{mark}answer"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>", "chat_template": template}))
    prompt = HFPrompt(tmp_path)

    ids = prompt.tokenize(user_prompt("Grade this: ", f"x {mark} y{mark}\n    z"), 0.0).ids

    number = tokenizer.token_to_id(mark)
    assert [place for place, each in enumerate(ids) if each == number] == [
        0,
        len(ids) - len(prompt.plain_ids("answer")) - 1,
    ]
    assert tokenizer.token_to_id("    ") in ids, "white space is nobody's mark"
    assert mark in tokenizer.decode([number], skip_special_tokens=False)


VOCABULARY = (("<|im_end|>", 3), ("<|odd_mark|>", 3), ("[TOOL]", 4), ("§stop§", 3), ("▁▁", 4), ("\n\n", 4), ("the", 1))


def sent_to_ollama(prompt: str, vocabulary: tuple[tuple[str, int], ...]) -> str:
    with FakeOllama() as server:
        server.habits.vocabulary = vocabulary
        engine = open_engine("ollama", EngineOptions(f"{server.url}/{MODEL}", context=1024))
        try:
            cast(OllamaEngine, engine).decode_text(user_prompt("", prompt), Sampling(max_tokens=8))
        finally:
            engine.close()
        return str(server.last_request("/api/chat")["messages"][0]["content"])


def test_every_control_token_of_the_served_model_is_broken_up() -> None:
    marks = [text for text, kind in VOCABULARY if kind != 1 and text.strip("▁\n")]
    prompt = "the end" + "\n\n".join(f"{mark} and {mark}{mark}" for mark in marks) + "<<|im_end|>> <|not_one|>"

    sent = sent_to_ollama(prompt, VOCABULARY)

    assert [mark for mark in marks if mark in sent] == []
    assert sent.replace("\u200b", "") == prompt
    assert "<|not_one|>" in sent
    assert sent.count("\u200b") == sum(map(prompt.count, marks))


def test_where_the_server_keeps_its_vocabulary_known_marks_are_broken_up() -> None:
    prompt = "a <|im_end|> b </s> c [INST] d <end_of_turn> e <turn|> 1 < 2 [x]"

    sent = sent_to_ollama(prompt, ())

    assert sent.replace("\u200b", "") == prompt
    assert sent.count("\u200b") == 5


# --- numbers that are none


@pytest.mark.parametrize("dtype", ["f16", "bf16", "f32"])
@pytest.mark.parametrize("wrong", [math.nan, -math.inf])
def test_a_cache_with_nan_or_inf_is_a_failed_kv_transfer(dtype: str, wrong: float) -> None:
    weights = f"{INSTANT},dtype={dtype}"
    with Pipeline() as pipeline:
        job = pipeline.job()
        prefill = pipeline.start_prefill(WatchedEngine(weights))
        pipeline.submit(job)
        wait_until(lambda: pipeline.ready(work("decode")) == 1, "the job waits to be decoded")
        info = prefill.engine.info
        assert info.layout
        prompt = prefill.engine.tokenize(job.prompt, 0.0)
        shared = shared_boundary(info.layout, min(prompt.shared_tokens, len(prompt.ids) - 1))
        refs = block_refs(info.fingerprint, info.layout, prompt.ids, len(prompt.ids) - 1, shared, job.job_id)
        [block] = pipeline.kv.get(info.fingerprint, info.layout, refs[1:2])
        spoilt = np.array(block.data)
        as_float = np.array([wrong], np.float32)
        spoilt[1, 1, 5, 0, 3] = as_float.view(np.uint32)[0] >> 16 if dtype == "bf16" else as_float[0]
        pipeline.kv.delete(refs[1:2])
        pipeline.kv.put(info.fingerprint, info.layout, [(refs[1], Block(block.start, spoilt))])

        pipeline.start_decode(WatchedEngine(weights))
        result = pipeline.result(job)

        assert result.text == pipeline.undisturbed_text(job, weights)
        assert (result.decode.kv_transfer, result.decode.evaluated_tokens) == ("verified", 1)
        assert pipeline.steps(job).count(Step.KV_GONE) == 1, "counted, and computed again"
