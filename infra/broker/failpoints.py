"""Named places between two steps of a handler, where a fault test can kill this process or fail a job.

They are off unless KVASIR_FAILPOINT is set when the process starts; `failpoint` then does nothing. Its forms are:

    kill:decode.stored:7        SIGKILL this process when the seventh job gets there
    kill:decode.loaded:JOB_ID   SIGKILL it whenever this job gets there: a job that kills its worker
    fail:prefill.taken:-500     the first 500 jobs that get there meet a transient error
"""

import itertools
import logging
import os
import signal
from collections.abc import Callable

from messages.errors import EngineUnavailable

VARIABLE = "KVASIR_FAILPOINT"

# The failpoints of each stage, in the order in which a job passes them.
PREFILL = ("prefill.taken", "prefill.tokenized", "prefill.storing", "prefill.stored", "prefill.passed", "prefill.acked")
DECODE = (
    *("decode.taken", "decode.claimed", "decode.loaded", "decode.generated", "decode.stored", "decode.replied"),
    *("decode.acked", "decode.deleted"),
)
GATEWAY = (
    *("gateway.copied", "gateway.described", "gateway.created", "gateway.planned", "gateway.advanced"),
    *("gateway.written", "gateway.over"),
)
# A worker with both roles passes this failpoint when it has stopped taking `bulk` jobs for one role. After that, it
# hands back the jobs that it has not begun.
CHANGE = ("bulk.held",)
# If a job has several answers, this failpoint is passed once for each, between "decode.loaded" and "decode.generated".
PER_ANSWER = ("decode.answered",)


def _no_fault(_name: str, _job_id: str) -> None:
    """Do nothing: no fault is configured."""


def parse(setting: str) -> Callable[[str, str], None]:
    """Return the function `failpoint` for this setting. Raises ValueError if the setting can't be read."""
    if not setting:
        return _no_fault
    action, name, target = [*setting.split(":"), "", ""][:3]
    if action not in _ACTIONS or name not in PREFILL + DECODE + CHANGE + PER_ANSWER + GATEWAY or not target:
        raise ValueError(f"{VARIABLE} must look like kill:decode.stored:7, not {setting!r:.80}")
    passages = itertools.count(1)

    def failpoint(place: str, job_id: str) -> None:
        if place == name and _is_meant(target, next(passages), job_id):
            _ACTIONS[action](place)

    return failpoint


def _is_meant(target: str, number: int, job_id: str) -> bool:
    if target.lstrip("-").isdigit():
        limit = int(target)
        return number == limit or number <= -limit
    return job_id == target


def _kill(_place: str) -> None:
    # Flush the logs before the process is killed.
    for handler in logging.getLogger().handlers:
        handler.flush()
    os.kill(os.getpid(), signal.SIGKILL)


def _fail(place: str) -> None:
    raise EngineUnavailable(f"a test fault at {place}")


_ACTIONS: dict[str, Callable[[str], None]] = {"kill": _kill, "fail": _fail}

failpoint = parse(os.environ.get(VARIABLE, ""))
