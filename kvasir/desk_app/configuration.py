"""The backend of the grading desk: one configuration, and how to act on it."""

import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from desk.backend import FleetView
from grading.request import GradeRequest
from infra.broker import topology
from infra.config.settings import Settings
from kvasir import class_run
from kvasir.connect import connect, is_cluster
from messages.errors import KvasirError
from producers.client import Client

_FRESH_S = 1.5  # all pages share one view of the fleet, which is cached for this many seconds


class DeskBackend:
    """Implements `desk.backend.Backend`. It connects to nothing until a page asks for the fleet."""

    def __init__(self, settings: Settings, config: Path | None, home: Path, extra_folders: Sequence[Path] = ()) -> None:
        self.home = home.absolute()
        self.extra_folders = tuple(path.absolute() for path in extra_folders)
        self.models = tuple(settings.models)
        self.notice = settings.grading.notice
        self.is_cluster = is_cluster(settings)
        self._settings = settings
        self._config = config
        # One connection for all pages. It is opened when a page needs it, and reopened after an error.
        self._client: Client | None = None
        self._view = FleetView()
        self._viewed_at = -_FRESH_S
        self._looking = threading.Lock()

    def command(self, *arguments: str) -> list[str]:
        """Return a `kvasir` command line that uses this Python and the same configuration."""
        config_option = ["--config", str(self._config.absolute())] if self._config else []
        return [sys.executable, "-m", "kvasir", *config_option, *arguments]

    def request_of(self, manifest_request: Mapping[str, Any]) -> GradeRequest:
        """Return the request that a manifest keeps. Raises ConfigError."""
        return class_run.request_from_manifest(self._settings, manifest_request)

    def fleet(self) -> FleetView:
        """Return workers and queues, at most a moment old, or why the cluster can't be reached.

        Without a cluster it is empty.
        """
        if not self.is_cluster:
            return FleetView()
        with self._looking:
            if time.monotonic() - self._viewed_at > _FRESH_S:
                self._view = self._look()
                self._viewed_at = time.monotonic()
            return self._view

    def _look(self) -> FleetView:
        names = [
            name
            for stage in topology.WORK_STAGES
            for model in self.models
            for name in topology.work_queues(stage, model)
        ]
        try:
            self._client = client = self._client or connect(self._settings, (), name="desk")
            depths = {name: depth.ready for name, depth in client.broker.depths(*names).items() if depth}
            return FleetView(client.workers(), depths)
        except KvasirError as error:
            if self._client:
                self._client.close()
            self._client = None
            return FleetView(problem=str(error))
