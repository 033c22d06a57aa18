"""Files with names and grades: for this user alone, whatever the umask, and never half written.

Everything that Kvasir keeps of students is written through here, and `kept_in` knows all of it: what `kvasir forget`
deletes, and what an older Kvasir left open to others.
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

# In a batch's folder, or an assignment's; batch.json last, so that forgetting can be repeated. Patterns say as much as
# there is to say: a folder that somebody gave to --out may have a `rubrics` of its own.
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
_TEMPORARY = re.compile(r"\..+\.[0-9a-f]{8}")  # left by a crash in the middle of write_atomically
_FILE, _FOLDER, _OTHERS_MODE = 0o600, 0o700, 0o077


def write_atomically(path: Path, content: str | bytes | Iterable[str]) -> None:
    """Replace `path` by bytes, or by text, whole or in pieces (UTF-8); on disk on return.

    Raises BatchError, with the old file intact.
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
    """An ordinary file, opened to be read. Raises OSError for a pipe or a device, which may never end, or begin."""
    return cast(BinaryIO, open(path, "rb", opener=partial(_open, os.O_NONBLOCK)))


def read_ordinary(path: Path) -> str:
    """The text (UTF-8) of an ordinary file. Raises OSError, UnicodeDecodeError."""
    with open_ordinary(path) as file:
        return file.read().decode("utf-8")


def open_private(path: Path, mode: str, follow: bool = False) -> IO[Any]:
    """A file opened to be written, which nobody else may read from now on. Raises OSError.

    A link, a pipe or a device only where a person has named it: in a folder it may lead to any file of the user's, or
    keep Kvasir waiting for ever.
    """
    return open(path, mode, opener=partial(_open, 0 if follow else os.O_NOFOLLOW | os.O_NONBLOCK))


def take_lock(path: Path, wait: bool = False) -> int | None:
    """Hold this file's lock until the descriptor is closed; None if another process holds it. Raises OSError.

    With `wait` it is had once the other process gives it up.
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
    if extra_flags & os.O_NOFOLLOW and os.path.islink(name):  # the flag refuses it too, in other words
        raise OSError(errno.ELOOP, "it is a link, which may lead anywhere; put the file itself there")
    descriptor = os.open(name, flags | os.O_CLOEXEC | extra_flags, _FILE)
    is_ordinary = stat.S_ISREG(os.fstat(descriptor).st_mode)
    if extra_flags and not is_ordinary:
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not an ordinary file")
    if is_ordinary and flags & (os.O_WRONLY | os.O_RDWR):
        with contextlib.suppress(PermissionError):  # somebody else's stays as it is
            os.fchmod(descriptor, _FILE)
    return descriptor


def make_folder(path: Path) -> None:
    """Make a folder, and those above it that are missing, for this user alone. Raises OSError."""
    for parent in reversed([place for place in (path, *path.parents) if not place.exists()]):
        parent.mkdir(_FOLDER, exist_ok=True)


def kept_in(folder: Path) -> list[Path]:
    """The files that Kvasir keeps in a batch's folder and in its rounds, and what a crash left half written.

    Nothing behind a link to a folder is among them; a link to a file is, itself.
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
    """Close to others what an older Kvasir left open in a batch's folder. Modes alone, and never through a link.

    The folder itself only if it is the desk's or holds nothing else: it may be anybody's, say of a whole project.
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
    """Whether it is ours, and not for us alone."""
    status = path.lstat()
    return not stat.S_ISLNK(status.st_mode) and status.st_uid == os.getuid() and bool(status.st_mode & _OTHERS_MODE)


def sync_folder(folder: Path) -> None:
    """Make the rename last; not every system can sync a folder."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
