"""Who can have written a file: the question before anything in it decides what runs, loads or is deleted."""

import os
import stat
from pathlib import Path


def is_foreign(path: Path) -> bool:
    """Whether a file or folder belongs neither to this user nor to root; of a link, it or what it leads to."""
    return any(status.st_uid not in (os.getuid(), 0) for status in (path.lstat(), path.stat()))


def why_not_ours(path: Path) -> str:
    """Why others than this user and root may have written a file or a folder, with what fixes it; "": they can't have.

    Raises OSError if nothing is there.
    """
    if is_foreign(path):
        return f"{path} belongs to another user"
    if path.stat().st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"others than you may write to {path}; if what is in it is yours: chmod go-w {path}"
    return ""
