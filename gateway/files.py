"""The files that clients upload and download. One gateway keeps them on disk, in a folder that only it uses.

A file exists once its description exists, which is written last. A file that a crash left without a description is
deleted at the next start.
"""

import hashlib
import json
import os
import re
import secrets
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal, TypeVar

from gateway.refusal import ApiError
from infra.broker.failpoints import failpoint
from infra.config.ownership import why_not_ours
from messages.change import non_default_fields
from messages.errors import ConfigError, UsageError
from messages.limits import MAX_FILES_BYTES_PER_KEY
from producers.batch import prompt_lines
from producers.storage.private import make_folder, open_private, read_ordinary, sync_folder, take_lock, write_atomically
from producers.storage.shapes import from_json, parse_as

T = TypeVar("T")

_PIECE_BYTES = 1 << 20
_DESCRIPTION_BYTES = 4096  # each description counts as this many bytes, because it takes at least that much disk space
_NAME = re.compile(r"(file-|batch_)[0-9a-f]{24}[a-z-]*")
_FILE_NAME = re.compile(rf"\.?{_NAME.pattern}\.jsonl?(\.[0-9a-f]{{8}})?")


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file's description. `owner` is the name of the key that sent it, or "" where no key is needed."""

    id: str
    owner: str
    name: str
    size: int
    sha256: str
    created: float  # seconds since the epoch
    purpose: Literal["batch", "batch_output"] = "batch"
    expires: float = 0.0  # seconds since the epoch; 0: never


def read_all(folder: Path, kind: type[T]) -> dict[str, T]:
    """Read all descriptions of this kind in a folder, by id. Unfinished files that a crash left there are deleted.

    Raises ConfigError if a description is damaged.
    """
    descriptions: dict[str, T] = {}
    for path in sorted(folder.glob("*.json")):
        try:
            if not _NAME.fullmatch(path.stem):
                raise ValueError("the gateway writes no file with such a name")
            description: T = parse_as(kind, from_json(read_ordinary(path)), "it")
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path} can't be read ({error}): restore it, or move it away") from None
        descriptions[path.stem] = description
    for path in folder.iterdir():
        if _FILE_NAME.fullmatch(path.name) and path.stem not in descriptions:
            path.unlink()
    return descriptions


def write_description(folder: Path, name: str, description: Any) -> None:
    """Write a description to disk. Fields that release 0.1.0 did not have are left out while they have their defaults.

    Raises BatchError.
    """
    default_names = {"endpoint", "expires", "output_expires_s"} - non_default_fields(description).keys()
    fields = {key: value for key, value in asdict(description).items() if key not in default_names}
    write_atomically(folder / f"{name}.json", json.dumps(fields, ensure_ascii=False) + "\n")


@contextmanager
def open_files(folder: Path) -> "Iterator[Files]":
    """Open the gateway's files in this folder, and lock the folder while they are open.

    Raises ConfigError if another gateway uses the folder, or if it can't be used.
    """
    try:
        make_folder(folder)
        if problem := why_not_ours(folder):
            raise ConfigError(problem)
        for place in ("files", "batches"):
            make_folder(folder / place)
        sync_folder(folder)
        sync_folder(folder.parent)
        descriptor = take_lock(folder / "gateway.lock")
    except OSError as error:
        raise ConfigError(f"can't keep files and batches in {folder}: {error.strerror or error}") from None
    if descriptor is None:
        raise ConfigError(f"another gateway uses {folder}: stop that gateway, or name another folder with --state")
    try:
        yield Files(folder / "files")
    finally:
        os.close(descriptor)


class Files:
    """Files by their ids. Methods may be called from any thread; methods that change something wait for the disk."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files = read_all(folder, StoredFile)

    def path(self, name: str) -> Path:
        """Return the path of a file's content."""
        return self.folder / f"{name}.jsonl"

    def of(self, owner: str) -> list[StoredFile]:
        """Return all files of one owner, oldest first."""
        return sorted((file for file in self._current_files() if file.owner == owner), key=lambda f: f.created)

    def get(self, name: str, owner: str) -> StoredFile:
        """Return a file's description. Raises ApiError if it does not exist or belongs to another owner."""
        file = next((file for file in self._current_files() if file.id == name), None)
        if file is None or file.owner != owner:
            raise ApiError(404, f"there is no file {name!r:.80}", "id", "not_found")
        return file

    def add(self, owner: str, name: str, content: BinaryIO) -> StoredFile:
        """Keep a file that a client uploads. It is on disk on return. Raises ApiError, BatchError."""
        file_id = f"file-{secrets.token_hex(12)}"
        try:
            size, sha256 = _copy(content, self.path(file_id))
            failpoint("gateway.copied", file_id)
            prompt_lines.check_file(self.path(file_id), "the file")
            if size + sum(file.size + _DESCRIPTION_BYTES for file in self.of(owner)) > MAX_FILES_BYTES_PER_KEY:
                most = f"{MAX_FILES_BYTES_PER_KEY >> 30} GiB"
                raise ApiError(
                    413,
                    f"your files would take more than {most} in total: delete some of them",
                    "file",
                    "too_many_bytes",
                )
            return self._describe(StoredFile(file_id, owner, name, size, sha256, time.time()))
        except ApiError:
            self.path(file_id).unlink(missing_ok=True)
            raise
        except OSError as error:
            self.path(file_id).unlink(missing_ok=True)
            raise ApiError(507, f"the file can't be saved: {error.strerror or error}") from None
        except UsageError as error:
            self.path(file_id).unlink(missing_ok=True)
            raise ApiError(400, str(error), "file", "invalid_value") from None

    def write(self, name: str, owner: str, title: str, lines: Iterable[str], expires: float) -> None:
        """Write a batch's output file. The caller chooses the id, and writing it again replaces the file."""
        write_atomically(self.path(name), lines)
        size = self.path(name).stat().st_size
        self._describe(StoredFile(name, owner, title, size, "", time.time(), "batch_output", expires))

    def delete(self, name: str, owner: str) -> None:
        """Delete a file. It is gone from the disk on return. Raises ApiError, OSError."""
        self.get(name, owner)
        self._remove(name)
        sync_folder(self.folder)

    def _current_files(self) -> list[StoredFile]:
        """Delete the files that have expired, and return all others."""
        now = time.time()
        for file in [file for file in list(self._files.values()) if 0 < file.expires < now]:
            with suppress(KeyError, OSError):  # another thread deleted it first
                self._remove(file.id)
        return list(self._files.values())

    def _remove(self, name: str) -> None:
        del self._files[name]
        (self.folder / f"{name}.json").unlink()
        self.path(name).unlink(missing_ok=True)

    def _describe(self, description: StoredFile) -> StoredFile:
        write_description(self.folder, description.id, description)
        failpoint("gateway.described", description.id)
        self._files[description.id] = description
        return description


def _copy(content: BinaryIO, path: Path) -> tuple[int, str]:
    """Copy a file to disk, and return its size and SHA-256. Raises OSError."""
    digest, size = hashlib.sha256(), 0
    with open_private(path, "xb") as file:
        while piece := content.read(_PIECE_BYTES):
            digest.update(piece)
            size += len(piece)
            file.write(piece)
        file.flush()
        os.fsync(file.fileno())
    return size, digest.hexdigest()
