"""A small cluster under observation: RabbitMQ, Redis, their exporters, Prometheus, and workers with simulated engines.

with World(folder, models=("m1",)) as world:
    world.worker("prefill", "m1", "sim:scale=1,prefill=4000")
    world.submit("m1", jobs=50)
    seen = world.look(seconds=6)      # {panel title: {legend: value}}
"""

import itertools
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

import pika
import redis

from infra.broker import topology
from infra.config.settings import load_settings
from kvasir.connect import connect
from messages.jobs import Sampling, user_prompt
from monitoring.dashboards.panels import PANELS, Query
from tests.support.monitors import WINDOW, Prometheus, RedisExporter, Series
from tests.support.processes import Cluster, ModelEntry, Worker, gateway_url
from tests.support.servers import HOST, RabbitMQServer, RedisServer, free_port
from tests.support.waiting import wait_until

SHARED_TOKENS, OWN_TOKENS = 256, 400
STORE_BYTES = 64 << 20
PATIENCE_S = 240.0
LATE_S = 2.0
_JUNK_BYTES = 1 << 20

PanelMeans = dict[str, dict[str, float]]  # panel title: legend: value

MACHINE = """
[machines.here]
host = "127.0.0.1"
watts = 100
"""


@dataclass(frozen=True, slots=True)
class TimeWindow:
    """A stretch of time, seconds since the epoch."""

    start: float
    end: float


class ObservedCluster:
    """Services, Prometheus and workers; leaving it ends all of them."""

    def __init__(self, folder: Path, models: Sequence[str]) -> None:
        self._stack = ExitStack()
        self._numbers = itertools.count(1)
        self._ports: dict[Worker, int] = {}
        self._pages: list[int] = []  # of gateways
        try:
            self._start(folder, models)
        except BaseException:
            self._stack.close()
            raise

    def _start(self, folder: Path, models: Sequence[str]) -> None:
        enter = self._stack.enter_context
        # Prometheus looks each second: figures that the broker renews every five would be half a test old.
        statistics = {"collect_statistics_interval": "1000"}
        self.broker = enter(RabbitMQServer(plugins=["rabbitmq_prometheus"], settings=statistics))
        self.broker.control("eval", "application:set_env(rabbit, quorum_tick_interval, 1000).")
        self.store = enter(RedisServer(max_memory=str(STORE_BYTES)))
        self.exporter = enter(RedisExporter(self.store.url))
        self.prometheus = enter(Prometheus({"rabbitmq": [self.broker.metrics_url], "redis": [self.exporter.url]}))
        entries = {name: ModelEntry("simulated", "sim:scale=0", context=32768) for name in models}
        self.cluster = enter(Cluster(folder, self.broker.url, self.store.url, entries))
        with self.cluster.config.open("a") as file:
            file.write(MACHINE)
        settings = load_settings(config=self.cluster.config, environ=self.cluster.environment)
        self.client = enter(connect(settings, name="observer"))
        self.redis = redis.Redis.from_url(self.store.url)
        self._stack.callback(self.redis.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._stack.__exit__(kind, error, tb)

    def worker(self, role: Literal["prefill", "decode"], model: str, weights: str, *options: str) -> Worker:
        """A worker that Prometheus watches, ready."""
        worker = self.launch(role, model, weights, *options)
        self.wait_for(worker)
        return worker

    def wait_for(self, *workers: Worker) -> None:
        """Return once these serve and Prometheus has read their figures: it sees only what changes after that."""
        for worker in workers:
            worker.wait_until_registered()
        pages = "|".join(f"{HOST}:{self._ports[worker]}" for worker in workers)
        self.until(f'count(kvasir_worker_info{{instance=~"{pages}"}})', at_least=len(workers))

    def launch(self, role: Literal["prefill", "decode"], model: str, weights: str, *options: str) -> Worker:
        """A worker that Prometheus will watch, and that may not be ready yet."""
        port = free_port()
        engine = ("--engine", "simulated", "--weights", weights, "--metrics-port", str(port))
        worker = self.cluster.launch(role, model, *engine, *options)
        self._ports[worker] = port
        self.prometheus.watch([*self._ports.values(), *self._pages])
        return worker

    def pair(self, model: str, prefill: str, decode: str, *options: str) -> list[Worker]:
        """One worker for each stage."""
        pair = self.launch_pair(model, prefill, decode, *options)
        self.wait_for(*pair)
        return pair

    def launch_pair(self, model: str, prefill: str, decode: str, *options: str) -> list[Worker]:
        """The same, not ready yet: several pairs start in the time of one."""
        return [self.launch("prefill", model, prefill), self.launch("decode", model, decode, *options)]

    def gateway(self, folder: Path) -> str:
        """A gateway that Prometheus watches too; its URL."""
        page = free_port()
        words = ("--port", "0", "--state", str(folder), "--metrics-port", str(page))
        gateway = self.cluster.start("serve", *words)
        self._pages.append(page)
        self.prometheus.watch([*self._ports.values(), *self._pages])
        url = gateway_url(gateway)
        self.until(f'count(kvasir_gateway_open_requests{{instance="{HOST}:{page}"}})', at_least=1)
        return url

    def forget(self, *workers: Worker) -> None:
        """End these workers, and have Prometheus look for them no longer."""
        for worker in workers:
            worker.kill()
            del self._ports[worker]
        self.prometheus.watch([*self._ports.values(), *self._pages])

    def forget_all(self) -> None:
        """End all workers."""
        self.forget(*self._ports)

    def submit(self, model: str, jobs: int, max_tokens: int = 400) -> None:
        """Publish jobs: a common beginning, a part of their own, the questions of a submission in turn."""
        shared_text = "".join(f"{number:4}" for number in range(SHARED_TOKENS))
        batch = f"batch-{next(self._numbers)}"
        jobs_to_submit = (
            self.client.new_job(
                batch,
                f"s{number // 2}.{('code', 'feedback')[number % 2]}",
                model,
                user_prompt(shared_text, f"{batch} {number} ".ljust(4 * OWN_TOKENS, "x")),
                Sampling(max_tokens),
            )
            for number in range(jobs)
        )
        self.client.submit(jobs_to_submit)

    @contextmanager
    def pause(self, worker: Worker) -> Iterator[None]:
        """A worker that takes no job meanwhile, by an operator's command: nobody has to be quicker than it is."""
        completed_command = self.cluster.run("pause", worker.registration.worker_id)
        assert completed_command.code == 0, completed_command.stderr
        try:
            yield
        finally:
            completed_command = self.cluster.run("resume", worker.registration.worker_id)
            assert completed_command.code == 0, completed_command.stderr

    def clear(self) -> None:
        """End all workers, empty all queues and the store: whatever happened here, the next one begins afresh."""
        self.forget_all()
        with pika.BlockingConnection(pika.URLParameters(self.broker.url)) as connection:
            for queue in (*self.cluster.queues(), topology.DEAD_LETTERS):
                connection.channel().queue_purge(queue)
        self.lose_blocks()

    @contextmanager
    def fill_store(self, share: float) -> Iterator[None]:
        """Redis filled up to this share of its memory with something that is none of ours."""
        names = []
        while self.redis.info("memory")["used_memory"] < share * STORE_BYTES:
            names.append(f"junk:{next(self._numbers)}")
            self.redis.set(names[-1], b"x" * _JUNK_BYTES)
        try:
            yield
        finally:
            self.redis.delete(*names)

    def lose_blocks(self) -> None:
        """Delete every block that lies in the store now."""
        names = list(self.redis.scan_iter("kv:*", count=1000))
        if names:
            self.redis.delete(*names)

    def window(self, seconds: float) -> TimeWindow:
        """The next `seconds`, once they have passed."""
        start = time.time()
        wait_until(lambda: time.time() >= start + seconds, "the window has passed", seconds + 5)
        return TimeWindow(start, start + seconds)

    def until(self, expression: str, at_least: float) -> None:
        """Return once Prometheus says so.

        It is asked late, on purpose: what workers can undo before a slow machine's Prometheus has looked is nothing to
        wait for. Hold them first.
        """
        self.window(LATE_S)
        wait_until(
            lambda: (self.prometheus.value(expression) or 0.0) >= at_least,
            f"{expression} is at least {at_least:g}",
            PATIENCE_S,
            poll_s=0.25,
        )

    def look(self, seconds: float) -> PanelMeans:
        """What the panels show over the next seconds: the mean of each series."""
        window = self.window(seconds)
        panel_series = {panel.title: self.series_of(panel.queries, window) for panel in PANELS}
        return {title: {name: _mean(series) for name, series in panel.items()} for title, panel in panel_series.items()}

    def series_of(self, queries: Sequence[Query], window: TimeWindow) -> dict[str, Series]:
        """Each series of a panel, by its legend."""
        return {
            legend(query.legend, labels): series
            for query in queries
            for labels, series in self.prometheus.values(expression(query), window.start, window.end)
            if series
        }


def expression(query: Query) -> str:
    """A panel's expression as Prometheus takes it."""
    return query.expr.replace("$model", ".*").replace("$__rate_interval", WINDOW)


def legend(template: str, labels: Mapping[str, str]) -> str:
    """`{{model}} {{stage}}` with the labels' values, as Grafana fills it."""
    return re.sub(r"\{\{(\w+)\}\}", lambda match: labels.get(match[1], ""), template)


def _mean(series: Series) -> float:
    return sum(value for _at, value in series) / len(series)
