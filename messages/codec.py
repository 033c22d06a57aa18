"""Messages to bytes and back: msgpack of `{"v": version, "kind": name, ...fields}`.

A field that has its default value is not sent. So a field that a later version adds breaks no reader of this version
until somebody uses it. Unknown fields are refused.

This module reads and writes this version and the one before it: a message is answered in the version that it came in. A
newer version raises NewerMessage, and its job waits for the upgrade. Anything else that can't be read raises
InvalidMessage. No input raises any other error.
"""

import itertools
import sys
import types
import typing
from array import array
from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

import msgpack

from messages.change import non_default_fields, values_of
from messages.errors import InvalidMessage, NewerMessage
from messages.jobs import (
    MIB,
    DecodeJob,
    DecodeReport,
    JobError,
    JobResult,
    Part,
    PrefillJob,
    PrefillReport,
    Question,
    QuestionAnswer,
    Sampling,
    StoredKV,
    TokenEvent,
    user_prompt,
)
from messages.kv import KVLayout
from messages.workers import Link, RateCurve, WorkerDetails, WorkerInfo

VERSION = 2
_PREVIOUS_VERSION = 1  # in version 1, a prompt had two texts, and a result's KV transfer had another name
_EARLIER_NAMES = {"kv_transfer": "hand_over", "transferred_tokens": "handed_over_tokens"}
# Limits for the number of lists and maps in a message, and for the entries of each. Kvasir's own messages have at most
# one map for each of 256 parts and four for each of 64 questions, and their longest list contains a worker's jobs.
#
# If values nest much deeper than _MAX_NESTS allows, not even an error can quote them.
_MAX_NESTS, _MAX_LENGTH = 640, 4096
MAX_MESSAGE_BYTES = 12 * MIB  # below RabbitMQ 4's limit of 16 MiB

_U32 = "I" if array("I").itemsize == 4 else "L"

_KINDS: dict[str, type] = {
    "prefill": PrefillJob,
    "decode": DecodeJob,
    "result": JobResult,
    "token": TokenEvent,
    "card": WorkerInfo,
    "details": WorkerDetails,
}
_NAMES = {cls: name for name, cls in _KINDS.items()}
_NESTED: tuple[type, ...] = (DecodeReport, JobError, KVLayout, PrefillJob, PrefillReport, Sampling, StoredKV)
_NESTED += (Link, Part, Question, QuestionAnswer, RateCurve)

Message = PrefillJob | DecodeJob | JobResult | TokenEvent | WorkerInfo | WorkerDetails
M = TypeVar("M", PrefillJob, DecodeJob, JobResult, TokenEvent, WorkerInfo, WorkerDetails)


def encode(message: Message, version: int = VERSION) -> bytes:
    """The message as bytes, at most MAX_MESSAGE_BYTES long. Raises InvalidMessage if it is longer.

    `version`: this version, or the previous one. Only answers to messages of the previous version can be written in it.
    """
    fields = _plain(message, non_default_fields)
    fields = fields if version == VERSION else _downgrade(fields)
    body: bytes = msgpack.packb({"v": version, "kind": _NAMES[type(message)], **fields})
    if len(body) > MAX_MESSAGE_BYTES:
        raise InvalidMessage(f"the message is {len(body):,} bytes long; at most {MAX_MESSAGE_BYTES:,} are allowed")
    return body


def decode(body: bytes, expected: type[M]) -> M:
    """The message in `body`, which must be of the type `expected`. Raises InvalidMessage or NewerMessage."""
    if len(body) > MAX_MESSAGE_BYTES:
        raise InvalidMessage(f"the message is {len(body):,} bytes long; at most {MAX_MESSAGE_BYTES:,} are allowed")
    fields = unpack(body)
    if not isinstance(fields, dict) or not all(isinstance(key, str) for key in fields):
        raise InvalidMessage("the message is not a msgpack map with text keys")
    version = fields.pop("v", None)
    if isinstance(version, int) and version > VERSION:
        raise NewerMessage(f"the message has version {version}; this program reads versions up to {VERSION}")
    if not isinstance(version, int) or version < _PREVIOUS_VERSION:
        raise InvalidMessage(
            f"the message has version {version!r:.20}; this program reads only {_PREVIOUS_VERSION} and {VERSION}"
        )
    kind = fields.pop("kind", None)
    if not isinstance(kind, str) or _KINDS.get(kind) is not expected:
        raise InvalidMessage(f"a message of kind {_NAMES[expected]!r} is expected here, not {kind!r:.40}")
    return typing.cast(M, _build(expected, fields if version == VERSION else _upgrade(fields)))


def version_of(body: bytes) -> int:
    """The version of a message, without reading the rest; 0 if it states none. Every writer puts the version first."""
    start = body.find(b"\xa1v", 1, 5) + 2
    return body[start] if start in (3, 5) and len(body) > start else 0


def answer_version(body: bytes) -> int:
    """The version in which the sender of this message can read an answer."""
    return _PREVIOUS_VERSION if version_of(body) == _PREVIOUS_VERSION else VERSION


def _upgrade(fields: dict[str, Any]) -> dict[str, Any]:
    """A message of the previous version, with this version's field names."""
    if isinstance(report := fields.get("decode"), dict) and "hand_over" in report:
        return {**fields, "decode": _with_kv_transfer(report)}
    job = inner if isinstance(inner := fields.get("job"), dict) else fields
    if "shared" in job and "own" in job:
        job["prompt"] = [_plain(part, values_of) for part in user_prompt(job.pop("shared"), job.pop("own"))]
    if "hands_over" in fields:
        fields["transfers_kv"] = fields.pop("hands_over")
    return fields


def _downgrade(fields: dict[str, Any]) -> dict[str, Any]:
    """A message with the previous version's field names."""
    if report := fields.get("decode"):
        fields["decode"] = {_EARLIER_NAMES.get(name, name): value for name, value in report.items()}
        # Version 1 called every KV transfer "kv". The field is sent only if there was a transfer.
        if "hand_over" in fields["decode"]:
            fields["decode"]["hand_over"] = "kv"
    job = fields.get("job", fields)
    if parts := job.pop("prompt", None):
        class_texts = [part["text"] for part in parts if part.get("scope") == "class"]
        job["shared"] = "".join(class_texts)
        job["own"] = "".join(part["text"] for part in parts[len(class_texts) :])
    return fields


def to_dict(result: JobResult) -> dict[str, Any]:
    """A result as plain maps, texts and numbers, for JSON."""
    return _plain(result, values_of)


def result_from_dict(fields: Any) -> JobResult:
    """The result that `to_dict` gave. Also reads results in older batch folders. Raises InvalidMessage."""
    return typing.cast(JobResult, _build(JobResult, _upgrade(fields) if isinstance(fields, dict) else fields))


def _with_kv_transfer(report: dict[str, Any]) -> dict[str, Any]:
    """A decode report from an older batch folder, with today's names: there the KV transfer was named differently."""
    new_names = {earlier: name for name, earlier in _EARLIER_NAMES.items()}
    fields = {new_names.get(name, name): value for name, value in report.items()}
    return {**fields, "kv_transfer": "verified" if fields["kv_transfer"] == "kv" else fields["kv_transfer"]}


def unpack(body: bytes) -> Any:
    """The value that these bytes encode, provided it holds few and short maps and lists. Raises InvalidMessage for any
    other bytes.

    Without this limit, twelve million empty lists fit into one message, and take a gigabyte once they are created.
    """
    nest_count = itertools.count(1)

    def count_nest(nest: Any) -> Any:
        if next(nest_count) > _MAX_NESTS:
            raise ValueError("too many maps and lists")
        return nest

    try:
        return msgpack.unpackb(
            body,
            strict_map_key=True,
            list_hook=count_nest,
            object_hook=count_nest,
            max_array_len=_MAX_LENGTH,
            max_map_len=_MAX_LENGTH,
            max_ext_len=0,
        )
    except Exception as error:  # noqa: BLE001  msgpack raises a family of its own, ValueError, and UnicodeDecodeError
        raise InvalidMessage(f"not a msgpack message: {type(error).__name__}: {error}") from None


def _plain(message: Any, select_fields: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
    """The chosen fields of a dataclass, nested ones as maps, token ids as packed little-endian u32."""
    result = select_fields(message)
    for name, writer in _writers(message.__class__):
        if name in result:
            result[name] = writer(result[name], select_fields)
    return result


@cache
def _writers(cls: type) -> list[tuple[str, Callable[[Any, Any], Any]]]:
    """How to write the fields that msgpack can't write itself."""
    return [(name, writer) for name, hint in typing.get_type_hints(cls).items() if (writer := _writer(name, hint))]


def _writer(name: str, hint: Any) -> Callable[[Any, Any], Any] | None:
    if any(kind in _NESTED for kind in (hint, *typing.get_args(hint))):
        if typing.get_origin(hint) is tuple:
            return lambda value, select_fields: [_plain(element, select_fields) for element in value]
        return lambda value, select_fields: None if value is None else _plain(value, select_fields)
    if name == "tokens":
        return lambda value, _select_fields: _packed_ids(value)
    return None


@cache
def _readers(cls: type) -> tuple[frozenset[str], list[tuple[str, Callable[[str, Any], Any]]]]:
    """All field names, and how to build the fields that need more than msgpack returns. Cached, because reading type
    hints is slow."""
    hints = typing.get_type_hints(cls)
    return frozenset(hints), [(name, reader) for name, hint in hints.items() if (reader := _reader(name, hint))]


def _reader(name: str, hint: Any) -> Callable[[str, Any], Any] | None:
    if isinstance(hint, types.UnionType):  # messages use no unions except X | None
        inner = _reader(name, next(option for option in typing.get_args(hint) if option is not types.NoneType))
        return inner and (lambda name, value: None if value is None else inner(name, value))
    if hint in _NESTED:
        return lambda _name, value: _build(hint, value)
    if name == "tokens":
        return lambda _name, value: _token_ids(value)
    if typing.get_origin(hint) is not tuple:
        return None
    kind = typing.get_args(hint)[0]
    if kind in _NESTED:
        return lambda name, value: tuple([_build(kind, element) for element in _as_tuple(name, value)])
    return _as_tuple


def _build(cls: type, fields: Any) -> Any:
    if not isinstance(fields, dict):
        raise InvalidMessage(f"{cls.__name__} must be a map, not {type(fields).__name__}")
    field_names, readers = _readers(cls)
    if not fields.keys() <= field_names:
        unknown = min(fields.keys() - field_names, key=str)
        raise InvalidMessage(
            f"{cls.__name__} has no field {unknown!r:.60} in this version; perhaps a newer kvasir wrote the message"
        )
    values = {name: reader(name, fields[name]) for name, reader in readers if name in fields}
    try:
        return cls(**(fields | values if values else fields))
    except TypeError as error:  # a required field is missing, or a value has a type that its check did not expect
        raise InvalidMessage(f"{cls.__name__}: {error}") from None


def _as_tuple(name: str, value: Any) -> tuple[Any, ...]:
    if not isinstance(value, list):
        raise InvalidMessage(f"{name} must be a list, not {type(value).__name__}")
    return tuple(value)


def _packed_ids(ids: tuple[int, ...]) -> bytes:
    words = array(_U32, ids)
    if sys.byteorder == "big":
        words.byteswap()
    return words.tobytes()


def _token_ids(value: Any) -> tuple[int, ...]:
    if not isinstance(value, bytes) or len(value) % 4:
        raise InvalidMessage("tokens must be packed 32-bit integers: the bytes' length must be a multiple of 4")
    ids = array(_U32, value)
    if sys.byteorder == "big":
        ids.byteswap()
    return tuple(ids)
