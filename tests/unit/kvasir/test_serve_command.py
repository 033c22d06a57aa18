"""`kvasir serve` and `kvasir keys` as a person types them: a process, curl, signals."""

import json
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvasir import cli
from tests.support.processes import SIMULATED_MODEL, ModelEntry, RunningProcess, config_text, environment, gateway_url
from tests.support.servers import free_port
from tests.support.waiting import wait_until

MODEL = "tiny:1b"
SLOW = ModelEntry("simulated", "sim:scale=1,prefill=1000000,decode=20,answer=30", context=4096)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    (tmp_path / "kvasir.toml").write_text(config_text({MODEL: SIMULATED_MODEL, "slow:1b": SLOW}), "utf-8")
    return tmp_path


@pytest.fixture
def serving(folder: Path) -> Iterator[RunningProcess]:
    running = RunningProcess(["serve", "--port", "0"], environment(folder), folder)
    yield running
    running.kill()


def curl(url: str, *arguments: str) -> str:
    program = shutil.which("curl")
    assert program, "curl is in no folder of PATH"
    done = subprocess.run([program, "-sS", "-N", "--max-time", "20", *arguments, url], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_from_one_process_curl_gets_answers_and_sigterm_ends_it_in_good_order(
    serving: RunningProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    url = gateway_url(serving)
    ask: Any = {"model": MODEL, "messages": [{"role": "user", "content": "What is a queue?"}]}
    whole = json.loads(curl(f"{url}/v1/chat/completions", "-d", json.dumps(ask)))
    assert whole["choices"][0]["message"]["content"]
    assert curl(f"{url}/v1/chat/completions", "-d", json.dumps(ask | {"stream": True})).endswith("data: [DONE]\n\n")
    lines = curl(f"{url}/api/generate", "-d", json.dumps({"model": MODEL, "prompt": "What is a queue?"})).splitlines()
    assert json.loads(lines[-1])["done"]
    assert json.loads(curl(f"{url}/ready"))["ready"]
    assert 'kvasir_gateway_requests_total{status="200"}' in curl(f"{url}/metrics")

    port = url.rpartition(":")[2]
    assert cli.run_command(["serve", "--port", port, "--model", MODEL]) == 2
    assert f"can't listen on 127.0.0.1:{port}" in capsys.readouterr().err

    # What is under way may end by itself
    body = {"model": "slow:1b", "messages": ask["messages"], "stream": True}
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=30) as response:
        stream = response.iter_lines()
        wait_until(lambda: "content" in next(stream), "it streams")
        serving.send(signal.SIGTERM)
        assert [line for line in stream if line][-1] == "data: [DONE]"
    assert serving.wait() == 0
    assert "Traceback" not in serving.text()


def test_its_own_page_needs_no_key_and_counts_what_the_gateway_answered(folder: Path) -> None:
    assert cli.run_command(["keys", "add", "ada"]) == 0
    page = f"http://127.0.0.1:{free_port()}"
    command = ["serve", "--port", "0", "--model", MODEL, "--metrics-port", page.rpartition(":")[2]]
    running = RunningProcess(command, environment(folder), folder)
    try:
        refused = json.loads(curl(f"{gateway_url(running)}/v1/models"))
        assert refused["error"]["code"] == "invalid_api_key"
        assert 'kvasir_gateway_requests_total{status="401"} 1.0' in curl(f"{page}/metrics")
        assert json.loads(curl(f"{page}/ready"))["ready"]
        status = json.loads(curl(f"{page}/status"))
        assert (status["role"], status["models"], status["reasons"]) == ("gateway", [MODEL], [])
    finally:
        running.kill()


def test_killed_at_any_time_a_batch_is_answered_once_line_by_line(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # Given 40 lines that take a few seconds
    model = ModelEntry("simulated", "sim:scale=1,prefill=1000000,decode=200,answer=20", context=4096)
    (folder / "kvasir.toml").write_text(config_text({MODEL: model}), "utf-8")
    names = [f"line {number}" for number in range(40)]
    lines = "".join(json.dumps(_line(name)) + "\n" for name in names)
    body: dict[str, Any] = {"endpoint": "/v1/chat/completions", "completion_window": "24h"}
    ids = set()
    serve = ["--config", str(folder / "kvasir.toml"), "serve", "--port", "0", "--state", str(folder / "state")]
    # When the gateway is killed after 1, 10 and 25 answers
    for enough in (1, 10, 25, 40):
        (folder / f"until {enough}").mkdir()
        running = RunningProcess(serve, environment(folder), folder / f"until {enough}")
        try:
            with httpx.Client(base_url=gateway_url(running), timeout=30) as http:
                if not ids:
                    form: Any = {"data": {"purpose": "batch"}, "files": {"file": ("p.jsonl", lines)}}
                    body["input_file_id"] = http.post("/v1/files", **form).json()["id"]
                    assert cli.run_command(serve) == 2
                    assert (
                        f"another gateway uses {folder / 'state'}: stop that gateway, or name another folder"
                        in capsys.readouterr().err
                    )
                begun = http.post("/v1/batches", json=body, headers={"Idempotency-Key": "monday"}).json()
                ids.add(begun["id"])
                look = partial(_reached, http, begun["id"], enough)
                batch = wait_until(look, f"{enough} lines are answered", timeout_s=30)
                if enough == 40:
                    answers = [
                        json.loads(row)
                        for row in http.get(f"/v1/files/{batch['output_file_id']}/content").text.splitlines()
                    ]
        finally:
            running.kill()
    # Then it is the same batch, and every line is there once
    assert len(ids) == 1
    assert (batch["status"], batch["request_counts"]) == ("completed", {"total": 40, "completed": 40, "failed": 0})
    assert [row["custom_id"] for row in answers] == names
    assert len({row["id"] for row in answers}) == 40


def _reached(http: httpx.Client, batch_id: str, enough: int) -> dict[str, Any]:
    """The batch, once so many lines are answered, of all also as a file."""
    batch: dict[str, Any] = http.get(f"/v1/batches/{batch_id}").json()
    assert batch["status"] in ("validating", "in_progress", "finalizing", "completed")
    there = batch["request_counts"]["completed"] >= enough and (enough < 40 or batch["status"] == "completed")
    return batch if there else {}


def _line(name: str) -> dict[str, Any]:
    body = {"model": MODEL, "messages": [{"role": "user", "content": f"What is {name}?"}], "max_tokens": 20}
    return {"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": body}


def test_what_can_not_be_served_is_one_sentence(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run_command(["serve", "--host", "0.0.0.0"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "kvasir keys add NAME" in said
    assert cli.run_command(["serve", "--model", "gpt-4o"]) == 2
    (folder / "kvasir.toml").write_text("")
    assert cli.run_command(["serve"]) == 2
    assert "no model is configured" in capsys.readouterr().err


def test_keys_are_added_listed_and_revoked(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run_command(["keys", "list"]) == 0
    assert cli.run_command(["keys", "add", "ada", "--model", MODEL]) == 0
    assert cli.run_command(["keys", "add", "bob"]) == 0
    secrets = re.findall(r"kv-\S{43}", capsys.readouterr().out)
    assert len(set(secrets)) == 2
    assert cli.run_command(["keys", "list"]) == 0
    shown = capsys.readouterr().out
    assert "ada" in shown
    assert not any(secret in shown for secret in secrets)
    assert cli.run_command(["keys", "revoke", "ada"]) == 0
    capsys.readouterr()
    assert cli.run_command(["keys", "list", "--json"]) == 0
    assert [(key["name"], key["models"]) for key in json.loads(capsys.readouterr().out)] == [("bob", [])]
    assert cli.run_command(["keys", "revoke", "ada"]) == 2
    assert cli.run_command(["keys", "add", "eve", "--model", "gpt-4o"]) == 2
