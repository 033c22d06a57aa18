"""The gateway: what its clients read, and what it keeps on disk, a batch under way among it."""

import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import httpx

from gateway.app import make_app
from gateway.keys import add_key
from tests.forms.batches import AT, HOME
from tests.support.gateway import ServedGateway
from tests.support.pipeline import MODEL, Pipeline
from tests.support.waiting import wait_until

KEY, NARROW = "kv-" + "a" * 43, "kv-" + "b" * 43
FILE, BATCH = "file-" + "b" * 24, "batch_" + "b" * 24  # of the batch under way
SAID = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is a queue?"}]
LINES = [
    {"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": {"model": MODEL, "messages": SAID}}
    for name in ("a", "b")
]
CONTENT = "".join(json.dumps(line) + "\n" for line in LINES) + "no JSON\n"
SCHEMA = {"type": "object", "properties": {"yes": {"type": "boolean"}}, "required": ["yes"]}
Call = Callable[..., httpx.Response]


def record(folder: Path) -> None:
    """Write `folder`/gateway.json and the state, `folder`/gateway."""
    home = folder / "gateway-home"
    with mock.patch("secrets.token_urlsafe", side_effect=[KEY[3:], NARROW[3:]]):
        add_key(home / "keys.json", "forms", ())
        add_key(home / "keys.json", "narrow", ("other:1b",))
    with Pipeline() as pipeline:
        pipeline.start()
        with serving(pipeline, home) as (served, call):
            said: dict[str, Any] = {"routes": _routes(served), "exchanges": list(_exchanges(call))}
    _begin_another(home)
    with Pipeline() as pipeline, serving(pipeline, home):
        submitted = home / "batches" / BATCH / "submitted.jsonl"
        wait_until(lambda: submitted.is_file() and submitted.read_bytes().count(b"\n") == 2, "its jobs are sent")
    known: dict[str, str] = {BATCH[6:]: BATCH[6:]}
    text = json.dumps(said, indent=1, ensure_ascii=False) + "\n"
    (folder / "gateway.json").write_text(steady(text, known, home), "utf-8")
    for path in sorted(home.rglob("*")):
        if path.is_file() and not path.name.endswith(".lock"):
            place = folder / "gateway" / steady(str(path.relative_to(home)), known, home)
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(steady(path.read_text("utf-8"), known, home).encode())
    shutil.rmtree(home)


@contextmanager
def serving(pipeline: Pipeline, home: Path) -> Iterator[tuple[ServedGateway, Call]]:
    """A gateway over this state, and how to call it with the key."""
    with ServedGateway(pipeline.client, home) as served, httpx.Client(base_url=served.url, timeout=30) as client:

        def call(method: str, path: str, key: str = KEY, **more: Any) -> httpx.Response:
            return client.request(method, path, headers={"Authorization": f"Bearer {key}"} if key else {}, **more)

        yield served, call


def _begin_another(home: Path) -> None:
    """A batch as the first one was when it began, with an identity that is known."""
    first = json.loads(next((home / "batches").glob("batch_*.json")).read_text("utf-8"))
    file = json.loads((home / "files" / f"{first['input_file_id']}.json").read_text("utf-8"))
    begun = {"id": BATCH, "input_file_id": FILE, "status": "validating", "since": {}, "idempotency_key": "twice"}
    begun |= {"total": 0, "completed": 0, "failed": 0, "output_file_id": "", "error_file_id": ""}
    (home / "batches" / f"{BATCH}.json").write_text(json.dumps(first | begun) + "\n", "utf-8")
    (home / "files" / f"{FILE}.json").write_text(json.dumps(file | {"id": FILE}) + "\n", "utf-8")
    (home / "files" / f"{FILE}.jsonl").write_text(CONTENT, "utf-8")
    head = {"version": 1, "batch_id": "batch-20270115-00000004", "created_at": AT, "secret": "0b" * 16}
    rest: dict[str, Any] = {"prompt_form": 3, "request": {}, "runs": {}, "jobs": []}
    (home / "batches" / BATCH).mkdir()
    (home / "batches" / BATCH / "batch.json").write_text(json.dumps(head | rest), "utf-8")


def _routes(served: ServedGateway) -> dict[str, Any]:
    """Every path with what its requests may say, whatever the classes are called that say so."""
    described = make_app(served.gateway).openapi()
    schemas = described.get("components", {}).get("schemas", {})
    return {
        f"{method.upper()} {path}": {
            "query": sorted(each["name"] for each in route.get("parameters", ()) if each["in"] == "query"),
            "body": _fields(route.get("requestBody", {}), schemas),
        }
        for path, methods in described["paths"].items()
        for method, route in methods.items()
    }


def _fields(body: Mapping[str, Any], schemas: Mapping[str, Any]) -> Any:
    """Names of fields, and * for those that must be there; a type of ours as its fields."""
    content = body.get("content", {}).get("application/json", {})
    return _shape(content.get("schema", {}), schemas)


def _shape(schema: Any, schemas: Mapping[str, Any]) -> Any:
    if "$ref" in schema:
        return _shape(schemas[schema["$ref"].rpartition("/")[2]], schemas)
    if "properties" in schema:
        must = schema.get("required", ())
        return {
            name + "*" * (name in must): _shape(each, schemas) for name, each in sorted(schema["properties"].items())
        }
    if "anyOf" in schema:
        return [_shape(each, schemas) for each in schema["anyOf"]]
    if schema.get("type") == "array":
        return [_shape(schema.get("items", {}), schemas)]
    values = schema.get("enum", [schema["const"]] if "const" in schema else ())
    words = [schema.get("type", "any"), *(f"= {value!r}" for value in values)]
    words += [f"default {schema['default']!r}"] if "default" in schema else []
    return " ".join(map(str, words))


def _exchanges(call: Call) -> Iterator[dict[str, Any]]:
    for path in ("/", "/health", "/ready", "/nothing", "/v1/models", f"/v1/models/{MODEL}", "/v1/models/none"):
        yield _exchange(call, "GET", path)
    for path in ("/api/tags", "/api/ps", "/api/version", "/api/embed"):
        yield _exchange(call, "GET", path)
    for key in ("", "kv-wrong", NARROW):
        yield _exchange(call, "GET", "/v1/models", key)
        yield _exchange(call, "GET", "/api/tags", key)
    yield _exchange(call, "POST", "/v1/chat/completions", NARROW, json={"model": MODEL, "messages": SAID})
    yield _exchange(call, "POST", "/api/chat", NARROW, json={"model": MODEL, "messages": SAID})
    yield from _openai(call)
    yield from _ollama(call)
    yield from _batches(call)


def _openai(call: Call) -> Iterator[dict[str, Any]]:
    usual = {"model": MODEL, "messages": SAID, "max_tokens": 6, "seed": 7}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    for more in (
        *({}, {"n": 2}, {"response_format": form, "max_tokens": 40}, {"stream": True}),
        {"stream": True, "stream_options": {"include_usage": True}},
        *({"model": "none"}, {"messages": []}, {"temperature": "warm"}, {"tools": [{"type": "function"}]}, {"x": 1}),
    ):
        yield _exchange(call, "POST", "/v1/chat/completions", json=usual | more)
    prompt = {"model": MODEL, "prompt": "Once", "max_tokens": 6, "seed": 7}
    for more in ({}, {"stream": True}, {"prompt": 5}):
        yield _exchange(call, "POST", "/v1/completions", json=prompt | more)
    yield _exchange(call, "POST", "/v1/chat/completions", content=b"{")
    yield _exchange(call, "PUT", "/v1/models")


def _ollama(call: Call) -> Iterator[dict[str, Any]]:
    usual = {"model": MODEL, "messages": SAID, "options": {"num_predict": 6, "seed": 7}}
    for more in ({"stream": False}, {}, {"format": SCHEMA, "stream": False}, {"model": "none"}, {"x": 1}):
        yield _exchange(call, "POST", "/api/chat", json=usual | more)
    prompt = {"model": MODEL, "prompt": "Once", "options": {"num_predict": 6, "seed": 7}}
    for more in ({"stream": False}, {}, {"options": {"mirostat": 1}}):
        yield _exchange(call, "POST", "/api/generate", json=prompt | more)
    yield _exchange(call, "POST", "/api/show", json={"model": MODEL})


def _batches(call: Call) -> Iterator[dict[str, Any]]:
    sent = call("POST", "/v1/files", files={"file": ("prompts.jsonl", CONTENT)}, data={"purpose": "batch"})
    yield _said(sent)
    file = sent.json()["id"]
    wanted = {"input_file_id": file, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    begun = call("POST", "/v1/batches", json=wanted | {"metadata": {"course": "101"}})
    yield {"status": begun.status_code, "fields": sorted(begun.json())}  # how far it is by then is chance
    place = f"/v1/batches/{begun.json()['id']}"
    wait_until(lambda: call("GET", place).json()["status"] == "completed", "the batch is over", timeout_s=20)
    done = _exchange(call, "GET", place)
    yield done
    for kind in ("output_file_id", "error_file_id"):
        yield _exchange(call, "GET", f"/v1/files/{done['body'][kind]}")
        yield _exchange(call, "GET", f"/v1/files/{done['body'][kind]}/content")
    for path in ("/v1/files", "/v1/batches", "/v1/files/file-none", "/v1/batches/batch_none", "/v1/batches?limit=0"):
        yield _exchange(call, "GET", path)
    yield _exchange(call, "POST", f"{place}/cancel")
    yield _exchange(call, "POST", "/v1/batches", json={"input_file_id": file})
    yield _exchange(call, "POST", "/v1/batches", json=wanted | {"input_file_id": "file-none"})
    spare = call("POST", "/v1/files", files={"file": ("spare.jsonl", CONTENT)}, data={"purpose": "batch"})
    yield _exchange(call, "DELETE", f"/v1/files/{spare.json()['id']}")


def _exchange(call: Call, method: str, path: str, key: str = KEY, **more: Any) -> dict[str, Any]:
    whose = {KEY: "", NARROW: "narrow", "": "none"}.get(key, "wrong")
    asked = {name: value for name, value in more.items() if name == "json"}
    return {"asked": f"{method} {path}", "key": whose, **asked, **_said(call(method, path, key, **more))}


def _said(response: httpx.Response) -> dict[str, Any]:
    kind = response.headers.get("content-type", "")
    told = {name: response.headers[name] for name in ("retry-after", "www-authenticate") if name in response.headers}
    body: Any = response.text
    if kind == "application/json":
        body = response.json()
    elif "event-stream" in kind or "ndjson" in kind:
        body = _stream(body)
    elif "\n" in body:
        body = body.splitlines()
    return {"status": response.status_code, "type": kind, **told, "body": body}


def _stream(text: str) -> dict[str, Any]:
    """What the pieces of a stream have between them: how many come, and with how much of the text, is chance."""
    lines = [line for line in text.splitlines() if line]
    pieces = [line.removeprefix("data: ") for line in lines]
    whole = _shapes([json.loads(piece) for piece in pieces if piece.startswith("{")])
    return {"begin with": lines[0].partition("{")[0], "hold": whole, "last": "" if "{" in lines[-1] else lines[-1]}


def _shapes(values: list[Any]) -> Any:
    """Of values at one place: the keys of all of them, or the kinds that they are of."""
    maps, lists = ([each for each in values if isinstance(each, kind)] for kind in (dict, list))
    if maps:
        return {
            key: _shapes([each[key] for each in maps if key in each]) for key in sorted({k for m in maps for k in m})
        }
    if lists:
        return [_shapes([one for each in lists for one in each])]
    return " or ".join(sorted({type(each).__name__ for each in values}))


def steady(text: str, known: dict[str, str], home: Path) -> str:
    """Ids in the order in which they come, one place and one clock; also in JSON within a text."""

    def numbered(found: re.Match[str]) -> str:
        before, id = found.groups()
        return before + known.setdefault(id, f"{len(known):0{len(id)}x}")

    for place in {str(home.resolve()), str(home)}:
        text = text.replace(place, HOME)
    ids = r"(?:file-|batch_|chatcmpl-|cmpl-|req_)"
    text = re.sub(rf"({ids})([0-9a-f]{{24}}(?:[0-9a-f]{{8}})?)(?![0-9a-f])", numbered, text)
    text = re.sub(r'(request_id\\?": ?\\?")([0-9a-f]{32})', numbered, text)
    text = re.sub(r"(?<![0-9a-zA-Z.])1[789]\d{8}(\.\d+)?(?![0-9.])", lambda at: str(AT if at[1] else int(AT)), text)
    text = re.sub(r'(_duration\\?": ?)\d+', r"\g<1>1000", text)
    text = re.sub(r'("\w+_s": ?)[0-9][0-9.e+-]*', r"\g<1>0.25", text)
    return re.sub(r"\b20\d\d-\d\d-\d\dT[\d:.]+(?:Z|\+00:00)", "2027-01-15T08:00:00Z", text)
