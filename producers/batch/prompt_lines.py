"""Prompts in a file with one JSON object per line, for any batch that is not a class.

The form is that of OpenAI's Batch API.

    {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"model": "m", "messages": […]}}
    {"id": "a", "prompt": "Translate: …", "shared": "You translate …", "model": "m", "max_tokens": 200}

Messages keep their roles, and each model's chat template renders them. The system message at the start (or `shared`) is
the part that lines have in common: if many lines begin with the same text, it is computed once. The prompt of a line
for /v1/completions is continued as it is. A line that can't be used gets a failed result with the reason, and the other
lines run.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, BinaryIO, cast

from messages import bounded_json
from messages.bounded_json import TooManyValues
from messages.errors import ConfigError, InvalidMessage, InvalidSchema, KvasirError, UsageError
from messages.jobs import (
    JobResult,
    Part,
    PrefillJob,
    conversation,
    job_id,
    user_prompt,
)
from messages.limits import MAX_FILE_BYTES, MAX_LINE_BYTES, MAX_LINES, MAX_PROMPT_BYTES
from messages.strict_schema import Objects
from producers.batch.batch import Batch, BatchEntry
from producers.batch.intake import failed_intake
from producers.batch.openai_body import (
    Defaults,
    choices_of,
    messages_of,
    raw_prompt,
    sampling_of,
    texts_of,
    usage_of,
)

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
URLS = (CHAT, COMPLETIONS)


class BadLine(KvasirError):
    """A line can't be used. The message says why, and what to write instead."""


@dataclass(frozen=True, slots=True)
class PromptLine:
    """A line: its job, or the problem with it."""

    custom_id: str
    item_id: str
    job: PrefillJob | None
    problem: str = ""
    model: str = ""  # the model's name as the line gives it
    is_raw: bool = False  # whether the line is for /v1/completions


# Returns the settings of the model that a line names. Raises ConfigError.
Resolve = Callable[[str], Defaults]


def check_file(path: Path, name: str) -> None:
    """Raise UsageError, with this name for the file, if it can't be read, is too large or contains no prompt."""
    try:
        size = path.stat().st_size
        rows = sum(1 for row in _rows(path) if row.strip()) if size <= MAX_FILE_BYTES else 0
    except OSError as error:
        raise UsageError(f"{name} can't be read: {error.strerror}") from None
    if size > MAX_FILE_BYTES or rows > MAX_LINES:
        raise UsageError(
            f"{name} is too large: at most {MAX_LINES:,} lines and {MAX_FILE_BYTES >> 20} MiB are read; split the file"
        )
    if not rows:
        raise UsageError(f"{name} contains no prompt")


def _rows(path: Path) -> Iterator[bytes]:
    """Yield lines.

    No line is kept while the next is not requested, since many files may be open and lines may be long.
    """
    with path.open("rb") as file:
        yield from iter(lambda: _row(file), b"")


def _row(file: BinaryIO) -> bytes:
    """Return the next line; b"" at the end. Of a line that is too long, return only the beginning."""
    row = rest = file.readline(MAX_LINE_BYTES + 1)
    while len(rest) > MAX_LINE_BYTES and not rest.endswith(b"\n"):
        rest = file.readline(MAX_LINE_BYTES + 1)
    return row


def read_lines(
    path: Path,
    batch_id: str,
    secret: bytes,
    resolve: Resolve,
    default_model: str = "",
    shares: bool = True,
    check: Callable[[dict[str, Any], str], None] = lambda _body, _url: None,
    objects: Objects = "closed",
) -> Iterator[PromptLine]:
    """Yield the lines of a file that `check_file` accepted, as they are read: a large file need not fit into memory.

    Args:
        default_model: the model of lines that name none.
        shares: whether the parts that lines share are stored under their content, where any other batch finds them.
        check: checks a request's body for a URL; raises BadLine.
        objects: see `strict_schema`; for a batch that is already planned, `objects_of`.
    """
    reader = _LineReader(batch_id, secret, resolve, default_model, shares, check, objects)
    return filter(None, map(reader.line, count(1), _rows(path)))


class _LineReader:
    """Turns rows into lines, and remembers which ids are taken."""

    def __init__(
        self,
        batch_id: str,
        secret: bytes,
        resolve: Resolve,
        default_model: str,
        shares: bool,
        check: Callable[[dict[str, Any], str], None],
        objects: Objects,
    ) -> None:
        self._batch_id = batch_id
        self._secret = secret
        self._resolve = resolve
        self._default_model = default_model
        self._shares = shares
        self._check = check
        self._objects: Objects = objects
        self._id_counts: Counter[str] = Counter()

    def line(self, number: int, row: bytes) -> PromptLine | None:
        """Read one row of the file. Returns None if it is blank."""
        if not row.strip():
            return None
        name = custom_id = f"line {number}"
        model = ""
        try:
            fields = _object(row)
            custom_id = _custom_id(fields)
            self._id_counts[custom_id] += 1
            if self._id_counts[custom_id] > 1:
                raise BadLine(
                    f"an earlier line has the same custom_id {custom_id!r:.60}; give this line a different custom_id"
                )
            name = custom_id
            if _has_half_characters(fields):
                raise BadLine("the line contains half a character (a lone surrogate)")
            url, body = _body(fields)
            if body is not fields:
                self._check(body, url)
            model = str(body.get("model") or "")
            job = self._job(custom_id, body, url)
            return PromptLine(custom_id, self._item(custom_id), job, model=model, is_raw=url == COMPLETIONS)
        except (BadLine, ConfigError, InvalidMessage, InvalidSchema) as error:
            return PromptLine(name, self._item(f"{custom_id} {number}"), None, str(error), model)

    def _item(self, name: str) -> str:
        return hashlib.blake2b(name.encode(), digest_size=8, key=self._secret, person=b"kvasir.item").hexdigest()

    def _job(self, custom_id: str, body: Mapping[str, Any], url: str) -> PrefillJob:
        defaults = self._resolve(str(body.get("model") or self._default_model))
        parts = raw_prompt(body.get("prompt")) if url == COMPLETIONS else self._parts(body)
        sampling = sampling_of(body, defaults, seed=0, objects=self._objects)
        if sum(len(part.text.encode()) for part in parts) > MAX_PROMPT_BYTES:
            raise BadLine(f"the prompt is longer than {MAX_PROMPT_BYTES >> 20} MiB; shorten it")
        item_id = self._item(custom_id)
        name = job_id(self._batch_id, item_id, defaults.model, parts, sampling)
        return PrefillJob(name, self._batch_id, item_id, defaults.model, parts, sampling)

    def _parts(self, body: Mapping[str, Any]) -> tuple[Part, ...]:
        if "messages" in body:
            return conversation(messages_of(body), "class" if self._shares else "own", "own")
        shared_text, own_text = body.get("shared", ""), body.get("prompt", "")
        if not isinstance(shared_text, str) or not isinstance(own_text, str) or not own_text.strip():
            raise BadLine("the prompt must be text and must not be empty")
        return user_prompt(shared_text, own_text)


def _object(row: bytes) -> dict[str, Any]:
    if len(row) > MAX_LINE_BYTES:
        raise BadLine(f"the line is longer than {MAX_LINE_BYTES >> 20} MiB")
    try:
        fields = bounded_json.loads(row)
    except TooManyValues as error:
        raise BadLine(str(error)) from None
    except (ValueError, RecursionError) as error:
        raise BadLine(f"it is not JSON: {str(error)[:100]}") from None
    if not isinstance(fields, dict):
        raise BadLine("the line is JSON, but not an object")
    return fields


def _custom_id(fields: Mapping[str, Any]) -> str:
    """Return the line's custom_id, or a short line's `id`, which may be a number. Raises BadLine."""
    value = fields.get("custom_id", fields.get("id"))
    if "custom_id" not in fields and type(value) is int:
        value = str(value)
    if value in (None, ""):
        raise BadLine("the line has no custom_id: give each line a different custom_id")
    if not isinstance(value, str):
        raise BadLine("custom_id must be text, in quotes")
    if _has_half_characters(value):
        raise BadLine("custom_id contains half a character (a lone surrogate)")
    return value[:512]


def _has_half_characters(value: Any) -> bool:
    """Whether a value contains lone surrogates. They can't be sent, and replacing them would change the prompt."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return True
    return False


def _body(fields: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the request's URL and body. A short line is its own body."""
    if "body" not in fields:
        if "prompt" not in fields:
            raise BadLine("the line has neither 'body' (as in the Batch API) nor 'prompt'")
        return CHAT, dict(fields)
    url, method = fields.get("url", CHAT), fields.get("method", "POST")
    if url not in URLS:
        raise BadLine(f"the url is {url!r:.60}; only {' and '.join(URLS)} are served")
    if method != "POST":
        raise BadLine(f"the method is {method!r:.60}; only POST is served")
    if not isinstance(fields["body"], dict):
        raise BadLine("the body is not an object")
    return url, fields["body"]


# --- the batch


def objects_of(batch: Batch, new: Objects = "closed") -> Objects:
    """Return how objects in the schemas of its lines are read: as when it was planned, or `new` if it is new."""
    return cast(Objects, batch.request.get("objects", "verbatim")) if batch.entries else new


def numbers_of_lines(path: Path) -> Iterator[int]:
    """Yield the number of each line that is not empty, counted from 1."""
    return (number for number, row in enumerate(_rows(path), 1) if row.strip())


def plan(
    batch: Batch, lines: Iterable[PromptLine], source: Path, fallback_model: str, objects: Objects = "closed"
) -> None:
    """Write the manifest, and failed results of lines that can't be used, before anything is published."""
    entries, failures = [], []
    request = {"prompts": str(source.resolve())}
    for line in lines:
        if job := line.job:
            role = "completion" if line.is_raw else "prompt"
            entries.append(BatchEntry(job.job_id, job.item_id, job.model, role, line.custom_id))
            if job.sampling.json_schema and objects != "verbatim":
                request["objects"] = objects
        else:
            entry, failure = failed_intake(batch, line.item_id, fallback_model, line.custom_id, "BadLine", line.problem)
            entries.append(entry)
            failures.append(failure)
    batch.plan(entries, request)
    batch.journal.record(failures)


def output_line(entry: BatchEntry, result: JobResult, created_at: float) -> dict[str, Any]:
    """Return a result as a line of the Batch API's output or error file."""
    line: dict[str, Any] = {"id": f"batch_req_{result.job_id}", "custom_id": entry.name}
    if result.state != "succeeded":
        return {
            **line,
            "response": None,
            "error": {"code": _code(result), "message": result.error.message if result.error else result.state},
        }
    return {
        **line,
        "response": {
            "status_code": 200,
            "request_id": result.job_id,
            "body": _completion(result, created_at, is_raw=entry.role == "completion"),
        },
        "error": None,
    }


def _code(result: JobResult) -> str:
    if result.error and result.error.stage == "intake":
        return "invalid_request"
    return {"expired": "batch_expired", "cancelled": "batch_cancelled"}.get(result.state, "server_error")


def _completion(result: JobResult, created_at: float, is_raw: bool) -> dict[str, Any]:
    return {
        "id": f"{'cmpl' if is_raw else 'chatcmpl'}-{result.job_id}",
        "object": "text_completion" if is_raw else "chat.completion",
        "created": int(created_at),
        "model": result.model,
        "choices": texts_of(result) if is_raw else choices_of(result),
        "usage": usage_of(result),
    }
