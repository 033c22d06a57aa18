"""Logging for people and for machines, with one line for each step of a job.

A job's line contains ids, counts, sizes and seconds, but never a prompt, an answer or a name. A fact is logged only if
it is a number whose name has a unit, or one of a few known words whose form no sentence has.
"""

import json
import logging
import queue
import re
import sys
import threading
from collections.abc import Collection, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any, Literal

from messages.lifecycle import Event, Step
from messages.lines import on_one_line

Style = Literal["console", "json"]

TIME_FIRST = '{"time": "'  # each line in the JSON style begins with this, followed by the time in UTC

# Our packages log at the requested level; libraries log only from WARNING on (pika logs routine steps at INFO).
ROOMS = (
    *("messages", "engines", "kvstore", "infra", "monitoring"),
    *("producers", "prefill_worker", "decode_worker"),
    *("grading", "gateway", "desk", "kvasir"),
)

_WORDS = ("batch_id", "stage", "lane", "state", "error", "worker_id", "engine", "device", "kv_transfer", "queue")
_COUNTS = ("run", "attempts", "returns", "kv_transfers", "slots", "busy")
_UNITS = ("_s", "_bytes", "_tokens", "_tokens_per_s")
_WORD = re.compile(r"[A-Za-z0-9._:/\-]{1,128}\Z")
_WARNED_OF = (Step.RETRIED, Step.KV_GONE, Step.REDELIVERED, Step.ISOLATED, Step.FAILED)
_LEVELS = {
    **dict.fromkeys(_WARNED_OF, logging.WARNING),
    Step.FIRST_TOKEN: logging.DEBUG,  # only DEBUG, because the line for ANSWERED also contains `ttft_s`
}

_FIRST_FIELDS = ("time", "level", "logger", "event")

_FLUSH_S = 1.0  # if a flush of stderr takes longer than this, stderr is stuck

_jobs = logging.getLogger("monitoring.jobs")
_as_json = json.JSONEncoder(ensure_ascii=False).encode


def configure(level: str = "info", style: Style = "console", background: bool = False) -> None:
    """Log to stderr. This replaces what an earlier call configured.

    `background`: a separate thread writes the lines, for workers with many threads and many short jobs.
    """
    # Log lines don't show thread, process or caller. Looking them up would make writing a line take a fifth longer.
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    logging._srcfile = None
    root = logging.getLogger()
    for handler in [handler for handler in root.handlers if isinstance(handler, _Stderr)]:
        root.removeHandler(handler)
        handler.close()
    handler = _Background() if background else _Stderr()
    handler.setFormatter(_FORMATTERS[style]())
    root.addHandler(handler)
    root.setLevel(logging.WARNING)
    for room in ROOMS:
        logging.getLogger(room).setLevel(level.upper())


def log_event(event: Event) -> None:
    """Log one line for an event, as an observer: at WARNING for steps that cost something, else mostly at INFO."""
    level = _LEVELS.get(event.step, logging.INFO)
    if _jobs.isEnabledFor(level):
        _jobs.log(level, event.step.value, extra={"job": job_fields(event)})


def job_fields(event: Event) -> dict[str, Any]:
    """Return the loggable fields of an event: job, model, and the facts that can't contain anyone's text."""
    facts = {name: value for name, value in event.facts.items() if _may_be_told(name, value)}
    batch = {"batch": facts.pop("batch_id")} if "batch_id" in facts else {}
    return {"job": event.job_id, **batch, "model": event.model, **facts}


def _may_be_told(name: str, value: object) -> bool:
    if isinstance(value, str):
        return _is_known_word(name, value)
    return isinstance(value, (int, float)) and _is_figure(name)


@lru_cache(maxsize=1024)  # most of these values are equal for all jobs of a batch
def _is_known_word(name: str, value: str) -> bool:
    return name in _WORDS and bool(_WORD.match(value))


@lru_cache(maxsize=1024)
def _is_figure(name: str) -> bool:
    return name in _COUNTS or name.endswith(_UNITS)


def as_console_line(line: str, left_out: Collection[str] = ()) -> str:
    """Return a line of the JSON style in the console style, without some fields, and with this machine's local time.

    Any other line is returned as it is.
    """
    with suppress(ValueError, TypeError, KeyError):  # the line was written by another program, or is incomplete
        fields = json.loads(line)
        written_at = datetime.fromisoformat(fields["time"]).astimezone()
        line = f"{written_at:%H:%M:%S} {fields['level'].upper():<7} {fields['event']}"
        line += "".join(f" {name}={_short(fields[name])}" for name in fields if name not in (*_FIRST_FIELDS, *left_out))
    # A terminal might execute control characters.
    return "".join(char if char.isprintable() or char == "\n" else "?" for char in line)


class _Stderr(logging.Handler):
    """Writes to the current sys.stderr, which a progress display replaces while it is shown.

    Each line is one write, which needs no lock. With a lock, threads would wait for each other's formatting and system
    calls.
    """

    def createLock(self) -> None:  # noqa: N802  logging's name
        self.lock = None

    def handle(self, record: logging.LogRecord) -> bool:
        """Handle a record without a lock.

        Since Python 3.13, logging's own method takes the lock without checking that it exists.
        """
        accepted_record = self.filter(record)
        if accepted_record:
            self.emit(accepted_record if isinstance(accepted_record, logging.LogRecord) else record)
        return bool(accepted_record)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            sys.stderr.write(self.format(record) + "\n")
            sys.stderr.flush()
        # A record that can't be written must not stop the program. The logging module demands this of its handlers.
        except Exception:  # noqa: BLE001
            self.handleError(record)


class _Background(_Stderr):
    """Leaves writing to a thread, which writes all waiting lines at once.

    Each write releases the interpreter lock, and among many threads, getting it back takes longer than writing the
    line. If the process is killed, the lines of its last milliseconds are lost.
    """

    def __init__(self) -> None:
        super().__init__()
        self._lines: queue.SimpleQueue[str | threading.Event] = queue.SimpleQueue()
        self._closing = False
        threading.Thread(target=self._write_all, name="log", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._lines.put(self.format(record) + "\n")
        except Exception:  # noqa: BLE001  as above
            self.handleError(record)

    def flush(self) -> None:
        """Return when all lines logged so far are written. Logging calls this at the end of the process."""
        event = threading.Event()
        self._lines.put(event)
        event.wait(_FLUSH_S)

    def close(self) -> None:
        """Write the remaining lines, and end the thread."""
        self._closing = True
        self.flush()
        super().close()

    def _write_all(self) -> None:
        while not self._closing:
            lines = [self._lines.get()]
            while not self._lines.empty():
                lines.append(self._lines.get())
            with suppress(Exception):  # a closed or full stderr must not end this thread
                sys.stderr.write("".join(line for line in lines if isinstance(line, str)))
                sys.stderr.flush()
            for line in lines:
                if isinstance(line, threading.Event):  # a flush waits for this event; all earlier lines are written
                    line.set()


class _Console(logging.Formatter):
    """`01:02:03 INFO decode_started job=… batch=… model=…`"""

    def format(self, record: logging.LogRecord) -> str:
        message = on_one_line(record.getMessage())
        text = f"{datetime.fromtimestamp(record.created):%H:%M:%S} {record.levelname:<7} {message}"
        job: Mapping[str, Any] = getattr(record, "job", {})
        text = " ".join([text, *(f"{name}={_short(value)}" for name, value in job.items())])
        return f"{text}\n{self.formatException(record.exc_info)}" if record.exc_info else text


class _Json(logging.Formatter):
    """One JSON object per line: time (UTC), level, logger, event, then the job's fields."""

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, Any] = {
            "time": _utc(int(record.created)) + f".{int(record.created % 1 * 1000):03}+00:00",
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": record.getMessage(),
            **getattr(record, "job", {}),
        }
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return on_one_line(_as_json(fields))


@lru_cache(maxsize=4)
def _utc(second: int) -> str:
    return datetime.fromtimestamp(second, UTC).isoformat()[: -len("+00:00")]


def _short(value: object) -> str:
    return f"{value:.3f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)


_FORMATTERS: dict[Style, type[logging.Formatter]] = {"console": _Console, "json": _Json}
