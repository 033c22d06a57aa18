"""What docs/how-to/gateway.md tells a reader to type, as it stands there, but for address and model."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.gateway import ServedGateway
from tests.support.pipeline import MODEL
from tests.support.processes import ROOT
from tests.support.waiting import wait_until

# They leave it to the end of their process to close what they opened.
pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

PAGE = (ROOT / "docs/how-to/gateway.md").read_text("utf-8")


def block(language: str, mark: str, served: ServedGateway) -> str:
    """The page's only block of this language with this mark."""
    (found,) = (text for text in re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL) if mark in text)
    return str(found).replace("http://127.0.0.1:8000", served.url).replace("kvasir-demo", MODEL)


@pytest.mark.parametrize("mark", ["for chunk in client", "from ollama", "from langchain_openai"])
def test_a_client_prints_the_answer(mark: str, standing: ServedGateway, capsys: pytest.CaptureFixture[str]) -> None:
    exec(block("python", mark, standing), {})
    assert len(capsys.readouterr().out.strip()) > 10


def test_curl_gets_the_answer(standing: ServedGateway) -> None:
    program = shutil.which("sh")
    assert program
    done = subprocess.run([program, "-c", block("", "What is a queue?", standing)], capture_output=True, timeout=30)
    assert json.loads(done.stdout)["choices"][0]["message"]["content"]


def test_a_batch_is_sent_and_its_answers_fetched(
    standing: ServedGateway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from openai import OpenAI

    monkeypatch.chdir(tmp_path)
    body = {"model": MODEL, "messages": [{"role": "user", "content": "What is a queue?"}]}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}
    Path("prompts.jsonl").write_text(json.dumps(line) + "\n")
    send, fetch = block("python", "client.files.create", standing).split("# later, from any process\n")
    with OpenAI(base_url=f"{standing.url}/v1", api_key="x", timeout=30) as client:
        there = {"client": client}
        exec(send, there)
        batch = there["batch"].id  # type: ignore[attr-defined]
        wait_until(lambda: client.batches.retrieve(batch).status == "completed", "it is over")
        exec(fetch, there)
    assert json.loads(capsys.readouterr().out)["custom_id"] == "a"
