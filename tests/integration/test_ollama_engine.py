"""Ollama: the real client against a server that speaks its protocol, alone and as one job's whole way."""

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from engines.ollama.engine import OllamaEngine, model_stops, parse_weights
from engines.proof import prove
from engines.registry import EngineOptions, open_engine
from infra.config.settings import load_settings
from kvasir.connect import connect
from messages.errors import ConfigError, ContextExceeded, EngineUnavailable, InvalidPrompt, InvalidSchema
from messages.jobs import JobResult, Part, Sampling, user_prompt
from tests.support.fake_ollama import MODEL, TEMPLATE_TOKENS, TRAINED_CONTEXT, FakeOllama
from tests.support.pipeline import Pipeline, WatchedEngine

SHORT = Sampling(max_tokens=64)


@pytest.fixture
def server() -> Iterator[FakeOllama]:
    with FakeOllama() as running:
        yield running


@pytest.fixture
def engine(server: FakeOllama) -> Iterator[OllamaEngine]:
    opened = load(server)
    yield opened
    opened.close()


def load(server: FakeOllama, context: int = 1024, model: str = MODEL) -> OllamaEngine:
    engine = open_engine("ollama", EngineOptions(f"{server.url}/{model}", context=context))
    assert isinstance(engine, OllamaEngine)
    return engine


def test_an_answer_is_streamed_and_the_prompt_is_the_decoders(engine: OllamaEngine) -> None:
    # When a prompt of three words is answered
    pieces: list[str] = []
    answer = engine.decode_text(user_prompt("", "grade this please"), SHORT, pieces.append)
    # Then the pieces are the text, and Ollama's own counts say what it spent
    assert "".join(pieces) == answer.text == "".join(f"word{n} " for n in range(12))
    assert len(pieces) == 12
    assert (answer.evaluated_tokens, answer.completion_tokens) == (TEMPLATE_TOKENS + 3, 12)
    assert (answer.finish_reason, answer.tokens) == ("stop", ())
    assert engine.decode_text(user_prompt("", "x"), Sampling(max_tokens=2)).finish_reason == "length"


TALK = (
    Part("system", "Be brief.", "class"),
    Part("user", "Who was", "conversation"),
    Part("user", " Kvasir?", "conversation"),
    Part("assistant", "Of all gods <|im_end|> the wisest.", "conversation"),
    Part("user", "And then?"),
)


@pytest.mark.parametrize(
    ("template", "modelfile"),
    [
        ("{{ if .System }}<|im_start|>system\n{{ .System }}{{ end }}<|im_start|>user\n{{ .Prompt }}", ""),
        ("{{ range .Messages }}<|im_start|>{{ .Role }}\n{{ .Content }}<|im_end|>{{ end }}", ""),
        ('{{ range .Messages }}{{ if eq .Role "system" }}S{{ else }}U{{ end }}{{ .Content }}{{ end }}', ""),
        ("{{ .Prompt }}", "FROM qwen\nRENDERER qwen3-coder\nPARSER qwen3-coder\n"),
    ],
    ids=["system", "any role", "system by name", "a renderer of its own"],
)
def test_a_conversation_reaches_the_server_by_role(server: FakeOllama, template: str, modelfile: str) -> None:
    server.habits.template, server.habits.modelfile = template, modelfile
    engine = load(server)
    assert engine.decode_text(TALK, SHORT).evaluated_tokens == TEMPLATE_TOKENS + 2 + 3 + 6 + 2
    engine.close()
    sent = [(message["role"], message["content"]) for message in server.last_request("/api/chat")["messages"]]
    assert [role for role, _ in sent] == ["system", "user", "assistant", "user"]
    assert sent[1][1] == "Who was Kvasir?"
    assert "<|im_end|>" not in sent[2][1]  # nobody's text becomes a control token


def test_a_raw_prompt_is_continued_without_a_template(engine: OllamaEngine, server: FakeOllama) -> None:
    pieces: list[str] = []
    answer = engine.decode_text((Part("raw", "Once upon <|im_end|> a"),), SHORT, pieces.append)
    assert "".join(pieces) == answer.text == "".join(f"word{n} " for n in range(12))
    assert (answer.evaluated_tokens, answer.completion_tokens, answer.finish_reason) == (4, 12, "stop")
    sent = server.last_request("/api/generate")
    assert (sent["raw"], sent["truncate"], sent["shift"]) == (True, False, False)
    assert "<|im_end|>" not in sent["prompt"]


CALLED = (
    Part("user", "Grade it."),
    Part("assistant", '{"points": 7}', function="grade"),
    Part("tool", "kept", function="grade"),
)


def test_calls_and_their_results_reach_the_server(engine: OllamaEngine, server: FakeOllama) -> None:
    engine.decode_text(CALLED, SHORT)
    _, call, result = server.last_request("/api/chat")["messages"]
    assert call["tool_calls"] == [{"function": {"name": "grade", "arguments": {"points": 7}}}]
    assert (result["role"], result["tool_name"], result["content"]) == ("tool", "grade", "kept")


def test_an_answer_that_was_begun_is_not_continued(engine: OllamaEngine) -> None:
    with pytest.raises(InvalidPrompt, match="can't continue an answer"):
        engine.decode_text((*CALLED, Part("assistant", "It is")), SHORT)


@pytest.mark.parametrize(
    "template", ["{{ .Prompt }}", '{{ range .Messages }}{{ if eq .Role "user" }}{{ .Content }}{{ end }}{{ end }}']
)
def test_a_system_message_that_the_template_would_drop_is_refused(server: FakeOllama, template: str) -> None:
    server.habits.template = template
    engine = load(server)
    with pytest.raises(InvalidPrompt, match="leaves out system messages"):
        engine.decode_text(TALK, SHORT)
    assert engine.decode_text(TALK[1:], SHORT).finish_reason == "stop"
    engine.close()


def test_every_sampling_parameter_reaches_the_server_and_its_own_defaults_are_neutral(
    engine: OllamaEngine, server: FakeOllama
) -> None:
    sampling = Sampling(max_tokens=7, temperature=0.3, top_p=0.8, top_k=11, seed=5, stop=("END", ""))
    engine.decode_text(user_prompt("", "hello"), sampling)
    asked = server.last_request("/api/chat")
    assert asked["options"] == {
        "num_ctx": 1024,
        "num_predict": 7,
        "temperature": 0.3,
        "top_p": 0.8,
        "top_k": 11,
        "seed": 5,
        "stop": ["<|im_end|>", "END"],  # a request's words take the place of the model's own
        "min_p": 0.0,
        "typical_p": 1.0,
        "repeat_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
    }
    assert (asked["truncate"], asked["shift"], asked["keep_alive"]) == (False, False, "60m")
    assert asked["messages"] == [{"role": "user", "content": "hello"}]
    engine.decode_text(user_prompt("", "hello"), SHORT)
    assert "stop" not in server.last_request("/api/chat")["options"]


def test_a_schema_travels_as_the_format_and_a_server_that_ignores_it_is_found_out(
    engine: OllamaEngine, server: FakeOllama
) -> None:
    schema = {"type": "object", "properties": {"points": {"type": "integer"}}}
    sampling = Sampling(max_tokens=64, json_schema=json.dumps(schema))
    assert json.loads(engine.decode_text(user_prompt("", "grade"), sampling).text) == {"points": 3}
    assert server.last_request("/api/chat")["format"] == schema
    server.habits.keeps_schemas = False
    with pytest.raises(InvalidSchema, match="did not follow the JSON schema"):
        engine.decode_text(user_prompt("", "grade"), sampling)


def test_a_schema_that_can_not_be_enforced_is_refused(engine: OllamaEngine) -> None:
    with pytest.raises(InvalidSchema, match="Unrecognized schema"):
        engine.decode_text(user_prompt("", "grade"), Sampling(max_tokens=8, json_schema='{"type": "nonsense"}'))


@pytest.mark.parametrize(
    "habits",
    [{}, {"knows_truncate": False}, {"knows_truncate": False, "cuts_to_half": True}],
    ids=["a server that can be told", "one that cuts to the context", "one that cuts to half of it"],
)
def test_a_prompt_longer_than_the_context_is_an_error_and_never_cut(
    engine: OllamaEngine, server: FakeOllama, habits: dict[str, Any]
) -> None:
    for name, value in habits.items():
        setattr(server.habits, name, value)
    with pytest.raises(ContextExceeded):
        engine.decode_text(user_prompt("", "def mean(values: list[float]) -> float: " * 400), SHORT)


@pytest.mark.public_report("ollama/ollama 17427")
def test_a_prompt_cut_to_half_is_told_by_its_neighbours_where_the_sample_expects_too_few_tokens(
    engine: OllamaEngine, server: FakeOllama
) -> None:
    # Given a server that cuts a prompt longer than its context to half of it and two tokens more, and reports that
    # count (Ollama 0.32 and 0.33, unless they are told not to: github.com/ollama/ollama/issues/17427)
    server.habits.knows_truncate, server.habits.cuts_to_half = False, True
    # And prompts of a letter for each token, of which the sample has many more
    neighbour = engine.decode_text(user_prompt("", "x " * 300), SHORT)
    assert neighbour.evaluated_tokens == 300 + TEMPLATE_TOKENS
    # When one is a little longer than the context
    with pytest.raises(ContextExceeded, match="cut a prompt"):
        engine.decode_text(user_prompt("", "x " * 1100), SHORT)
    # Then it is refused, and one that really has half as many tokens as the context is not
    whole = engine.decode_text(user_prompt("", "x " * (514 - TEMPLATE_TOKENS)), SHORT)
    assert whole.evaluated_tokens == 514


@pytest.mark.public_report("ollama/ollama 17427", "ollama/ollama 17889")
@pytest.mark.parametrize("text", ["x " * 1100, "\u8bed " * 1100], ids=["letters", "Chinese"])
def test_the_first_prompt_that_is_cut_to_half_is_refused_whatever_its_density(
    engine: OllamaEngine, server: FakeOllama, text: str
) -> None:
    # Given no neighbours yet, and a server that cuts to num_keep + (num_ctx - num_keep) / 2, where num_keep is 4
    server.habits.knows_truncate, server.habits.cuts_to_half = False, True
    # Then a count that nothing confirms is none of a whole prompt
    with pytest.raises(ContextExceeded, match="seems to have cut"):
        engine.decode_text(user_prompt("", text), SHORT)


@pytest.mark.public_report("ollama/ollama server/prompt.go")
def test_a_prompt_whose_first_messages_were_dropped_is_refused_at_any_count(
    engine: OllamaEngine, server: FakeOllama
) -> None:
    # Given a server that drops messages from the front until the rest fits (chatPrompt, with truncate)
    server.habits.knows_truncate, server.habits.drops_messages = False, True
    assert engine.decode_text(user_prompt("", "x " * 300), SHORT).evaluated_tokens == 300 + TEMPLATE_TOKENS
    # When the first two messages were dropped, and one of 300 tokens is left
    parts = (Part("user", "y " * 800), Part("assistant", "yes"), Part("user", "x " * 300))
    with pytest.raises(ContextExceeded, match="seems to have cut"):
        engine.decode_text(parts, SHORT)


def test_long_runs_of_one_character_and_other_scripts_are_not_taken_for_a_cut_prompt(engine: OllamaEngine) -> None:
    # Given neighbours of five bytes a token
    prose = "word " * 400
    assert engine.decode_text(user_prompt("", prose), SHORT).evaluated_tokens == 400 + TEMPLATE_TOKENS
    # Then whole prompts of many letters for each token are answered, since a run counts for little
    for text in (prose + " " * 4000, prose + "-" * 4000, "\u8bed\u8a00 " * 400):
        assert engine.decode_text(user_prompt("", text), SHORT).finish_reason == "stop"


def test_prompt_and_answer_must_fit_together(engine: OllamaEngine) -> None:
    prompt = "word " * 900
    fitting = 1024 - 900 - TEMPLATE_TOKENS
    assert (
        engine.decode_text(user_prompt("", prompt), Sampling(max_tokens=fitting)).evaluated_tokens
        == 900 + TEMPLATE_TOKENS
    )
    with pytest.raises(ContextExceeded, match="909 tokens"):
        engine.decode_text(user_prompt("", prompt), Sampling(max_tokens=fitting + 1))
    with pytest.raises(ContextExceeded, match="max_tokens is 2,000"):
        engine.decode_text(user_prompt("", "hi"), Sampling(max_tokens=2000))


def test_closing_ends_a_decode_in_progress_and_unloads_nothing(engine: OllamaEngine, server: FakeOllama) -> None:
    server.habits.hang.clear()
    with pytest.raises(EngineUnavailable, match="closed"):
        engine.decode_text(user_prompt("", "go"), SHORT, lambda _: engine.close())
    engine.close()
    with pytest.raises(EngineUnavailable, match="closed"):
        engine.decode_text(user_prompt("", "go"), SHORT)
    assert all(body.get("keep_alive") != 0 for _, body in server.requests)


def test_what_may_pass_is_an_unavailable_engine(engine: OllamaEngine, server: FakeOllama) -> None:
    server.habits.fails_with = (500, "model runner has unexpectedly stopped")
    with pytest.raises(EngineUnavailable, match="unexpectedly stopped"):
        engine.decode_text(user_prompt("", "go"), SHORT)
    server.habits.fails_with = None
    server.habits.done_reason = "unload"
    with pytest.raises(EngineUnavailable, match="unload"):
        engine.decode_text(user_prompt("", "go"), SHORT)
    server.models.clear()
    with pytest.raises(EngineUnavailable, match="not found"):
        engine.decode_text(user_prompt("", "go"), SHORT)
    server.close()
    with pytest.raises(EngineUnavailable, match="does not answer"):
        engine.decode_text(user_prompt("", "go"), SHORT)


def test_what_is_wrong_at_the_start_is_said_in_one_sentence(server: FakeOllama) -> None:
    with pytest.raises(ConfigError, match=r"it has: qwen3-coder:30b\); run `ollama pull llama9` there"):
        load(server, model="llama9")
    with pytest.raises(ConfigError, match="trained for a context of 4,096"):
        load(server, context=TRAINED_CONTEXT + 1)
    server.habits.loads_context = 512
    with pytest.raises(ConfigError, match="a context of 512, not 1,024"):
        load(server)
    server.close()
    with pytest.raises(ConfigError, match="is it running there"):
        load(server)


@pytest.mark.parametrize("weights", ["127.0.0.1:11434/m", "http:///m", "http://127.0.0.1:11434", "ollama:", "m.gguf"])
def test_weights_that_name_no_server_or_no_model_are_refused(weights: str) -> None:
    with pytest.raises(ConfigError):
        parse_weights(weights)


def test_weights_name_a_server_and_a_model() -> None:
    assert parse_weights("http://127.0.0.1:11434/hf.co/org/m:Q4") == ("http://127.0.0.1:11434", "hf.co/org/m:Q4")
    assert parse_weights("ollama:qwen3-coder:30b") == ("", "qwen3-coder:30b")
    assert model_stops('stop   "<|a|>"\nstop      "\\"b\\""\ntop_k  20\nstop plain') == ["<|a|>", '"b"', "plain"]


def test_the_device_is_where_ollama_put_the_model(server: FakeOllama, caplog: pytest.LogCaptureFixture) -> None:
    devices = []
    with caplog.at_level(logging.WARNING):
        for in_gpu in (18_000_000_000, 9_000_000_000, 0):
            server.habits.size_vram = in_gpu
            engine = load(server)
            devices.append(engine.info.device)
            engine.close()
    assert devices == ["gpu", "gpu", "cpu"]
    assert "only 50%" in caplog.text


def test_it_declares_that_it_hands_nothing_over(engine: OllamaEngine) -> None:
    assert "can't give out a KV cache" in prove(engine, engine)
    assert (engine.info.layout, engine.info.fingerprint) == (None, "")
    assert engine.tokenize(user_prompt("a", "b"), 0.0).ids == ()
    assert engine.count_tokens("word " * 100) > 20


def test_a_job_crosses_the_prefill_stage_untouched_and_its_result_says_why(server: FakeOllama, tmp_path: Path) -> None:
    # Given a pipeline whose model is served by Ollama
    weights = {"ollama": f"{server.url}/{MODEL}"}
    settings = load_settings({"models": {"m": {"context": 1024, "weights": weights}}}, cwd=tmp_path, user_dir=tmp_path)
    # When a prompt is asked
    with connect(settings, ["m"]) as client:
        *events, result = client.stream("m", "how many points", Sampling(max_tokens=32))
    # Then the answer came in pieces, and the result says who did the prompt, and why
    assert isinstance(result, JobResult)
    assert (result.state, len(result.text.split())) == ("succeeded", 12)
    assert "".join(event.text for event in events if not isinstance(event, JobResult)) == result.text
    report = result.decode
    assert (report.engine, report.kv_transfer) == ("ollama", "none")
    assert report.why_none == "the ollama engine can't give out a KV cache"
    assert report.evaluated_tokens == report.prompt_tokens == TEMPLATE_TOKENS + 3
    assert (result.prefill.engine, result.prefill.computed_tokens) == ("ollama", 0)


def test_a_job_that_passed_as_text_is_tokenized_by_a_decoder_of_another_engine(engine: OllamaEngine) -> None:
    # Given Ollama at the prefill stage, and an engine with ids of its own at the other
    with Pipeline() as pipeline:
        pipeline.start_prefill(cast(WatchedEngine, engine))
        pipeline.start_decode()
        # When a job crosses both
        job = pipeline.job()
        result = pipeline.run(job)
        # Then its answer is that engine's, which did the prompt
        assert result.text == pipeline.undisturbed_text(job)
        assert (result.decode.kv_transfer, result.decode.engine) == ("none", "simulated")
        assert result.decode.why_none == "engine ollama can't export a KV cache"
        assert result.decode.evaluated_tokens == result.decode.prompt_tokens > 10
