"""Who can have written a file. This is checked before anything in the file decides what runs, loads or is deleted."""

import os
import stat
from pathlib import Path


def is_foreign(path: Path) -> bool:
    """Whether a file or folder belongs neither to this user nor to root. For a link this covers the link and its
    target."""
    return any(status.st_uid not in (os.getuid(), 0) for status in (path.lstat(), path.stat()))


def why_not_ours(path: Path) -> str:
    """Why somebody besides this user and root may have written a file or a folder, and how to fix that; "": nobody can
    have.

    Raises OSError if it does not exist.
    """
    if is_foreign(path):
        return f"{path} belongs to another user"
    if path.stat().st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"others than you may write to {path}; if what is in it is yours: chmod go-w {path}"
    return ""
