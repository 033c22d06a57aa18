"""The answers of a job with several: decoded in parallel where slots are idle, and stored one by one.

Each answer is noted in the cluster state as soon as it is complete. After a crash, the next worker reuses the noted
answers and decodes only the rest.
"""

import logging
from collections import deque
from collections.abc import Callable
from threading import Thread

from engines.base import Answer
from infra.broker.failpoints import failpoint
from infra.worker_loop import SlotPool
from kvstore.base import ClusterState
from messages import codec
from messages.errors import InvalidMessage, NewerMessage
from messages.jobs import DecodeReport, JobResult, PrefillJob, QuestionAnswer

log = logging.getLogger(__name__)


class Answers:
    """The `total` answers of a job. `give(n)` decodes the n-th; it is called from several threads at once."""

    def __init__(
        self,
        job: PrefillJob,
        total: int,
        give: Callable[[int], Answer],
        slots: SlotPool,
        cluster_state: ClusterState,
    ) -> None:
        self._job = job
        self._give = give
        self._slots = slots
        self._cluster_state = cluster_state
        self._answers = self._load_noted(total)
        self._open_numbers = deque(number for number in range(total) if number not in self._answers)
        self._helpers: list[Thread] = []
        self._errors: list[BaseException] = []

    def collect(self) -> list[Answer]:
        """Return all answers, in order.

        The calling thread decodes in its own slot; the others use idle slots. If an answer fails, the first error is
        raised once the answers that had begun are complete. What they noted stays.
        """
        if self._answers:
            log.info(
                "job %s: %d answers are noted, %d left", self._job.job_id, len(self._answers), len(self._open_numbers)
            )
        while self._next():
            pass
        # The list of helpers can grow during this loop, because a helper can start another helper.
        for helper in self._helpers:
            helper.join()
        if self._errors:
            raise self._errors[0]
        return [answer for _, answer in sorted(self._answers.items())]

    def _next(self) -> bool:
        """Decode the next answer. Returns False if there is none left."""
        try:
            number = self._open_numbers.popleft()
        except IndexError:
            return False
        while self._open_numbers and (helper := self._slots.lend(self._next)):
            self._helpers.append(helper)
        try:
            answer = self._answers[number] = self._give(number)
            self._cluster_state.note_answer(self._job.job_id, self._job.run, number, _encode(self._job, answer))
            log.debug("job %s: answer %d is noted", self._job.job_id, number)
            failpoint("decode.answered", self._job.job_id)
        except BaseException as error:  # noqa: BLE001  `collect` raises it in the job's own thread
            self._errors.append(error)
            self._open_numbers.clear()
        return True

    def _load_noted(self, total: int) -> dict[int, Answer]:
        answers = {}
        bodies = self._cluster_state.noted_answers(self._job.job_id, self._job.run)
        for number, body in bodies.items():
            try:
                if number < total:
                    answers[number] = _decode(body)
            except (InvalidMessage, NewerMessage) as error:  # this answer is decoded again
                log.info("job %s: a noted answer can't be read: %s", self._job.job_id, error)
        return answers


def _encode(job: PrefillJob, answer: Answer) -> bytes:
    """Return a result that contains only this answer."""
    report = DecodeReport(
        evaluated_tokens=answer.evaluated_tokens,
        completion_tokens=answer.completion_tokens,
        ttft_s=answer.first_token_s,
        decode_s=answer.seconds,
    )
    names = (job.job_id, job.run, job.batch_id, job.item_id, job.model)
    question_answers = (QuestionAnswer(likelihoods=answer.likelihoods),) if answer.likelihoods else ()
    return codec.encode(
        JobResult(*names, "succeeded", answer.text, answer.finish_reason, decode=report, answers=question_answers)
    )


def _decode(body: bytes) -> Answer:
    result = codec.decode(body, JobResult)
    report = result.decode
    counts = (report.completion_tokens, result.finish_reason, report.evaluated_tokens)
    likelihoods = result.answers[0].likelihoods if result.answers else ()
    return Answer(result.text, (), *counts, report.ttft_s, report.decode_s, likelihoods)
