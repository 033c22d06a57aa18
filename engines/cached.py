"""Stores results that take long to compute in the user's cache folder, under a hash of everything that they depend
on."""

import hashlib
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path


def note_path(kind: str, identity: str) -> Path:
    """The path of a note of this kind."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "kvasir" / kind / hashlib.sha256(identity.encode()).hexdigest()


def write_note(note: Path, body: bytes) -> None:
    """Write a note completely or not at all. If the folder is not writable, the value is computed again next time."""
    draft = note.with_name(f"{note.name}.{os.getpid()}")
    with suppress(OSError):
        note.parent.mkdir(parents=True, exist_ok=True)
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(body)
        draft.replace(note)


def file_identity(stat: os.stat_result) -> str:
    """What tells whether a file has changed: its size, times and inode number. Resetting a file's mtime does not reset
    its ctime."""
    return f"{stat.st_size}\0{stat.st_mtime_ns}\0{stat.st_ctime_ns}\0{stat.st_ino}"


def weights_digest(identity: str, compute: Callable[[], str]) -> str:
    """The SHA-256 of weights, as 64 hexadecimal digits; `identity`: paths, sizes and times of their files."""
    note = note_path("weights", identity)
    with suppress(OSError):
        cached_digest = note.read_text()
        if len(cached_digest) == 64:
            return cached_digest
    digest = compute()
    write_note(note, digest.encode())
    return digest
