"""The team's earlier scripts run as they are written in its documents: only the import finds another module."""

import asyncio
import json
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from kvasir import compat, load_settings
from kvasir.compat import (
    BusinessAnalyticsGraderV2,
    DisaggregatedClient,
    DisaggregatedInference,
    GenerationFailed,
    grade_submission,
    resolve_model,
)
from messages.errors import ConfigError, RubricError

TOML = """
[grading]
code_model = "qwen3-coder:30b"
feedback_model = "gpt-oss:120b"
[models."qwen3-coder:30b"]
engine = "simulated"
context = 32768
weights = { simulated = "sim:scale=0,answer=12" }
[models."gpt-oss:120b"]
engine = "simulated"
context = 32768
weights = { simulated = "sim:scale=0,answer=12" }
"""

# The technical documentation, "Step 6: Initialize Client".
WITH_A_PATH = """
from disaggregated_client import DisaggregatedClient

# Initialize once
client = DisaggregatedClient('disaggregated_inference/config_current.json')

# Use for inference
response, metrics = client.generate(
    model="qwen3-coder:30b",
    prompt="Your prompt here",
    max_tokens=2000
)

print(f"Response: {response}")
print(f"Prefill: {metrics['prefill_time']:.2f}s @ {metrics['prefill_speed']:.0f} tok/s")
print(f"Decode: {metrics['decode_time']:.2f}s @ {metrics['decode_speed']:.0f} tok/s")
"""
# The same, "Phase 1: Request Initiation".
WITHOUT_A_PATH = """
from disaggregated_client import DisaggregatedClient

client = DisaggregatedClient()
response, metrics = client.generate(
    model="qwen3-coder:30b",
    prompt="Analyze this code...",
    max_tokens=2000
)
"""
# The same, "Parallel Execution Pattern", with its two lines of set-up.
BOTH_MODELS = """
from concurrent.futures import ThreadPoolExecutor
from disaggregated_client import DisaggregatedClient
client, executor = DisaggregatedClient(), ThreadPoolExecutor(2)
code_analysis_prompt, feedback_prompt = "Analyze", "Give feedback"

future_code = executor.submit(
    client.generate,
    model="qwen3-coder:30b",
    prompt=code_analysis_prompt
)

future_feedback = executor.submit(
    client.generate,
    model="gpt-oss:120b",
    prompt=feedback_prompt
)

# Both run in parallel!
code_analysis = future_code.result()
feedback = future_feedback.result()
executor.shutdown()
"""
# The Ollama set-up, "Testing".
WITH_URLS = """
from disaggregated_client import DisaggregatedClient
client = DisaggregatedClient(
    'http://169.254.150.103:11434',
    'http://169.254.150.102:11434',
    'qwen3-coder:30b'
)
result = client.generate('def hello():', max_tokens=100)
print(f'Response: {result[\"response\"][:100]}')
print(f'Time: {result[\"total_time\"]:.2f}s')
"""
# The complete-system page, "API Usage".
ORCHESTRATOR = """
from disaggregated_inference.orchestrator import DisaggregatedInference

config = {
    'prefill_servers': [
        {'host': '192.168.100.1', 'port': 8000, 'model': 'qwen'},
    ],
    'decode_servers': [
        {'host': '169.254.150.101', 'port': 8001, 'model': 'qwen'},
    ]
}

orchestrator = DisaggregatedInference(config)

result = await orchestrator.generate(
    prompt="def fibonacci(n):",
    model_type="qwen",
    max_tokens=100
)

print(result['response'])
print(f"Speed: {result['tokens_per_sec']:.1f} tok/s")
"""
THEIR_CONFIG = {
    "prefill_servers": [{"host": "169.254.150.103", "port": 8000, "model": "qwen", "name": "DGX Spark 1"}],
    "decode_servers": [{"host": "169.254.150.102", "port": 8001, "model": "qwen", "name": "Mac Studio 2"}],
}
METRICS = {
    *("prefill_time", "decode_time", "total_time", "prompt_tokens", "completion_tokens", "total_tokens"),
    *("prefill_speed", "decode_speed", "method", "prefill_server", "decode_server"),
}
RUBRIC = {"code_quality": {"points": 6, "description": "It runs."}, "business_insight": {"points": 4}}


@pytest.fixture(autouse=True)
def their_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where their scripts run: our kvasir.toml, their config_current.json, their modules' names."""
    (tmp_path / "kvasir.toml").write_text(TOML, "utf-8")
    (tmp_path / "disaggregated_inference").mkdir()
    path = tmp_path / "disaggregated_inference" / "config_current.json"
    path.write_text(json.dumps(THEIR_CONFIG), "utf-8")
    monkeypatch.chdir(tmp_path)
    for name in ("disaggregated_client", "disaggregated_inference", "disaggregated_inference.orchestrator"):
        monkeypatch.setitem(sys.modules, name, compat)
    return tmp_path


def run(script: str) -> dict[str, Any]:
    """What the script leaves in its variables; what it opened is closed."""
    names: dict[str, Any] = {}
    if "await " in script:
        body = f"async def main():\n{textwrap.indent(script, '    ')}\n    return locals()"
        exec(body, names)
        names = asyncio.run(names["main"]())
    else:
        exec(script, names)
    for name in ("client", "orchestrator"):
        if name in names:
            names[name].close()
    return names


@pytest.mark.parametrize("script", [WITH_A_PATH, WITHOUT_A_PATH])
def test_the_client_made_from_a_configuration_gives_text_and_metrics(script: str) -> None:
    left = run(script)

    assert left["response"].strip()
    assert left["metrics"].keys() == METRICS
    assert left["metrics"]["completion_tokens"] > 0
    assert left["metrics"]["method"] == "disaggregated_kv"


def test_two_models_work_at_the_same_time() -> None:
    left = run(BOTH_MODELS)

    assert left["code_analysis"][0].strip()
    assert left["feedback"][0].strip()


@pytest.mark.parametrize(("script", "figure"), [(WITH_URLS, "total_time"), (ORCHESTRATOR, "tokens_per_sec")])
def test_the_client_made_from_urls_and_the_orchestrator_give_one_dict(script: str, figure: str) -> None:
    result = run(script)["result"]

    assert result["response"].strip()
    assert result[figure] > 0


def test_a_failed_job_raises_and_makes_no_answer_up() -> None:
    with DisaggregatedClient() as client, pytest.raises(GenerationFailed, match="failed"):
        client.generate(model="qwen", prompt="x = 1; " * 60_000, max_tokens=10)


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("qwen", "qwen3-coder:30b"),
        ("gpt-oss", "gpt-oss:120b"),
        ("disaggregated:qwen3-coder:30b", "qwen3-coder:30b"),
        ("disaggregated:gpt-oss", "gpt-oss:120b"),
        ("gpt-oss:120b", "gpt-oss:120b"),
    ],
)
def test_short_names_and_the_prefix_resolve_through_the_configuration(name: str, model: str) -> None:
    assert resolve_model(load_settings(), name) == model


def test_a_short_name_of_two_models_means_the_one_that_grades(their_folder: Path) -> None:
    more = '\n[models."qwen3:4b"]\nengine = "simulated"\nweights = { simulated = "sim:scale=0" }\n'
    (their_folder / "kvasir.toml").write_text(TOML + more, "utf-8")
    assert resolve_model(load_settings(), "qwen") == "qwen3-coder:30b"

    (their_folder / "kvasir.toml").write_text(TOML.replace('code_model = "qwen3-coder:30b"', "") + more, "utf-8")
    with pytest.raises(ConfigError, match="could be qwen3-coder:30b or qwen3:4b"):
        resolve_model(load_settings(), "qwen")


def test_a_name_that_nothing_is_configured_for_is_an_error() -> None:
    with pytest.raises(ConfigError, match="not configured"):
        resolve_model(load_settings(), "disaggregated:llama3")


@pytest.mark.parametrize("config", [{}, {"prefill_servers": []}, {"prefill_servers": 1, "decode_servers": []}])
def test_a_configuration_of_another_form_is_refused(config: dict[str, Any], their_folder: Path) -> None:
    (their_folder / "other.json").write_text(json.dumps(config), "utf-8")

    with pytest.raises(ConfigError, match="must have the lists"):
        DisaggregatedInference(config)
    with pytest.raises(ConfigError, match="must have the lists"):
        DisaggregatedClient("other.json")


def test_a_url_without_a_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="two URLs and a model"):
        DisaggregatedClient("http://a", "http://b")


# --- grading


@pytest.fixture
def grader(their_folder: Path) -> BusinessAnalyticsGraderV2:
    (their_folder / "rubric.json").write_text(json.dumps(RUBRIC), "utf-8")
    return BusinessAnalyticsGraderV2("qwen", "gpt-oss", "http://localhost:11434", rubric_path="rubric.json")


def test_a_grade_comes_under_the_earlier_names(grader: BusinessAnalyticsGraderV2) -> None:
    result = grader.grade_submission(
        student_code="x <- mean(orders$amount)",
        student_markdown="Revenue grew.",
        template_code="# start here",
        solution_code="x <- mean(orders$amount, na.rm = TRUE)",
        assignment_info={"title": "Homework 4", "student_name": "Nobody"},
    )

    assert result["max_points"] == 10
    assert result["final_score"] == sum(result["component_scores"].values())
    assert set(result["component_scores"]) == {
        "technical_points",
        "business_points",
        "analysis_points",
        "communication_points",
        "bonus_points",
    }
    assert result["component_percentages"]["data_interpretation"] is None
    assert {"instructor_comments", "detailed_feedback"} == set(result["comprehensive_feedback"])
    assert {"code_strengths", "code_suggestions", "technical_observations"} == set(result["technical_analysis"])
    assert set(result["grading_stats"]) == {"qwen3-coder:30b", "gpt-oss:120b"}


def test_the_rubric_may_come_with_the_assignment() -> None:
    assert grade_submission("x <- 1", "Text.", assignment_info={"rubric": RUBRIC})["max_points"] == 10


def test_what_holds_nothing_has_no_points_and_what_has_no_room_has_no_grade(
    grader: BusinessAnalyticsGraderV2, their_folder: Path
) -> None:
    assert grader.grade_submission("", "")["final_score"] == 0

    (their_folder / "kvasir.toml").write_text(TOML.replace("32768", "1024"), "utf-8")
    with pytest.raises(ConfigError, match="has no room"):
        BusinessAnalyticsGraderV2(rubric_path="rubric.json").grade_submission("x <- 1", "Text.")


def test_a_rubric_is_needed_and_must_add_up() -> None:
    with pytest.raises(ConfigError, match="no rubric"):
        grade_submission("x <- 1", "Text.")
    wrong = {"assignment_info": {"total_points": 12}, "rubric_elements": {"code": {"max_points": 10}}}
    with pytest.raises(RubricError, match="'total' is 12, but the criteria add up to 10"):
        grade_submission("x <- 1", "Text.", assignment_info={"rubric": wrong})
