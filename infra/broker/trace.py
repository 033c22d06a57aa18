"""W3C trace context, `traceparent`: 00-<trace id>-<parent id>-<flags> (https://www.w3.org/TR/trace-context/).

A job's id is 128 bits in hex, like a trace id, so all runs of a job can be found under the job's id. Kvasir's programs
pass the header on unchanged, so that the spans of other systems before and after them join the same trace.
`monitoring.traces` makes spans if tracing is on.
"""

import hashlib
import re

HEADER = "traceparent"

_TRACE_ID = re.compile(r"(?!0{32})[0-9a-f]{32}\Z")
# Versions after 00 may add fields; version ff is invalid.
_VALID = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(?:-[!-~]{0,128})?\Z")


def new_traceparent(job_id: str, run: int) -> str:
    """The traceparent of a run. It is always the same, so that a message published twice stays the same message.

    A job id in any other form is hashed to a trace id.
    """
    trace_id = job_id if _TRACE_ID.match(job_id) else _hash(job_id, 16)
    return f"00-{trace_id}-{_hash(f'{job_id}/{run}', 8)}-01"


def valid_traceparent(value: object) -> str:
    """The header's value, or "" if it is invalid, because a broken trace is no reason to refuse a job."""
    return value if isinstance(value, str) and _VALID.match(value) else ""


def _hash(text: str, size: int) -> str:
    return hashlib.blake2b(text.encode(), digest_size=size, person=b"kvasir.trace").hexdigest()
