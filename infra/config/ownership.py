"""Who may have written a file. This is checked before its content decides what is run, loaded or deleted."""

import os
import stat
from pathlib import Path


def is_foreign(path: Path) -> bool:
    """Whether a path, or the target of a link, belongs to another user than this one and root."""
    return any(status.st_uid not in (os.getuid(), 0) for status in (path.lstat(), path.stat()))


def why_not_ours(path: Path) -> str:
    """Return why another user may have written a file or folder, with the remedy.

    Returns "" if only this user and root can have written it. Raises OSError if the path doesn't exist.
    """
    if is_foreign(path):
        return f"{path} belongs to another user"
    if path.stat().st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"other users can write to {path}; if its content is yours, run: chmod go-w {path}"
    return ""
