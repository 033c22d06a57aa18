"""Writing a file so that a crash leaves either the old one or the new one."""

from __future__ import annotations

import os
from pathlib import Path

from messages.errors import BatchError


def write_atomically(path: Path, text: str) -> None:
    """Replace `path` by `text` (UTF-8), on disk on return. Raises BatchError, with the old file intact."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8", newline="") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise BatchError(f"can't write {path}: {error.strerror}") from error
