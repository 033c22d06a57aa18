"""The cluster of a night: services with a user for each role, behind proxies; workers; a gateway; Prometheus.

A supervisor would start again what was killed. Here the troubles of the night do so, and every process that there ever
was stays known, with its log.
"""

import json
import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol, Self

from infra.deploy.permissions import AccountRole
from tests.acceptance.faults.services import HEARTBEAT_S, STORE_TIMEOUT_S
from tests.night.courses import EXAMPLE_MODEL, READER, WRITER, Course
from tests.night.reader import Reader
from tests.night.services import clusters, one_of_each
from tests.support.deployed import RoleCluster
from tests.support.monitors import Prometheus, RedisExporter
from tests.support.processes import (
    DEMO,
    ROOT,
    CompletedCommand,
    ModelEntry,
    ProcessRole,
    RunningProcess,
    config_text,
    gateway_url,
)
from tests.support.servers import HOST, RabbitMQServer, free_port, plain_values
from tests.support.waiting import wait_until
from tests.upgrade.programs import PREVIOUS

_ACCOUNTS: dict[ProcessRole, AccountRole] = {"prefill": "prefill", "decode": "decode", "both": "worker"}
BEGINNINGS = ("prefill_started", "decode_started")
FINISHES = ("replied", "failed", "expired")  # of a job
# Of a worker's part in one: with kv_gone it goes back to prefill.
ENDINGS = (*FINISHES, "passed_on", "cancelled", "kv_gone", "retried", "isolated")


class Owner(Protocol):
    """Whatever waits for a batch's results."""

    @property
    def alive(self) -> bool:
        """Whether it still waits."""

    def wait(self, timeout_s: float) -> int | None:
        """Its exit code, once it has ended by itself."""

    def text(self) -> str:
        """What it has said."""


@dataclass(frozen=True, slots=True)
class Pace:
    """How long the night's jobs take."""

    writer_tokens_per_s: float  # of each slot
    reader_s: float  # for each question


class WorkerProcess(Protocol):
    """What a night asks of a worker's process, whoever has started it."""

    @property
    def pid(self) -> int:
        """Its process id."""

    def text(self) -> str:
        """What it has written so far."""

    def events(self, event: str = "") -> list[dict[str, Any]]:
        """The JSON lines of its log so far; with `event` only those of this step."""

    def kill(self) -> None:
        """SIGKILL."""

    def wait_until_registered(self) -> None:
        """Return when it serves."""

    def terminate(self, timeout_s: float) -> int | None:
        """SIGTERM, and its exit code."""


@dataclass(eq=False)
class Hand:
    """One worker's process, with what is needed to start another in its place."""

    role: ProcessRole
    model: str
    options: tuple[str, ...]
    port: int  # of its page
    process: WorkerProcess
    is_earlier: bool = False  # of the release before

    @property
    def name(self) -> str:
        """As it is called in the night's table."""
        return f"{self.role} worker of {self.model}" if self.role != "both" else f"worker of {self.model}"

    def lines(self) -> list[dict[str, Any]]:
        """What it has logged so far."""
        return self.process.events()

    def held_jobs(self) -> set[str]:
        """Jobs that it has begun, and neither passed on nor ended."""
        jobs: set[str] = set()
        for line in self.lines():
            if line["event"].startswith("metrics, "):  # a new process, in its log's first line
                jobs.clear()
            elif line["event"] in BEGINNINGS:
                jobs.add(line["job"])
            elif line["event"] in ENDINGS:
                jobs.discard(line["job"])
        return jobs


class Site:
    """See the module. Leaving it ends every process."""

    def __init__(
        self,
        folder: Path,
        pace: Pace,
        real_models: Mapping[str, ModelEntry] = MappingProxyType({}),
        has_clusters: bool = False,
    ) -> None:
        """`has_clusters`: three brokers and a Redis Cluster in place of one of each."""
        self.folder = folder
        self.real_models = real_models
        self._has_clusters = has_clusters
        self.pace = pace
        self.hands: list[Hand] = []  # that work now
        self.past_hands: list[Hand] = []
        self.deployed_hands: list[Hand] = []  # that `kvasir deploy` has started; their supervisors keep them
        self.missed_ports: list[int] = []  # of workers that Prometheus still looks for
        self.owners: dict[str, Owner] = {}  # by the course's title
        self.gateway: RunningProcess | None = None
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *_error: object) -> None:
        self._stack.close()

    def _start(self) -> None:
        enter = self._stack.enter_context
        for name in ("services", "cluster"):
            (self.folder / name).mkdir(parents=True)
        start_services = clusters if self._has_clusters else one_of_each
        self.services = enter(start_services(self.folder / "services"))
        self.deployed = self.services.deployed
        for broker in self.services.brokers:
            broker.control("eval", "application:set_env(rabbit, quorum_tick_interval, 1000).")
        self.deployed.options["broker"] = {"heartbeat": str(HEARTBEAT_S)}
        if not self._has_clusters:  # of a Redis Cluster's nodes they are as short already
            timeouts = {"socket_timeout": str(STORE_TIMEOUT_S), "socket_connect_timeout": str(STORE_TIMEOUT_S)}
            self.deployed.options["store"] = timeouts
        exporters = [enter(RedisExporter(store.url)) for store in self.services.stores]
        broker_urls = [broker.metrics_url for broker in self.services.brokers]
        exporter_urls = [exporter.url for exporter in exporters]
        self.prometheus = enter(Prometheus({"rabbitmq": broker_urls, "redis": exporter_urls}))
        self.reader = enter(Reader(self.pace.reader_s))
        self.cluster = enter(RoleCluster(self.folder / "cluster", self.deployed, self.models()))
        self.cluster.config.write_text(self.config(self.models()), "utf-8")

    def models(self, quiet: bool = False) -> dict[str, ModelEntry]:
        """Those of the night; `quiet`: the same ones, as fast as they go."""
        pace = f"sim:scale={0 if quiet else 1},prefill=400,decode={self.pace.writer_tokens_per_s:g},layers=2"
        return {
            WRITER: ModelEntry("simulated", pace, context=32_768),
            READER: ModelEntry("openai", self.reader.weights, context=32_768, slots=4),
            EXAMPLE_MODEL: DEMO,
            **self.real_models,
        }

    def config(self, models: dict[str, ModelEntry]) -> str:
        """A kvasir.toml in which the reader grades code and the writer the rest."""
        graders = config_text(models).replace(f'code_model = "{WRITER}"', f'code_model = "{READER}"')
        return f"{graders}[services]\nbroker_nodes = {len(self.services.brokers)}\n"

    # Processes, each with its role's rights.

    def command(self, role: AccountRole, *words: str, timeout_s: float = 200.0) -> CompletedCommand:
        """A command to its end."""
        self.cluster.role = role
        return self.cluster.run(*words, timeout_s=timeout_s)

    def start(self, role: AccountRole, *words: str) -> RunningProcess:
        """A command that goes on."""
        self.cluster.role = role
        return self.cluster.start(*words)

    def hire(self, role: ProcessRole, model: str, *options: str, source: Path | None = None) -> Hand:
        """A worker that may not be ready yet, and that Prometheus will watch; `source`: the program's, if another."""
        port = free_port()
        self.cluster.role = _ACCOUNTS[role]
        self.cluster.variables = self._python_path(options, source)
        process = self.cluster.launch(role, model, "--metrics-port", str(port), *options)
        self.cluster.variables = {}
        hand = Hand(role, model, options, port, process, source is not None)
        self.hands.append(hand)
        self.watch_pages()
        return hand

    def _python_path(self, options: Sequence[str], source: Path | None) -> dict[str, str]:
        """Where Python finds the program; for MLX also a quick BLAS: without it its proof takes half an hour."""
        if "mlx" not in options:
            return {"PYTHONPATH": str(source)} if source else {}
        folder = self.folder / "quick-blas"
        folder.mkdir(exist_ok=True)
        (folder / "sitecustomize.py").write_text("from tests.support import mlx_blas\n\nmlx_blas.load()\n", "utf-8")
        return {"PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])}

    def replace(self, hand: Hand) -> Hand:
        """One more like it; the other is no longer expected back."""
        self.dismiss(hand)
        return self.hire(hand.role, hand.model, *hand.options)

    def dismiss(self, hand: Hand) -> None:
        """It is over, or will be. Prometheus misses it, as it does until somebody edits its list."""
        self.hands.remove(hand)
        self.past_hands.append(hand)
        self.missed_ports.append(hand.port)

    def watch_pages(self) -> None:
        """Have Prometheus look for the workers that there should be, and for those that are missed."""
        self.prometheus.watch([*(hand.port for hand in self.hands), *self.missed_ports])

    def miss_nobody(self) -> None:
        """The list of workers is edited: only those that there are."""
        self.missed_ports.clear()
        self.watch_pages()

    def own(self, course: Course) -> RunningProcess:
        """Watch a course's batch, for the first time or again."""
        owner = self.start("producer", "watch", str(course.out), "--quiet", "--json")
        self.owners[course.title] = owner
        return owner

    def process_of(self, course: Course) -> RunningProcess:
        """The command that watches a course's batch."""
        owner = self.owners[course.title]
        assert isinstance(owner, RunningProcess), f"{course.title} is the desk's"
        return owner

    def serve(self) -> None:
        """The gateway, for the first time or again: on the same port, with the same state."""
        port = free_port() if self.gateway is None else self.gateway_port
        self.gateway_port = port
        state = str(self.folder / "gateway")
        self.gateway = self.start("producer", "serve", "--port", str(port), "--state", state)
        gateway_url(self.gateway)

    @property
    def gateway_url(self) -> str:
        """As OpenAI's SDK takes it."""
        return f"http://{HOST}:{self.gateway_port}/v1"

    def everyone(self) -> list[Hand]:
        """All workers that there ever were."""
        return [*self.past_hands, *self.hands, *self.deployed_hands]

    # What is to be seen.

    def depths(self) -> dict[str, int]:
        """Messages in every queue of the broker, held ones included, as RabbitMQ itself says."""
        lines = self.services.broker.control("list_queues", "--no-table-headers", "name", "messages").splitlines()
        return {name: int(count) for name, count in (line.split("\t") for line in lines if "\t" in line)}

    def store_values(self) -> Iterator[bytes]:
        """Every key of the store, with all that it holds."""
        with closing(self.deployed.redis("operator")) as client:
            yield from plain_values(client)

    def broker_files(self) -> Iterator[bytes]:
        """What the brokers have on disk: every message that lies in a queue, and many that have gone."""
        for broker in self.services.brokers:
            for path in (broker.folder / "data").rglob("*"):
                if path.is_file():
                    yield path.read_bytes()

    def logs(self) -> Iterator[bytes]:
        """Of every worker, the gateway and all services; an owner's terminal is its instructor's."""
        folders = (self.folder / "cluster" / "processes").iterdir()
        logs = [
            folder / "log" for folder in folders if folder.name.endswith(("-prefill", "-decode", "-both", "-serve"))
        ]
        for server in (*self.services.brokers, *self.services.stores):
            logs += server.folder.rglob("*.log")
        for log in logs:
            yield log.read_bytes()
        for hand in self.deployed_hands:
            yield hand.process.text().encode()


def earlier_release(folder: Path) -> Path | None:
    """The source of the release before, or None where the history lacks it."""
    archive = subprocess.run(["git", "archive", PREVIOUS], cwd=ROOT, capture_output=True)
    if archive.returncode:
        return None
    folder.mkdir()
    subprocess.run(["tar", "x", "-C", str(folder)], input=archive.stdout, check=True)
    return folder


def journal_lines(folders: Sequence[Path]) -> list[dict[str, Any]]:
    """The results in these batches' folders; a last line that is being written is left out."""
    texts = [path.read_text("utf-8") for folder in folders if (path := folder / "results.jsonl").exists()]
    return [json.loads(line) for text in texts for line in text.splitlines(keepends=True) if line.endswith("\n")]


def seconds_of(line: dict[str, Any]) -> float:
    """When a line was logged, since the epoch."""
    return datetime.fromisoformat(line["time"]).timestamp()


def wait_for_workers(hands: Sequence[Hand]) -> None:
    """Return when these serve."""
    for hand in hands:
        hand.process.wait_until_registered()


def wait_for_disk(broker: RabbitMQServer) -> None:
    """Return when no queue is so new that a SIGKILL of the broker would lose its register (see RabbitMQServer)."""
    lines = broker.control("list_queues", "--no-table-headers", "name", "type").splitlines()
    types = dict(line.split("\t") for line in lines if line.startswith(("prefill", "decode", "reply", "retry")))
    wanted = [name for name, kind in types.items() if kind in ("quorum", "rabbit_quorum_queue")]
    wait_until(lambda: broker.wait_until_on_disk(*wanted) or True, "every queue is on disk", 60)
