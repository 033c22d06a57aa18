"""W3C trace context, `traceparent`: 00-<trace id>-<parent id>-<flags> (https://www.w3.org/TR/trace-context/).

A job's id is 128 bits in hex, which is also the form of a trace id. So the trace of a job, with all its runs, is found
by the job's id. Our programs pass the header on unchanged, so that spans of the systems before and after Kvasir join
one trace. `monitoring.traces` makes spans of our own steps, if they are wanted.
"""

import hashlib
import re

HEADER = "traceparent"

_TRACE_ID = re.compile(r"(?!0{32})[0-9a-f]{32}\Z")
# Versions after 00 can add fields; ff is not a valid version.
_VALID = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(?:-[!-~]{0,128})?\Z")


def new_traceparent(job_id: str, run: int) -> str:
    """Return the header for a run of a job.

    It is always the same, so a message that is published twice stays one message. A job id that is not a valid trace id
    is hashed to one.
    """
    trace_id = job_id if _TRACE_ID.match(job_id) else _hash(job_id, 16)
    return f"00-{trace_id}-{_hash(f'{job_id}/{run}', 8)}-01"


def valid_traceparent(value: object) -> str:
    """Return the header's value, or "" if it is not valid. An invalid trace is no reason to refuse a job."""
    return value if isinstance(value, str) and _VALID.match(value) else ""


def _hash(text: str, size: int) -> str:
    return hashlib.blake2b(text.encode(), digest_size=size, person=b"kvasir.trace").hexdigest()
