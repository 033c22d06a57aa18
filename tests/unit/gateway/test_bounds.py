"""What a request costs is bounded before it is paid: bodies, lists, schemas, places, files, batches."""

import io
import json
import select
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway import app, batches, files, server
from gateway import gateway as gateway_module
from gateway.keys import add_key, file_in
from messages import limits
from messages.limits import MAX_ENTRIES, MAX_HEADER_BYTES, MAX_ITEMS
from producers.batch.openai_body import Defaults
from tests.support.gateway import ServedGateway
from tests.support.pipeline import MODEL, Pipeline
from tests.support.waiting import wait_until

CHAT = "/v1/chat/completions"
ASK: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "What is a queue?"}]}
SCHEMA_BOMB = {"type": "array", "items": {"type": "integer"}, "minItems": 100_000_000}


def post(url: str, body: Any, **headers: str) -> httpx.Response:
    return httpx.post(url, content=json.dumps(body).encode(), headers=headers, timeout=60)


def bearer(secret: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {secret}"}


def connected(served: ServedGateway) -> socket.socket:
    host, port = served.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=10)


def under_schema(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}


@pytest.mark.parametrize(
    ("path", "fields"), [(CHAT, {"response_format": under_schema(SCHEMA_BOMB)}), ("/api/chat", {"format": SCHEMA_BOMB})]
)
def test_a_schema_that_costs_too_much_is_refused(standing: ServedGateway, path: str, fields: dict[str, Any]) -> None:
    answer = post(standing.url + path, ASK | fields)
    assert answer.status_code == 400
    assert f"more than {MAX_ITEMS:,} items" in answer.text


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {"messages": [{}] * 1_000_000}),
        (CHAT, {"messages": [0] * 300_000}),
        (CHAT, {"messages": [{"role": "user", "content": "x"}] * (MAX_ENTRIES + 1)}),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "text"}] * 30_000}]}),
        (CHAT, {"metadata": {str(number): number for number in range(30_000)}}),
        (CHAT, {str(number): number for number in range(30_000)}),
        (CHAT, {"stop": ["a"] * 1_000_000}),
        ("/api/chat", {"messages": [{}] * 1_000_000}),
        ("/api/chat", {"options": {str(number): number for number in range(30_000)}}),
        ("/v1/batches", {"metadata": [[]] * 1_000_000}),
        ("/api/show", {"options": {"a": [[]] * 1_000_000}}),
    ],
)
def test_a_body_of_many_values_is_refused_at_once(standing: ServedGateway, path: str, fields: dict[str, Any]) -> None:
    content = json.dumps(ASK | fields).encode()
    start = time.process_time()
    answer = httpx.post(standing.url + path, content=content, timeout=60)
    assert time.process_time() - start < 1  # of this process, and so of the gateway in it
    assert answer.status_code == 400
    assert len(answer.content) < 1000
    assert httpx.post(standing.url + CHAT, json=ASK).status_code == 200


def test_long_bodies_are_read_apart_and_answered_as_short_ones(standing: ServedGateway) -> None:
    long = ASK | {"user": "x" * 20_000}
    assert post(standing.url + CHAT, long).json()["choices"][0]["message"]["content"]
    nobody = {"messages": [{"role": "king"}]}
    for spoiled, param in (({"seed": "x"}, "seed"), ({"shoes": 1}, "shoes"), (nobody, "messages[0].role")):
        error = post(standing.url + CHAT, long | spoiled).json()["error"]
        assert error["param"] == param
    assert post(standing.url + CHAT, [long]).json()["error"]["type"] == "invalid_request_error"
    assert post(standing.url + CHAT, long | {"model": "nobody"}).status_code == 404


def test_a_line_of_many_values_is_a_bad_line(pipeline: Pipeline, served: ServedGateway) -> None:
    pipeline.start()
    line = {"custom_id": "bomb", "method": "POST", "url": CHAT, "body": ASK | {"messages": [{}] * 1_000_000}}
    schema = {"custom_id": "schema", "body": ASK | {"response_format": under_schema(SCHEMA_BOMB)}}
    rows = [line, schema, {"custom_id": "good", "body": ASK}]
    content = "\n".join(map(json.dumps, rows)).encode()
    form: Any = {"data": {"purpose": "batch"}, "files": {"file": ("p.jsonl", content)}}
    file_id = httpx.post(f"{served.url}/v1/files", **form).json()["id"]
    request = {"input_file_id": file_id, "endpoint": CHAT, "completion_window": "24h"}
    url = f"{served.url}/v1/batches/{httpx.post(f'{served.url}/v1/batches', json=request).json()['id']}"
    wait_until(lambda: httpx.get(url).json()["status"] == "completed", "the batch is over")
    assert httpx.get(url).json()["request_counts"] == {"total": 3, "completed": 1, "failed": 2}
    errors = httpx.get(f"{served.url}/v1/files/{httpx.get(url).json()['error_file_id']}/content").text
    assert "too many values" in errors
    assert f"more than {MAX_ITEMS:,} items" in errors


def test_nobody_without_a_key_takes_a_place_or_keeps_others_out(
    pipeline: Pipeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = add_key(file_in(tmp_path), "ada", [])
    monkeypatch.setattr(limits, "MAX_OPEN", 2)
    monkeypatch.setattr(server, "MAX_GUESTS", 20)
    pipeline.start()
    with ServedGateway(pipeline.client, tmp_path) as served, ExitStack() as stack:
        for path in ("/health", "/docs", CHAT) * 20:  # a body is announced, and some of it sent
            half_sent = stack.enter_context(connected(served))
            head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 4000000\r\n\r\n"
            half_sent.sendall(head.encode() + b"x" * 1000)
        waiting = [stack.enter_context(connected(served)) for _ in range(40)]
        for connection in waiting:
            connection.sendall(b"GET /health HTTP/1.1\r\n")
        assert "kvasir_gateway_open_requests 1.0" in httpx.get(f"{served.url}/metrics", headers=bearer(secret)).text
        assert httpx.post(served.url + CHAT, json=ASK, headers=bearer(secret), timeout=60).status_code == 200
        with suppress(ConnectionResetError):
            assert waiting[0].recv(100) == b""  # the oldest have made room
        waiting[-1].sendall(b"Host: localhost\r\n\r\n")
        assert b"200 OK" in waiting[-1].recv(100)


def test_connections_are_bounded(pipeline: Pipeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MAX_CONNECTIONS", 10)
    with ServedGateway(pipeline.client, tmp_path) as served, ExitStack() as stack:
        for _ in range(10):
            stack.enter_context(connected(served)).sendall(b"GET /health HTTP/1.1\r\n")
        wait_until(lambda: httpx.get(f"{served.url}/health").status_code == 503, "there are too many")
        stack.close()
        wait_until(lambda: httpx.get(f"{served.url}/health").status_code == 200, "there is room again")


def test_what_is_open_to_all_takes_no_body(standing: ServedGateway) -> None:
    with connected(standing) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nContent-Length: 4000000\r\n\r\n" + b"x" * 1000)
        assert b"200 OK" in connection.recv(100)


def test_headers_that_come_whole_are_bounded_too(standing: ServedGateway) -> None:
    with connected(standing) as connection:  # at once, so that it is read in one piece
        fields = b"".join(b"x%d: %b\r\n" % (number, b"y" * 1000) for number in range(100))
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + fields + b"\r\n")
        assert connection.recv(100).split()[1] in (b"400", b"431")
    assert httpx.get(f"{standing.url}/health", headers={"x": "y" * (MAX_HEADER_BYTES // 2)}).status_code == 200


def test_one_keys_requests_leave_places_for_anothers(
    pipeline: Pipeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ada, bob = (add_key(file_in(tmp_path), name, []) for name in ("ada", "bob"))
    monkeypatch.setattr(limits, "MAX_OPEN_PER_KEY", 2)
    monkeypatch.setattr(limits, "MAX_BODIES_BYTES_PER_KEY", 1 << 20)
    pipeline.start()
    with ServedGateway(pipeline.client, tmp_path) as served, ExitStack() as stack:

        def begin(secret: str, path: str, sent: int) -> socket.socket:
            connection = stack.enter_context(connected(served))
            head = f"POST {path} HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {secret}\r\nContent-Length: 4000000\r\n"
            kind = "Content-Type: multipart/form-data; boundary=b\r\n\r\n--b\r\n"
            connection.sendall(head.encode() + kind.encode() + b"x" * sent)
            return connection

        assert b" 429 " in begin(ada, CHAT, 2 << 20).recv(100)
        uploading = begin(ada, "/v1/files", 10)
        wait_until(lambda: served_open(served, bob) == 2, "the upload is under way")  # and this request
        begin(ada, CHAT, 10)
        wait_until(lambda: served_open(served, bob) == 3, "both are under way")
        assert httpx.get(f"{served.url}/v1/models", headers=bearer(ada)).status_code == 429
        assert httpx.post(served.url + CHAT, json=ASK, headers=bearer(bob), timeout=60).status_code == 200
        uploading.close()
        wait_until(lambda: served_open(served, bob) == 2, "the upload is over")
        assert httpx.get(f"{served.url}/v1/models", headers=bearer(ada)).status_code == 200


@pytest.mark.parametrize(
    ("path", "bounds"),
    [
        (CHAT, ("MAX_BODIES_BYTES_PER_KEY", "MAX_BODIES_BYTES")),
        ("/v1/files", ("MAX_UPLOADS_BYTES_PER_KEY", "MAX_UPLOADS_BYTES")),
    ],
)
def test_bytes_that_are_being_sent_are_bounded_for_each_key_and_for_all(
    pipeline: Pipeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, bounds: tuple[str, str]
) -> None:
    ada, bob, eve = (add_key(file_in(tmp_path), name, []) for name in ("ada", "bob", "eve"))
    for name, most in zip(bounds, (1 << 20, 3 << 19), strict=True):
        monkeypatch.setattr(limits, name, most)
    with ServedGateway(pipeline.client, tmp_path) as served, ExitStack() as stack:

        def begin(secret: str, sent: int) -> socket.socket:
            connection = stack.enter_context(connected(served))
            head = f"POST {path} HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {secret}\r\nContent-Length: 4000000\r\n"
            kind = "Content-Type: multipart/form-data; boundary=b\r\n\r\n--b\r\n"
            part = "Content-Disposition: form-data; name=file; filename=a\r\n\r\n"
            connection.sendall((head + kind + part).encode() + b"x" * sent)
            return connection

        assert b" 429 " in begin(ada, 1_100_000).recv(100)  # more than a key may send
        both = [begin(ada, 900_000), begin(bob, 900_000)]  # more than all may: the later one is refused
        (refused,) = select.select(both, [], [], 30)[0]
        assert b" 429 " in refused.recv(100)
        for connection in both:
            connection.close()
        wait_until(lambda: served_open(served, eve) == 1, "both have left")
        assert not select.select([begin(eve, 900_000)], [], [], 0.5)[0]  # there is room again


def test_who_sends_large_files_keeps_nobody_from_an_answer(
    pipeline: Pipeline, served: ServedGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given more uploads that are being written than there are threads
    monkeypatch.setattr(gateway_module, "_FRESH_S", 0.0)
    written, writing = threading.Event(), threading.Semaphore(0)
    add = files.Files.add

    def add_slowly(*arguments: Any) -> Any:
        writing.release()
        written.wait(60)
        return add(*arguments)

    monkeypatch.setattr(files.Files, "add", add_slowly)
    pipeline.start()
    form: Any = {"data": {"purpose": "batch"}, "files": {"file": ("p.jsonl", b'{"id": "a", "prompt": "b"}')}}
    with ThreadPoolExecutor(40) as pool:
        uploads = [pool.submit(httpx.post, f"{served.url}/v1/files", timeout=90, **form) for _ in range(40)]
        assert writing.acquire(timeout=30)
        wait_until(lambda: "open_requests 41.0" in httpx.get(f"{served.url}/metrics").text, "all are under way")
        # Then somebody else is answered, and they are once they are written
        assert httpx.post(served.url + CHAT, json=ASK, timeout=30).status_code == 200
        written.set()
        assert {upload.result().status_code for upload in uploads} == {200}


def test_batches_are_read_in_turns_and_in_one_thread(
    pipeline: Pipeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batches, "_TURN_S", 0.0)
    lines: list[tuple[str, str]] = []
    both = threading.Event()

    def check(body: dict[str, Any], _url: str) -> None:
        lines.append((body["user"], threading.current_thread().name))
        if len(lines) == 1:
            both.wait(30)

    with files.open_files(tmp_path) as stored, closing(batches.Batches(stored, pipeline.client, check)) as every:

        def begin(name: str, count: int) -> None:
            rows = [{"custom_id": str(at), "body": ASK | {"user": name}} for at in range(count)]
            content = io.BytesIO("\n".join(map(json.dumps, rows)).encode())
            every.create(stored.add("", name, content), "", {}, {MODEL: Defaults(MODEL, 8, 0.0, 1.0)})

        begin("long", 200)
        wait_until(lambda: lines, "it is being read")
        begin("short", 3)
        wait_until(lambda: batches._reader._work_queue.qsize() == 1, "both want to be read")
        both.set()
        wait_until(lambda: len(lines) == 203, "both are read")
    assert len({thread for _, thread in lines}) == 1
    assert max(at for at, (name, _) in enumerate(lines) if name == "short") < 20


def test_what_anybody_may_ask_for_is_made_once(
    pipeline: Pipeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []

    def make(api: Any) -> str:
        made.append(api)
        return "a page"

    monkeypatch.setattr(app, "page", make)
    with ServedGateway(pipeline.client, tmp_path) as served:
        answers = [httpx.get(served.url + path) for path in ("/docs", "/openapi.json") * 3]
    assert {answer.status_code for answer in answers} == {200}
    assert len(made) == 1
    assert answers[1].json() == answers[5].json() == made[0]


def served_open(served: ServedGateway, secret: str) -> int:
    [line] = [
        line
        for line in httpx.get(f"{served.url}/metrics", headers=bearer(secret)).text.splitlines()
        if line.startswith("kvasir_gateway_open_requests ")
    ]
    return int(float(line.split()[1]))


def test_one_keys_batches_and_files_leave_room_for_anothers(
    pipeline: Pipeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given two keys, and nobody who works, so that each batch stays open
    ada, bob = (add_key(file_in(tmp_path), name, []) for name in ("ada", "bob"))
    with ServedGateway(pipeline.client, tmp_path) as served:

        def upload(secret: str, size: int = 100) -> httpx.Response:
            content = json.dumps({"custom_id": "a", "body": ASK}).encode() + b"\n" * size
            form: Any = {"data": {"purpose": "batch"}, "files": {"file": ("p.jsonl", content)}}
            return httpx.post(f"{served.url}/v1/files", headers=bearer(secret), **form)

        def create(secret: str, file_id: str) -> int:
            request = {"input_file_id": file_id, "endpoint": CHAT, "completion_window": "24h"}
            return httpx.post(f"{served.url}/v1/batches", json=request, headers=bearer(secret)).status_code

        # When one opens as many as it may, then the other's first is accepted at once
        adas, bobs = upload(ada).json()["id"], upload(bob).json()["id"]
        assert [create(ada, adas) for _ in range(33)] == [200] * 32 + [429]
        assert create(bob, bobs) == 200
        monkeypatch.setattr(batches, "MAX_BATCHES", 33)
        assert create(bob, bobs) == 429
        # And so with the bytes of their files
        monkeypatch.setattr(files, "MAX_FILES_BYTES_PER_KEY", 100_000)
        assert upload(ada, 50_000).status_code == 200
        refused = upload(ada, 50_000)
        assert refused.status_code == 413
        assert "delete some" in refused.text
        assert len(list((tmp_path / "files").glob("*.jsonl"))) == 3
        assert upload(bob, 50_000).status_code == 200
