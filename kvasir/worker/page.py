"""A worker's page: what `/health`, `/ready` and `/status` say, and the numbers behind `/metrics`."""

import logging
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from infra.broker.base import Broker
from infra.config.settings import Settings
from kvstore.base import ClusterState
from messages.errors import StoreUnavailable
from messages.workers import NO_DETAILS, WorkerInfo, WorkerStage
from monitoring.access import LOOPBACK
from monitoring.energy import GpuCollector, PowerMeter, nvml_watts
from monitoring.metrics import Metrics
from monitoring.server import Page, PageServer
from monitoring.worker_metrics import RegistrationCollector

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PageOptions:
    """Where the page is served. `metrics_port` None: nowhere; 0: on a free port, which the log names."""

    metrics_port: int | None = None
    metrics_host: str = LOOPBACK


class WorkerPage:
    """Holds what the page says about one worker. Call `mark_loaded` once the worker can take jobs."""

    def __init__(self, stage: WorkerStage, model: str, models: Iterable[str]) -> None:
        self.metrics = Metrics()
        self.url = ""  # "" if the page is not served
        self._stage = stage
        self._model = model
        self._stealable_models = tuple(models)  # models whose jobs the worker is allowed to steal
        self._start_s = time.monotonic()
        self._registration: Callable[[], WorkerInfo] | None = None
        self._prefill: Callable[[], WorkerInfo] | None = None
        self._broker: Broker | None = None
        self._cluster_state: ClusterState | None = None
        self.metrics.registry.register(RegistrationCollector(self._registrations))

    def mark_loaded(
        self,
        registration: Callable[[], WorkerInfo],
        broker: Broker,
        cluster_state: ClusterState,
        prefill: Callable[[], WorkerInfo] | None = None,
    ) -> None:
        """Record that the model is loaded. From now on the page shows the worker's registration.

        `prefill`: the second registration, if the worker has both roles.
        """
        self._registration, self._broker, self._cluster_state = registration, broker, cluster_state
        self._prefill = prefill
        if prefill:
            self.metrics.prepare(self._model, "prefill")
        for model in (self._model, *self._stealable_models):
            self.metrics.prepare(model, self._stage)
        self.metrics.prepare_steals(self._stealable_models)

    def is_busy(self) -> bool:
        """Whether it has a job in hand."""
        return any(registration.busy for registration in self._registrations())

    def _registrations(self) -> list[WorkerInfo]:
        return [registration() for registration in (self._registration, self._prefill) if registration]

    def page(self) -> Page:
        """Return the functions that the page's server calls."""
        return Page(self.metrics.registry, self._health, self._why_not_ready, self._status)

    def _health(self) -> dict[str, Any]:
        registration = self._registration() if self._registration else None
        return {
            "status": "ok" if registration else "loading",
            "model": self._model,
            "loaded": bool(registration),
            "backend": f"{registration.engine} on {registration.device}" if registration else "",
        }

    def _why_not_ready(self) -> list[str]:
        if self._registration is None or self._broker is None or self._cluster_state is None:
            return [f"{self._model} is still being loaded, or its KV transfer is being tested"]
        reasons = [] if self._broker.is_connected else ["the broker can't be reached"]
        try:
            self._cluster_state.now()
        except StoreUnavailable as error:
            reasons.append(f"the store can't be reached: {error}")
        pauses = dict.fromkeys(registration.details.paused_because for registration in self._registrations())
        return reasons + [f"it paused itself: {reason}" for reason in pauses if reason]

    def _status(self) -> dict[str, Any]:
        known_fields = [_fields(registration) for registration in self._registrations()]
        reasons = self._why_not_ready()
        return {
            **(known_fields[0] if known_fields else {"role": self._stage, "model": self._model}),
            **({"prefill": known_fields[1]} if known_fields[1:] else {}),
            "ready": not reasons,
            "reasons": reasons,
            "uptime_s": round(time.monotonic() - self._start_s, 1),
        }


def _fields(registration: WorkerInfo) -> dict[str, Any]:
    fields = asdict(registration)
    if registration.details == NO_DETAILS:
        del fields["details"]
    return fields


@contextmanager
def worker_page(
    settings: Settings, options: PageOptions, stage: WorkerStage, model: str, steal: Sequence[str] = ()
) -> Iterator[WorkerPage]:
    """Serve a page while the context is open. Metrics are counted even without a server. Raises ConfigError."""
    page = WorkerPage(stage, model, settings.models if "all" in steal else steal)
    with ExitStack() as stack:
        if options.metrics_port is not None:
            watts = _declared_watts(settings)
            registry = page.metrics.registry
            registry.register(GpuCollector(socket.gethostname()))
            stack.enter_context(PowerMeter(registry, socket.gethostname(), page.is_busy, watts, nvml_watts()))
            server = stack.enter_context(PageServer(page.page(), options.metrics_host, options.metrics_port))
            page.url = server.url
            log.info("metrics, health, readiness and status are at %s", server.url)
        yield page


def _declared_watts(settings: Settings) -> float:
    """Return the configured watts of this machine, found by name or address; 0 if there are none."""
    name = socket.gethostname()
    with_watts = [machine for machine in settings.machines.values() if machine.watts]
    return next((machine.watts for machine in with_watts if machine.is_called(name) or _is_local(machine.host)), 0.0)


def _is_local(host: str) -> bool:
    """Whether an address belongs to this machine: only local addresses can be bound."""
    if not host:
        return False
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.bind((host, 0))
    except (OSError, UnicodeError):
        return False
    return True
