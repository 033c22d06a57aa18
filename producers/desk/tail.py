"""Reading a growing file of JSON lines without ever reading a line twice."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from messages.errors import BatchError


class Tail:
    """The rows of a file that another process appends to, each returned once. A missing file has none yet."""

    def __init__(self, path: Path, strict: bool = True) -> None:
        """`strict`: a line that is no JSON object is an error; else it is passed over."""
        self.path = path
        self._strict = strict
        self._offset = 0
        self._inode = 0

    def read(self) -> tuple[list[dict[str, Any]], bool]:
        """(whole lines since the last call, whether the file was replaced: then forget the earlier ones).

        Raises BatchError on a line that is no JSON object, if strict, or if the file can't be read.
        """
        try:
            data, replaced = self._unread()
        except FileNotFoundError:
            replaced, self._offset, self._inode = self._offset > 0, 0, 0
            return [], replaced
        except OSError as error:
            raise BatchError(f"{self.path} can't be read: {error.strerror}") from None
        whole = data[: data.rfind(b"\n") + 1]  # the last line may be half written
        self._offset += len(whole)
        return [row for line in whole.splitlines() if (row := self._parse(line)) is not None], replaced

    def _unread(self) -> tuple[bytes, bool]:
        with self.path.open("rb") as file:
            status = os.fstat(file.fileno())
            replaced = self._inode not in (0, status.st_ino) or status.st_size < self._offset
            self._offset = 0 if replaced else self._offset
            self._inode = status.st_ino
            file.seek(self._offset)
            return file.read(), replaced

    def _parse(self, line: bytes) -> dict[str, Any] | None:
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if isinstance(row, dict):
            return row
        if self._strict:
            raise BatchError(f"{self.path}: a line is not a JSON object: {line[:60]!r}; remove it to go on")
        return None
