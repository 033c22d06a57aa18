"""`kvasir run`: any batch of prompts; a line that can't be used gets its reason and the others run."""

import json
from pathlib import Path
from typing import Any

import pytest

from kvasir import cli
from messages.jobs import Part
from producers.batch.openai_body import Defaults
from producers.batch.prompt_lines import PromptLine, read_lines

MODEL = "tiny:1b"


@pytest.fixture(autouse=True)
def folder(configured_folder: Path) -> Path:
    return configured_folder


def openai(custom_id: str, text: str = "Hello.", **body: Any) -> dict[str, Any]:
    messages = [{"role": "system", "content": "You translate."}, {"role": "user", "content": text}]
    request = {"model": MODEL, "messages": messages, "max_tokens": 20, **body}
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": request}


def write(folder: Path, *lines: Any) -> Path:
    path = folder / "prompts.jsonl"
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines), "utf-8")
    return path


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def lines(folder: Path, *given: Any) -> list[PromptLine]:
    return list(read_lines(write(folder, *given), "b", b"s" * 16, lambda _name: Defaults(MODEL, 100, 0.2, 0.9)))


def made_older(out: Path, form: int) -> None:
    """Give the batch the job ids and the form of an earlier version."""
    manifest = json.loads((out / "batch.json").read_text("utf-8"))
    assert manifest["prompt_form"] > form
    manifest["prompt_form"] = form
    (out / "batch.json").write_text(json.dumps(manifest), "utf-8")
    for path in (out / name for name in ("batch.json", "submitted.jsonl", "results.jsonl")):
        text = path.read_text("utf-8")
        for entry in manifest["jobs"]:
            text = text.replace(entry["job_id"], entry["job_id"][::-1])
        path.write_text(text, "utf-8")


@pytest.mark.parametrize("form", [2, 3])
def test_from_a_folder_of_an_older_form_nothing_new_is_sent_and_its_answers_stay(
    folder: Path, capsys: pytest.CaptureFixture[str], form: int
) -> None:
    # Given a batch of an earlier version, all of it answered
    write(folder, openai("a"), {"id": "b", "prompt": "Review this.", "max_tokens": 10})
    command = ["run", "prompts.jsonl", "--model", MODEL, "--out", "out", "--quiet"]
    assert cli.run_command(command) == 0
    out = folder / "out"
    made_older(out, form)
    sent = (out / "submitted.jsonl").read_bytes(), json.loads((out / "batch.json").read_text("utf-8"))
    # When it is run again, the answers are shown as they were
    (out / "answers.jsonl").unlink()
    assert cli.run_command(command) == 0
    assert [row["custom_id"] for row in rows(out / "answers.jsonl")] == ["a", "b"]
    # And if one was never sent, it is not sent now, and a sentence says why
    for name in ("submitted.jsonl", "results.jsonl"):
        first = (out / name).read_text("utf-8").splitlines(keepends=True)[0]
        (out / name).write_text(first, "utf-8")
    assert cli.run_command(command) == 1
    assert "of an older form" in capsys.readouterr().err
    assert len(rows(out / "answers.jsonl")) == len(rows(out / "submitted.jsonl")) == 1
    assert json.loads((out / "batch.json").read_text("utf-8")) == sent[1]
    assert cli.run_command([*command, "--retry-failed"]) == cli.EXIT_USAGE


def test_lines_in_and_answers_out_are_the_batch_apis(folder: Path) -> None:
    write(folder, openai("a"), {"id": "b", "prompt": "Review this.", "max_tokens": 10}, openai("c", n=2))

    assert cli.run_command(["run", "prompts.jsonl", "--model", MODEL, "--out", "out", "--quiet"]) == 0

    answers = rows(folder / "out/answers.jsonl")
    assert [row["custom_id"] for row in answers] == ["a", "b", "c"]
    assert [len(row["response"]["body"]["choices"]) for row in answers] == [1, 1, 2]
    for row in answers:
        assert row["error"] is None
        assert row["response"]["status_code"] == 200
        assert row["response"]["body"]["choices"][0]["message"]["content"].strip()
        used = row["response"]["body"]["usage"]
        assert used["total_tokens"] == used["prompt_tokens"] + used["completion_tokens"] > 0
    assert rows(folder / "out/errors.jsonl") == []


def test_a_rerun_runs_nothing_again_and_a_new_line_alone(folder: Path) -> None:
    write(folder, openai("a"))
    cli.run_command(["run", "prompts.jsonl", "--out", "out", "--quiet"])
    first = (folder / "out/results.jsonl").read_text("utf-8")

    assert cli.run_command(["run", "prompts.jsonl", "--out", "out", "--quiet"]) == 0
    assert (folder / "out/results.jsonl").read_text("utf-8") == first

    write(folder, openai("a"), openai("b"))
    cli.run_command(["run", "prompts.jsonl", "--out", "out", "--quiet"])
    assert (folder / "out/results.jsonl").read_text("utf-8").startswith(first)
    assert len(rows(folder / "out/results.jsonl")) == 2


NOT_ENFORCED = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"uniqueItems": True}}}
CALL = {"id": "1", "type": "function", "function": {"name": "look", "arguments": "{}"}}


def test_bad_lines_are_rows_with_a_reason_and_the_rest_is_answered(folder: Path) -> None:
    write(
        folder,
        openai("good"),
        "not json",
        openai("good"),
        openai("other", model="nobody:1b"),
        {"prompt": "No id."},
        openai("chat", messages=[{"role": "user", "content": "Hi"}, {"role": "assistant", "tool_calls": [CALL]}]),
        openai("hot", temperature=9),
        openai("long", text="x" * (1 << 20)),
        "",
    )

    assert cli.run_command(["run", "prompts.jsonl", "--out", "out", "--quiet"]) == 1

    assert [row["custom_id"] for row in rows(folder / "out/answers.jsonl")] == ["good"]
    errors = {row["custom_id"]: row["error"] for row in rows(folder / "out/errors.jsonl")}
    assert len(rows(folder / "out/errors.jsonl")) == 7
    assert {error["code"] for error in errors.values()} == {"invalid_request"}
    reasons = {name: error["message"] for name, error in errors.items()}
    assert "not JSON" in reasons["line 2"]
    assert "an earlier line has the same custom_id" in reasons["line 3"]
    assert "not configured" in reasons["other"]
    assert "no custom_id" in reasons["line 5"]
    assert "ends with a function call" in reasons["chat"]
    assert "temperature" in reasons["hot"]
    assert "longer than 1 MiB" in reasons["long"]


def test_a_conversation_keeps_its_roles_and_is_answered(folder: Path) -> None:
    said = [("developer", "Be brief."), ("system", "Be kind."), ("user", "Hi."), ("assistant", "Yes?"), ("user", "Go.")]
    messages = [{"role": role, "content": text} for role, text in said]
    given = openai("a", messages=messages)

    [line] = lines(folder, given)

    assert line.job is not None
    assert [(part.role, part.text, part.scope) for part in line.job.prompt] == [
        ("system", "Be brief.", "class"),
        ("system", "\n\nBe kind.", "class"),
        ("user", "Hi.", "own"),
        ("assistant", "Yes?", "own"),
        ("user", "Go.", "own"),
    ]
    assert cli.run_command(["run", "prompts.jsonl", "--out", "out", "--quiet"]) == 0
    assert rows(folder / "out/answers.jsonl")[0]["response"]["body"]["choices"][0]["message"]["content"]


def test_a_short_lines_job_is_what_it_was_before_lines_kept_roles(folder: Path) -> None:
    [line] = lines(folder, {"id": "a", "prompt": "Review this.", "shared": "You review.", "max_tokens": 10})

    assert line.job is not None
    assert line.job.job_id == "2389219fbbc2835a512006ad7d53a02e"


def test_system_messages_are_the_shared_part_and_options_become_sampling(folder: Path) -> None:
    schema = {"type": "object", "properties": {"x": {"type": "integer"}}}
    format_ = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}

    [line] = lines(folder, openai("a", temperature=0, top_p=0.5, seed=7, stop="END", response_format=format_))

    assert line.job is not None
    assert line.job.prompt == (Part("system", "You translate.", "class"), Part("user", "Hello."))
    sampling = line.job.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p, sampling.seed) == (20, 0, 0.5, 7)
    assert sampling.stop == ("END",)
    assert json.loads(sampling.json_schema) == schema | {"additionalProperties": False}


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ({"id": "a"}, "neither 'body'"),
        ({"id": "a", "prompt": " "}, "must not be empty"),
        ({"id": "a", "prompt": "x", "shared": 3}, "must be text"),
        ("[]", "not an object"),
        (openai("a", messages=[]), "list of objects"),
        (openai("a", messages=[{"role": "tool", "content": "4"}]), "must give an earlier tool call's id"),
        (openai("a", messages=[{"role": "function", "content": "4"}]), "must have one of these roles"),
        (openai("a", messages=[{"role": "assistant", "tool_calls": 5}]), "tool_calls must have a function"),
        ({**openai("a"), "method": "GET"}, "only POST is served"),
        ({**openai("a"), "url": "/v1/completions"}, "prompt must be a single non-empty string"),
        (openai("a", response_format=NOT_ENFORCED), "at $: uniqueItems"),
        (json.dumps(openai("a", "x" * (8 << 20))), "longer than 8 MiB"),
        (openai("a", messages=[{"role": "user", "content": [{"type": "image_url"}]}]), "images are not supported"),
        (openai("a", response_format="json"), "response_format"),
        (openai("a", max_tokens=0), "max_tokens"),
        (openai("a", stop=3), "stop"),
        ({**openai("a"), "url": "/v1/embeddings"}, "only /v1/chat/completions"),
        ({**openai("a"), "body": []}, "body is not an object"),
        (openai("a\ud800"), "custom_id contains half a character"),
        ({"id": "a\ud800", "prompt": "x"}, "custom_id contains half a character"),
        ({"id": "a", "prompt": "x\ud800y"}, "the line contains half a character"),
        (openai("a", "d\ud800up"), "the line contains half a character"),
        (openai("a", stop="\ud800"), "the line contains half a character"),
        ({**openai("a"), "custom_id": 5}, "custom_id must be text"),
        ({**openai("a"), "custom_id": ["a"]}, "custom_id must be text"),
        ({**openai("a"), "custom_id": None}, "no custom_id"),
        ({"id": True, "prompt": "x"}, "custom_id must be text"),
    ],
)
def test_each_thing_that_is_wrong_with_a_line_is_said(folder: Path, line: Any, why: str) -> None:
    [found] = lines(folder, line)

    assert found.job is None
    assert why in found.problem


def test_an_id_that_can_not_be_written_is_named_by_its_line_and_others_stay(folder: Path) -> None:
    write(
        folder, {"id": "a\ud800", "prompt": "x"}, {"id": "b", "prompt": "\ud800"}, {"id": 5, "prompt": "\ud83d\ude00"}
    )

    assert cli.run_command(["run", "prompts.jsonl", "--model", MODEL, "--out", "out", "--quiet"]) == 1

    assert [row["custom_id"] for row in rows(folder / "out/errors.jsonl")] == ["line 1", "b"]
    assert [row["custom_id"] for row in rows(folder / "out/answers.jsonl")] == ["5"]


@pytest.mark.parametrize("opened", ['{"a":', "["])
def test_a_line_of_any_depth_is_read_or_has_a_reason(folder: Path, opened: str) -> None:
    # Around the depth that Python reads (994 in 3.11, 9,998 in 3.13): all of it is looked through
    closed = {"[": "]"}.get(opened, "}")
    depths = (*range(800, 1001), 1400, 1500, 9_900, 9_990, 9_999, 100_000)
    deep = [f'{{"id": "{n}", "prompt": "x", "a": {opened * n}1{closed * n}}}' for n in depths]

    found = lines(folder, *deep)

    assert all(each.job or "not JSON" in each.problem for each in found[:-1])
    assert found[-1].job is None
    assert "too many values" in found[-1].problem  # counted before it is parsed


def test_a_file_without_prompts_and_a_wrong_model_are_the_commands_mistakes(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(folder, "")
    assert cli.run_command(["run", "prompts.jsonl", "--out", "out"]) == cli.EXIT_USAGE
    assert "contains no prompt" in capsys.readouterr().err
    write(folder, openai("a"))
    assert cli.run_command(["run", "prompts.jsonl", "--out", "out", "--model", "nobody"]) == cli.EXIT_USAGE
    assert cli.run_command(["run", "missing.jsonl", "--out", "out"]) == cli.EXIT_USAGE


def test_grading_commands_say_that_this_batch_is_none_of_theirs(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(folder, openai("a"))
    cli.run_command(["run", "prompts.jsonl", "--out", "out", "--quiet"])

    assert cli.run_command(["results", "out"]) == cli.EXIT_USAGE
    assert "kvasir run" in capsys.readouterr().err
