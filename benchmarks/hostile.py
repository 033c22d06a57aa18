"""1,000 bombs at a gateway and its workers, and 200 requests beside them that anybody might send.

A gateway with two keys, a prefill and a decode worker of the demo model (llama.cpp where xllamacpp is installed, else
the simulated engine). One key sends schemas, lists and bodies; raw jobs with the same schemas go past the gateway into
the work queue; clients without a key send half of a request and stay; files hold lines as bad; chat templates and the
answers of other servers meet the engines' readers. The other key is the neighbour. Before, every socket of the gateway
(with keys and without), its page, the workers, their pages and the desk is attacked.

    sockets, unguarded  listening sockets of these, and those where an attack got through. Goal: 0. Null: not Linux
    bombs               how many were sent
    peak_MB             most memory that the gateway or a worker took beyond what it had before. Goal: 300
    worst_health_s      the gateway's /health, 99th percentile. Goal: 0.5
    neighbour_ratio     median latency of the neighbour's short requests: beside the bombs and the ordinary requests, by
                        that of a gateway that has nothing else to do. Goal: 2
    ordinary_ratio      the same beside the ordinary requests alone: so much of it is not the bombs' doing
    served, legitimate  of the requests that anybody might send: large schemas of pydantic models, long conversations,
                        files of 100 MB. All of them have to be served
    ended               processes that ended. Goal: 0

Whoever sends is elsewhere as a rule. Here senders are on the same cores, with the lowest priority, each in a process of
its own; what waits with it on a busy machine is the neighbour, too, so ratios mean little where others work.
"""

import argparse
import importlib.util
import json
import os
import random
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import httpx
import pika
from pydantic import BaseModel, Field, create_model

from benchmarks import harness
from benchmarks.overhead import percentile
from engines.openai.http import OpenAIServer
from engines.template import require_bounded
from gateway.keys import add_key, file_in
from infra.broker import topology
from infra.broker.envelope import submit_message
from messages.errors import KvasirError
from messages.jobs import PrefillJob, Sampling, user_prompt
from tests.support import intruders
from tests.support.endless import EndlessServer
from tests.support.processes import DEMO, SIMULATED_MODEL, Cluster, RunningProcess, Worker, gateway_url
from tests.support.servers import free_port
from tests.support.sockets import processes_of
from tests.support.waiting import wait_until

MODEL = "attacked:1b"
CHAT = "/v1/chat/completions"
BOMBS, QUICK_BOMBS = 1_000, 60
LEGITIMATE, QUICK_LEGITIMATE = 200, 20
FILE_BYTES = 100 << 20
EXPENSIVE_EVERY = 100  # of the bombs: templates and servers without an end take a second each
ATTACKERS = 8
KNOCKS = 200  # of the neighbour, before
DRAIN_S = 300.0
NICE = 19
# Of the environment: a command line is everybody's to read.
KEY, BROKER, SIZE = "KVASIR_HOSTILE_KEY", "KVASIR_HOSTILE_BROKER", "KVASIR_HOSTILE_SIZE"

Bomb = Callable[[], object]


# --- bombs


def schema_bomb(rng: random.Random) -> dict[str, Any]:
    """A schema that costs whoever makes a grammar of it gigabytes or minutes, or ends his process."""
    many = rng.choice((10**5, 10**6, 10**8))
    length = rng.randint(1_000, 3_000)
    parts = {f"d{at}": {"type": "array", "items": {"$ref": f"#/$defs/d{at + 1}"}} for at in range(length)}
    nested: dict[str, Any] = {"type": "integer"}
    for _ in range(rng.randint(70, 200)):
        nested = {"type": "array", "items": nested, "minItems": 1}
    patterns = [{"type": "string", "pattern": f"(a|b)*a(a|b){{{at}}}c"} for at in range(rng.randint(12, 30))]
    return rng.choice(
        (
            {"type": "array", "items": {"type": "integer"}, "minItems": many},
            {"type": "array", "items": {"type": "string"}, "maxItems": many},
            {"type": "string", "minLength": 1000 * many},
            {"type": "string", "pattern": f"^((a{{1000}}){{1000}}){{{rng.randint(2, 1000)}}}$"},
            {"type": "integer", "multipleOf": rng.randint(10**6, 10**9)},
            {"$defs": parts | {f"d{length}": {"type": "integer"}}, "$ref": "#/$defs/d0"},
            {"allOf": patterns},
            nested,
        )
    )


def list_bomb(rng: random.Random) -> dict[str, Any]:
    """A body of many values, each of them bad."""
    element = rng.choice(({}, [], 0, {"role": "king"}, {"role": "user", "content": [{}]}))
    field = rng.choice(("messages", "stop", "metadata", "tools", "user"))
    return _ask() | {field: [element] * rng.randint(300_000, 1_000_000)}


def _ask(text: str = "What is a queue?", **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "max_tokens": 8, "messages": [{"role": "user", "content": text}]} | fields


def _under(schema: dict[str, Any]) -> dict[str, Any]:
    return _ask(response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": schema}})


TEMPLATES = (
    "".join("{% for " + name + " in range(99999) %}" for name in "abcd") + "{% endfor %}" * 4,
    "{{ '%0999999999d' % 1 }}",
    "{{ 'x'.ljust(999999999) }}",
    "{% set n = namespace(x='x') %}{% for _ in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}{{ n.x }}",
)
ANSWERS = (
    ("text/event-stream", b"data: {"),
    ("text/event-stream", b": nothing yet\n\n"),
    ("text/event-stream", b'data: {"choices":[{"index":0,"delta":{"content":"more "}}]}\n\n'),
    ("application/json", b"["),
)


class Attack:
    """A method for each sort of bomb; what they are answered is counted. `url`: the gateway; `key`: the attacker's."""

    def __init__(self, url: str, key: str, broker_url: str, seed: int) -> None:
        self._url, self._headers = url, {"Authorization": f"Bearer {key}"}
        self._broker_url = broker_url
        self._rng = random.Random(seed)
        self._slow: list[socket.socket] = []
        self._numbers = iter(range(1 << 30))
        self.answers: Counter[str] = Counter()

    def bombs(self, count: int) -> Iterator[tuple[str, Bomb]]:
        """So many, each with its sort: the same for a seed."""
        for number in range(count):
            rng = random.Random(self._rng.random())
            cheap = (
                self._schema,
                self._list,
                self._body,
                self._lines,
                self._long_headers,
                self._slow_client,
                self._job,
            )
            sort = rng.choice((self._template, self._answer) if number % EXPENSIVE_EVERY == 0 else cheap)
            yield sort.__name__.strip("_"), partial(sort, rng)

    def run(self, bombs: Iterator[tuple[str, Bomb]]) -> None:
        """Throw them, some at a time."""

        def throw(named: tuple[str, Bomb]) -> None:
            name, bomb = named
            try:
                self.answers[f"{name} {bomb()}"] += 1
            except (httpx.HTTPError, OSError) as error:
                self.answers[f"{name} {type(error).__name__}"] += 1

        with ThreadPoolExecutor(ATTACKERS) as pool:
            list(pool.map(throw, bombs))
        for connection in self._slow:
            connection.close()

    def _schema(self, rng: random.Random) -> int:
        return self._post(CHAT, _under(schema_bomb(rng)))

    def _list(self, rng: random.Random) -> int:
        return self._post(CHAT, list_bomb(rng))

    def _body(self, rng: random.Random) -> int:
        text = rng.choice(("[", '{"a":', '"\\\\', "[],", "9"))
        return self._send(CHAT, b"[" + text.encode() * ((7 << 20) // len(text)))

    def _lines(self, rng: random.Random) -> int:
        lines = [{"custom_id": str(at), "body": rng.choice((list_bomb, _schema_body))(rng)} for at in range(3)]
        form: Any = {"data": {"purpose": "batch"}, "files": {"file": ("p.jsonl", "\n".join(map(json.dumps, lines)))}}
        sent = httpx.post(f"{self._url}/v1/files", headers=self._headers, timeout=120, **form)
        if sent.status_code != httpx.codes.OK:
            return sent.status_code
        request = {"input_file_id": sent.json()["id"], "endpoint": CHAT, "completion_window": "24h"}
        return self._post("/v1/batches", request)

    def _long_headers(self, rng: random.Random) -> bytes:
        fields = b"".join(b"x%d: %b\r\n" % (at, b"y" * 1000) for at in range(rng.randint(80, 400)))
        with self._connected() as connection:
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + fields + b"\r\n")
            return connection.recv(100)[9:12]

    def _slow_client(self, rng: random.Random) -> str:
        """Without a key: half of a request, and then nothing."""
        connection = self._connected()
        path = rng.choice(("/health", "/docs", CHAT, "/v1/files"))
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 8000000\r\n\r\n".encode() + b"x" * 50_000
        connection.sendall(head[: rng.choice((20, len(head)))])
        self._slow.append(connection)
        return "stays"

    def _job(self, rng: random.Random) -> str:
        """Past the gateway: as somebody's older producer, or one with the broker's credentials, would send it."""
        sampling = Sampling(8)
        object.__setattr__(sampling, "json_schema", json.dumps(schema_bomb(rng)))  # no check of ours sees it
        ids = (f"bomb-{next(self._numbers)}", "bombs", f"item-{rng.getrandbits(40)}", MODEL)
        _, sealed = submit_message(PrefillJob(*ids, user_prompt("", "go"), sampling, submitted_at=time.time()))
        properties = pika.BasicProperties(
            content_type="application/x-msgpack", message_id=sealed.message_id, headers=dict(sealed.headers)
        )
        with pika.BlockingConnection(pika.URLParameters(self._broker_url)) as connection:
            queue = topology.work_queue("prefill", MODEL, rng.choice(("now", "bulk")))
            connection.channel().basic_publish(topology.WORK, queue, sealed.body, properties)
        return "sent"

    def _template(self, rng: random.Random) -> str:
        try:
            require_bounded(rng.choice(TEMPLATES) + f"{{# {rng.random()} #}}", (), "a model")
        except KvasirError:
            return "refused"
        return "taken"

    def _answer(self, rng: random.Random) -> str:
        with (
            EndlessServer(*rng.choice(ANSWERS)) as endless,
            closing(OpenAIServer(f"{endless.url}/v1", "", allow_external=False)) as server,
        ):
            try:
                return f"answered {len(list(server.chat({'model': 'm', 'messages': []})))}"
            except KvasirError:
                return "given up"

    def _post(self, path: str, body: Any) -> int:
        return self._send(path, json.dumps(body).encode())

    def _send(self, path: str, content: bytes) -> int:
        return httpx.post(self._url + path, content=content, headers=self._headers, timeout=120).status_code

    def _connected(self) -> socket.socket:
        host, port = self._url.removeprefix("http://").split(":")
        return socket.create_connection((host, int(port)), timeout=30)


def _schema_body(rng: random.Random) -> dict[str, Any]:
    return _under(schema_bomb(rng))


# --- what anybody might send


def pydantic_schema(rng: random.Random) -> dict[str, Any]:
    """Of a model of many fields, with models in them."""
    text = Annotated[str, Field(max_length=rng.randint(10, 2000))]
    inner: list[type[BaseModel]] = [
        create_model(f"Part{at}", **{f"field_{n}": (text, ...) for n in range(rng.randint(3, 8))})  # type: ignore[call-overload]
        for at in range(rng.randint(5, 20))
    ]
    fields: dict[str, Any] = {f"part_{at}": (list[part], ...) for at, part in enumerate(inner)}  # type: ignore[valid-type]
    fields |= {f"number_{at}": (Annotated[int, Field(ge=0, le=100)] | None, None) for at in range(rng.randint(5, 40))}
    return create_model("Grade", **fields).model_json_schema()  # type: ignore[no-any-return]


class Everybody:
    """Requests that have to be served; one that is refused for a moment (429) is sent again, as clients do."""

    def __init__(self, url: str, key: str, seed: int) -> None:
        self._client = httpx.Client(base_url=url, headers={"Authorization": f"Bearer {key}"}, timeout=300)
        self._rng = random.Random(seed)
        self.refused: list[str] = []

    def run(self, count: int, file_bytes: int) -> int:
        """How many were served."""
        served = 0
        for number in range(count):
            if number % 50 == 25:
                answer = self._upload(file_bytes)
            elif number % 2:
                answer = self._asked(_under(pydantic_schema(self._rng)))
            else:
                turns = [{"role": ("user", "assistant")[at % 2], "content": "A word. " * 4} for at in range(255)]
                answer = self._asked(_ask() | {"messages": turns})
            served += answer.status_code == httpx.codes.OK
            if answer.status_code != httpx.codes.OK:
                self.refused.append(answer.text[:200])
        return served

    def latency(self) -> float:
        """Seconds that a short request takes."""
        start = time.monotonic()
        self._asked(_ask()).raise_for_status()
        return time.monotonic() - start

    def _asked(self, body: dict[str, Any]) -> httpx.Response:
        for _ in range(20):
            answer = self._client.post(CHAT, json=body)
            if answer.status_code != httpx.codes.TOO_MANY_REQUESTS:
                break
            time.sleep(0.5)
        return answer

    def _upload(self, size: int) -> httpx.Response:
        line = json.dumps({"custom_id": "a", "body": _ask("x" * 4000)}).encode() + b"\n"
        form: Any = {"data": {"purpose": "batch"}, "files": {"file": ("p.jsonl", line * (size // len(line)))}}
        sent = self._client.post("/v1/files", **form)
        if sent.status_code == httpx.codes.OK:
            self._client.delete(f"/v1/files/{sent.json()['id']}")
        return sent


# --- the measurement


class Watch:
    """Looks meanwhile: at /health, at the neighbour's latency, at the memory of the processes."""

    def __init__(self, url: str, neighbour: Everybody, processes: list[RunningProcess]) -> None:
        self._client = httpx.Client(base_url=url, timeout=30)
        self._neighbour, self._processes = neighbour, processes
        self._before = {process.pid: _memory(process.pid, "VmRSS") for process in processes}
        self._over = threading.Event()
        self.health: list[float] = []
        self.latencies: list[float] = []
        self._threads = [threading.Thread(target=self._repeat, args=(look,)) for look in (self._knock, self._ask)]

    def __enter__(self) -> "Watch":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def peaks(self) -> dict[str, float]:
        """MB that each process took at most, beyond what it had before."""
        return {
            process.arguments[-1] if not isinstance(process, Worker) else process.log.parent.name: (
                _memory(process.pid, "VmHWM") - self._before[process.pid]
            )
            / 1e6
            for process in self._processes
            if process.alive
        }

    def _repeat(self, look: Callable[[], None]) -> None:
        while not self._over.wait(0.05):
            with suppress(httpx.HTTPError):
                look()

    def _knock(self) -> None:
        start = time.monotonic()
        try:
            self._client.get("/health").raise_for_status()
        finally:
            self.health.append(time.monotonic() - start)

    def _ask(self) -> None:
        self.latencies.append(self._neighbour.latency())


def _memory(pid: int, field: str) -> int:
    found = re.search(rf"{field}:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    return int(found[1]) * 1024 if found else 0


def sockets(cluster: Cluster) -> tuple[int | None, int | None]:
    """(what the cluster, a gateway without keys and a desk listen on; how many of them an attack gets through)."""
    if sys.platform != "linux":
        return None, None
    started = [cluster.start("serve", "--port", "0", "--state", "without-keys")]
    gateway_url(started[0])
    if importlib.util.find_spec("streamlit"):
        port = free_port()
        started.append(cluster.start("ui", "--home", "desk", "--port", str(port)))
        wait_until(lambda: f"127.0.0.1:{port}" in intruders.doors(processes_of(cluster.folder)), "the desk listens", 60)
    doors = intruders.doors(processes_of(cluster.folder))
    ways = {door: intruders.ways_in(door) for door in doors}
    for process in started:
        process.kill()
    print("\n".join(sorted(way for found in ways.values() for way in found)) or f"guarded: {', '.join(sorted(doors))}")
    return len(doors), sum(map(bool, ways.values()))


def _send(what: str, url: str, count: int, seed: int, **secrets: str) -> subprocess.Popen[str]:
    """In a process of its own: making bombs, or files of 100 MB, would delay what is measured."""
    words = [sys.executable, "-m", "benchmarks.hostile", "--seed", str(seed), "--send", what, url, str(count)]
    process = subprocess.Popen(words, env=os.environ | secrets, stdout=subprocess.PIPE, text=True)
    os.setpriority(os.PRIO_PROCESS, process.pid, NICE)
    return process


def _sent(process: subprocess.Popen[str], timeout_s: float | None = None) -> dict[str, Any]:
    output, _ = process.communicate(timeout=timeout_s)
    if process.returncode:
        raise RuntimeError(f"a sender ended with {process.returncode}")
    return harness.last_object(output)


def measure(folder: Path, bombs: int, legitimate: int, size: int, seed: int, pair: Any) -> dict[str, Any]:
    """Throw the bombs at a cluster of its own."""
    entry = DEMO if importlib.util.find_spec("xllamacpp") else SIMULATED_MODEL
    state = folder / "gateway"
    attacker, neighbour = (add_key(file_in(state), name, []) for name in ("attacker", "neighbour"))
    # As an operator has it: a model that is asked for one thread computes a prompt in one piece, and others wait.
    entry = replace(entry, slots=2, threads=0)
    with Cluster(folder / "cluster", pair.broker_url, pair.store_url, {MODEL: entry}) as cluster:
        workers = [cluster.worker(role, MODEL, "--metrics-port", "0") for role in ("prefill", "decode")]
        page = str(free_port())
        gateway = cluster.start("serve", "--port", "0", "--state", str(state), "--metrics-port", page)
        url, processes = gateway_url(gateway), [gateway, *workers]
        wait_until(lambda: httpx.get(f"{url}/ready").status_code == httpx.codes.OK, "the gateway is ready", 60)
        number, unguarded = sockets(cluster)
        asking = Everybody(url, neighbour, seed)
        before = [asking.latency() for _ in range(max(10, min(KNOCKS, bombs)))][5:]
        send = partial(_send, url=url, seed=seed, **{KEY: neighbour, BROKER: pair.broker_url, SIZE: str(size)})
        with Watch(url, asking, processes) as alone:
            _sent(send("ordinary", count=max(10, legitimate // 4)))
        with Watch(url, asking, processes) as watch:
            ordinary = send("ordinary", count=legitimate)
            answers = _sent(send("bombs", count=bombs, **{KEY: attacker}))
            outcome = _sent(ordinary, DRAIN_S)
        peaks = alone.peaks()  # beyond what they had before anything was sent
        ended = sum(not process.alive for process in processes)
    print("\n".join(f"{name}: {count}" for name, count in sorted(answers.items())))
    print(f"peaks: {peaks}; refused: {outcome['refused']}; neighbour's before: {median(before):.3f} s")
    return {
        "sockets": number,
        "unguarded": unguarded,
        "bombs": sum(answers.values()),
        "peak_MB": max(peaks.values()),
        "worst_health_s": percentile(watch.health, 0.99),
        "neighbour_ratio": median(watch.latencies) / median(before),
        "ordinary_ratio": median(alone.latencies) / median(before),
        "served": outcome["served"],
        "legitimate": legitimate,
        "ended": ended,
    }


def _be_sender(what: str, url: str, count: int, seed: int) -> None:
    if what == "bombs":
        attack = Attack(url, os.environ[KEY], os.environ[BROKER], seed)
        attack.run(attack.bombs(count))
        harness.finish(**attack.answers)
    else:
        everybody = Everybody(url, os.environ[KEY], seed)
        served = everybody.run(count, int(os.environ[SIZE]))
        harness.finish(served=served, refused=everybody.refused[:5])


def main() -> int:
    """Print the figures; 1 if a process ended, a socket is open, or somebody was not served."""
    parser = harness.parser(__doc__)
    parser.add_argument("--send", nargs=3, metavar=("WHAT", "URL", "COUNT"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.send:
        what, url, count = given.send
        _be_sender(what, url, int(count), given.seed)
        return 0
    print(harness.machine(), flush=True)
    bombs, legitimate = (QUICK_BOMBS, QUICK_LEGITIMATE) if given.quick else (BOMBS, LEGITIMATE)
    size = 1 << 20 if given.quick else FILE_BYTES
    with harness.pair() as pair, tempfile.TemporaryDirectory(prefix="kvasir-hostile-") as folder:
        figures = measure(Path(folder), bombs, legitimate, size, given.seed, pair)
    harness.finish(seed=given.seed, **figures)
    return 1 if figures["ended"] or figures["unguarded"] or figures["served"] < figures["legitimate"] else 0


if __name__ == "__main__":
    sys.exit(main())
