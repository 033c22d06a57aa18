"""The two contracts of the store: KVStore (blocks) and ClusterState (small facts that workers share).

Everything here is a cache or a courtesy. Losing all of it costs time, never a job: RabbitMQ holds the truth about
work. Both raise StoreUnavailable when the store can't be reached, and may be called from any thread.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TypeVar

from kvstore.blocks import BlockRef, snapshot_refs
from messages import codec
from messages.errors import InvalidMessage, NewerMessage
from messages.kv import Block, KVCache, KVLayout, Record, RecurrentState, Window
from messages.workers import NO_DETAILS, WorkerDetails, WorkerInfo

# A leak guard, longer than any deadline or queue. Every put and every use sets it again.
TTL_S = 24 * 3600

# So long it is known which workers registered no more, and did not say that they leave.
LOST_FOR_S = 3600

R = TypeVar("R", Block, Window, RecurrentState)
Run = tuple[str, int]  # job_id, run
EncodedRegistration = tuple[bytes, bytes]  # a WorkerInfo, and its WorkerDetails; b"": none


@dataclass(frozen=True, slots=True)
class StoreUsage:
    """Bytes in use and the bytes allowed (0: no limit known)."""

    used_bytes: int
    max_bytes: int


class KVStore(ABC):
    """Blocks of KV caches under their keys."""

    @abstractmethod
    def find_missing(self, refs: Sequence[BlockRef]) -> list[BlockRef]:
        """Those of `refs` that are not stored; all others had their TTL renewed. One pipeline."""

    @abstractmethod
    def put(self, fingerprint: str, layout: KVLayout, records: Iterable[tuple[BlockRef, Record]]) -> int:
        """Store records, each as one atomic value with a TTL; returns the bytes stored.

        Raises StoreUnavailable, also when the store is full; what was stored before stays.
        """

    @abstractmethod
    def read(self, kind: type[R], fingerprint: str, layout: KVLayout, refs: Sequence[BlockRef]) -> list[R]:
        """The records of `refs`, which are all of this kind, in order, TTLs renewed.

        Raises KVTransferFailed if one is missing, damaged, or not of this fingerprint, layout and chain: nothing
        is returned then, and the reason says which and why.
        """

    def get(self, fingerprint: str, layout: KVLayout, refs: Sequence[BlockRef]) -> list[Block]:
        """The blocks of `refs`, in order. Raises KVTransferFailed as `read`."""
        return self.read(Block, fingerprint, layout, refs)

    def get_window(self, fingerprint: str, layout: KVLayout, ref: BlockRef) -> Window:
        """The window record of `ref`. Raises KVTransferFailed as `read`."""
        return self.read(Window, fingerprint, layout, [ref])[0]

    def get_states(self, fingerprint: str, layout: KVLayout, refs: Sequence[BlockRef]) -> list[RecurrentState]:
        """The recurrent states of `refs`, in order. Raises KVTransferFailed as `read`."""
        return self.read(RecurrentState, fingerprint, layout, refs)

    def get_cache(self, fingerprint: str, layout: KVLayout, refs: Sequence[BlockRef]) -> KVCache:
        """The KV cache of the blocks of `refs` and of what lies at their end. Raises KVTransferFailed as `read`."""
        blocks = self.get(fingerprint, layout, refs)
        ends = snapshot_refs(layout, refs[-1]) if layout.snapshots else []
        window = self.get_window(fingerprint, layout, ends.pop(0)) if layout.window_layers else None
        states = self.get_states(fingerprint, layout, ends) if ends else []
        return KVCache(layout, tuple(blocks), window, tuple(states))

    @abstractmethod
    def prepare(self) -> None:
        """Have memory ready for the first `get`, where that helps: whoever will read calls it once, early."""

    @abstractmethod
    def delete(self, refs: Sequence[BlockRef]) -> None:
        """Delete records; missing ones are fine."""

    @abstractmethod
    def free_shared(self, size_bytes: int) -> int:
        """Delete shared records, least recently used first, until `size_bytes` are free; returns the bytes freed.

        Jobs' own records are left alone. Whoever needed a deleted one finds it missing, and it is computed again.
        """

    @abstractmethod
    def usage(self) -> StoreUsage:
        """How full the store is."""

    @abstractmethod
    def close(self) -> None:
        """Close connections. Idempotent."""


class ClusterState(ABC):
    """Worker registrations, stored results, tombstones, claims and reservations. Every entry has a TTL."""

    @abstractmethod
    def now(self) -> float:
        """The store's clock, seconds since the epoch: the one clock that all machines share."""

    @abstractmethod
    def register(self, registration: WorkerInfo, ttl_s: float) -> None:
        """Publish or renew a worker's registration."""

    @abstractmethod
    def encoded_registrations(self) -> dict[str, EncodedRegistration]:
        """Registrations of all workers alive as they were written, by worker_id: of any version."""

    def registrations(self) -> list[WorkerInfo]:
        """Registrations of all workers alive, by worker_id. Unreadable ones are left out."""
        return readable_registrations(self.encoded_registrations().values())

    def lost_registrations(self) -> list[tuple[float, WorkerInfo]]:
        """The last of those workers whose registrations ran out within LOST_FOR_S, and when each did.

        Without details. None in one process, whose workers end together.
        """
        return []

    @abstractmethod
    def unregister(self, worker_id: str) -> None:
        """A worker leaves."""

    @abstractmethod
    def take_up(self, worker_id: str, runs: Sequence[Run], ttl_s: float) -> list[tuple[bytes | None, bool]]:
        """For each (job_id, run) its result, and whether we hold its claim; a claim only where there is no result.

        In one round trip if the store can.
        """

    @abstractmethod
    def finish(self, worker_id: str, results: Sequence[tuple[str, int, bytes]], ttl_s: float = TTL_S) -> None:
        """Keep each encoded JobResult, and then `release`: a job that is delivered again is answered, not decoded.

        In one round trip if the store can.
        """

    @abstractmethod
    def note_answer(self, job_id: str, run: int, number: int, body: bytes, ttl_s: float = TTL_S) -> None:
        """Keep one of several answers of a run that has not ended, so that after a crash it is not given again."""

    @abstractmethod
    def noted_answers(self, job_id: str, run: int) -> dict[int, bytes]:
        """The answers kept for this run, by their numbers."""

    @abstractmethod
    def forget_answers(self, job_id: str, run: int) -> None:
        """The run has ended; fine if none were kept."""

    @abstractmethod
    def cancel(self, batch_id: str, ttl_s: float = TTL_S) -> None:
        """Set a batch's tombstone."""

    @abstractmethod
    def is_cancelled(self, batch_id: str) -> bool:
        """Whether the batch has a tombstone."""

    @abstractmethod
    def claim(self, job_id: str, run: int, worker_id: str, ttl_s: float) -> bool:
        """Best effort: True if this worker now holds (or renewed) the decode of this run, False if another does."""

    @abstractmethod
    def release(self, job_id: str, run: int, worker_id: str) -> None:
        """Give up a claim held by this worker; others' claims are left alone."""

    @abstractmethod
    def count_crashes(self, stage: str, job_id: str, run: int, change: int, ttl_s: float = TTL_S) -> int:
        """Change how many workers hold this run at this stage, or died while holding it; never below 0."""

    @abstractmethod
    def put_sketch(self, name: str, body: bytes, ttl_s: float = TTL_S) -> None:
        """Keep what one engine computes (`engines.sketch`) under the hash that names it, or renew it if it is there."""

    @abstractmethod
    def get_sketch(self, name: str) -> bytes | None:
        """The bytes under this name, or None. Whoever reads them checks that it is theirs."""

    @abstractmethod
    def reserve(self, name: str, size_bytes: int, capacity_bytes: int, ttl_s: float) -> bool:
        """Reserve space in the store, atomically: False if all live reservations would exceed `capacity_bytes`.

        A second call with the same name replaces the first reservation.
        """

    @abstractmethod
    def unreserve(self, name: str) -> None:
        """Give a reservation up; a missing one is fine."""

    @abstractmethod
    def reserved_bytes(self) -> int:
        """Sum of all live reservations."""

    @abstractmethod
    def close(self) -> None:
        """Close connections. Idempotent."""


def encoded(registration: WorkerInfo) -> EncodedRegistration:
    """A registration as it is written: what the release before this one refuses is in a body of its own."""
    details = registration.details
    card = codec.encode(replace(registration, details=NO_DETAILS))
    return card, b"" if details == NO_DETAILS else codec.encode(details)


def readable_registrations(bodies: Iterable[EncodedRegistration]) -> list[WorkerInfo]:
    """The registrations that this program can read, by worker_id; without details that it can't read."""
    registrations = []
    for card, details in bodies:
        with suppress(InvalidMessage, NewerMessage):  # a worker of another version, in the middle of an upgrade
            registrations.append(codec.decode(card, WorkerInfo))
            if details:
                registrations[-1] = replace(registrations[-1], details=codec.decode(details, WorkerDetails))
    return sorted(registrations, key=lambda registration: registration.worker_id)


def other_versions(bodies: Mapping[str, EncodedRegistration]) -> tuple[list[str], list[str]]:
    """Of all workers that registered (by worker_id) those of older and those of newer versions.

    An older one reads no message of this version. Of a newer one this program can't read what it registered.
    """
    older_ids = [worker_id for worker_id, (card, _) in bodies.items() if 0 < codec.version_of(card) < codec.VERSION]
    return older_ids, [worker_id for worker_id, body in bodies.items() if not readable_registrations([body])]
