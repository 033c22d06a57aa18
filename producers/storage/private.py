"""Files with names and grades. Only this user can read them, whatever the umask, and they are never half written.

Everything that Kvasir keeps about students is written through this module. `kept_in` lists all of it, for `kvasir
forget` to delete, and for closing files that an older Kvasir left readable to others.
"""

import contextlib
import errno
import fcntl
import os
import re
import secrets
import stat
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

from messages.errors import BatchError

# Files that Kvasir keeps in the folder of a batch or an assignment. `kvasir forget` deletes them in this order.
# batch.json comes after all other data, so that an interrupted `kvasir forget` can be repeated.
#
# The patterns are as specific as possible, because a folder given to --out can also contain the user's own files, such
# as a folder `rubrics`.
_KEPT_PATTERNS = (
    "runs/grade/*",
    "runs/dry-run/*",
    "versions/[0-9]*-????????/grades.json",
    "rubrics/????????.*",
    "handed-in/????????/*",
    "inputs/????????/*",
    "results.jsonl",
    "submitted.jsonl",
    "reviews.jsonl",
    "exports.jsonl",
    "requests.jsonl",
    "roster.json",
    "assigned.jsonl",
    "times.csv",
    "changes.jsonl",
    "bound.json",
    "bound.[0-9]*.json",
    "hand-grades.csv",
    "hand-grades.[0-9]*.csv",
    "grades.csv",
    "grades.json",
    "report.html",
    "evaluation.html",
    "answers.jsonl",
    "errors.jsonl",
    "replies.csv",
    "final-grades.csv",
    "canvas-gradebook.csv",
    "moodle-worksheet.csv",
    "moodle-feedback.zip",
    "feedback-md.zip",
    "feedback-html.zip",
    "desk.json",
    "report.lock",
    "batch.json",
    "batch.lock",
)
_TEMPORARY = re.compile(r"\..+\.[0-9a-f]{8}")  # names of files that a crash during write_atomically leaves behind
_FILE, _FOLDER, _OTHERS_MODE = 0o600, 0o700, 0o077


def write_atomically(path: Path, content: str | bytes | Iterable[str]) -> None:
    """Replace the file `path` by bytes or text (UTF-8), whole or in pieces. On return it is on disk.

    Raises BatchError, and then the old file is intact.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    pieces = [content] if isinstance(content, str | bytes) else content
    try:
        with open_private(temporary, "xb") as file:
            file.writelines(piece.encode() if isinstance(piece, str) else piece for piece in pieces)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        raise BatchError(f"can't write {path}: {error.strerror}") from error
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)


def open_ordinary(path: Path) -> BinaryIO:
    """Open a regular file for reading. Raises OSError for a pipe or a device, whose reading may never begin or end."""
    return cast(BinaryIO, open(path, "rb", opener=partial(_open, os.O_NONBLOCK)))


def read_ordinary(path: Path) -> str:
    """Return the text (UTF-8) of a regular file. Raises OSError, UnicodeDecodeError."""
    with open_ordinary(path) as file:
        return file.read().decode("utf-8")


def open_private(path: Path, mode: str, follow: bool = False) -> IO[Any]:
    """Open a file for writing that from now on only this user may read. Raises OSError.

    With `follow`, which is for paths that a person has named, it may be a link, a pipe or a device. Otherwise these are
    refused: in a folder, a link may lead to any file of the user's, and a pipe may block forever.
    """
    return open(path, mode, opener=partial(_open, 0 if follow else os.O_NOFOLLOW | os.O_NONBLOCK))


def take_lock(path: Path, wait: bool = False) -> int | None:
    """Lock this file until the descriptor is closed; None if another process has locked it. Raises OSError.

    With `wait`, wait until the other process releases it.
    """
    with open_private(path, "ab") as file:
        descriptor = os.dup(file.fileno())
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def _open(extra_flags: int, name: str, flags: int) -> int:
    # O_NOFOLLOW would refuse a link too, but with a less clear message.
    if extra_flags & os.O_NOFOLLOW and os.path.islink(name):
        raise OSError(errno.ELOOP, "the file is a link, and a link could lead anywhere; put the file itself there")
    descriptor = os.open(name, flags | os.O_CLOEXEC | extra_flags, _FILE)
    is_ordinary = stat.S_ISREG(os.fstat(descriptor).st_mode)
    if extra_flags and not is_ordinary:
        os.close(descriptor)
        raise OSError(errno.EINVAL, "the file is not a regular file")
    if is_ordinary and flags & (os.O_WRONLY | os.O_RDWR):
        with contextlib.suppress(PermissionError):  # another user's file keeps its mode
            os.fchmod(descriptor, _FILE)
    return descriptor


def make_folder(path: Path) -> None:
    """Make a folder and its missing parents, with access for this user only. Raises OSError."""
    for parent in reversed([place for place in (path, *path.parents) if not place.exists()]):
        parent.mkdir(_FOLDER, exist_ok=True)


def kept_in(folder: Path) -> list[Path]:
    """Return the files that Kvasir keeps in a batch's folder and in its rounds, and half-written files left by a crash.

    Files behind a link to a folder are not included. A link to a file is included, but not its target.
    """
    rounds = [place for place in sorted(folder.glob("rounds/*")) if place.name.isdigit()]
    paths = [path for place in rounds if _leads_inside(place, folder) for path in kept_in(place)]
    temporaries = [path for path in sorted(folder.glob(".*")) if _TEMPORARY.fullmatch(path.name)]
    paths += [path for path in temporaries if path.name[1:-9] in _KEPT_PATTERNS]
    paths += [path for pattern in _KEPT_PATTERNS for path in sorted(folder.glob(pattern))]
    return [path for path in paths if _leads_inside(path.parent, folder) and (path.is_symlink() or path.is_file())]


def _leads_inside(place: Path, folder: Path) -> bool:
    return place.resolve() == folder.resolve() / place.relative_to(folder)


def tighten(folder: Path) -> None:
    """Remove the access of others that an older Kvasir left in a batch's folder.

    It changes only modes, never through a link. The folder itself is changed only if it is the desk's or contains
    nothing else, since it may be, say, a whole project's.
    """
    if not _is_open(folder):
        return
    paths = kept_in(folder)
    inside = {place for path in paths for place in path.relative_to(folder).parents} - {Path()}
    tops = {path.relative_to(folder).parts[0] for path in paths}
    whole = folder / "desk.json" in paths or tops == {item.name for item in folder.iterdir()}
    for path in (*paths, *(folder / place for place in inside), *([folder] if whole else [])):
        if _is_open(path):
            path.chmod(path.stat().st_mode & ~_OTHERS_MODE)


def _is_open(path: Path) -> bool:
    """Whether the file is ours and others have access to it."""
    status = path.lstat()
    return not stat.S_ISLNK(status.st_mode) and status.st_uid == os.getuid() and bool(status.st_mode & _OTHERS_MODE)


def sync_folder(folder: Path) -> None:
    """Make a rename permanent. Not every system can sync a folder."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
