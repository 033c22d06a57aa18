"""Whatever a command listens on is guarded: each socket is found, and attacked."""

import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
import pytest

from gateway.keys import add_key, file_in
from kvasir.cli import kvasir
from tests.support import intruders
from tests.support.homework import tiny, tiny_class
from tests.support.processes import DEMO, Cluster, RunningProcess, config_text, environment
from tests.support.servers import Process, free_port
from tests.support.sockets import processes_of
from tests.support.waiting import wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

PATIENCE_S = 60.0


@contextmanager
def started(folder: Path, *words: str, **variables: str) -> Iterator[RunningProcess]:
    """A command over one model in this process of its own, until the end of the block."""
    config = folder / "kvasir.toml"
    config.write_text(config_text({"demo": DEMO}), "utf-8")
    process = RunningProcess(["--config", str(config), *words], environment(folder) | variables, folder)
    try:
        yield process
    finally:
        process.kill()


def attacked(folder: Path, ports: int, files: int) -> list[str]:
    """The ways in, once so many sockets with a port and in a folder are open."""

    def found() -> set[str]:
        doors = intruders.doors(processes_of(folder))
        in_folders = [door for door in doors if door.startswith("/")]
        return doors if (len(doors) - len(in_folders), len(in_folders)) == (ports, files) else set()

    doors = wait_until(found, f"{ports} ports and {files} files are listened on", PATIENCE_S)
    return [way for door in sorted(doors) for way in intruders.ways_in(door)]


@pytest.mark.parametrize("with_key", [False, True], ids=["loopback", "a key"])
def test_a_gateway_its_page_and_the_models_in_its_process(tmp_path: Path, with_key: bool) -> None:
    state, page = tmp_path / "state", free_port()
    if with_key:
        add_key(file_in(state), "ada", [])
    words = ["serve", "--port", "0", "--state", str(state), "--metrics-port", str(page)]
    with started(tmp_path, *words, *(["--host", "0.0.0.0"] if with_key else [])):
        assert attacked(tmp_path, ports=2, files=1) == []


def test_an_attack_that_gets_through_is_seen() -> None:
    # Given a server that answers everybody, and a socket in a folder that is open to everybody
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        script = "; ".join(
            [
                "import http.server as s, socket",
                f"u = socket.socket(socket.AF_UNIX); u.bind({str(folder / 'u.sock')!r}); u.listen()",
                "s.ThreadingHTTPServer(('0.0.0.0', 0), s.SimpleHTTPRequestHandler).serve_forever()",
            ]
        )
        process = Process([sys.executable, "-c", script], environment(folder), folder, folder / "log")
        try:
            ways = attacked(folder, ports=1, files=1)
        finally:
            process.end(signal.SIGKILL, 10)
    assert any("is open to the network without a key" in way for way in ways)
    assert any("answered 200 to a name that leads here" in way for way in ways)
    assert any("every user can get to" in way for way in ways)


# Every command that ends by itself, in a folder with a graded class; whether it succeeds there is no matter.
WORDS = {
    "demo": "--out demo",
    "grade": "submissions --rubric rubric.yaml --out another",
    "submit": "submissions --rubric rubric.yaml --out sent",
    "watch": "graded",
    "results": "graded",
    "retry": "graded",
    "cancel": "graded",
    "regrade": "graded --rubric rubric.yaml --out regraded",
    "dead list": "",
    "dead show": "1",
    "dead replay": "1",
    "dead drop": "1",
    "deploy": "status",
    "logs": "",
    "export": "graded --format csv",
    "requests": "graded",
    "bound": "graded",
    "evaluate": "graded",
    "run": "prompts.jsonl --model demo --out answered",
    "migrate": "graded",
    "assign": "graded",
    "rubric from": "homework.ipynb",
    "keys add": "ada --state state",
    "keys list": "--state state",
    "keys revoke": "ada --state state",
    "forget": "graded",
    "ask": "Hello --model demo",
    "job": "1",
    "status": "",
    "config": "",
    "engines install": "vllm",
    "engines connector": "connector",
    "doctor": "",
    "plan": "",
    "measure": "--minutes 0",
    "pause": "nobody",
    "resume": "nobody",
    "drain": "nobody",
    "top": "--once",
}
SERVERS = ("serve", "prefill-worker", "decode-worker", "worker", "ui")  # each has a test of its own
LOADS_A_MODEL = {"demo", "grade", "ask", "run"}
LONGEST_S = 10.0


def leaves(group: click.Group, *names: str) -> Iterator[str]:
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from leaves(command, *names, name)
        else:
            yield " ".join((*names, name))


def test_every_command_is_attacked() -> None:
    assert sorted(leaves(kvasir)) == sorted((*WORDS, *SERVERS))


@pytest.mark.system  # a process for each command
def test_what_a_command_opens_while_it_works(tmp_path: Path) -> None:
    tiny_class(tmp_path, 1)
    (tmp_path / "prompts.jsonl").write_text('{"custom_id": "1", "prompt": "Hello"}\n')
    opened, ways = set(), []
    commands = [("grade", tiny(tmp_path, tmp_path / "graded"))]
    commands += [(name, words.split()) for name, words in WORDS.items()]
    for name, words in commands:
        seen: set[str] = set()
        with started(tmp_path, *name.split(), *words) as process:
            end = time.monotonic() + LONGEST_S
            while process.alive and time.monotonic() < end:
                for door in intruders.doors(processes_of(tmp_path)) - seen:
                    seen.add(door)
                    ways += [f"{name}: {way}" for way in intruders.ways_in(door)]
                time.sleep(0.02)
        opened |= {name} if seen else set()
    assert ways == []
    assert opened >= LOADS_A_MODEL


@pytest.mark.system  # needs Streamlit
def test_the_desk(tmp_path: Path) -> None:
    with started(tmp_path, "ui", "--home", "desk", "--port", str(free_port())):
        assert attacked(tmp_path, ports=1, files=0) == []


@pytest.mark.system  # a broker and a store
@pytest.mark.parametrize("role", ["prefill", "decode", "both"])
def test_a_worker_and_its_page(tmp_path: Path, broker_url: str, store_url: str, model_name: str, role: Any) -> None:
    with Cluster(tmp_path, broker_url, store_url, {model_name: DEMO}) as cluster:
        cluster.worker(role, model_name, "--metrics-port", "0")
        assert attacked(tmp_path, ports=1, files=1) == []
