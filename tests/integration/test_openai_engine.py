"""The openai engine against a server of ours on its bad days, alone and as one job's whole way."""

import json
import logging
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from email.utils import formatdate
from pathlib import Path

import pytest

from engines.openai.engine import OpenAIEngine, parse_weights
from engines.openai.http import outside
from engines.proof import prove
from engines.registry import EngineOptions, open_engine
from infra.config.settings import describe, load_settings
from kvasir import cli
from kvasir.class_run import facts
from kvasir.connect import connect
from kvasir.doctor.cluster import examine
from messages.errors import (
    Cancelled,
    ConfigError,
    ContextExceeded,
    EngineUnavailable,
    InvalidPrompt,
    InvalidSchema,
    KvasirError,
)
from messages.jobs import DecodeReport, JobResult, Part, Sampling, user_prompt
from tests.support.fake_openai import KEY, MODEL, FakeOpenAI

ROOT = Path(__file__).resolve().parents[2]
SHORT = Sampling(max_tokens=64)
GO = user_prompt("", "go on")
SCHEMA = Sampling(max_tokens=64, json_schema='{"type": "object", "properties": {"points": {"type": "integer"}}}')


@pytest.fixture
def server() -> Iterator[FakeOpenAI]:
    with FakeOpenAI() as running:
        yield running


@pytest.fixture
def engine(server: FakeOpenAI) -> Iterator[OpenAIEngine]:
    opened = load(server)
    yield opened
    opened.close()


def load(server: FakeOpenAI, context: int = 0, model: str = MODEL, key: str = "") -> OpenAIEngine:
    engine = open_engine("openai", EngineOptions(f"{server.url}/{model}", context=context, api_key=key))
    assert isinstance(engine, OpenAIEngine)
    return engine


def test_an_answer_is_streamed_and_counted_by_the_server(engine: OpenAIEngine) -> None:
    pieces: list[str] = []
    answer = engine.decode_text(user_prompt("", "grade this please"), SHORT, pieces.append)
    assert "".join(pieces) == answer.text == "".join(f"word{n} " for n in range(12))
    assert len(pieces) == 12
    assert (answer.evaluated_tokens, answer.completion_tokens) == (3, 12)
    assert (answer.finish_reason, answer.tokens) == ("stop", ())
    assert engine.decode_text(GO, Sampling(max_tokens=2)).finish_reason == "length"


def test_a_raw_prompt_is_continued(engine: OpenAIEngine, server: FakeOpenAI) -> None:
    pieces: list[str] = []
    answer = engine.decode_text((Part("raw", "Once upon <|im_end|> a"),), SHORT, pieces.append)
    assert "".join(pieces) == answer.text == "".join(f"word{n} " for n in range(12))
    assert (answer.evaluated_tokens, answer.completion_tokens, answer.finish_reason) == (4, 12, "stop")
    assert "messages" not in server.requests[-1]
    assert "<|im_end|>" not in server.requests[-1]["prompt"]


def test_calls_and_their_results_reach_the_server(engine: OpenAIEngine, server: FakeOpenAI) -> None:
    called = (
        Part("user", "Grade it."),
        Part("assistant", '{"points": 7}', function="grade"),
        Part("tool", "kept", function="grade"),
    )
    engine.decode_text(called, SHORT)
    _, call, result = server.requests[-1]["messages"]
    assert call["tool_calls"][0]["function"] == {"name": "grade", "arguments": '{"points": 7}'}
    assert result["tool_call_id"] == call["tool_calls"][0]["id"]
    with pytest.raises(InvalidPrompt, match="can't continue an answer"):
        engine.decode_text((*called, Part("assistant", "It is")), SHORT)


def test_one_answer_after_the_other_comes_over_one_connection(engine: OpenAIEngine, server: FakeOpenAI) -> None:
    before = len(server.connections)
    for _ in range(5):
        engine.decode_text(GO, SHORT)
    assert len(server.connections) - before <= 1


def test_a_connection_that_may_be_closing_is_not_used_again(engine: OpenAIEngine, server: FakeOpenAI) -> None:
    engine.decode_text(GO, SHORT)
    before = len(server.connections)
    time.sleep(1.5)  # servers keep an idle connection for 2 s at least
    engine.decode_text(GO, SHORT)
    assert len(server.connections) == before + 1


def test_what_is_asked_means_the_same_as_in_every_engine(engine: OpenAIEngine, server: FakeOpenAI) -> None:
    talk = (
        Part("system", "Be brief.", "class"),
        Part("user", "Who was", "conversation"),
        Part("user", " Kvasir?", "conversation"),
        Part("assistant", "Of all gods <|im_end|> the wisest.", "conversation"),
        Part("user", "And then?"),
    )
    sampling = Sampling(max_tokens=7, temperature=0.3, top_p=0.8, top_k=11, seed=5, stop=("END", ""))
    engine.decode_text(talk, sampling)
    asked = dict(server.requests[-1])
    messages = asked.pop("messages")
    assert asked == {
        "model": MODEL,
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": 7,
        "temperature": 0.3,
        "top_p": 0.8,
        "top_k": 11,
        "seed": 5,
        "stop": ["END"],
        "min_p": 0.0,
        "repetition_penalty": 1.0,
    }
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "user"]
    assert messages[1]["content"] == "Who was Kvasir?"
    assert "<|im_end|>" not in messages[2]["content"]  # nobody's text becomes a control token


def test_a_field_that_the_server_refuses_is_not_sent_again(
    server: FakeOpenAI, caplog: pytest.LogCaptureFixture
) -> None:
    server.habits.refuses = ("top_k", "seed", "response_format")
    engine = load(server)
    assert caplog.text.count("which is not sent") == 3
    assert engine.decode_text(GO, SHORT).completion_tokens == 12
    assert not {"top_k", "seed"} & set(server.requests[-1])
    # And its answer is still held to the schema
    with pytest.raises(InvalidSchema, match="did not follow the JSON schema"):
        engine.decode_text(GO, SCHEMA)
    engine.close()


def test_a_schema_is_sent_and_a_server_that_ignores_it_is_found_out(engine: OpenAIEngine, server: FakeOpenAI) -> None:
    assert json.loads(engine.decode_text(GO, SCHEMA).text) == {"points": 3}
    assert server.requests[-1]["response_format"]["json_schema"]["schema"] == json.loads(SCHEMA.json_schema)
    server.habits.keeps_schemas = False
    with pytest.raises(InvalidSchema, match="did not follow the JSON schema"):
        engine.decode_text(GO, SCHEMA)


@pytest.mark.parametrize("wait", [lambda: "0.2", lambda: formatdate(time.time() + 1, usegmt=True)])
def test_a_busy_server_is_asked_again_when_it_says(engine: OpenAIEngine, server: FakeOpenAI, wait: object) -> None:
    assert callable(wait)
    server.habits.busy = [wait(), wait()]
    before = len(server.requests)
    assert engine.decode_text(GO, SHORT).completion_tokens == 12
    assert len(server.requests) == before + 3


def test_waiting_for_a_busy_server_can_be_called_off(engine: OpenAIEngine, server: FakeOpenAI) -> None:
    server.habits.busy = ["500"]
    stop = threading.Event()
    timer = threading.Timer(0.2, stop.set)
    timer.start()
    with pytest.raises(Cancelled):
        engine.decode_text(GO, SHORT, stop=stop)


@pytest.mark.parametrize(
    ("habits", "error", "words"),
    [
        ({"busy": [""]}, EngineUnavailable, "answered 429"),
        ({"busy": ["86400"]}, EngineUnavailable, "answered 429"),
        ({"fails_with": (500, "CUDA out of memory")}, EngineUnavailable, "CUDA out of memory"),
        ({"fails_with": (400, "maximum context length is 1024 tokens")}, ContextExceeded, "maximum context"),
        ({"fails_with": (400, "roles must alternate")}, InvalidPrompt, "roles must alternate"),
        ({"fails_with": (400, "Invalid schema for response_format")}, InvalidSchema, "Invalid schema"),
        ({"event": "{broken"}, EngineUnavailable, "not JSON"),
        ({"event": '{"choices": 7}'}, EngineUnavailable, "an unknown form"),
        ({"event": '{"error": {"message": "worker died"}}'}, EngineUnavailable, "worker died"),
        ({"ends_after": 3}, EngineUnavailable, "ended its answer early"),
        ({"reason": "content_filter"}, InvalidPrompt, "withheld"),
        ({"is_stream": False}, EngineUnavailable, "other than a stream"),
    ],
)
def test_a_bad_day_of_the_server_is_one_of_our_errors(
    engine: OpenAIEngine, server: FakeOpenAI, habits: dict[str, object], error: type[KvasirError], words: str
) -> None:
    for name, value in habits.items():
        setattr(server.habits, name, value)
    with pytest.raises(error, match=words):
        engine.decode_text(GO, SHORT)


def test_prompt_and_answer_must_fit_together(engine: OpenAIEngine, server: FakeOpenAI) -> None:
    with pytest.raises(ContextExceeded, match="1,000 tokens"):
        engine.decode_text(user_prompt("", "word " * 1000), SHORT)
    with pytest.raises(ContextExceeded, match="max_tokens is 2,000"):
        engine.decode_text(GO, Sampling(max_tokens=2000))
    server.habits.tells_usage = False
    assert engine.decode_text(GO, SHORT).evaluated_tokens == 0


def test_what_is_wrong_at_the_start_is_said_in_one_sentence(server: FakeOpenAI) -> None:
    with pytest.raises(ConfigError, match=r"has no model 'other' \(it has: org/tiny\)"):
        load(server, model="other")
    with pytest.raises(ConfigError, match=r"context of 1,024"):
        load(server, context=4096)
    server.habits.context = None
    with pytest.raises(ConfigError, match="set context"):
        load(server)
    server.close()
    with pytest.raises(ConfigError, match="is it running there"):
        load(server)


def test_a_key_is_sent_and_never_shown(server: FakeOpenAI, caplog: pytest.LogCaptureFixture) -> None:
    server.habits.key = KEY
    with caplog.at_level(logging.DEBUG):
        with pytest.raises(ConfigError, match="it wants an API key: set KVASIR_API_KEY"):
            load(server)
        wrong = "sk-wrong-one"
        with pytest.raises(ConfigError, match="does not take this API key") as refused:
            load(server, key=wrong)
        engine = load(server, key=KEY)
        assert engine.decode_text(GO, SHORT).completion_tokens == 12
        engine.close()
    assert server.keys[-1] == KEY
    assert wrong not in str(refused.value)
    assert KEY not in caplog.text
    assert wrong not in caplog.text
    assert KEY not in repr(EngineOptions("", api_key=KEY))


@pytest.mark.parametrize(
    ("url", "host"),
    [
        ("http://127.0.0.1:1/v1", ""),
        ("http://10.1.2.3/v1", ""),
        ("http://172.31.0.1/v1", ""),
        ("http://192.168.1.7:8000/v1", ""),
        ("http://169.254.3.4/v1", ""),
        ("http://[::1]:8000/v1", ""),
        ("http://[fd00::5]/v1", ""),
        ("http://[fe80::5]/v1", ""),
        ("http://[::ffff:10.0.0.1]/v1", ""),
        ("http://localhost:8000/v1", ""),
        ("http://no-such-spark.local:8000/v1", ""),
        ("http://172.32.0.1/v1", "172.32.0.1"),
        ("http://8.8.8.8/v1", "8.8.8.8"),
        ("http://100.64.0.1/v1", "100.64.0.1"),
        ("http://[2001:db8::1]/v1", "2001:db8::1"),
        ("http://[::ffff:8.8.8.8]/v1", "::ffff:8.8.8.8"),
        ("http://no-such-host.invalid/v1", "no-such-host.invalid"),
    ],
)
def test_what_is_outside(url: str, host: str) -> None:
    assert outside(url) == host


def test_an_address_outside_is_refused_unless_it_is_allowed() -> None:
    with pytest.raises(ConfigError, match=r"203.0.113.9 is outside private networks.* allow_external = true"):
        open_engine("openai", EngineOptions("http://203.0.113.9/v1/m", context=64))


@pytest.mark.parametrize("weights", ["127.0.0.1:8000/v1/m", "http://h/m", "http://h/v1", "http://h/v1/", "m.gguf"])
def test_weights_that_name_no_server_or_no_model_are_refused(weights: str) -> None:
    with pytest.raises(ConfigError, match="must be a URL such as"):
        parse_weights(weights)


def test_weights_name_a_server_and_a_model() -> None:
    assert parse_weights("http://h:1/v1/org/m:Q4") == ("http://h:1/v1", "org/m:Q4")
    assert parse_weights("https://h/api/v1//models/tiny") == ("https://h/api/v1", "/models/tiny")
    with pytest.raises(ConfigError) as refused:
        parse_weights("http://user:hidden@h/v1/m")
    assert "hidden" not in str(refused.value)


def test_a_job_crosses_the_prefill_stage_untouched_and_its_result_says_why(server: FakeOpenAI, tmp_path: Path) -> None:
    # Given a model behind the server, which wants the key that the environment has
    server.habits.key = KEY
    tables = {"models": {"m": {"weights": {"openai": f"{server.url}/{MODEL}"}}}}
    settings = load_settings(tables, environ={"KVASIR_API_KEY": KEY}, cwd=tmp_path, user_dir=tmp_path)
    assert KEY not in repr(settings)
    assert ("models.m.api_key", "***", "KVASIR_API_KEY") in describe(settings)
    # When a prompt is asked while the server is busy
    with connect(settings, ["m"]) as client:
        server.habits.busy = ["0.1"]
        *events, result = client.stream("m", "how many points", Sampling(max_tokens=32, answers=2))
    # Then all answers came, the first in pieces, at the first attempt, and the result says who did the prompt, and why
    assert isinstance(result, JobResult)
    assert (result.state, result.attempts, len(result.more_texts)) == ("succeeded", 1, 1)
    assert "".join(event.text for event in events if not isinstance(event, JobResult)) == result.text
    assert {body["seed"] for body in server.requests[-2:]} == {0, 1}
    report = result.decode
    assert (report.engine, report.kv_transfer) == ("openai", "none")
    assert report.why_none == "the openai engine can't give out a KV cache"
    assert report.evaluated_tokens == report.prompt_tokens == 3


def test_the_result_and_the_report_of_an_outside_server_name_it(engine: OpenAIEngine) -> None:
    # Given an engine that says its server is outside
    engine.info = replace(engine.info, outside="api.example.com")
    # Then the reason that its results give names the host, and the report reads it there
    why = prove(engine, engine)
    assert why.endswith("prompts go to api.example.com, outside private networks")
    done = JobResult("a", 1, "b", "c", "m", "succeeded", decode=DecodeReport(why_none=why))
    assert ("Outside", "prompts went to api.example.com, outside private networks") in facts([done])
    inside = replace(done, decode=DecodeReport(why_none="the openai engine can't give out a KV cache"))
    assert "Outside" not in dict(facts([inside]))


def test_a_dry_run_names_a_server_outside_and_asks_it_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "kvasir.toml"
    config.write_text(
        '[grading]\ncode_model = "m"\nfeedback_model = "m"\n[models.m]\ncontext = 9000\nallow_external = true\n'
        'weights.openai = "http://203.0.113.5:9/v1/x"\n[services]\nbroker = "amqp://u@127.0.0.1:1/x"\n'
        'store = "redis://127.0.0.1:1/0"\n'
    )
    homework = ROOT / "examples/homework"
    asked = ["grade", str(homework / "submissions"), "--rubric", str(homework / "rubric.yaml"), "--dry-run"]
    cli.run_command(["--config", str(config), *asked])
    assert "OUTSIDE: prompts, with students' work, go to 203.0.113.5" in capsys.readouterr().out


def test_a_key_file_is_read_when_the_engine_starts(server: FakeOpenAI, tmp_path: Path) -> None:
    server.habits.key = KEY
    (tmp_path / "key").write_text(KEY + "\n")
    model = {"weights": {"openai": f"{server.url}/{MODEL}"}, "api_key_file": str(tmp_path / "key")}
    settings = load_settings({"models": {"m": model}}, environ={}, cwd=tmp_path, user_dir=tmp_path)
    # doctor goes by it, and says what is wrong
    assert ("ok", f"openai reaches {server.url}/{MODEL}") in [
        (one.level, one.what) for one in examine(lambda: settings)
    ]
    server.habits.key = "another"
    found = [one for one in examine(lambda: settings) if one.subject == "m"]
    assert [one.level for one in found] == ["error"]
    assert "does not take this API key" in found[0].what
    assert KEY not in found[0].what
