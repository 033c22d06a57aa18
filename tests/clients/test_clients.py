"""Libraries that people use, unmodified and as their documentation calls them: they get another URL and nothing else.

Each runs in an environment of its own (`tests.support.scratch_env`). What they send by default was read in their
sources: instructor and pydantic-ai force a function, llama-index's `complete` and LangChain's `OpenAI` ask
/v1/completions, lm-eval puts a `type` into each message, LiteLLM and Vercel's SDK send fields that say nothing.
"""

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import scratch_env
from tests.support.processes import environment, serving

pytestmark = pytest.mark.system

MODEL = "tiny:1b"
KINDS = ("chat", "completion")  # of OpenAI's
PROGRAMS = Path(__file__).parent / "programs"
PROMPTFOO_PACKAGES = ("promptfoo@0.121.20", "@libsql/linux-x64-gnu@0.5.29")
AI_PACKAGES = ("ai@6.0.326", "@ai-sdk/openai@3.0.141", "@ai-sdk/openai-compatible@2.0.92", "zod@4.6.7")


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serving(tmp_path_factory.mktemp("gateway"), MODEL) as url:
        yield url


def run(command: list[str], folder: Path, **variables: str) -> str:
    """What a program wrote; it must have ended well."""
    environ = environment(folder) | {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "DO_NOT_TRACK": "1"} | variables
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environ, cwd=folder)
    assert done.returncode == 0, f"{done.stdout[-2000:]}{done.stderr[-4000:]}"
    return done.stdout


def found_by(release: str, name: str, url: str, folder: Path) -> dict[str, Any]:
    """What one of the programs came back with."""
    program = str(PROGRAMS / f"{name}_client.py")
    lines = run([str(scratch_env.python(release)), program, url, MODEL], folder).splitlines()
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def test_instructor_by_a_function_and_by_a_schema(url: str, tmp_path: Path) -> None:
    found = found_by("instructor-1.17.0", "instructor", url, tmp_path)
    assert set(found) == {"TOOLS", "TOOLS streamed", "JSON_SCHEMA", "JSON_SCHEMA streamed"}
    for person in found.values():
        assert (type(person["name"]), type(person["age"]), len(person)) == (str, int, 2)


def test_pydantic_ai_by_its_output_type_and_natively(url: str, tmp_path: Path) -> None:
    found = found_by("pydantic-ai-2.38.0", "pydantic_ai", url, tmp_path)
    assert found.pop("text")
    assert set(found) == {"output_type", "NativeOutput", "streamed"}
    for city in found.values():
        assert (type(city["name"]), type(city["people"]), len(city)) == (str, int, 2)


def test_llama_index_completes_streams_and_is_structured(url: str, tmp_path: Path) -> None:
    found = found_by("llama-index-0.14.25", "llama_index", url, tmp_path)
    for name in ("structured", "Ollama structured"):
        assert set(found.pop(name)) == {"title", "songs"}
    assert len(found) == 6
    assert all(found.values())


def test_langchain_invokes_streams_and_is_structured_by_both_methods(url: str, tmp_path: Path) -> None:
    found = found_by("langchain-1.8.3", "langchain", url, tmp_path)
    for method in ("json_schema", "function_calling"):
        for name in (method, f"Ollama {method}"):
            grade = found.pop(name)
            assert (type(grade["letter"]), type(grade["points"])) == (str, int)
    assert [bool(text) for text in found.pop("texts")] == [True, True]
    assert len(found) == 4
    assert all(found.values())


def test_litellm_by_its_four_prefixes(url: str, tmp_path: Path) -> None:
    found = found_by("litellm-1.108.7", "litellm", url, tmp_path)
    assert [bool(text) for text in found.pop("texts")] == [True, True]
    for prefix in ("openai", "hosted_vllm", "ollama_chat", "ollama"):
        assert found[prefix]
        assert found[f"{prefix} streamed"]
        assert set(json.loads(found[f"{prefix} structured"])) == {"letter", "points"}


def test_llm_prompts_streams_completes_and_keeps_a_schema(url: str, tmp_path: Path) -> None:
    models = [
        {"model_id": "kv", "model_name": MODEL, "api_base": f"{url}/v1", "supports_schema": True},
        {"model_id": "texts", "model_name": MODEL, "api_base": f"{url}/v1", "completion": True},
    ]
    (tmp_path / "extra-openai-models.yaml").write_text(json.dumps(models))  # YAML reads JSON
    program = str(scratch_env.folder("llm-0.36") / "bin" / "llm")

    def asked(*words: str) -> str:
        return run([program, *words, "--key", "x"], tmp_path, LLM_USER_PATH=str(tmp_path)).strip()

    assert asked("-m", "kv", "What is a queue?")
    assert asked("-m", "kv", "--no-stream", "-s", "Be brief.", "What is a queue?")
    assert asked("-m", "texts", "Once upon a")
    assert set(json.loads(asked("-m", "kv", "--schema", "name, age int", "Ada"))) == {"name", "age"}


def test_vercels_sdk_generates_text_and_objects(url: str, tmp_path: Path) -> None:
    folder = scratch_env.node_modules("ai-6.0.326", AI_PACKAGES)
    (tmp_path / "node_modules").symlink_to(folder / "node_modules")
    program = shutil.copy(PROGRAMS / "ai_client.mjs", tmp_path)
    found = json.loads(run(["node", str(program), url, MODEL], tmp_path).splitlines()[-1])
    for kind in ("openai", "structured"):
        assert set(found.pop(f"{kind} generateObject")) == {"letter", "points"}
    assert len(found) == 6
    assert all(found.values())


def test_promptfoo_evaluates(url: str, tmp_path: Path) -> None:
    folder = scratch_env.node_modules("promptfoo-0.121.20", PROMPTFOO_PACKAGES)
    server = {"apiBaseUrl": f"{url}/v1", "apiKey": "x"}
    providers: list[dict[str, Any]] = [{"id": f"openai:{kind}:{MODEL}", "config": server} for kind in KINDS]
    evaluation = {
        "prompts": ["What is {{thing}}?"],
        "providers": [*providers, {"id": f"ollama:chat:{MODEL}"}],
        "tests": [{"vars": {"thing": "a queue"}, "assert": [{"type": "javascript", "value": "output.length > 0"}]}],
    }
    (tmp_path / "promptfooconfig.yaml").write_text(json.dumps(evaluation))
    program = str(folder / "node_modules" / ".bin" / "promptfoo")
    quiet = {"PROMPTFOO_DISABLE_TELEMETRY": "1", "PROMPTFOO_DISABLE_UPDATE": "1", "PROMPTFOO_CONFIG_DIR": str(tmp_path)}
    run([program, "eval", "--no-cache", "-o", "out.json"], tmp_path, OLLAMA_BASE_URL=url, **quiet)
    counts = json.loads((tmp_path / "out.json").read_text())["results"]["stats"]
    assert (counts["successes"], counts["failures"], counts["errors"]) == (3, 0, 0)


@pytest.mark.parametrize(
    ("model", "route", "more"),
    [
        ("local-chat-completions", "chat/completions", ["--apply_chat_template"]),
        ("local-completions", "completions", []),
    ],
)
def test_lm_eval_generates(url: str, tmp_path: Path, model: str, route: str, more: list[str]) -> None:
    rows = [{"q": f"What is a {name}?", "a": "A line."} for name in ("queue", "stack")]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = {
        "task": "queues",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(tmp_path / "rows.jsonl")}},
        "test_split": "test",
        "output_type": "generate_until",
        "doc_to_text": "{{q}}",
        "doc_to_target": "{{a}}",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 16, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
    }
    (tmp_path / "queues.yaml").write_text(json.dumps(task))
    options = f"model={MODEL},base_url={url}/v1/{route},max_retries=1,tokenized_requests=False,tokenizer_backend=None"
    program = str(scratch_env.folder("lm-eval-0.4.13") / "bin" / "lm_eval")
    words = [program, "run", "--model", model, "--model_args", options, "--tasks", "queues", "--log_samples"]
    words += ["--include_path", str(tmp_path), "--output_path", str(tmp_path / "out"), *more]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "OPENAI_API_KEY": "x"}

    run(words, tmp_path, **offline)

    (samples,) = (tmp_path / "out").rglob("samples_queues*.jsonl")
    answers = [json.loads(row)["resps"][0][0] for row in samples.read_text().splitlines()]
    assert len(answers) == len(rows)
    assert all(answers)
