"""Reads a growing file of JSON lines without reading any line twice."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from messages.errors import BatchError
from producers.storage.private import open_ordinary
from producers.storage.shapes import row_of


class LineTail:
    """Returns each row of a file that another process appends to once. A missing file has no rows yet."""

    def __init__(self, path: Path, strict: bool = True, make: Callable[[dict[str, Any]], Any] = dict) -> None:
        """`make` converts a row into what is returned.

        With `strict`, an invalid line is an error; else it is skipped.
        """
        self.path = path
        self._strict = strict
        self._make = make
        self._lines = 0
        self._offset = 0
        self._inode = 0

    def read(self) -> tuple[list[Any], bool]:
        """Return (new complete lines, whether the file was replaced, so that earlier lines no longer count).

        Raises BatchError for a line that is not a JSON object, if strict, or if the file can't be read.
        """
        try:
            data, is_replaced = self._read_new()
        except FileNotFoundError:
            is_replaced, self._offset, self._inode, self._lines = self._offset > 0, 0, 0, 0
            return [], is_replaced
        except OSError as error:
            raise BatchError(f"{self.path} can't be read: {error.strerror}") from None
        whole = data[: data.rfind(b"\n") + 1]  # the last line may be incomplete
        lines = whole.split(b"\n")[:-1]
        rows = [self._row(line, number) for number, line in enumerate(lines, self._lines + 1)]
        # The offset moves only after all lines were parsed, so an unreadable line is reported at each read until it is
        # fixed.
        self._offset, self._lines = self._offset + len(whole), self._lines + len(lines)
        return [row for row in rows if row is not None], is_replaced

    def _read_new(self) -> tuple[bytes, bool]:
        with open_ordinary(self.path) as file:
            status = os.fstat(file.fileno())
            is_replaced = self._inode not in (0, status.st_ino) or status.st_size < self._offset
            self._offset, self._lines = (0, 0) if is_replaced else (self._offset, self._lines)
            self._inode = status.st_ino
            file.seek(self._offset)
            return file.read(), is_replaced

    def _row(self, line: bytes, number: int) -> Any:
        try:
            return row_of(line, f"{self.path}, line {number} ({line[:60]!r})", self._make)
        except BatchError:
            if self._strict:
                raise
            return None
