"""Messages to bytes and back: msgpack of `{"v": version, "kind": name, ...fields}`.

Reads this version and the one before it. A newer one raises NewerMessage (it waits for the upgrade), anything else
that can't be read raises InvalidMessage; no input makes it raise something else.
"""

from __future__ import annotations

import sys
import types
import typing
from array import array
from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

import msgpack

from messages.cards import WorkerCard
from messages.change import values_of
from messages.errors import InvalidMessage, NewerMessage
from messages.jobs import (
    MIB,
    DecodeJob,
    DecodeReport,
    JobError,
    JobResult,
    PrefillJob,
    PrefillReport,
    Sampling,
    StoredKV,
    TokenEvent,
)
from messages.kv import KVLayout

VERSION = 1
OLDEST_READ = 1
MAX_MESSAGE_BYTES = 12 * MIB  # below the 16 MiB that RabbitMQ 4 takes

_U32 = "I" if array("I").itemsize == 4 else "L"

_KINDS: dict[str, type] = {
    "prefill": PrefillJob,
    "decode": DecodeJob,
    "result": JobResult,
    "token": TokenEvent,
    "card": WorkerCard,
}
_NAMES = {cls: name for name, cls in _KINDS.items()}
_NESTED = (DecodeReport, JobError, KVLayout, PrefillJob, PrefillReport, Sampling, StoredKV)

Message = PrefillJob | DecodeJob | JobResult | TokenEvent | WorkerCard
M = TypeVar("M", PrefillJob, DecodeJob, JobResult, TokenEvent, WorkerCard)


def encode(message: Message) -> bytes:
    """The message as bytes, at most MAX_MESSAGE_BYTES long. Raises InvalidMessage if it is longer."""
    fields = {"v": VERSION, "kind": _NAMES[type(message)], **_plain(message)}
    body: bytes = msgpack.packb(fields)
    if len(body) > MAX_MESSAGE_BYTES:
        raise InvalidMessage(f"message of {len(body):,} bytes; at most {MAX_MESSAGE_BYTES:,} are allowed")
    return body


def decode(body: bytes, expected: type[M]) -> M:
    """The message in `body`, which must be an `expected`. Raises InvalidMessage or NewerMessage."""
    fields = _unpack(body)
    version = fields.pop("v", None)
    if isinstance(version, int) and version > VERSION:
        raise NewerMessage(f"message version {version}; this program reads up to {VERSION}")
    if not isinstance(version, int) or version < OLDEST_READ:
        raise InvalidMessage(f"message version {version!r:.20} is not one this program reads")
    kind = fields.pop("kind", None)
    if not isinstance(kind, str) or _KINDS.get(kind) is not expected:
        raise InvalidMessage(f"a {kind!r:.40} message where a {_NAMES[expected]!r} belongs")
    return typing.cast(M, _build(expected, fields))


def to_dict(result: JobResult) -> dict[str, Any]:
    """A result as plain maps, texts and numbers, for JSON."""
    return _plain(result)


def result_from_dict(fields: Any) -> JobResult:
    """The result that `to_dict` gave. Raises InvalidMessage."""
    return typing.cast(JobResult, _build(JobResult, fields))


def _unpack(body: bytes) -> dict[str, Any]:
    if len(body) > MAX_MESSAGE_BYTES:
        raise InvalidMessage(f"message of {len(body):,} bytes; at most {MAX_MESSAGE_BYTES:,} are allowed")
    try:
        fields = msgpack.unpackb(body, strict_map_key=True)
    except Exception as error:  # noqa: BLE001  msgpack raises a family of its own, ValueError, and UnicodeDecodeError
        raise InvalidMessage(f"not a msgpack message: {type(error).__name__}: {error}") from None
    if not isinstance(fields, dict) or not all(isinstance(key, str) for key in fields):
        raise InvalidMessage("not a msgpack map with text keys")
    return fields


def _plain(message: Any) -> dict[str, Any]:
    """Fields of a dataclass, nested ones as maps, token ids as packed little-endian u32."""
    result = values_of(message)
    for name, writer in _writers(message.__class__):
        result[name] = writer(result[name])
    return result


@cache
def _writers(cls: type) -> list[tuple[str, Callable[[Any], Any]]]:
    """How those fields are written that msgpack can't write."""
    return [(name, writer) for name, hint in typing.get_type_hints(cls).items() if (writer := _writer(name, hint))]


def _writer(name: str, hint: Any) -> Callable[[Any], Any] | None:
    if any(kind in _NESTED for kind in (hint, *typing.get_args(hint))):
        return lambda value: None if value is None else _plain(value)
    if name == "tokens":
        return _packed_ids
    return None


@cache
def _readers(cls: type) -> tuple[frozenset[str], list[tuple[str, Callable[[str, Any], Any]]]]:
    """All fields, and how those are made that are not what msgpack gave. Found once: type hints are slow to read."""
    hints = typing.get_type_hints(cls)
    return frozenset(hints), [(name, reader) for name, hint in hints.items() if (reader := _reader(name, hint))]


def _reader(name: str, hint: Any) -> Callable[[str, Any], Any] | None:
    if isinstance(hint, types.UnionType):  # X | None is the only union in use
        inner = _reader(name, next(option for option in typing.get_args(hint) if option is not types.NoneType))
        return inner and (lambda name, value: None if value is None else inner(name, value))
    if hint in _NESTED:
        return lambda _name, value: _build(hint, value)
    if name == "tokens":
        return lambda _name, value: _token_ids(value)
    return _listed if typing.get_origin(hint) is tuple else None


def _build(cls: type, fields: Any) -> Any:
    if not isinstance(fields, dict):
        raise InvalidMessage(f"{cls.__name__} must be a map, not {type(fields).__name__}")
    known, readers = _readers(cls)
    if not fields.keys() <= known:
        raise InvalidMessage(f"{cls.__name__} has no field {min(fields.keys() - known, key=str)!r:.60}")
    read = {name: reader(name, fields[name]) for name, reader in readers if name in fields}
    try:
        return cls(**{**fields, **read})
    except TypeError as error:  # a required field is missing, or a value has a type its check did not expect
        raise InvalidMessage(f"{cls.__name__}: {error}") from None


def _listed(name: str, value: Any) -> tuple[Any, ...]:
    if not isinstance(value, list):
        raise InvalidMessage(f"{name} must be a list, not {type(value).__name__}")
    return tuple(value)


def _packed_ids(ids: tuple[int, ...]) -> bytes:
    packed = array(_U32, ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def _token_ids(value: Any) -> tuple[int, ...]:
    if not isinstance(value, bytes) or len(value) % 4:
        raise InvalidMessage("tokens must be packed 32-bit integers")
    ids = array(_U32, value)
    if sys.byteorder == "big":
        ids.byteswap()
    return tuple(ids)
