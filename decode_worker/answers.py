"""What happens to answers: results stored, published and confirmed, deliveries acked, the jobs' own blocks deleted.

Done for all answers that are ready at once, each step for all of them before the next: one round trip to the store
and one to the broker serve many short jobs, while their slots decode the next ones.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from decode_worker.fetching import own_refs
from decode_worker.running import Running, RunningJobs
from infra.endings import Endings, Outgoing, replying
from infra.envelope import Envelope
from infra.fault_points import reached
from infra.group import Group
from infra.intake import HELD_IF_INSTANT
from kvstore.base import Board, KVStore
from messages.errors import BrokerUnavailable, StoreUnavailable
from messages.jobs import DecodeJob, DecodeReport, JobResult
from messages.lifecycle import Step

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Answered:
    """A job whose answer is complete, and its result as it will be stored and sent."""

    job: DecodeJob
    running: Running
    envelope: Envelope
    result: JobResult
    body: bytes


class Answers:
    """One worker's answers on their way out. `see` reports a moment of a job."""

    def __init__(
        self,
        endings: Endings,
        board: Board,
        kv: KVStore,
        worker_id: str,
        running: RunningJobs,
        see: Callable[..., None],
    ) -> None:
        self._endings = endings
        self._board = board
        self._kv = kv
        self._worker_id = worker_id
        self._running = running
        self._see = see
        self._group = Group("answers", self.settle, HELD_IF_INSTANT)
        self.add = self._group.add
        self.unfinished = self._group.unfinished
        self.finish = self._group.finish
        self.close = self._group.close

    def delete_own_blocks(self, jobs: Iterable[DecodeJob]) -> None:
        """Delete what these jobs alone used: nobody will need it again."""
        refs = [ref for job in jobs for ref in own_refs(job)]
        try:
            self._kv.delete(refs)
        except StoreUnavailable as error:  # their TTL ends them
            log.info("%d blocks stay until their TTL: %s", len(refs), error)

    def settle(self, answers: list[Answered]) -> None:
        """Take these through all steps. Never raises."""
        settled = False
        try:
            self._store(answers)
            self._endings.settle(*(ready for one in answers if (ready := self._stored(one))))
            settled = True
            self._clear_up(answers)
        except BrokerUnavailable:  # only if our broker object was closed: the broker hands the jobs out again
            log.warning("%d jobs: left unacked, the broker connection is closed", len(answers))
        finally:
            for one in answers:
                self._running.end(one.running, settled)

    def _store(self, answers: list[Answered]) -> None:
        """So that a redelivery is answered and not decoded again. Claims are of no use from then on."""
        self._board.finish(self._worker_id, [(*one.running.key, one.body) for one in answers])

    def _stored(self, one: Answered) -> Outgoing | None:
        try:
            reached("decode.stored", one.envelope.job_id)
            self._see(Step.ANSWERED, one.job, **_facts(one.job, one.result.decode))
            return replying(one.running.held, one.envelope, one.result, one.body)
        except Exception as error:  # noqa: BLE001  one job's trouble, not its neighbours'
            self._endings.error(one.running.held, one.envelope, error)
            return None

    def _clear_up(self, answers: list[Answered]) -> None:
        for one in answers:
            reached("decode.acked", one.envelope.job_id)
        self.delete_own_blocks(one.job for one in answers)
        for one in answers:
            reached("decode.deleted", one.envelope.job_id)


def _facts(job: DecodeJob, report: DecodeReport) -> dict[str, float]:
    tokens = ("prompt_tokens", "handed_over_tokens", "evaluated_tokens", "completion_tokens")
    facts = {name: getattr(report, name) for name in (*tokens, "get_s", "ttft_s", "decode_s", "total_s")}
    return facts | {"get_bytes": job.kv.stored_bytes if job.kv and report.handed_over_tokens else 0}
