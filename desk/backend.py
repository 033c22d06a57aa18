"""What the desk needs from other rooms. Whoever starts the desk hands it in, since the desk builds no worker."""

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
    queue_depths: Mapping[str, int] | None = None  # jobs ready, by queue
    problem: str = ""


class Backend(Protocol):
    """A configuration, and how to act on it."""

    @property
    def home(self) -> Path:
        """Folder of the assignments that the desk creates."""

    @property
    def extra_folders(self) -> Sequence[Path]:
        """Batch folders from elsewhere that are shown too."""

    @property
    def models(self) -> Sequence[str]:
        """Names of the configured models."""

    @property
    def notice(self) -> str:
        """A banner across every page; "" for none."""

    @property
    def is_cluster(self) -> bool:
        """Whether jobs go to workers elsewhere."""

    def command(self, *arguments: str) -> list[str]:
        """The command line of `kvasir` with these arguments, under the same configuration."""

    def request_of(self, manifest_request: Mapping[str, Any]) -> GradeRequest:
        """The request that a manifest keeps. Raises KvasirError."""

    def fleet(self) -> FleetView:
        """Workers and queues now; empty without a cluster."""
