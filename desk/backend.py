"""What the desk needs from other packages.

The program that starts the desk passes it in, since the desk builds no worker.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from grading.request import GradeRequest
from messages.workers import WorkerInfo


@dataclass(frozen=True, slots=True)
class FleetView:
    """The cluster at one moment. `problem` says why it can't be seen."""

    workers: Sequence[WorkerInfo] = ()
    queue_depths: Mapping[str, int] | None = None  # number of ready jobs in each queue
    problem: str = ""


class Backend(Protocol):
    """A configuration, and ways to act on it."""

    @property
    def home(self) -> Path:
        """The folder of the assignments that the desk creates."""

    @property
    def extra_folders(self) -> Sequence[Path]:
        """Batch folders from other places that the desk shows too."""

    @property
    def models(self) -> Sequence[str]:
        """The names of the configured models."""

    @property
    def notice(self) -> str:
        """A banner for every page; "" for none."""

    @property
    def is_cluster(self) -> bool:
        """Whether jobs go to workers on a cluster."""

    def command(self, *arguments: str) -> list[str]:
        """Return a `kvasir` command line with these arguments and the same configuration."""

    def request_of(self, manifest_request: Mapping[str, Any]) -> GradeRequest:
        """Return the request that a manifest keeps. Raises KvasirError."""

    def fleet(self) -> FleetView:
        """Return the current workers and queues; empty without a cluster."""
