"""The example of `kvasir run` runs."""

import json
from pathlib import Path

import pytest

from examples.prompts.make import SENTENCES, lines
from kvasir import cli
from tests.support.processes import SIMULATED_MODEL, config_text


def test_every_sentence_is_answered_and_the_instructions_are_shared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "kvasir.toml").write_text(config_text({"tiny:1b": SIMULATED_MODEL}), "utf-8")
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines("tiny:1b")), "utf-8")

    assert cli.run_command(["run", "prompts.jsonl", "--out", "out", "--quiet"]) == 0

    answers = [json.loads(line) for line in (tmp_path / "out/answers.jsonl").read_text("utf-8").splitlines()]
    assert len(answers) == len(SENTENCES)
    cached = [answer["response"]["body"]["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers]
    assert sum(count > 0 for count in cached) >= len(SENTENCES) - 1
