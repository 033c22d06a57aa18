"""What the grading desk is given to work with: one configuration, and how to act on it."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from desk.backend import FleetView
from grading.request import GradeRequest
from infra.broker import topology
from infra.config.settings import Settings, load_settings
from kvasir import class_run
from kvasir.connect import connect, is_cluster
from messages.errors import KvasirError
from messages.jobs import LANES
from producers.client import Client

_FRESH_S = 1.5  # several pages that look at once share one look


class DeskBackend:
    """A `desk.backend.Backend`. Connects to nothing until the fleet is looked at."""

    def __init__(self, settings: Settings, config: Path | None, home: Path, extra_folders: Sequence[Path] = ()) -> None:
        self.home = home.absolute()
        self.extra_folders = tuple(path.absolute() for path in extra_folders)
        self.models = tuple(settings.models)
        self.notice = settings.grading.notice
        self.is_cluster = is_cluster(settings)
        self._settings = settings
        self._config = config
        self._look = _FleetViewer(settings)

    def command(self, *arguments: str) -> list[str]:
        """`kvasir` by this Python, under the same configuration."""
        config_option = ["--config", str(self._config.absolute())] if self._config else []
        return [sys.executable, "-m", "kvasir", *config_option, *arguments]

    def request_of(self, manifest_request: Mapping[str, Any]) -> GradeRequest:
        """The request that a manifest keeps. Raises ConfigError."""
        return class_run.request_from_manifest(self._settings, manifest_request)

    def fleet(self) -> FleetView:
        """Workers and queues, at most a moment old; empty without a cluster."""
        return self._look.now() if self.is_cluster else FleetView()


@dataclass
class _FleetViewer:
    """One connection for all pages, opened when somebody looks, and anew after it failed."""

    settings: Settings
    client: Client | None = None
    view: FleetView = field(default_factory=FleetView)
    viewed_at: float = -_FRESH_S
    lock: threading.Lock = field(default_factory=threading.Lock)

    def now(self) -> FleetView:
        """The fleet; its problem if the cluster can't be reached."""
        with self.lock:
            if time.monotonic() - self.viewed_at > _FRESH_S:
                self.view = self._look()
                self.viewed_at = time.monotonic()
            return self.view

    def _look(self) -> FleetView:
        try:
            self.client = self.client or connect(self.settings, (), name="desk")
            return FleetView(self.client.workers(), self._queue_depths(self.client))
        except KvasirError as error:
            if self.client:
                self.client.close()
            self.client = None
            return FleetView(problem=str(error))

    def _queue_depths(self, client: Client) -> dict[str, int]:
        names = [
            topology.work_queue(stage, model, lane)
            for stage in topology.WORK_STAGES
            for model in self.settings.models
            for lane in LANES
        ]
        return {name: depth.ready for name in names if (depth := client.broker.depth(name))}


def open_desk(config: Path | None, home: Path, extra_folders: Sequence[Path]) -> DeskBackend:
    """The desk for a configuration. Raises ConfigError."""
    return DeskBackend(load_settings(config=config), config, home, extra_folders)
