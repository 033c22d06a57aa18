"""Several answers of one job: given together where slots idle, and noted one by one.

Each is noted in the cluster state as soon as it is complete. Whoever is given the job after a crash takes over what is
noted, and gives the rest.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from threading import Thread

from engines.base import Answer
from infra.broker.consume import Slots
from infra.broker.failpoints import failpoint
from kvstore.base import ClusterState
from messages import codec
from messages.errors import InvalidMessage, NewerMessage
from messages.jobs import DecodeReport, JobResult, PrefillJob, QuestionAnswer

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Given:
    """An answer, and how likely each value was that it might have had, if that is known."""

    answer: Answer
    likelihoods: tuple[float, ...] = ()


class Answers:
    """The `total` answers of a job. `give(n)` makes the n-th; it is called from several threads at once."""

    def __init__(
        self, job: PrefillJob, total: int, give: Callable[[int], Given], slots: Slots, cluster_state: ClusterState
    ) -> None:
        self._job = job
        self._give = give
        self._slots = slots
        self._cluster_state = cluster_state
        self._given = self._noted(total)
        self._left = deque(number for number in range(total) if number not in self._given)
        self._helpers: list[Thread] = []
        self._errors: list[BaseException] = []

    def all(self) -> list[Given]:
        """In order. The first of those left is given in the calling thread, whose slot nobody else is lent.

        Raises the first error that comes up, once those that had begun are through; what they noted stays.
        """
        if self._given:
            log.info("job %s: %d answers are noted, %d left", self._job.job_id, len(self._given), len(self._left))
        while self._next():
            pass
        for helper in self._helpers:  # may become more until the last has ended
            helper.join()
        if self._errors:
            raise self._errors[0]
        return [given for _, given in sorted(self._given.items())]

    def _next(self) -> bool:
        """Give one more; whether there was one."""
        try:
            number = self._left.popleft()
        except IndexError:
            return False
        while self._left and (helper := self._slots.lend(self._next)):
            self._helpers.append(helper)
        try:
            given = self._given[number] = self._give(number)
            self._cluster_state.note_answer(self._job.job_id, self._job.run, number, _encoded(self._job, given))
            log.debug("job %s: answer %d is noted", self._job.job_id, number)
            failpoint("decode.answered", self._job.job_id)
        except BaseException as error:  # noqa: BLE001  raised in the job's own thread
            self._errors.append(error)
            self._left.clear()
        return True

    def _noted(self, total: int) -> dict[int, Given]:
        found = {}
        noted = self._cluster_state.noted_answers(self._job.job_id, self._job.run)
        for number, body in noted.items():
            try:
                if number < total:
                    found[number] = _decoded(body)
            except (InvalidMessage, NewerMessage) as error:  # it is given again
                log.info("job %s: a noted answer can't be read: %s", self._job.job_id, error)
        return found


def _encoded(job: PrefillJob, given: Given) -> bytes:
    """A result with this answer alone."""
    answer = given.answer
    report = DecodeReport(
        evaluated_tokens=answer.evaluated_tokens,
        completion_tokens=answer.completion_tokens,
        ttft_s=answer.first_token_s,
        decode_s=answer.seconds,
    )
    names = (job.job_id, job.run, job.batch_id, job.item_id, job.model)
    also = (QuestionAnswer(likelihoods=given.likelihoods),) if given.likelihoods else ()
    return codec.encode(JobResult(*names, "succeeded", answer.text, answer.finish_reason, decode=report, answers=also))


def _decoded(body: bytes) -> Given:
    one = codec.decode(body, JobResult)
    done = one.decode
    counts = (done.completion_tokens, one.finish_reason, done.evaluated_tokens)
    answer = Answer(one.text, (), *counts, done.ttft_s, done.decode_s)
    return Given(answer, one.answers[0].likelihoods if one.answers else ())
