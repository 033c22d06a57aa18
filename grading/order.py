"""How much work a job is expected to be: a batch is published longest first.

Queues are first in, first out, so what is published first is decoded first. A long job that begins last would keep one
slot busy while all others are idle.
"""

from messages.jobs import PrefillJob, answer_tokens


def expected_work(job: PrefillJob) -> tuple[int, int]:
    """A key that grows with the work: tokens that may be generated, then bytes of the student's part.

    Only what is known before decoding. A model's mean answer, which workers learn, is the same for all jobs of its
    queue and would change nothing in their order.
    """
    return answer_tokens(job), len(job.prompt[-1].text.encode())
