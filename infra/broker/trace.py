"""W3C trace context, `traceparent`: 00-<trace id>-<parent id>-<flags> (https://www.w3.org/TR/trace-context/).

A job's id is 128 bits in hex, as a trace id is: so the trace of a job is found by the job's id, in all its runs. Our
programs pass the header on unchanged, so that what stands before and behind them joins up; `monitoring.traces` makes
spans of it where somebody wants them.
"""

import hashlib
import re

HEADER = "traceparent"

_TRACE_ID = re.compile(r"(?!0{32})[0-9a-f]{32}\Z")
# Versions after 00 may add fields; ff is none.
_VALID = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(?:-[!-~]{0,128})?\Z")


def new_traceparent(job_id: str, run: int) -> str:
    """For a run of a job: always the same, so that a message published twice stays one message.

    A job id of another form than ours is hashed to a trace id.
    """
    trace_id = job_id if _TRACE_ID.match(job_id) else _hash(job_id, 16)
    return f"00-{trace_id}-{_hash(f'{job_id}/{run}', 8)}-01"


def valid_traceparent(value: object) -> str:
    """The header's value, or "" if it is none: a broken trace is no reason to refuse a job."""
    return value if isinstance(value, str) and _VALID.match(value) else ""


def _hash(text: str, size: int) -> str:
    return hashlib.blake2b(text.encode(), digest_size=size, person=b"kvasir.trace").hexdigest()
