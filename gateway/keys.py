"""API keys: a file of their SHA-256 hashes, each with the models that it may use.

A key is 32 random bytes, so its hash can't be turned back by guessing, and needs neither salt nor many rounds.
"""

import hashlib
import hmac
import json
import secrets
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from infra.config.ownership import why_not_ours
from messages import checks
from messages.errors import ConfigError, InvalidMessage, UsageError
from producers.storage.private import make_folder, read_ordinary, write_atomically

_LOOK_S = 1.0


@dataclass(frozen=True, slots=True)
class Key:
    """One key: its name, the hash of what the client sends, the models it may use ((): all)."""

    name: str
    sha256: str
    models: tuple[str, ...] = ()
    created: int = 0  # seconds since the epoch

    def __post_init__(self) -> None:
        checks.identifier("name", self.name)
        if not isinstance(self.sha256, str) or len(self.sha256) != 64:
            raise InvalidMessage("sha256 must be 64 hexadecimal digits")
        for model in self.models:
            checks.model_name("models", model)
        checks.whole("created", self.created, 0, 1 << 40)

    @property
    def tag(self) -> str:
        """Under which the KV caches of its conversations are kept. Nobody gets from it to the key, or to its hash."""
        return hashlib.sha256(b"kvasir.conversations" + self.sha256.encode()).hexdigest()[:32]

    def may_use(self, model: str) -> bool:
        """Whether this model is there for its owner."""
        return not self.models or model in self.models


def tag_of(key: Key | None) -> str:
    """The tag of a request's conversation; without keys all have the same."""
    return key.tag if key else "anybody"


def file_in(home: Path) -> Path:
    """The path of a gateway's keys."""
    return home / "keys.json"


def read_keys(path: Path) -> list[Key] | None:
    """The keys in a file; None where there is no file. Raises ConfigError."""
    try:
        rows = json.loads(read_ordinary(path))
        if problem := why_not_ours(path):
            raise ConfigError(problem)
        return [Key(**(row | {"models": tuple(row["models"])})) for row in _list(rows)]
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(f"{path} can't be read: {error.strerror or error}") from None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, InvalidMessage):
        raise ConfigError(f"{path} is not a file of keys of this version; move it away and add them again") from None


def add_key(path: Path, name: str, models: Sequence[str]) -> str:
    """Make a key and keep its hash; the key itself, which nobody can show again. Raises UsageError, ConfigError."""
    keys = read_keys(path) or []
    if any(key.name == name for key in keys):
        raise UsageError(f"there is a key named {name!r} already: revoke it first, or choose another name")
    secret = f"kv-{secrets.token_urlsafe(32)}"
    try:
        new_key = Key(name, _hash(secret), tuple(models), int(time.time()))
    except InvalidMessage as error:
        raise UsageError(str(error)) from None
    make_folder(path.parent)
    _write(path, [*keys, new_key])
    return secret


def revoke_key(path: Path, name: str) -> Key:
    """Take a key away, and return it; a running gateway sees it within a second. Raises UsageError, ConfigError."""
    keys = read_keys(path) or []
    remaining_keys = [key for key in keys if key.name != name]
    if len(remaining_keys) == len(keys):
        raise UsageError(f"no key is named {name!r}; there are: {', '.join(key.name for key in keys) or 'none'}")
    _write(path, remaining_keys)
    return next(key for key in keys if key.name == name)


def _write(path: Path, keys: Sequence[Key]) -> None:
    write_atomically(path, json.dumps([asdict(key) for key in keys], indent=1) + "\n")


def _list(rows: Any) -> list[Any]:
    if not isinstance(rows, list):
        raise ValueError("no list")
    return rows


def _hash(secret: str) -> str:
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).hexdigest()


class KeyRing:
    """The keys of a running gateway, read again when the file changes. A damaged or deleted file lets nobody in."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigError if the file is there and can't be used."""
        keys = read_keys(path)
        self.is_required = keys is not None  # fixed while this gateway runs: deleting the file opens nothing
        self._path = path
        self._keys = keys or []
        self._file_state: Any = self._state()
        self._next_look = time.monotonic() + _LOOK_S
        self._lock = threading.Lock()

    def find(self, secret: str) -> Key | None:
        """The key that a client sends; in a time that does not depend on how much of it is right."""
        digest, matching_key = _hash(secret), None
        for key in self._now():
            if hmac.compare_digest(key.sha256, digest):
                matching_key = key
        return matching_key

    def _now(self) -> list[Key]:
        with self._lock:
            if time.monotonic() > self._next_look:
                self._next_look = time.monotonic() + _LOOK_S
                if (state := self._state()) != self._file_state:
                    self._file_state = state
                    self._keys = self._read()
            return self._keys

    def _read(self) -> list[Key]:
        try:
            return read_keys(self._path) or []
        except ConfigError:
            return []

    def _state(self) -> object:
        try:
            status = self._path.stat()
        except OSError:
            return None
        return status.st_ino, status.st_mtime_ns, status.st_size
