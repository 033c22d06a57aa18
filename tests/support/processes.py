"""Kvasir as an operator runs it: worker processes and commands over one broker and one store.

    with Cluster(folder, broker_url, store_url, {model: SIMULATED}) as cluster:
        cluster.worker("prefill", model)
        decode = cluster.worker("decode", model, "--slots", "2")
        done = cluster.run("grade", …)          # waits; code, stdout, stderr
        watching = cluster.start("watch", …)    # does not wait
        decode.kill()

Each cluster has models, a kvasir.toml and a working folder of its own, so that tests share a broker and a store
without meeting. Leaving it ends every process and deletes every queue of its models.
"""

import itertools
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

import pika
import pika.exceptions
from pika.adapters.blocking_connection import BlockingChannel

from engines.vllm import environment as vllm_environment
from infra.broker import topology
from infra.config.settings import load_settings
from kvstore.redis.cluster_state import RedisClusterState
from messages.urls import addresses
from messages.workers import WorkerInfo
from tests.support.servers import Process
from tests.support.waiting import wait_until

ROOT = Path(__file__).resolve().parents[2]

# Slow machines share their cores with other work; nothing here waits that long when all is well.
PATIENCE_S = 120.0


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """An entry of [models] in kvasir.toml."""

    engine: str
    weights: str
    context: int = 16384
    slots: int = 2
    threads: int = 0
    short_prompt_tokens: int = 0  # tests are about the KV transfer as a rule, and their prompts are short


# One thread: with more, the last digits of a sum depend on what else is in the batch, and a random model has near ties.
DEMO = ModelEntry("llamacpp", str(ROOT / "examples/model/kvasir-demo.gguf"), threads=1)
SIMULATED_MODEL = ModelEntry("simulated", "sim:scale=0", context=32768)


@dataclass(frozen=True, slots=True)
class CompletedCommand:
    """A command that has ended."""

    code: int
    stdout: str
    stderr: str

    def json(self) -> Any:
        """What a command with --json printed; nothing else may be on stdout."""
        return json.loads(self.stdout)


class RunningProcess:
    """A `kvasir` process in the background; what it writes goes to `log`."""

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str], folder: Path) -> None:
        self.arguments = tuple(arguments)
        self.log = folder / "log"
        self._process = Process(command(*arguments), environment, folder, self.log)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether it still runs."""
        return self._process.alive

    def text(self) -> str:
        """What it has written so far."""
        return self.log.read_text("utf-8", errors="replace")

    def events(self, event: str = "") -> list[dict[str, Any]]:
        """The JSON lines of its log so far; with `event` only those of this step."""
        return json_lines(self.text(), event)

    def send(self, number: signal.Signals) -> None:
        """A signal to this process alone."""
        os.kill(self.pid, number)

    def wait(self, timeout_s: float = PATIENCE_S) -> int | None:
        """Its exit code, once it has ended by itself; the log is in the message if it doesn't."""
        try:
            wait_until(lambda: not self.alive, f"kvasir {self.arguments} ended", timeout_s)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.text()[-3000:]}") from None
        self._process.end(signal.SIGTERM, 0)
        return self._process.exit_code

    def terminate(self, timeout_s: float = 30.0) -> int | None:
        """SIGTERM, and its exit code."""
        self.send(signal.SIGTERM)
        return self.wait(timeout_s)

    def kill(self) -> None:
        """SIGKILL: gone on return, without a word. Idempotent."""
        self._process.end(signal.SIGKILL, 10.0)


def json_lines(log: str, event: str = "") -> list[dict[str, Any]]:
    """The JSON lines of a log; with `event` only those of this step."""
    lines = (json.loads(line) for line in log.splitlines(keepends=True) if line.endswith("}\n"))
    return [line for line in lines if not event or line.get("event") == event]


@contextmanager
def serving(folder: Path, model: str, entry: ModelEntry = SIMULATED_MODEL) -> Iterator[str]:
    """A gateway with one model, a simulated one unless it is said which, all in one process; its URL."""
    (folder / "kvasir.toml").write_text(config_text({model: entry}), "utf-8")
    words = ["--config", str(folder / "kvasir.toml"), "serve", "--port", "0", "--state", str(folder / "state")]
    gateway = RunningProcess(words, environment(folder), folder)
    try:
        yield gateway_url(gateway)
    finally:
        gateway.kill()


def gateway_url(gateway: RunningProcess) -> str:
    """Where it says that it answers, as soon as it does."""

    def find_address() -> re.Match[str] | None:
        assert gateway.alive, gateway.text()
        return re.search(r"answers at (\S+) ", gateway.text())

    match = wait_until(find_address, "the gateway says where it answers", 60)
    assert match
    return match[1]


ProcessRole = Literal["prefill", "decode", "both"]


class Worker(RunningProcess):
    """A worker process whose registration has been seen on the cluster state."""

    def __init__(
        self, arguments: Sequence[str], environment: Mapping[str, str], folder: Path, cluster_state: RedisClusterState
    ) -> None:
        super().__init__(arguments, environment, folder)
        self._cluster_state = cluster_state

    def wait_until_registered(self, timeout_s: float = PATIENCE_S) -> None:
        """Return when it serves. Raises AssertionError with its log if it ends, or if that takes too long."""
        try:
            wait_until(
                lambda: self.find_registration() or not self.alive,
                f"the registration of {self.arguments} is up",
                timeout_s,
            )
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.text()[-3000:]}") from None
        if not self.alive:
            raise AssertionError(f"{self.arguments} ended while starting:\n{self.text()[-3000:]}")

    def find_registration(self) -> WorkerInfo | None:
        """Its registration now, or None."""
        return next(
            (registration for registration in self._cluster_state.registrations() if registration.pid == self.pid), None
        )

    @property
    def registration(self) -> WorkerInfo:
        """Its registration now; raises AssertionError if there is none."""
        registration = self.find_registration()
        assert registration, f"{self.arguments} has no registration"
        return registration


class Cluster:
    """Processes over one broker and one store, with a configuration of their own."""

    def __init__(self, folder: Path, broker_url: str, store_url: str, models: Mapping[str, ModelEntry] | Path) -> None:
        """`models`: what the configuration is made from, or the file of one that is there already."""
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.broker_url = broker_url
        self.store_url = store_url
        self.config = models if isinstance(models, Path) else folder / "cluster.toml"
        if not isinstance(models, Path):
            self.config.write_text(config_text(models), "utf-8")
        self.models = list(load_settings(config=self.config, environ={}).models)
        self.cluster_state = RedisClusterState(store_url)
        self._numbers = itertools.count(1)
        self._processes: list[RunningProcess] = []

    @property
    def environment(self) -> dict[str, str]:
        """Of a process in this cluster."""
        return environment(self.folder) | {"KVASIR_BROKER_URL": self.broker_url, "KVASIR_STORE_URL": self.store_url}

    def run(self, *arguments: str, timeout_s: float = PATIENCE_S) -> CompletedCommand:
        """A command over the cluster, to its end."""
        return run("--config", str(self.config), *arguments, env=self.environment, cwd=self.folder, timeout_s=timeout_s)

    def start(self, *arguments: str, **environment: str) -> RunningProcess:
        """A command over the cluster, in the background, with these variables besides."""
        words, folder = ["--config", str(self.config), *arguments], self._new_folder(arguments[0])
        process = RunningProcess(words, self.environment | environment, folder)
        self._processes.append(process)
        return process

    def worker(self, role: ProcessRole, model: str, *options: str) -> Worker:
        """A worker that serves `model`, ready."""
        worker = self.launch(role, model, *options)
        worker.wait_until_registered()
        return worker

    def launch(self, role: ProcessRole, model: str, *options: str) -> Worker:
        """A worker that may not be ready yet: `wait_until_registered`."""
        arguments = [
            *("--config", str(self.config), "--log-style", "json", "--log-level", "info"),
            *("worker" if role == "both" else f"{role}-worker", "--model", model, *options),
        ]
        worker = Worker(arguments, self.environment, self._new_folder(role), self.cluster_state)
        self._processes.append(worker)
        return worker

    def queues(self) -> list[str]:
        """The work queues of these models."""
        specs = [spec for spec in topology.queues(self.models) if spec.exchange == topology.WORK]
        return [spec.name for spec in specs]

    def left_over(self) -> dict[str, int]:
        """Messages in the work queues once all workers have ended, so that none is merely held: by queue."""
        assert not any(isinstance(process, Worker) and process.alive for process in self._processes)
        with pika.BlockingConnection(pika.URLParameters(addresses(self.broker_url)[0])) as connection:
            depths = {name: _ready(connection.channel(), name) for name in self.queues()}
        return {name: ready for name, ready in depths.items() if ready}

    def has_queue(self, name: str) -> bool:
        """Whether the broker has this queue."""
        with pika.BlockingConnection(pika.URLParameters(addresses(self.broker_url)[0])) as connection:
            try:
                connection.channel().queue_declare(name, passive=True)
            except pika.exceptions.ChannelClosedByBroker:
                return False
            return True

    def close(self) -> None:
        """End every process, delete every queue of these models. Idempotent."""
        for process in self._processes:
            process.kill()
        self._delete_queues()
        self.cluster_state.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

    def _new_folder(self, name: str) -> Path:
        folder = self.folder / "processes" / f"{next(self._numbers)}-{name}"
        folder.mkdir(parents=True)
        return folder

    def _delete_queues(self) -> None:
        with pika.BlockingConnection(pika.URLParameters(addresses(self.broker_url)[0])) as connection:
            channel = connection.channel()
            for name in self.queues():
                channel.queue_delete(name)


def _ready(channel: BlockingChannel, queue: str) -> int:
    return int(channel.queue_declare(queue, passive=True).method.message_count)


def command(*arguments: str) -> list[str]:
    """`kvasir` with these arguments, by this Python."""
    return [sys.executable, "-m", "kvasir", *arguments]


def run(*arguments: str, env: Mapping[str, str], cwd: Path, timeout_s: float = PATIENCE_S) -> CompletedCommand:
    """A command to its end. Raises TimeoutExpired."""
    completed_process = subprocess.run(
        command(*arguments),
        env=dict(env),
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        encoding="utf-8",
        timeout=timeout_s,
    )
    return CompletedCommand(completed_process.returncode, completed_process.stdout, completed_process.stderr)


def environment(home: Path) -> dict[str, str]:
    """The environment of a process that finds this source tree, and no settings of the developer's."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith("KVASIR_")}
    folders = {"XDG_CONFIG_HOME": str(home / "config"), "XDG_DATA_HOME": str(home / "data")}
    vllm = {vllm_environment.VARIABLE: str(vllm_environment.python_path())}  # it lies in the developer's own folder
    return variables | folders | vllm | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}


def config_text(models: Mapping[str, ModelEntry]) -> str:
    """A kvasir.toml with these models; the first one grades."""
    first = next(iter(models))
    lines = ["[grading]", f'code_model = "{first}"', f'feedback_model = "{first}"', "temperature = 0.0"]
    for name, model in models.items():
        lines += [f'[models."{name}"]', f'engine = "{model.engine}"', f"context = {model.context}"]
        lines += [f"short_prompt_tokens = {model.short_prompt_tokens}"]
        lines += [f"slots = {model.slots}", f"threads = {model.threads}", f'weights.{model.engine} = "{model.weights}"']
    return "\n".join(lines) + "\n"
