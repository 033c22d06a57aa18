"""API keys, kept in a file of SHA-256 hashes. Each key lists the models that it may use.

A key is 32 random bytes. Nobody can guess it from its hash, so the hash needs neither a salt nor many rounds.
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
    """An API key: its name, the hash of the secret, and the models that it may use (an empty tuple means all)."""

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
        """The tag under which the KV caches of this key's conversations are kept.

        It reveals neither the key nor its hash.
        """
        return hashlib.sha256(b"kvasir.conversations" + self.sha256.encode()).hexdigest()[:32]

    def may_use(self, model: str) -> bool:
        """Whether the key may use this model."""
        return not self.models or model in self.models


def file_in(home: Path) -> Path:
    """Return the path of the file of keys."""
    return home / "keys.json"


def read_keys(path: Path) -> list[Key] | None:
    """Read the keys in a file, or return None if the file does not exist. Raises ConfigError."""
    try:
        rows = json.loads(read_ordinary(path))
        if problem := why_not_ours(path):
            raise ConfigError(problem)
        if not isinstance(rows, list):
            raise ValueError("no list")
        return [Key(**(row | {"models": tuple(row["models"])})) for row in rows]
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(f"{path} can't be read: {error.strerror or error}") from None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, InvalidMessage):
        raise ConfigError(
            f"{path} is not a file of keys that this version can read: move it away and add the keys again"
        ) from None


def add_key(path: Path, name: str, models: Sequence[str]) -> str:
    """Make a key, keep its hash, and return the secret. It can't be shown again later.

    Raises UsageError, ConfigError.
    """
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
    """Delete a key and return it. A running gateway notices within a second. Raises UsageError, ConfigError."""
    keys = read_keys(path) or []
    remaining_keys = [key for key in keys if key.name != name]
    if len(remaining_keys) == len(keys):
        raise UsageError(f"no key is named {name!r}; existing keys: {', '.join(key.name for key in keys) or 'none'}")
    _write(path, remaining_keys)
    return next(key for key in keys if key.name == name)


def _write(path: Path, keys: Sequence[Key]) -> None:
    write_atomically(path, json.dumps([asdict(key) for key in keys], indent=1) + "\n")


def _hash(secret: str) -> str:
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).hexdigest()


class KeyRing:
    """The keys of a running gateway.

    The file is read again when it changes; a damaged or deleted file admits nobody.
    """

    def __init__(self, path: Path) -> None:
        """Raises ConfigError if the file exists and can't be used."""
        keys = read_keys(path)
        # This is decided only once, at the start, because deleting the key file must not open a running gateway to
        # everybody.
        self.is_required = keys is not None
        self._path = path
        self._keys = keys or []
        self._file_state: Any = self._state()
        self._next_look = time.monotonic() + _LOOK_S
        self._lock = threading.Lock()

    def find(self, secret: str) -> Key | None:
        """Return the key with this secret, or None.

        The time taken does not depend on how much of the secret is right.
        """
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
