"""What is refused of a server that runs already, and what becomes of one that changes. Needs no vLLM.

In its place a server of HTTP answers as vLLM's does, and its connector's part is played with the real datagrams.
"""

import ast
import http.client
import json
import os
import socket
import stat
import sys
import time
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest

from engines.registry import EngineOptions, open_engine
from engines.vllm import attached, conversation, environment
from engines.vllm.attached import AttachedServer
from engines.vllm.host.kvasir_vllm import events
from kvasir import cli
from messages.errors import ConfigError, EngineUnavailable
from tests.support.servers import free_port
from tests.support.waiting import wait_until

SHAPE = {"num_layers": 2, "kv_heads": 1, "head_dim": 4, "dtype": "f32"}
PROMPT = {"tokens": [5, 6, 7], "max_tokens": 2, "ends": [2], "sampling": None, "constraint": {}, "logprobs": 0}


class StandIn(ThreadingHTTPServer):
    """Answers completions; its attributes say how."""

    def __init__(self, shared: Path, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.shared = shared
        self.said: dict[str, Any] | None = {"version": events.VERSION, "instance": "a", "vllm": "0", "context": 64}
        self.number = 1.0  # a factor of its keys and values
        self.status = 200
        self.reaches = True
        self.cut = False  # an answer breaks off
        self.pieces = 1  # that it sends before the last
        self.asked: list[dict[str, Any]] = []
        self.authorization: str | None = None
        Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def tell(self, given: dict[str, Any], **message: Any) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            place = self.shared / given["folder"] / events.SOCKET
            sender.sendto(events.pack_datagram(message | {"id": given["key"]}), str(place))

    def computed(self, given: dict[str, Any], count: int) -> None:
        """What the connector does for a prompt of so many tokens."""
        assert self.said is not None
        self.tell(given, op="evaluated", tokens=count, instance=self.said["instance"])
        if given["emit"] is not None:
            name = f"{given['key']}-0.kv"
            keys = np.arange(2 * 2 * count * 4, dtype="<f4").reshape(2, 2, count, 1, 4) * self.number
            cut = np.split(keys, range(given["block"], count, given["block"]), axis=2)
            (self.shared / given["folder"] / name).write_bytes(b"".join(block.tobytes() for block in cut))
            self.tell(given, op="block", file=name, start=0, end=count, shape=SHAPE)

    def end(self) -> None:
        self.shutdown()
        self.server_close()


class Handler(BaseHTTPRequestHandler):
    server: StandIn
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append(asked)
        self.server.authorization = self.headers["Authorization"]
        if self.server.status != 200:
            return self._say(self.server.status, json.dumps({"error": {"message": "no", "type": "x"}}).encode())
        if self.server.reaches and self.server.said:
            self.server.computed(asked["kv_transfer_params"][events.NAME], len(asked["prompt"]))
        if not asked.get("stream"):
            transfer = {events.NAME: self.server.said} if self.server.said else None
            return self._say(200, json.dumps({"choices": [], "kv_transfer_params": transfer}).encode())
        tokens = [{"token_ids": [9], "finish_reason": None}, {"token_ids": [8], "finish_reason": "length"}]
        tokens = [tokens[0]] * self.server.pieces + tokens[1:] * (not self.server.cut)
        lines = [f"data: {json.dumps({'choices': [one]})}\n\n" for one in tokens]
        return self._say(200, "".join([*lines, "data: [DONE]\n\n"]).encode())

    def _say(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Quiet."""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[StandIn]:
    made = StandIn(tmp_path)
    yield made
    made.end()


@pytest.fixture
def reached(server: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[AttachedServer]:
    monkeypatch.setattr(attached, "FIRST_PAUSE_S", 0.05)
    made = AttachedServer(server.url, tmp_path, "secret")
    yield made
    made.close()


def evaluated(reached: AttachedServer) -> int | None:
    """What comes of a request; None while it is away."""
    try:
        *_, last = reached.ask(None, emit=None, inject=None, **PROMPT)
    except EngineUnavailable:
        return None
    return int(last["evaluated"])


def test_what_a_server_is_not_is_said_in_a_sentence(server: StandIn, tmp_path: Path) -> None:
    def why() -> str:
        with pytest.raises(ConfigError) as refused:
            AttachedServer(server.url, tmp_path)
        return str(refused.value)

    known = server.said
    server.said = None
    assert "without Kvasir's connector" in why()
    server.said, server.reaches = {"version": events.VERSION - 1}, False
    assert f"speaks version {events.VERSION - 1}, but this release speaks version {events.VERSION}: run" in why()
    server.said = known
    assert "does not reach" in why()
    for status, what in ((401, "set KVASIR_API_KEY"), (404, "is it a vLLM?"), (400, attached.COMMAND)):
        server.status = status
        assert what in why()
    with pytest.raises(ConfigError, match="is it running there"):
        AttachedServer(f"http://127.0.0.1:{free_port()}", tmp_path)
    with pytest.raises(ConfigError, match="there is no folder"):
        AttachedServer(server.url, tmp_path / "none")
    with pytest.raises(ConfigError, match="use 'model' or 'shared'"):
        open_engine("vllm", EngineOptions(f"{server.url}?slots=/dev/shm"))
    assert list(tmp_path.iterdir()) == []  # no folder is left over


@pytest.mark.public_report("vllm-project/vllm 42125", "vllm-project/vllm 30931")
def test_nobody_else_can_reach_its_folder_and_every_request_is_salted(server: StandIn, reached: AttachedServer) -> None:
    assert stat.S_IMODE(reached.folder.stat().st_mode) == 0o700
    assert stat.S_IMODE((reached.folder / events.SOCKET).stat().st_mode) == 0o600
    assert [evaluated(reached) for _ in range(3)] == [3, 3, 3]
    salts = {asked["cache_salt"] for asked in server.asked}
    assert len(salts) == len(server.asked) == 4  # with the greeting
    assert {(asked["temperature"], asked["repetition_penalty"]) for asked in server.asked} == {(0, 1)}
    # No request names a model, so none asks for a LoRA adapter, which vLLM would tell from another by its name alone
    assert not any("model" in asked for asked in server.asked)
    assert server.authorization == "Bearer secret"


def test_doctor_asks_the_server_and_wants_no_vllm_here(
    server: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(environment.VARIABLE, str(tmp_path / "none"))
    config = tmp_path / "kvasir.toml"

    def found(url: str) -> str:
        config.write_text(f'[models.small]\nengine = "vllm"\nweights = {{ vllm = "{url}?shared={tmp_path}" }}\n')
        cli.run_command(["--config", str(config), "doctor", "--json"])
        (finding,) = [one for one in json.loads(capsys.readouterr().out) if one["subject"] == "small"]
        return f"{finding['level']}: {finding['what']}"

    assert found(server.url).startswith("ok: vllm reaches http")
    assert "is it running there?" in found(f"http://127.0.0.1:{free_port()}")
    server.said = None
    assert "without Kvasir's connector" in found(server.url)


def test_a_file_is_looked_for_in_its_folder_alone(reached: AttachedServer) -> None:
    (reached.folder / "passwd").write_bytes(b"ours")
    for name in ("../../etc/passwd", "/etc/passwd", "passwd"):
        with reached.open_file(name) as file:
            assert file.read() == b"ours"


def test_a_link_in_the_place_of_its_folder_leads_nobody_elsewhere(
    server: StandIn, reached: AttachedServer, tmp_path: Path
) -> None:
    theirs, moved = tmp_path / "theirs", tmp_path / "moved"
    theirs.mkdir()
    (theirs / "secret.kv").write_bytes(b"theirs")
    reached.folder.rename(moved)
    reached.folder.symlink_to(theirs)

    with reached.open_file("a.kv", os.O_WRONLY | os.O_CREAT | os.O_EXCL) as file:
        file.write(b"a student's work")
    reached.remove_file("secret.kv")

    assert [path.name for path in theirs.iterdir()] == ["secret.kv"]
    assert (moved / "a.kv").read_bytes() == b"a student's work"
    (moved / "link.kv").symlink_to(theirs / "secret.kv")
    with pytest.raises(OSError, match=r"link\.kv"):
        reached.open_file("link.kv")


def test_an_answer_that_breaks_off_is_none(server: StandIn, reached: AttachedServer) -> None:
    server.cut = True
    with pytest.raises(EngineUnavailable, match="broke off"):
        list(reached.ask(None, emit=None, inject=None, **PROMPT))
    server.cut = False
    assert evaluated(reached) == 3


def test_a_server_that_is_faster_than_its_reader_waits(
    server: StandIn, reached: AttachedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attached, "MAX_WAITING_EVENTS", 10)
    monkeypatch.setattr(attached, "POLL_S", 0.001)
    server.pieces = 500
    replies = reached.ask(None, emit=None, inject=None, **PROMPT)
    next(replies)
    (inbox,) = reached._inboxes.values()
    wait_until(lambda: inbox.qsize() == 10, "as many wait as may")
    time.sleep(0.2)
    assert inbox.qsize() == 10
    assert sum(len(reply.get("tokens", ())) for reply in replies) == 500


def test_a_server_that_is_started_again_is_looked_at_again(server: StandIn, reached: AttachedServer) -> None:
    assert server.said is not None
    server.said |= {"instance": "b"}
    with pytest.raises(EngineUnavailable, match="started again"):
        list(reached.ask(None, emit=None, inject=None, **PROMPT))
    wait_until(lambda: evaluated(reached) == 3, "it is taken up again")
    # And with other numbers, or another context, it is not, until it is again what it was
    known = server.said
    for number, context in ((1.5, 64), (1.0, 32)):
        server.number, server.said = number, known | {"instance": f"of {number}", "context": context}
        assert evaluated(reached) is None
        wait_until(lambda: "serves another model now" in why_not(reached), "it is looked at")
        server.number, server.said = 1.0, known
        wait_until(lambda: evaluated(reached) == 3, "it is taken up again")


def why_not(reached: AttachedServer) -> str:
    """Why it is away; "": it isn't."""
    try:
        list(reached.ask(None, emit=None, inject=None, **PROMPT))
    except EngineUnavailable as away:
        return str(away)
    return ""


def test_a_server_that_goes_away_is_looked_for(server: StandIn, reached: AttachedServer, tmp_path: Path) -> None:
    port = server.server_address[1]
    server.end()
    assert evaluated(reached) is None
    with pytest.raises(EngineUnavailable, match="is looked for again"):
        list(reached.ask(None, emit=None, inject=None, **PROMPT))
    another = StandIn(tmp_path, port)
    try:
        wait_until(lambda: evaluated(reached) == 3, "it is taken up again")
    finally:
        another.end()


def test_while_a_server_is_away_its_engine_says_so_the_log_once_and_it_is_found_within_seconds(
    server: StandIn,
    reached: AttachedServer,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert reached.outage == ""
    looks: list[None] = []
    greeted = reached._greet
    monkeypatch.setattr(reached, "_greet", lambda: (looks.append(None), greeted())[1])
    port = server.server_address[1]
    server.end()
    evaluated(reached)
    wait_until(lambda: len(looks) >= 4, "it has looked four times")
    said = [record.message for record in caplog.records if "is looked for again" in record.message]
    assert len(said) == len(set(said)) <= 2
    assert reached.outage in said
    another = StandIn(tmp_path, port)
    try:
        wait_until(lambda: not reached.outage, "it is there again", attached._LONGEST_PAUSE_S + 5)
        assert evaluated(reached) == 3
    finally:
        another.end()


def test_one_that_says_nothing_of_any_work_is_given_up(
    server: StandIn, reached: AttachedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a server that takes a request and answers nothing
    monkeypatch.setattr(conversation, "SILENT_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        answering, reached._server.url = reached._server.connect, "http://somewhere"
        reached._server.connect = partial(http.client.HTTPConnection, *silent.getsockname())
        with pytest.raises(EngineUnavailable, match="it hangs"):
            list(reached.ask(None, emit=None, inject=None, **PROMPT))
        reached._server.connect = answering
    wait_until(lambda: evaluated(reached) == 3, "it is taken up again")


def test_the_connector_s_files_import_nothing_but_numpy_and_what_vllm_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # Given what the command writes
    assert cli.run_command(["engines", "connector", str(tmp_path)]) == 0
    said = capsys.readouterr()
    assert f"PYTHONPATH={tmp_path} vllm serve" in said.out + said.err
    files = sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file())
    assert files[-1] == environment.FLAGS
    # Then each import is of Python's, of vLLM's, or of a file beside it
    beside = {Path(name).stem for name in files}
    for name in files[:-1]:
        for node in ast.walk(ast.parse((tmp_path / name).read_text())):
            if isinstance(node, ast.ImportFrom) and node.level:
                found = {node.module} if node.module else {alias.name for alias in node.names}
                assert found <= beside, name
            elif isinstance(node, ast.Import | ast.ImportFrom):
                tops = [node.module] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
                assert {str(top).split(".")[0] for top in tops} <= sys.stdlib_module_names | {"numpy", "torch", "vllm"}
    # And flags that somebody changed stay
    (tmp_path / environment.FLAGS).write_text("max-logprobs: 128\n")
    assert cli.run_command(["engines", "connector", str(tmp_path)]) == 0
    assert (tmp_path / environment.FLAGS).read_text() == "max-logprobs: 128\n"
    said = capsys.readouterr()
    assert "was left as it is" in said.out + said.err
