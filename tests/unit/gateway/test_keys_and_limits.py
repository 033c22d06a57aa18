"""Who may ask, and how much."""

import gzip
import json
import os
import re
import socket
import stat
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from gateway import guard, keys, server
from gateway.keys import KeyRing, add_key, file_in, read_keys, revoke_key
from gateway.server import check_host
from infra.config.types import ModelSettings
from messages import limits
from messages.errors import ConfigError, UsageError
from tests.support.gateway import ServedGateway
from tests.support.pipeline import MODEL, Pipeline
from tests.support.waiting import wait_until

OTHER = "other:1b"
MODELS = {name: ModelSettings(name=name, max_tokens=16, temperature=0.0) for name in (MODEL, OTHER)}
ASK: Any = {"model": MODEL, "messages": [{"role": "user", "content": "What is a queue?"}]}


def with_key(secret: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {secret}"}


def connected(served: ServedGateway) -> socket.socket:
    host, port = served.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=10)


def test_a_file_of_keys_holds_hashes_for_its_owner_alone(tmp_path: Path) -> None:
    path = file_in(tmp_path / "new")
    secret = add_key(path, "ada", [MODEL])
    assert secret not in path.read_text()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert KeyRing(path).find(secret) == (read_keys(path) or [])[0]
    assert KeyRing(path).find(secret[:-1]) is None
    with pytest.raises(UsageError, match="already"):
        add_key(path, "ada", [])
    with pytest.raises(UsageError, match="name must be"):
        add_key(path, "a b", [])
    revoke_key(path, "ada")
    assert read_keys(path) == []
    with pytest.raises(UsageError, match="no key is named"):
        revoke_key(path, "ada")


@pytest.mark.parametrize(
    "content", ["", "{}", "[1]", '[{"name": "a"}]', '[{"name":"a","sha256":"x","models":[]}]', "\xff"]
)
def test_a_damaged_file_is_one_sentence_and_lets_nobody_in(
    tmp_path: Path, content: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = file_in(tmp_path)
    secret = add_key(path, "ada", [])
    monkeypatch.setattr(keys, "_LOOK_S", 0.0)
    ring = KeyRing(path)
    assert ring.find(secret)
    path.write_bytes(content.encode("latin-1"))
    assert ring.find(secret) is None
    path.unlink()
    assert ring.find(secret) is None
    assert ring.is_required
    path.write_bytes(content.encode("latin-1") or b"[]]")
    with pytest.raises(ConfigError, match=r"keys\.json"):
        KeyRing(path)


def test_a_file_that_others_may_write_is_refused(tmp_path: Path) -> None:
    path = file_in(tmp_path)
    add_key(path, "ada", [])
    os.chmod(path, 0o666)
    with pytest.raises(ConfigError, match="chmod go-w"):
        read_keys(path)


def test_a_key_opens_its_models_and_no_others(
    pipeline: Pipeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keys, "_LOOK_S", 0.0)
    one, all_models = add_key(file_in(tmp_path), "one", [OTHER]), add_key(file_in(tmp_path), "all", [])
    pipeline.start()
    with ServedGateway(pipeline.client, tmp_path, MODELS) as served, httpx.Client(base_url=served.url) as http:
        for header in ({}, with_key("kv-wrong"), {"Authorization": f"Basic {one}"}):
            for path in ("/v1/models", "/api/tags", "/metrics", "/v1/nothing"):
                refused = http.get(path, headers=header)
                assert refused.status_code == 401
                assert refused.headers["www-authenticate"] == "Bearer"
        assert http.get("/health").status_code == http.get("/ready").status_code == 200
        assert [each["id"] for each in http.get("/v1/models", headers=with_key(one)).json()["data"]] == [OTHER]
        assert [each["name"] for each in http.get("/api/tags", headers=with_key(one)).json()["models"]] == [OTHER]
        assert http.get("/api/ps", headers=with_key(one)).json()["models"] == []
        figures = http.get("/metrics", headers=with_key(one)).text
        assert f'model="{OTHER}"' in figures
        assert "kvasir_gateway_open_requests 1.0" in figures
        assert MODEL not in figures
        assert f'model="{MODEL}"' in http.get("/metrics", headers=with_key(all_models)).text
        for path in ("/v1/chat/completions", "/api/chat", "/api/show"):
            body = ASK if "show" not in path else {"model": MODEL}
            refused = http.post(path, json=body, headers=with_key(one))
            assert refused.status_code == 404
            assert MODEL not in refused.text.replace(f"model '{MODEL}'", "")
        with openai.OpenAI(base_url=f"{served.url}/v1", api_key=all_models, max_retries=0) as client:
            assert client.chat.completions.create(**ASK).choices[0].message.content
            revoke_key(file_in(tmp_path), "all")
            with pytest.raises(openai.AuthenticationError):
                client.models.list()


def test_with_keys_each_finds_what_it_has_sent_itself_and_nobody_what_others_have(
    pipeline: Pipeline, tmp_path: Path
) -> None:
    ada, bob = (add_key(file_in(tmp_path), name, []) for name in ("ada", "bob"))
    pipeline.start()
    body = ASK | {"messages": [{"role": "system", "content": "A rule. " * 200}, *ASK["messages"]]}
    with ServedGateway(pipeline.client, tmp_path) as served:
        cached = [
            httpx.post(f"{served.url}/v1/chat/completions", json=body, headers=with_key(secret)).json()["usage"][
                "prompt_tokens_details"
            ]["cached_tokens"]
            for secret in (ada, bob, bob, ada)
        ]
    assert cached[:2] == [0, 0]
    assert cached[2] == cached[3] >= 384  # in whole blocks


@pytest.mark.parametrize(
    ("host", "fine"),
    [("127.0.0.1", True), ("localhost", True), ("::1", True), ("0.0.0.0", False), ("192.168.1.5", False), ("::", False),
     ("example.org", False)],
)  # fmt: skip
def test_without_keys_it_listens_on_loopback_only(tmp_path: Path, host: str, fine: bool) -> None:
    if fine:
        check_host(host, tmp_path)
    else:
        with pytest.raises(ConfigError, match="kvasir keys add"):
            check_host(host, tmp_path)
    add_key(file_in(tmp_path), "ada", [])
    check_host(host, tmp_path)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("Host", "evil.example"),
        ("Origin", "https://evil.example"),
        ("Origin", "null"),
        ("Host", "[x]"),
        ("Origin", "http://[x"),
    ],
)
def test_without_keys_pages_from_elsewhere_are_not_answered(standing: ServedGateway, name: str, value: str) -> None:
    assert httpx.get(f"{standing.url}/v1/models", headers={name: value}).status_code == 403
    assert httpx.get(f"{standing.url}/v1/models", headers={"Origin": "http://localhost:3000"}).status_code == 200


@pytest.mark.parametrize("announced", [True, False])
def test_a_body_that_is_too_long_is_refused_before_it_is_read(
    standing: ServedGateway, monkeypatch: pytest.MonkeyPatch, announced: bool
) -> None:
    monkeypatch.setattr(limits, "MAX_BODY_BYTES", 1 << 20)
    content = b"x" * (2 << 20)
    pieces = (content[start : start + 65536] for start in range(0, len(content), 65536))
    answer = httpx.post(f"{standing.url}/v1/chat/completions", content=content if announced else pieces)
    assert answer.status_code == 413
    assert answer.json()["error"]["code"] == "body_too_large"


def test_a_body_that_never_ends_is_given_up(standing: ServedGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "BODY_S", 0.2)
    with connected(standing) as connection:
        connection.sendall(b"POST /api/chat HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10\r\n\r\n{")
        assert b" 408 " in connection.recv(100)


def test_headers_are_bounded(standing: ServedGateway) -> None:
    with connected(standing) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nx: " + b"y" * (66 << 10))
        assert b" 400 " in connection.recv(100)


def test_headers_that_never_end_are_given_up(standing: ServedGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "HEADERS_S", 0.5)
    request = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
    with connected(standing) as silent, connected(standing) as slow, connected(standing) as fine:
        slow.sendall(request)
        for _ in range(3):  # a connection that was good once, and whose next request never ends
            fine.sendall(request + b"\r\n")
            answer = b""
            while not answer.endswith(b'{"status":"ok"}'):
                piece = fine.recv(1000)
                assert piece, "it was closed"
                answer += piece
        fine.sendall(request)
        for connection in (silent, slow, fine):
            while connection.recv(1000):  # until it is closed; none is within ten seconds otherwise
                pass
    assert httpx.get(f"{standing.url}/health").status_code == 200


def test_a_client_that_takes_nothing_is_cut_off(standing: ServedGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "TAKE_S", 0.5)
    content = (json.dumps({"custom_id": "a", "body": "x" * (1 << 20)}) + "\n").encode() * 16
    form: Any = {"data": {"purpose": "batch"}, "files": {"file": ("p.jsonl", content)}}
    path = f"/v1/files/{httpx.post(f'{standing.url}/v1/files', **form).json()['id']}/content"
    with connected(standing) as connection:
        connection.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        assert b"200 OK" in connection.recv(100)
        metrics = f"{standing.url}/metrics"
        wait_until(lambda: "kvasir_gateway_open_requests 1.0" in httpx.get(metrics).text, "only this request is open")
    assert httpx.get(standing.url + path).content == content  # whoever takes it gets it all
    httpx.delete(standing.url + path.removesuffix("/content"))


def test_open_requests_are_bounded(standing: ServedGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_OPEN", 0)
    refused = httpx.post(f"{standing.url}/v1/chat/completions", json=ASK)
    assert refused.status_code == 429
    assert refused.headers["retry-after"]
    assert httpx.get(f"{standing.url}/health").status_code == 200


@pytest.mark.parametrize("body", [b"{", b"[]", b"null", b"\xff", b'{"model": ' + b"[" * 100_000, b""])
def test_nonsense_is_a_bad_request_in_the_apis_form(standing: ServedGateway, body: bytes) -> None:
    answer = httpx.post(f"{standing.url}/v1/chat/completions", content=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert httpx.post(f"{standing.url}/api/chat", content=body).json()["error"]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b'{"model":', "not JSON"),
        (b'{"model": "\xff"}', "not JSON in UTF-8"),
        # No time of day in it: the bytes are part of the test's name, which both halves of a run must agree on.
        (gzip.compress(json.dumps(ASK).encode(), mtime=0), "must not be compressed"),
        (b"[" * 100_000, "nests too deep"),
        (b'{"seed": ' + b"1" * 5000 + b"}", "too many digits"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/batches", "/api/chat", "/api/show"])
def test_a_body_that_can_not_be_decoded_is_no_json(standing: ServedGateway, path: str, body: bytes, said: str) -> None:
    answer = httpx.post(standing.url + path, content=body, headers={"Content-Encoding": "gzip"})
    assert answer.status_code == 400
    error = answer.json()["error"]
    if path.startswith("/v1/"):
        assert (error["code"], error["param"]) == ("invalid_json", None)
        error = error["message"]
    assert error.startswith("the body is not JSON")
    assert said in error


def test_half_characters_are_refused(standing: ServedGateway) -> None:
    content = json.dumps(ASK | {"messages": [{"role": "user", "content": "\ud800"}]})
    assert httpx.post(f"{standing.url}/v1/chat/completions", content=content).status_code == 400


def test_other_addresses_are_not_served_in_the_apis_form(standing: ServedGateway) -> None:
    answer = httpx.post(f"{standing.url}/v1/embeddings", json={})
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "unknown_url"
    assert httpx.get(f"{standing.url}/v1/chat/completions").status_code == 405
    assert httpx.get(standing.url).text == "Kvasir is running"


def test_the_page_of_both_apis_has_every_route_and_field_and_nothing_from_elsewhere(standing: ServedGateway) -> None:
    page, api = httpx.get(f"{standing.url}/docs"), httpx.get(f"{standing.url}/openapi.json").json()
    assert page.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert "//" not in page.text
    for path, methods in api["paths"].items():
        assert all(f"{method.upper()} {path}<" in page.text for method in methods)
    schemas = api["components"]["schemas"]
    for target in re.findall("href='#([^']+)'", page.text):
        assert target in schemas
    for name, schema in schemas.items():
        section = page.text[page.text.index(f"id='{name}'") :].partition("</table>")[0]
        assert all(f"<td>{field}" in section for field in schema.get("properties", {}))
    assert {"CompletionRequest", "Options", "BatchRequest"} <= set(schemas)
    assert "ValidationError" not in page.text  # FastAPI's own answer, which is never given
